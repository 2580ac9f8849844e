"""Ends the processes that a benchmark has started."""

import signal
import sys
from multiprocessing import active_children
from typing import NoReturn


def end_children_with_this() -> None:
    """Let SIGTERM end the processes that this one has started, too, which else would go on."""

    def end(*_) -> NoReturn:
        for child in active_children():
            child.terminate()
        sys.exit(128 + signal.SIGTERM)  # by which subprocess ends its own

    signal.signal(signal.SIGTERM, end)
