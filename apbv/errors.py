"""The kinds of errors that a user meets, and how one crosses hosts.

Each kind is a class with a code, which travels between hosts together with the message, so that a
stage that fails on one host raises the same class with the same message on all of them. Every other
exception is a fault of this package: it keeps its traceback on the host where it happened, and the
others raise a :class:`HostError` that names it.

================================  =================  ===========  ===========
class                             code               exit status  HTTP status
================================  =================  ===========  ===========
:class:`InvalidRequestError`      invalid_request    65           400
:class:`InvalidConfigError`       invalid_config     78           400
:class:`UnsupportedModelError`    unsupported_model  79           400
:class:`NotEnoughMemoryError`     not_enough_memory  71           503
:class:`StorageError`             storage            74           503
:class:`BackendUnavailableError`  backend            69           503
:class:`RequestCancelled`         cancelled          130          499
:class:`ModelOutputError`         model_output       70           500
:class:`HostError`                host               75           500
any other exception                                  70           500
================================  =================  ===========  ===========

Where sysexits.h has a number for a kind, the exit status is that number.
"""

import errno
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

FAULT_EXIT_STATUS = 70  # EX_SOFTWARE: of an exception of no kind
FAULT_HTTP_STATUS = 500

_MOST_CHARACTERS = 2**14  # of an error that is sent to other processes
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)

Raised = TypeVar("Raised", Exception, BaseException)

# By code: the kinds, and the classes of errors below them.
_CLASSES: dict[str, type["ApbvError"]] = {}


class ApbvError(Exception):
    """An error that a user, a client or an operator can do something about.

    Attributes:
        code: names the class between hosts.
        exit_status: with which a program ends that this error ends.
        http_status: with which a server answers a request that this error ends.
        is_agreed: whether all hosts raise it at the same point of a stage with exchanges, so that
            no host waits for another and their group can go on.
        host: the name of the process where it happened; None: this one.
        stage: the stage in which it happened there; None if ``host`` is.
    """

    code: ClassVar[str]
    exit_status: ClassVar[int]
    http_status: ClassVar[int]
    is_agreed: ClassVar[bool] = False

    host: str | None = None
    stage: str | None = None

    @property
    def is_of_others(self) -> bool:
        """Whether it says that another process failed, of which all processes know by now."""
        return self.host is not None

    def __init_subclass__(cls, **options) -> None:
        super().__init_subclass__(**options)
        if "code" not in cls.__dict__:
            parent_code = next(_codes_of(cls))
            cls.code = f"{parent_code}/{cls.__name__}"
        _CLASSES[cls.code] = cls


def _codes_of(kind: type[ApbvError]) -> Iterator[str]:
    """Yield the codes of a class and of those above, the most particular first."""
    for base in kind.__mro__:
        if "code" in base.__dict__:
            yield base.__dict__["code"]


class InvalidRequestError(ApbvError, ValueError):
    """A prompt, a file or a parameter of a request cannot be handled."""

    code = "invalid_request"
    exit_status = 65  # EX_DATAERR
    http_status = 400


class PromptError(InvalidRequestError):
    """Raised if this model cannot answer the prompt; the message says why."""


class InvalidConfigError(ApbvError, ValueError):
    """A setting is wrong, or does not go with another, with the model or with the hosts."""

    code = "invalid_config"
    exit_status = 78  # EX_CONFIG
    http_status = 400


class UnsupportedModelError(ApbvError, ValueError):
    """The model, or its checkpoint, is none that can be loaded and prefilled."""

    code = "unsupported_model"
    exit_status = 79
    http_status = 400


class NotEnoughMemoryError(ApbvError, ValueError):
    """A host ran out of memory, or certainly would."""

    code = "not_enough_memory"
    exit_status = 71  # EX_OSERR
    http_status = 503


class StorageError(ApbvError, ValueError):
    """KV or files cannot be stored, sent, found or read."""

    code = "storage"
    exit_status = 74  # EX_IOERR
    http_status = 503


class BackendUnavailableError(ApbvError, ValueError):
    """A device, a kernel or a package that was asked for is not there, or does not work."""

    code = "backend"
    exit_status = 69  # EX_UNAVAILABLE
    http_status = 503


