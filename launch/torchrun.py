"""Finding out how long torchrun lets its processes run when it is asked to end."""

import argparse
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_DEFAULT_SECONDS = 30.0
# On top of the time that work may take: for the last responses, and for the interpreter to exit.
_EXIT_SECONDS = 10.0


def warn_of_early_kill(grace: float) -> None:
    """Warn on stderr, once per machine, if torchrun would kill its processes before their work is done.

    Args:
        grace: seconds that the work may take after SIGTERM.
    """
    seconds = seconds_until_killed()
    if seconds is not None and seconds < grace + _EXIT_SECONDS and os.environ.get("LOCAL_RANK") == "0":
        sys.stderr.write(
            f"warning: torchrun kills its processes {seconds:g} s after SIGTERM, but --grace is {grace:g} s: give "
            f"torchrun --shutdown-timeout {math.ceil(grace + _EXIT_SECONDS)} (newer than torch 2.11), or send "
            "SIGTERM to host 0's process\n"
        )


def seconds_until_killed() -> float | None:
    """Return the seconds after which torchrun kills the processes that it has asked to end.

    None where this process was not started by torchrun, or where its command line cannot be read (from /proc).
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    try:
        command = os.fsdecode(Path("/proc", str(os.getppid()), "cmdline").read_bytes()).split("\0")
    except OSError:
        return None
    if not any(Path(word).name in ("torchrun", "torch.distributed.run") for word in command):
        return None
    return shutdown_timeout(command, os.environ)


def shutdown_timeout(command: Sequence[str], environment: Mapping[str, str]) -> float | None:
    """Return a torchrun's shutdown timeout in seconds, by its command line and environment.

    None where the command line cannot be understood.
    """
    default = _DEFAULT_SECONDS
    for name in ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PET_SHUTDOWN_TIMEOUT"):  # the latter goes before
        default = environment.get(name, default)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--shutdown-timeout", "--shutdown_timeout", type=float, default=default)
    try:
        return parser.parse_known_args(command)[0].shutdown_timeout
    except argparse.ArgumentError:
        return None
