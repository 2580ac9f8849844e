"""Serve a model over HTTP, with OpenAI's interface for chats and raw prompts.

torchrun --nproc-per-node 2 launch/serve.py --model demo --media-dir clips
torchrun --nproc-per-node 8 launch/serve.py --model Qwen/Qwen2.5-VL-7B-Instruct --api-key SECRET
python launch/serve.py --model demo          (one host)

SIGTERM to host 0's process, which the greeting names, finishes the running answers (--grace) and ends all hosts,
and torchrun, with status 0. torchrun itself passes a SIGTERM on to its processes, but kills what still runs after
its --shutdown-timeout (30 s; it has to be longer than --grace), and exits with 1 in any case.
"""

import argparse
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from apbv.config import REUSE_MODES, ReuseConfig
from apbv.launch.observability import add_observability_options, check_observability
from apbv.launch.options import (
    OptionParser,
    add_draft_options,
    add_host_options,
    add_prefill_options,
    check,
    exit_with,
    load_engine,
    prepare_process,
)
from apbv.launch.transfer import add_transfer_options, check_transfer, transfer_settings

if TYPE_CHECKING:
    from apbv import HostGroup
    from apbv.serve.server import ServerSettings

_MIB = 2**20
_LONGEST_GRACE = 86_400


def parse_arguments(arguments: list[str] | None = None, prog: str | None = None) -> argparse.Namespace:
    """Read and check the options, which ends the process where one is wrong."""
    parser = OptionParser(prog, description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help='"demo", a directory, or a hub id')
    http = parser.add_argument_group("HTTP")
    http.add_argument("--host", default="127.0.0.1", help="the address to listen on (default 127.0.0.1)")
    http.add_argument("--port", type=int, default=8000, help="default 8000; 0: any that is free")
    http.add_argument(
        "--served-model-name", metavar="NAME", help="what requests call the model (default: --model)"
    )
    http.add_argument(
        "--api-key",
        metavar="KEY",
        help="the bearer token that clients must send (default: $APBV_API_KEY, or none)",
    )
    http.add_argument("--max-queue", type=int, default=64, help="requests that may wait (default 64)")
    http.add_argument(
        "--max-running", type=int, metavar="N", help="answers decoded at once (default: as many as the KV allows)"
    )
    http.add_argument(
        "--max-kv-mib",
        type=float,
        metavar="N",
        help="the most MiB of KV of all requests (default: half of what is free on host 0)",
    )
    http.add_argument(
        "--max-body-mib", type=float, default=96.0, help="the most MiB of a request's body (default 96)"
    )
    http.add_argument(
        "--grace",
        type=float,
        default=20.0,
        help="seconds to finish the running answers after SIGTERM (default 20); under torchrun at most its "
        "--shutdown-timeout less 10",
    )

    requests = parser.add_argument_group("requests")
    requests.add_argument("--max-model-len", type=int, help="tokens of prompt and answer (default: the model's)")
    requests.add_argument(
        "--max-frames",
        type=int,
        default=2048,
        help="the most frames of all videos of a request, with its images (default 2048)",
    )
    requests.add_argument("--max-new-tokens", type=int, help="if a request does not say (default: the model's)")
    requests.add_argument("--temperature", type=float, default=0.0, help="likewise; 0 is greedy (default)")
    requests.add_argument("--top-p", type=float, default=1.0, help="likewise")
    requests.add_argument(
        "--media-dir", type=Path, metavar="DIR", help="files that requests may name, on every host"
    )
    requests.add_argument(
        "--allow-media-host",
        action="append",
        default=[],
        metavar="HOST",
        help="a host to fetch files from; may be repeated",
    )
    requests.add_argument(
        "--max-media-mib", type=float, default=64.0, help="the most MiB of a file sent or fetched (default 64)"
    )
    requests.add_argument(
        "--max-decoded-mib",
        type=float,
        default=8192.0,
        help="the most MiB of a request's decoded frames (default 8192)",
    )
    requests.add_argument(
        "--max-image-mib",
        type=float,
        default=512.0,
        help="the most MiB of a request's decoded images (default 512)",
    )
    requests.add_argument(
        "--fetch-seconds", type=float, default=30.0, help="seconds to fetch a request's files (default 30)"
    )

    add_prefill_options(parser)
    add_draft_options(parser)
    reuse = parser.add_argument_group("further questions about the same video or text")
    reuse.add_argument("--reuse", choices=REUSE_MODES, help="keep embeddings (exact) or KV (default: nothing)")
    reuse.add_argument(
        "--reuse-mib", type=int, default=4096, help="the most MiB that each process keeps (default 4096)"
    )
    add_transfer_options(parser)
    add_host_options(parser)
    add_observability_options(parser)
    options = parser.parse_args(arguments)
    sizes = ("max_body_mib", "max_media_mib", "max_decoded_mib", "max_image_mib")
    for name in ("max_queue", "max_frames", "fetch_seconds", *sizes):
        if not getattr(options, name) > 0:
            parser.error(f"--{name.replace('_', '-')} must be positive")
    for name in ("max_running", "max_kv_mib"):
        if (given := getattr(options, name)) is not None and not 0 < given < math.inf:
            parser.error(f"--{name.replace('_', '-')} must be positive")
    if not 0 <= options.grace <= _LONGEST_GRACE:
        parser.error(f"--grace must lie in 0 .. {_LONGEST_GRACE} seconds")
    if options.api_key == "":
        parser.error("--api-key is empty: nobody would be asked for it")
    if options.media_dir is not None and not options.media_dir.is_dir():
        parser.error(f"--media-dir {options.media_dir} is no folder")
    check(parser, options)
    check_observability(parser, options)
    check_transfer(parser, options)
    try:
        reuse_config(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def reuse_config(options: argparse.Namespace) -> ReuseConfig | None:
    """Make the settings of what is kept for further questions; None: nothing is.

    Raises:
        ValueError: the bound makes no sense, or the KV cannot be kept.
    """
    if options.reuse is None:
        return None
    if options.reuse == "kv" and options.reduce is not None:
        raise ValueError("--reduce chooses visual tokens anew for every prompt: it works with --reuse exact only")
    return ReuseConfig(mode=options.reuse, max_bytes=options.reuse_mib * _MIB)


def settings_of(options: argparse.Namespace) -> "ServerSettings":
    """Make the server's settings."""
    from apbv.serve.media import MediaSettings
    from apbv.serve.reading import RequestSettings
    from apbv.serve.server import ServerSettings

    media = MediaSettings(
        folder=options.media_dir,
        hosts=frozenset(host.lower() for host in options.allow_media_host),
        max_bytes=int(options.max_media_mib * _MIB),
        fetch_seconds=options.fetch_seconds,
    )
    requests = RequestSettings(
        max_model_len=options.max_model_len,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        num_frames=options.frames,
        fps=options.fps,
        max_frames=options.max_frames,
        max_decoded_bytes=int(options.max_decoded_mib * _MIB),
        max_image_bytes=int(options.max_image_mib * _MIB),
        media=media,
    )
    return ServerSettings(
        model=options.served_model_name or options.model,
        max_queue=options.max_queue,
        max_running=options.max_running,
        max_kv_bytes=None if options.max_kv_mib is None else int(options.max_kv_mib * _MIB),
        max_body_bytes=int(options.max_body_mib * _MIB),
        grace=options.grace,
        api_key=options.api_key or os.environ.get("APBV_API_KEY") or None,
        transfer=transfer_settings(options),
        otlp_traces_endpoint=options.otlp_traces_endpoint,
        requests=requests,
    )


def main(arguments: list[str] | None = None, prog: str | None = None) -> int:
    """Serve on this host until asked to end, and return the exit status."""
    options = parse_arguments(arguments, prog)
    # Only now what takes seconds to import.
    from apbv.hosts import run_on_hosts
    from apbv.launch.torchrun import warn_of_early_kill
    from apbv.serve.executor import why_one_at_a_time
    from apbv.serve.log import log_to_stderr
    from apbv.serve.server import bind, serve

    def run(hosts: "HostGroup") -> None:
        prepare_process(options, hosts)
        warn_of_early_kill(options.grace)
        if hosts.is_leader:
            log_to_stderr(options.log_format)
        with hosts.local_stage("opening the port"):
            settings = settings_of(options)
            sock = bind(options.host, options.port) if hosts.is_leader else None
        engine = load_engine(options, hosts, reuse_config(options))
        if hosts.device.type == "cuda":
            engine.warm_up(in_batch=why_one_at_a_time(engine) is None)
        serve(engine, hosts, sock, settings)

    return run_on_hosts(run, options.timeout, options.tensor_parallel, options.device)


if __name__ == "__main__":
    exit_with(main)
