"""OpenAI-compatible HTTP server for chats and raw prompts, with continuous batching.

torchrun --nproc-per-node 2 launch/serve.py --model demo --media-dir clips
torchrun --nproc-per-node 8 launch/serve.py --model Qwen/Qwen2.5-VL-7B-Instruct --api-key SECRET
python launch/serve.py --model demo          (one host)

On SIGTERM to host 0's process, whose id the startup line gives, the server finishes running
requests (--grace) and all hosts and torchrun exit with status 0. On SIGTERM to torchrun itself,
torchrun forwards the signal, kills processes that still run after its --shutdown-timeout (30 s;
must be longer than --grace), and always exits with 1.
"""

import argparse
import os
import re
from dataclasses import Field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apbv.compat.versions import how_to_install
from apbv.config import REASONING_TAGS, REUSE_MODES, ReuseConfig
from apbv.config.refusals import refuse
from apbv.errors import BackendUnavailableError, InvalidConfigError
from apbv.launch.options import (
    ANSWER_LENGTH,
    SAMPLING,
    OptionParser,
    add_draft_options,
    add_host_options,
    add_prefill_options,
    add_settings,
    check,
    exit_with,
    help_from_docstring,
    load_engine,
    positive,
    prepare_process,
    reading,
)
from apbv.serve.metrics.log import LOG_FORMATS
from apbv.serve.settings import KVTransferSettings, MediaLimits, ServerSettings

if TYPE_CHECKING:
    from apbv import HostGroup

_MIB = 2**20
_NEEDED = ("starlette", "uvicorn", "pydantic", "prometheus_client")
_LAST_PORT = 65_535
_MOST, _MOST_SECONDS = 10**12, 86_400  # of a limit, as a number of things or MiB
_PORT = reading(
    int,
    f"lie in 0 .. {_LAST_PORT}",
    lambda value: isinstance(value, int) and 0 <= value <= _LAST_PORT,
)
_KEY = reading(str, "be a key, or the option left out", bool)
# As browsers send origins: a scheme, a host in lower case, and a port unless it is the scheme's
# own.
_HOST = r"[a-z0-9_-]+(\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\]"
_AN_ORIGIN = re.compile(rf"(?P<scheme>[a-z][a-z0-9+.-]*)://({_HOST})(:(?P<port>[1-9]\d{{0,4}}))?")
_OWN_PORTS = {"http": 80, "https": 443}
_GRACE = reading(
    float,
    "lie in 0 .. 86400 seconds",
    lambda value: isinstance(value, float) and 0 <= value <= 86_400,
)


def _is_origin(text: str) -> bool:
    """Return whether a browser may send this origin.

    ``*`` stands for all, ``null`` for pages without one.
    """
    if text in ("*", "null"):
        return True
    found = _AN_ORIGIN.fullmatch(text)
    if found is None:
        return False
    port = int(found["port"] or 0)
    return port <= _LAST_PORT and port != _OWN_PORTS.get(found["scheme"])


_ORIGIN = reading(
    str,
    "be *, null or an origin as browsers send it: as https://example.com or http://localhost:3000, "
    "in lower case, without a wildcard, a path or the scheme's own port",
    _is_origin,
)


