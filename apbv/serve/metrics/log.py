"""The log on stderr, with rate limits for repeated warnings."""

import json
import logging
import time
from datetime import UTC, datetime

LOG_FORMATS = ("text", "json")
_MAX_CHARS = 300  # of a reason, which may quote a request
FIELDS = "fields"  # of a record: a dictionary with the same content as its message


class JsonLines(logging.Formatter):
    """Formats each record as one JSON object per line.

    It has ``time`` (UTC, ISO 8601), ``level``, ``logger`` and ``message``, the record's ``fields``,
    and for an error its ``traceback``.
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


def in_one_line(text: str) -> str:
    """Return a text for one line of a log: bounded, without line breaks and control characters."""
    line = ""
    for character in " ".join(text[: 2 * _MAX_CHARS].split()):
        line += character if character.isprintable() else "\N{REPLACEMENT CHARACTER}"
    return line if len(line) <= _MAX_CHARS else f"{line[:_MAX_CHARS]}…"


def reason_in_one_line(message: str, param: str | None) -> str:
    """Return an error's field and message for one line of a log.

    Args:
        message, param: an error reply's. A message may begin with the last step of the field's
            path.
    """
    if param is None:
        return in_one_line(message)
    last_step = param.rpartition(".")[2]
    message = message.removeprefix(f"{last_step}: ")
    return in_one_line(f"{param}: {message}")


class OncePerPeriod(logging.Filter):
    """Filter that lets each warning through once per period, up to a number of different ones.

    Args:
        seconds: the period.
        most: the most warnings in a period. Clients choose part of their text, and must not fill
            the log.
    """

    def __init__(self, seconds: float, most: int = 100):
        super().__init__()
        self._seconds = seconds
        self._most = most
        # When each was last let through, from the earliest on.
        self._passed_at: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record passes."""
        if record.levelno != logging.WARNING:
            return True
        text = record.getMessage()
        now = time.monotonic()
        for earlier_text, passed_at in list(self._passed_at.items()):
            if now - passed_at < self._seconds:
                break
            del self._passed_at[earlier_text]
        if text in self._passed_at or len(self._passed_at) >= self._most:
            return False
        self._passed_at[text] = now
        return True
