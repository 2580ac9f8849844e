"""The settings of a server; ``apbv serve`` makes options of the limits on requests."""

from dataclasses import dataclass, field
from pathlib import Path

_MIB = 2**20


def _most(default: float | None, about: str):
    """Make a field with a limit, and say what is limited."""
    return field(default=default, metadata={"about": about})


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The settings of a server, and the limits on its requests.

    Attributes:
        model: the name that requests give.
        max_queue: how many requests may wait.
        max_running: how many answers may be decoded at once; None: as many as the KV allows.
        max_kv_bytes: the most bytes of KV; None: half of what is free on host 0.
        max_body_bytes: the largest body of a request.
        max_model_len: tokens of prompt and answer together; None: as many as the model was made for.
        max_frames: the most frames of all videos of a request, with its images.
        max_packets: the most packets that a video may have, which is about as many as it has frames.
        max_media_bytes: the size of one file that is sent inline or fetched.
        max_decoded_bytes: the most bytes that the frames of one request may take as RGB, in their stored size.
        max_image_bytes: the most bytes that may be allocated to decode the images of one request. Of an animation
            only the first frame is decoded.
        fetch_seconds: how long fetching all files of a request may take.
        temperature, top_p, fps: the default of the request's field of that name.
        max_new_tokens, num_frames: likewise; None: the engine's default.
        media_dir: the folder of which requests may name files; None: no files.
        media_hosts: names of the hosts that may be fetched from, lower case; an address or ``localhost`` that
            stands here itself may be one of this machine or its network.
        grace: seconds that running answers may take once the server was asked to end.
        api_key: the bearer token that /v1/* wants; None: none.
        otlp_traces_endpoint: the URL that a trace of each request is sent to; None: none is.
        kv_host: where each process listens for those who fetch KV; None: no KV is handed over.
        kv_port, kv_seconds: see :class:`apbv.kv.offers.Offers`.
    """

    model: str = "demo"
    max_queue: int = _most(64, "requests that may wait")
    max_running: int | None = _most(None, "answers decoded at once (default: as many as the KV allows)")
    max_kv_bytes: int | None = _most(None, "KV of all requests (default: half of what is free on host 0)")
    max_body_bytes: int = _most(96 * _MIB, "a request's body")
    max_model_len: int | None = _most(None, "tokens of prompt and answer (default: the model's)")
    max_frames: int = _most(2048, "frames of all videos of a request, with its images")
    max_packets: int = _most(2**20, "packets of a video, which are about its frames")
    max_media_bytes: int = _most(64 * _MIB, "a file sent or fetched")
    max_decoded_bytes: int = _most(8192 * _MIB, "a request's decoded frames")
    max_image_bytes: int = _most(3072 * _MIB, "memory to decode a request's images")
    fetch_seconds: float = _most(30.0, "to fetch a request's files")
    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    num_frames: int | None = None
    fps: float | None = None
    media_dir: Path | None = None
    media_hosts: frozenset[str] = frozenset()
    grace: float = 20.0
    api_key: str | None = field(default=None, repr=False)
    otlp_traces_endpoint: str | None = None
    kv_host: str | None = None
    kv_port: int = 0
    kv_seconds: float = 120.0
