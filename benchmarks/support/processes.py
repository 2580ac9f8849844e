"""Runs scripts in processes of their own, and reads the figures that they write."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence


def figures_of(command: Sequence[str], name: str, **environment: str) -> list[dict]:
    """Run Python with these arguments and ``--json``, and return the records that the script wrote.

    Args:
        name: what an error calls it.
        environment: variables that the process has besides those of this one.

    Raises:
        ValueError: it failed; with what it wrote to stderr.
    """
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
