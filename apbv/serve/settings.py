"""Server settings; ``apbv serve`` turns the request limits into options."""

from dataclasses import dataclass, field
from pathlib import Path

_MIB = 2**20


def _limit(default: float | None):
    """Make a field for a limit, which is an option of the server."""
    return field(default=default, metadata={"is_limit": True})


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """Limits of the videos, images and audio of one request.

    Attributes:
        max_frames: maximum frames of all videos of a request, plus its images.
        max_packets: maximum packets of a video (about one per frame).
        max_media_bytes: maximum size of one file that is sent inline or fetched.
        max_decoded_bytes: maximum size of one request's frames as RGB, as large as they are stored.
        max_image_bytes: maximum memory to decode one request's images. Only the first frame of an
            animation is decoded.
        fetch_seconds: maximum seconds to fetch all files of a request.
    """

    max_frames: int = _limit(2048)
    max_packets: int = _limit(2**20)
    max_media_bytes: int = _limit(64 * _MIB)
    max_decoded_bytes: int = _limit(8192 * _MIB)
    max_image_bytes: int = _limit(3072 * _MIB)
    fetch_seconds: float = _limit(30.0)


@dataclass(frozen=True, kw_only=True)
class KVTransferSettings:
    """How another server, such as vLLM, fetches the KV of prompts.

    Attributes:
        host: address on which each process listens for KV consumers.
        port: the port of that address; 0: any free one.
        seconds: how long exported KV waits to be fetched.
    """

    host: str
    port: int = 0
    seconds: float = 120.0


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Server settings and request limits.

    Attributes:
        model: the model name in requests.
        max_queue: maximum number of waiting requests.
        max_running: maximum number of answers decoded in one batch, of which every host has one.
            None: limited by ``max_kv_bytes``.
        min_host_tokens: minimum prompt tokens per host to prefill a prompt on all hosts. A shorter
            one is prefilled by its decode host alone, while other hosts prefill others.
        max_kv_bytes: maximum KV cache of each host. None: half of the free memory of the host that
            has least.
        max_body_bytes: maximum size of a request body.
        max_model_len: maximum tokens of prompt and answer together. None: the model's context
            length.
        media: limits of a request's videos, images and audio.
        reasoning_parser: how the thought with which a chat's answer begins is found, a name of
            :data:`apbv.config.REASONING_TAGS`, ``"auto"`` or ``"off"``.
        fps: the default of the requests' field of this name.
        temperature, top_p, max_new_tokens, num_frames: the defaults of the requests' fields of
            these names; None: the engine's.
        media_dir: the directory whose files requests may name; None: no files.
        media_hosts: network names, in lower case, from which files may be fetched. Private and
            local addresses are allowed only if they, or ``localhost``, are listed themselves.
        cors_origins: origins of the browser clients that may read responses; ``*``: any.
        grace: seconds that running requests get after SIGTERM.
        api_key: the bearer token that /v1/* requires; None: none.
        kv_transfer: how KV consumers reach this server; None: no KV transfer.
    """

    model: str = "demo"
    max_queue: int = _limit(64)
    max_running: int | None = _limit(None)
    min_host_tokens: int = _limit(256)
    max_kv_bytes: int | None = _limit(None)
    max_body_bytes: int = _limit(96 * _MIB)
    max_model_len: int | None = _limit(None)
    media: MediaLimits = MediaLimits()
    reasoning_parser: str = "auto"
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    num_frames: int | None = None
    fps: float | None = None
    media_dir: Path | None = None
    media_hosts: frozenset[str] = frozenset()
    cors_origins: tuple[str, ...] = ()
    grace: float = 20.0
    api_key: str | None = field(default=None, repr=False)
    kv_transfer: KVTransferSettings | None = None