def parse_arguments(
    arguments: list[str] | None = None, prog: str | None = None
) -> argparse.Namespace:
    """Read and check the options, which ends the process where one is wrong."""
    parser = OptionParser(
        prog, "%(prog)s --model MODEL [options]", description=__doc__.splitlines()[0]
    )
    parser.add_argument("name", nargs="?", metavar="MODEL", help="same as --model")
    parser.add_argument("--model", help='"demo", a directory, or a hub id')
    http = parser.add_argument_group("HTTP")
    http.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default %(default)s)"
    )
    http.add_argument(
        "--port", type=_PORT, default=8000, help="port; 0: any free one (default %(default)s)"
    )
    http.add_argument(
        "--api-key",
        type=_KEY,
        metavar="KEY",
        help="required of clients (default: $APBV_API_KEY, or none)",
    )
    origins: dict[str, Any] = {
        "type": _ORIGIN,
        "action": "append",
        "default": [],
        "metavar": "ORIGIN",
    }
    http.add_argument("--cors-origin", **origins, help="web page origin that may call; or *")
    http.add_argument(
        "--grace",
        type=_GRACE,
        default=20.0,
        help="seconds to finish running requests after SIGTERM (default 20); under torchrun at "
        "most its "
        "--shutdown-timeout minus 10",
    )
    http.add_argument(
        "--log-format", choices=LOG_FORMATS, default="text", help="json adds timings (default text)"
    )

    add_request_options(parser)
    add_prefill_options(parser)
    add_draft_options(parser)
    add_reuse_options(parser)
    transfer = parser.add_argument_group("KV transfer to another server, such as vLLM")
    transfer.add_argument(
        "--kv-transfer", choices=["tcp"], help="transfer KV from each process's memory over TCP"
    )
    transfer.add_argument(
        "--kv-host", metavar="ADDRESS", help="address of this machine (default: detected)"
    )
    transfer.add_argument(
        "--kv-port", type=int, metavar="BASE", help="process p uses BASE + p (default: any)"
    )
    transfer.add_argument(
        "--kv-seconds", type=positive(float, _MOST_SECONDS), help="KV lifetime (default 120)"
    )
    add_host_options(parser)
    options = parser.parse_args(arguments)
    if (options.name is None) == (options.model is None):
        parser.error("give a model: apbv serve MODEL, or --model MODEL")
    options.model = options.model or options.name
    check(parser, options)
    with parser.rejecting():
        _check(options)
    return options


def add_request_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for requests, which are those of :func:`request_settings`."""
    requests = parser.add_argument_group("requests: limits and defaults")
    requests.add_argument(
        "--served-model-name", metavar="NAME", help="model name in requests (default: --model)"
    )
    for config in (ServerSettings, MediaLimits):
        for each in fields(config):
            if "is_limit" in each.metadata:
                _add_limit(requests, config, each)
    requests.add_argument(
        "--reasoning-parser",
        choices=("auto", "off", *REASONING_TAGS),
        default="auto",
        help="how the thought is found with which a chat's answer begins; off: it is not separated "
        "(default auto: by the prompt's end and the answer's beginning)",
    )
    requests.add_argument(
        "--media-dir", type=Path, metavar="DIR", help="files for requests, on every host"
    )
    requests.add_argument(
        "--allow-media-host",
        action="append",
        default=[],
        metavar="HOST",
        help="to fetch from; can be repeated",
    )
    add_settings(requests, ANSWER_LENGTH)
    add_settings(requests, SAMPLING[:2])


def add_reuse_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of :func:`reuse_config`."""
    reuse = parser.add_argument_group("prefix and embedding cache")
    reuse.add_argument(
        "--reuse", choices=REUSE_MODES, help="cache embeddings (exact) or KV (default: neither)"
    )
    reuse.add_argument(
        "--reuse-mib",
        type=positive(int, _MOST),
        default=4096,
        help="MiB per process (default 4096)",
    )


def limit_option(limit: Field) -> str:
    """Return the option of a limit; those in bytes are given in MiB."""
    return "--" + limit.name.replace("_bytes", "_mib").replace("_", "-")


def _add_limit(group: argparse._ActionsContainer, config: type, limit: Field) -> None:
    """Add an option for a positive number."""
    is_bytes = limit.name.endswith("_bytes")
    if limit.name.endswith("_seconds"):
        read = positive(float, _MOST_SECONDS)
    else:
        read = positive(float if is_bytes else int, _MOST)
    shown = limit.default
    if is_bytes and isinstance(shown, int):
        shown //= _MIB
    options = {each.name: limit_option(each) for each in fields(config)}
    names = [limit_option(limit)]
    if limit.name == "max_running":  # vLLM's name
        names.append("--max-num-seqs")
    group.add_argument(
        *names,
        dest=limit.name,
        type=(lambda text: int(read(text) * _MIB)) if is_bytes else read,
        default=limit.default,
        metavar="MIB" if is_bytes else "N",
        help=help_from_docstring(config, limit.name, shown, options),
    )


