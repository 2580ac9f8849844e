"""Runs scripts in processes of their own, and reads the figures that they write."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import active_children
from typing import NoReturn


def end_children_with_this() -> None:
    """Let SIGTERM end the processes that this one has started, too, which else would go on."""

    def end(*_) -> NoReturn:
        for child in active_children():
            child.terminate()
        sys.exit(128 + signal.SIGTERM)  # by which subprocess ends its own

    signal.signal(signal.SIGTERM, end)


def figures_of(command: Sequence[str], name: str, **environment: str) -> list[dict]:
    """Run Python with these arguments and ``--json``, and return the records that the script wrote.

    Args:
        name: what an error calls it.
        environment: variables that the process has besides those of this one.

    Raises:
        ValueError: it failed; with what it wrote to stderr.
    """
    end_children_with_this()
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as figures:
        result = subprocess.run(
            [sys.executable, *command, "--json", figures.name],
            env=os.environ | environment,
            capture_output=True,
            text=True,
        )
        if result.returncode:
            raise ValueError(f"{name} failed:\n{result.stderr}")
        return [json.loads(line) for line in figures]
