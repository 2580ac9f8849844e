"""Answer a file of requests in OpenAI's batch format; a further run continues what was interrupted.

    torchrun --nproc-per-node 2 launch/batch.py requests.jsonl --out answers.jsonl \
        --model demo --media-dir clips
    python launch/batch.py - --out answers.jsonl --model demo  # one host, requests from a pipe

SIGINT or SIGTERM to host 0's process, or to torchrun, finishes running requests; a second one ends
them. torchrun kills processes that still run after its --shutdown-timeout (30 s).
"""

import argparse
import re
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

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
from apbv.launch.serve import (
    add_request_options,
    add_reuse_options,
    check_requests,
    request_settings,
    reuse_config,
)
from apbv.reporting import report_error

if TYPE_CHECKING:
    from apbv import HostGroup
    from apbv.serve.batch.runner import Batch

_LOG_SECONDS = 30.0  # between progress messages where there is no terminal
_STAGES = ("queue", "prefill", "decode")


def parse_arguments(
    arguments: list[str] | None = None, prog: str | None = None
) -> argparse.Namespace:
    """Parse and check the options; exits if one is wrong."""
    usage = "%(prog)s REQUESTS --out ANSWERS --model MODEL [options]"
    parser = OptionParser(prog, usage, description=__doc__.splitlines()[0])
    parser.add_argument(
        "requests", type=Path, metavar="REQUESTS", help="JSON lines, or a pipe; -: standard input"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="answers are appended to it"
    )
    parser.add_argument("--model", required=True, help='"demo", a directory, or a hub id')
    parser.add_argument(
        "--retry-errors",
        action="store_true",
        help="ask again what failed with status 408, 429 or 500 and above",
    )
    parser.add_argument(
        "--shard",
        type=_shard,
        default=(0, 1),
        metavar="I/N",
        help="only lines I, I + N, … of all, from 0",
    )
    add_request_options(parser)
    add_prefill_options(parser)
    add_draft_options(parser)
    add_reuse_options(parser)
    add_host_options(parser)
    options = parser.parse_args(arguments)
    check(parser, options)
    with parser.rejecting():
        check_requests(options)
    return options


def _shard(text: str) -> tuple[int, int]:
    """Return the index and the number of shards."""
    match = re.fullmatch(r"(\d+)/(\d+)", text, re.ASCII)
    if match is not None:
        index = int(match[1])
        size = int(match[2])
        if index < size:
            return index, size
    raise argparse.ArgumentTypeError(f"must be I/N with 0 <= I < N, not {text}")


def main(arguments: list[str] | None = None, prog: str | None = None) -> int:
    """Answer the requests; return the exit status.

    It is 0 if all are answered, 1 if any failed, and 128 plus a signal's number if that stopped the
    batch before its end.
    """
    options = parse_arguments(arguments, prog)
    statuses = []
    # Imported here because this takes seconds.
    from tqdm import tqdm

    from apbv.hosts import run_on_hosts
    from apbv.serve.batch.files import Answers, Requests
    from apbv.serve.batch.runner import Batch
    from apbv.serve.server import run_worker

    def run(hosts: "HostGroup") -> None:
        prepare_process(options, hosts)
        with hosts.local_stage("opening the files"):
            if hosts.is_leader:
                answers = Answers(options.out, options.retry_errors)
                requests = Requests(options.requests, options.shard)
        engine = load_engine(options, hosts, reuse_config(options))
        settings = request_settings(options)
        if hosts.device.type == "cuda":
            engine.warm_up(in_batch=True)
        if not hosts.is_leader:
            return run_worker(engine, hosts, settings)
        # Without a terminal: now and then a line for a log.
        is_log = not sys.stderr.isatty()
        bar = tqdm(
            desc="batch",
            unit="request",
            leave=is_log,
            mininterval=_LOG_SECONDS if is_log else 0.1,
            miniters=0,
        )
        with closing(answers), bar:

            def show(batch: Batch) -> None:
                bar.total = batch.total
                bar.set_postfix(running=batch.num_running, failed=batch.num_failed, refresh=False)
                bar.update(batch.num_answered - bar.n)

            batch = Batch(requests, answers, settings, show)
            run_worker(engine, hosts, settings, batch.open)
        print(summary(batch), file=sys.stderr, flush=True)
        if batch.num_failed:
            report_error(failures(batch, options.out))
        if batch.was_stopped and batch.stopped_by is not None:
            statuses.append(128 + batch.stopped_by)
        elif batch.num_failed:
            statuses.append(1)

    status = run_on_hosts(run, options.timeout, options.tensor_parallel, options.device)
    if status == 0 and statuses:
        return statuses[0]
    return status


def failures(batch: "Batch", out: Path) -> str:
    """Format why the first requests failed, and how many did.

    Args:
        out: the file of answers.
    """
    lines = [f"  {reason}" for reason in batch.reasons]
    lines.append(
        f"{batch.num_failed} of {batch.num_in_file} requests were answered with errors: see {out}"
    )
    return "\n".join(lines)


def summary(batch: "Batch") -> str:
    """Format the figures of a batch as a table."""
    metrics = batch.metrics
    seconds = batch.seconds
    rate = f"{batch.num_answered * 60 / seconds:.1f} a minute"
    rows = [
        ("answers", f"{batch.num_answered} in {seconds:.1f} s, {rate}"),
        ("failed", str(batch.num_failed)),
    ]
    if batch.was_stopped:
        rows.append(("stopped", "the same command continues"))
    num_read = int(metrics.total("prompt_tokens"))
    num_generated = int(metrics.total("generation_tokens"))
    per_second = f"{num_generated / seconds:.1f} a second"
    rows.append(("tokens", f"{num_read} of prompts, {num_generated} generated, {per_second}"))
    times = []
    for stage in _STAGES:
        mean_seconds = metrics.mean(f"request_{stage}_time_seconds")
        if mean_seconds is not None:
            times.append(f"{stage} {mean_seconds * 1e3:.0f} ms")
    if times:
        rows.append(("mean times", ", ".join(times)))
    return "\n".join(f"  {name:<20} {value}" for name, value in rows)


if __name__ == "__main__":
    exit_with(main)
