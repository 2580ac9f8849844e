"""Check which parts of apbv work on this machine, and why the others do not.

python -m apbv.doctor                           (this machine's first GPU, or its CPU)
torchrun --nproc-per-node 8 -m apbv.doctor      (eight GPUs and the links between them)

The exit status is 0 if no check fails. Nothing is downloaded.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from apbv.launch.options import OptionParser, device_name, exit_with, positive, prepare_process

if TYPE_CHECKING:
    from apbv import HostGroup

PARTS = {
    "machine": "versions, GPUs, memory, and the links between GPUs",
    "backends": "which attention backends work here, and why the others do not",
    "kernels": "every operator with every backend, against fp64",
    "hosts": "all collectives between hosts, with known values",
    "demo": "the demo model's answers",
}
_REPORTING_SECONDS = 30.0  # beyond a check's limit, for its host to report to the others


def parse_arguments(
    arguments: list[str] | None = None, prog: str | None = None
) -> argparse.Namespace:
    """Parse and check the options; exits if one is wrong."""
    parser = OptionParser(prog or "apbv.doctor", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        metavar="PART",
        help="; ".join(f"{name}: {about}" for name, about in PARTS.items()),
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="append the results as one JSON line"
    )
    parser.add_argument(
        "--limit",
        type=positive(),
        default=180.0,
        help="seconds after which a check fails (default 180)",
    )
    parser.add_argument(
        "--device",
        type=device_name,
        metavar="cpu|cuda|cuda:N",
        help="device to check (default: one GPU per process, shared if too few; without GPUs the "
        "CPU)",
    )
    parser.add_argument(
        "--threads", type=positive(int), metavar="N", help="CPU threads per process"
    )
    options = parser.parse_args(arguments)
    options.parts = list(PARTS)
    if options.only:
        options.parts = [name for name in PARTS if name in options.only]
    return options


def main(arguments: list[str] | None = None, prog: str | None = None) -> int:
    """Run the checks on this host; return the exit status."""
    options = parse_arguments(arguments, prog)
    # Imported here because this takes seconds.
    from apbv.hosts import run_on_hosts

    is_healthy = True

    def examine(hosts: "HostGroup") -> None:
        nonlocal is_healthy
        is_healthy = _examine(options, hosts)

    seconds = options.limit + _REPORTING_SECONDS
    status = run_on_hosts(examine, seconds, device=options.device)
    return 0 if status == 0 and is_healthy else 1


def _examine(options: argparse.Namespace, hosts: "HostGroup") -> bool:
    """Run the checks; host 0 prints and writes the results. Return whether no check failed."""
    # Imported here because this takes seconds.
    from apbv.doctor import hosts as between_hosts
    from apbv.doctor import kernels, machine
    from apbv.doctor.examination import FAILED, Examination, record
    from apbv.stats import append_json_lines

    prepare_process(options, hosts)
    checks = {
        "machine": machine.checks,
        "backends": kernels.backend_checks,
        "kernels": kernels.operator_checks,
        "hosts": between_hosts.exchange_checks,
        "demo": between_hosts.answer_checks,
    }
    parts = {name: checks[name](hosts) for name in options.parts}
    examination = Examination(hosts, options.limit, sys.stdout if hosts.is_leader else None)
    results = examination.run(parts)
    with hosts.local_stage("writing the report"):
        if options.json and hosts.is_leader:
            append_json_lines(options.json, [record(results, hosts, options)])
    is_healthy = all(result.status != FAILED for result in results)
    if examination.stuck is not None:
        # A normal exit would wait for the stuck check, or tear down its resources while it runs.
        # All hosts meet here first, because torchrun stops the others once one exits; through CPU
        # memory, because the GPU may be hanging.
        hosts.gather_json(None)
        sys.stdout.flush()
        os._exit(1)
    if not is_healthy:
        hosts.let_others_report()
    return is_healthy


if __name__ == "__main__":
    exit_with(main)
