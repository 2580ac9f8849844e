"""The log on stderr, with rate limits for repeated warnings."""

import json
import logging
import time
from datetime import UTC, datetime

LOG_FORMATS = ("text", "json")
FIELDS = "fields"  # of a record: a dictionary with the same content as its message


class JsonLines(logging.Formatter):
    """Formats each record as one JSON object per line.

    It has ``time`` (UTC, ISO 8601), ``level``, ``logger`` and ``message``, the record's ``fields``, and for an
    error its ``traceback``.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        moment = datetime.fromtimestamp(record.created, UTC)
        line = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage().rstrip(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def log_to_stderr(form: str = "text") -> None:
    """Log requests and libraries' warnings to stderr.

    Args:
        form: one of LOG_FORMATS. With ``json``, Python's warnings are logged, too.
    """
    handler = logging.StreamHandler()
    if form == "json":
        handler.setFormatter(JsonLines())
        logging.captureWarnings(True)
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logging.getLogger().addHandler(handler)
    logging.getLogger("apbv.serve").setLevel(logging.INFO)


class OncePerPeriod(logging.Filter):
    """Filter that lets each warning through once per period, up to a number of different ones.

    Args:
        seconds: the period.
        most: warnings in a period. Clients choose part of their text, and must not fill the log.
    """

    def __init__(self, seconds: float, most: int = 100):
        super().__init__()
        self._seconds, self._most = seconds, most
        self._said: dict[str, float] = {}  # when each was last let through, from the earliest on

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record passes."""
        if record.levelno != logging.WARNING:
            return True
        text, now = record.getMessage(), time.monotonic()
        while self._said and now - next(iter(self._said.values())) >= self._seconds:
            del self._said[next(iter(self._said))]
        if text in self._said or len(self._said) >= self._most:
            return False
        self._said[text] = now
        return True
