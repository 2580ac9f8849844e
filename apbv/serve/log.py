"""Keeping a flood of bad connections from flooding the log."""

import logging
import time
from collections.abc import Callable


class OncePerPeriod(logging.Filter):
    """A filter that lets each warning through once per period; the next one says how many were left out.

    Args:
        seconds: the period.
        clock: seconds since some moment.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        super().__init__()
        self._seconds, self._clock = seconds, clock
        self._said: dict[str, float] = {}  # when each was last let through; by the code's text, so there are few
        self._left_out: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Decide whether a record passes; errors, and what is less than a warning, always do."""
        if record.levelno != logging.WARNING:
            return True
        text, now = str(record.msg), self._clock()
        if text in self._said and now - self._said[text] < self._seconds:
            self._left_out[text] = self._left_out.get(text, 0) + 1
            return False
        self._said[text] = now
        if count := self._left_out.pop(text, 0):
            record.msg = f"{text} ({count} more like this since the last time)"
        return True