def check_requests(options: argparse.Namespace) -> None:
    """Reject options of :func:`add_request_options` and :func:`add_reuse_options`.

    Raises:
        InvalidConfigError: an option is rejected, or a package that answers requests is not
            installed.
    """
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise BackendUnavailableError(
            f"the server needs {', '.join(missing)}: {how_to_install('serve')}"
        )
    if options.media_dir is not None and not options.media_dir.is_dir():
        raise InvalidConfigError(f"--media-dir {options.media_dir} is not a directory")
    refuse(reduction=options.reduce, kv_reuse=options.reuse == "kv")


def _check(options: argparse.Namespace) -> None:
    """Reject server options that are invalid or incompatible.

    Raises:
        InvalidConfigError: an option is rejected, as of :func:`check_requests`.
    """
    check_requests(options)
    refuse(
        reduction=options.reduce,
        handing_over="--kv-transfer" if options.kv_transfer else None,
    )
    if options.kv_transfer is None:
        for name in ("kv_host", "kv_port", "kv_seconds"):
            if getattr(options, name) is not None:
                raise InvalidConfigError(f"--{name.replace('_', '-')} needs --kv-transfer")
    last = (options.kv_port or 0) + int(os.environ.get("WORLD_SIZE", 1)) - 1
    if options.kv_port is not None and not 0 <= options.kv_port <= last <= _LAST_PORT:
        raise InvalidConfigError(
            f"--kv-port must leave a port up to {_LAST_PORT} for each process, not "
            f"{options.kv_port}"
        )
    if options.kv_port and options.kv_port <= options.port <= last:
        raise InvalidConfigError(
            f"--port {options.port} is one of the ports {options.kv_port} .. {last} of --kv-port"
        )


def settings_of(options: argparse.Namespace) -> ServerSettings:
    """Build the server's settings.

    Raises:
        OSError: KV transfer is on, and this machine's own address cannot be determined.
    """
    from apbv.kv.wire import own_address

    kv_transfer = None
    if options.kv_transfer is not None:
        kv_transfer = KVTransferSettings(
            host=options.kv_host or own_address(options.host),
            port=options.kv_port or 0,
            seconds=options.kv_seconds or KVTransferSettings.seconds,
        )
    return request_settings(
        options,
        api_key=options.api_key or os.environ.get("APBV_API_KEY") or None,
        cors_origins=tuple(options.cors_origin),
        kv_transfer=kv_transfer,
    )


def request_settings(options: argparse.Namespace, **more: Any) -> ServerSettings:
    """Build settings from the options of :func:`add_request_options`, and others by their names."""
    given = vars(options) | {
        "model": options.served_model_name or options.model,
        "num_frames": options.frames,
        "media_hosts": frozenset(host.lower() for host in options.allow_media_host),
        "media": MediaLimits(**_some(vars(options), MediaLimits)),
        "kv_transfer": None,
        **more,
    }
    return ServerSettings(**_some(given, ServerSettings))


def _some(values: dict[str, Any], kind: type) -> dict[str, Any]:
    """Return the values that are fields of a dataclass."""
    return {field.name: values[field.name] for field in fields(kind) if field.name in values}


def reuse_config(options: argparse.Namespace) -> ReuseConfig | None:
    """Build the config of what is kept for further requests, if anything is."""
    return (
        ReuseConfig(mode=options.reuse, max_bytes=options.reuse_mib * _MIB)
        if options.reuse
        else None
    )


def main(arguments: list[str] | None = None, prog: str | None = None) -> int:
    """Serve on this host until shutdown; return the exit status."""
    options = parse_arguments(arguments, prog)
    # Imported here because this takes seconds.
    from apbv.hosts import run_on_hosts
    from apbv.serve.metrics.log import log_to_stderr
    from apbv.serve.server import bind, serve

    def run(hosts: "HostGroup") -> None:
        prepare_process(options, hosts)
        if hosts.is_leader:
            log_to_stderr(options.log_format)
        with hosts.local_stage("opening the port"):
            settings = settings_of(options)
            sock = bind(options.host, options.port) if hosts.is_leader else None
        engine = load_engine(options, hosts, reuse_config(options))
        if hosts.device.type == "cuda":
            engine.warm_up(in_batch=True)
        serve(engine, hosts, sock, settings)

    return run_on_hosts(run, options.timeout, options.tensor_parallel, options.device)


if __name__ == "__main__":
    exit_with(main)
