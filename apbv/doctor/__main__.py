"""Find out what of apbv works on this machine, and why the rest does not.

python -m apbv.doctor                           (this machine's first GPU, or its CPU)
torchrun --nproc-per-node 8 -m apbv.doctor      (eight GPUs, and what lies between them)

The exit status is 0 where nothing has failed. Nothing is downloaded.
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
    "backends": "which attention back ends work here, and why not the others",
    "kernels": "every operator by every back end, against fp64",
    "hosts": "everything that hosts exchange, with known numbers",
    "demo": "the demo model's answers",
}
_REPORTING_SECONDS = 30.0  # beyond a check's limit, until its host has told the others


def parse_arguments(arguments: list[str] | None = None, prog: str | None = None) -> argparse.Namespace:
    """Read and check the options, which ends the process where one is wrong."""
    parser = OptionParser(prog or "apbv.doctor", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        metavar="PART",
        help="; ".join(f"{name}: {about}" for name, about in PARTS.items()),
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="append everything found as one JSON line")
    parser.add_argument(
        "--limit", type=positive(), default=180.0, help="seconds after which a check has failed (180)"
    )
    parser.add_argument(
        "--device",
        type=device_name,
        metavar="cpu|cuda|cuda:N",
        help="what each process examines (default: a GPU, of which several may share one, or else the CPU)",
    )
    parser.add_argument("--threads", type=positive(int), metavar="N", help="CPU threads of each process")
    options = parser.parse_args(arguments)
    options.parts = [name for name in PARTS if name in (options.only or PARTS)]
    return options


def main(arguments: list[str] | None = None, prog: str | None = None) -> int:
    """Examine this machine on this host, and return the exit status."""
    options = parse_arguments(arguments, prog)
    # Only now what takes seconds to import.
    from apbv.hosts import run_on_hosts

    healthy: list[bool] = []
    status = run_on_hosts(
        lambda hosts: healthy.append(_examine(options, hosts)),
        options.limit + _REPORTING_SECONDS,
        device=options.device,
    )
    return int(status != 0 or not all(healthy))


def _examine(options: argparse.Namespace, hosts: "HostGroup") -> bool:
    """Run the checks, and let host 0 print and write what they find; return whether nothing has failed."""
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
    healthy = all(result.status != FAILED for result in results)
    if examination.stuck is not None:
        # What still runs would be waited for, or be torn down under its own feet. Nobody ends before all are here,
        # because torchrun then stops the others; over host memory, because a GPU may be what hangs.
        hosts.gather_json(None)
        sys.stdout.flush()
        os._exit(1)
    if not healthy:
        hosts.let_others_report()
    return healthy


if __name__ == "__main__":
    exit_with(main)