class RequestCancelled(ApbvError, ValueError):
    """``stop`` ended a request before its first token; the hosts can continue."""

    code = "cancelled"
    exit_status = 130  # as after Ctrl-C
    http_status = 499
    is_agreed = True

    def __init__(self, message: str = "the request was cancelled before its first token"):
        super().__init__(message)


class ModelOutputError(ApbvError, ValueError):
    """The model gave NaN or infinite logits; all hosts raise it, and can continue."""

    code = "model_output"
    exit_status = FAULT_EXIT_STATUS
    http_status = FAULT_HTTP_STATUS
    is_agreed = True


class HostError(ApbvError, RuntimeError):
    """Another host failed or cannot be reached; the message says which, where and why."""

    code = "host"
    exit_status = 75  # EX_TEMPFAIL
    http_status = 500

    @property
    def is_of_others(self) -> bool:
        return True


def as_kind(error: Raised) -> Raised:
    """Return the error of a kind that an exception stands for; itself if it stands for none.

    The allocator's errors and those of a full disk have classes of Python's and torch's; the
    kernels, which stand alone, name the kind of theirs.
    """
    if isinstance(error, ApbvError):
        return error
    kind = _CLASSES.get(getattr(error, "apbv_code", ""))
    if kind is not None:
        return _caused_by(kind(str(error)), error)
    if is_out_of_memory(error):
        return _caused_by(NotEnoughMemoryError(str(error) or "out of memory"), error)
    if isinstance(error, OSError) and error.errno in _FULL_DISK:
        return _caused_by(StorageError(str(error)), error)
    return error


def without_frames(error: Raised) -> Raised:
    """Return an error's kind without the frames that hold a request's tensors.

    The traceback of a fault becomes a note of it, so that it is printed all the same.
    """
    known = as_kind(error)
    if not isinstance(known, ApbvError) and known.__traceback__ is not None:
        known.add_note("".join(traceback.format_exception(known)).rstrip())
    known.__cause__ = None
    known.__context__ = None
    return known.with_traceback(None)


def exit_status_of(error: BaseException) -> int:
    """Return with which status a program ends that an error ends."""
    return error.exit_status if isinstance(error, ApbvError) else FAULT_EXIT_STATUS


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocator raised an exception.

    That of a CPU has no class of its own, only a message.
    """
    import torch  # which takes seconds to import, and a wrong setting does not wait for it

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate" in str(error)


def _caused_by(error: ApbvError, cause: BaseException) -> ApbvError:
    error.__cause__ = cause
    return error


@dataclass(frozen=True)
class ErrorReport:
    """An error as one process tells the others of it.

    Attributes:
        codes: of its class and of those above, the most particular first; empty for a fault of this
            package.
        message: its message; of a fault with its type before it.
    """

    codes: Sequence[str]
    message: str

    @classmethod
    def of(cls, error: BaseException) -> "ErrorReport":
        """Return the report of an error of this process."""
        if not isinstance(error, ApbvError):
            return cls([], describe_error(error)[:_MOST_CHARACTERS])
        return cls(list(_codes_of(type(error))), printable(str(error))[:_MOST_CHARACTERS])

    def to_json(self) -> list[Any]:
        """Return the report JSON-ready, for :meth:`from_json` on another process."""
        return [list(self.codes), self.message]

    @classmethod
    def from_json(cls, fields: list[Any]) -> "ErrorReport":
        """Return the report that :meth:`to_json` made."""
        codes, message = fields
        return cls(codes, message)

    def error(self, host: str, stage: str) -> ApbvError:
        """Return the error for another process to raise.

        It has the class of the reported one, or of the first above it that this process knows, and
        its message; for a fault it is a HostError that quotes it.

        Args:
            host: the name of the process where it happened.
            stage: the stage in which it happened.
        """
        known_codes = [code for code in self.codes if code in _CLASSES]
        if known_codes:
            kind = _CLASSES[known_codes[0]]
            error = kind.__new__(kind)
            error.args = (self.message,)
            error.add_note(f"It happened on {host}, in {stage}.")
        else:
            error = HostError(f"{host} failed in {stage}: {self.message}")
        error.host = host
        error.stage = stage
        return error


def describe_error(error: BaseException) -> str:
    """Give an error's type and message, with the undecodable bytes of a file name escaped."""
    return printable(f"{type(error).__name__}: {error}")


def printable(text: str) -> str:
    """Escape the undecodable bytes of a file name."""
    return text.encode(errors="backslashreplace").decode()
