"""Description of a prompt's KV, which saved KV, tickets and consumers compare, and the rows of its
parts.

Other engines' processes import this module: it needs only torch and the standard library.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import repeat
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from ..layout import intersect

Run = tuple[int, int]  # [start, stop)

_DTYPES = ("float32", "float16", "bfloat16", "float64")


class StorageError(ValueError):
    """Raised if KV cannot be written, read, fetched or used; the message says why."""


@dataclass(frozen=True, kw_only=True)
class ModelIdentity:
    """Identity of the model that computed some KV.

    Attributes:
        model: path or hub id from which it was loaded.
        revision: the hub's commit; None for a directory.
        family: its ``model_type``.
        config_sha256: digest of its configuration (see :mod:`apbv.model.digest`).
        weights_sha256: digest of its language model's weights, which differ between fine-tuned
            siblings.
    """

    model: str
    revision: str | None
    family: str
    config_sha256: str
    weights_sha256: str

    @classmethod
    def of(cls, other: "ModelIdentity") -> "ModelIdentity":
        """Take this class's fields from a larger description."""
        return cls(**{each.name: getattr(other, each.name) for each in fields(cls)})


@dataclass(frozen=True, kw_only=True)
class KVFacts(ModelIdentity):
    """Everything that decides whether a consumer may use a prompt's KV.

    Attributes:
        num_tokens: n, the number of tokens.
        tokens_sha256: :func:`digest_of_tokens` of the prompt.
        positions_sha256: :func:`digest_of_positions` of its rotary positions.
        position_rule: the rule that gave them, ``"transformers"`` or ``"vllm"``.
        dtype: of keys and values, as torch names it.
        num_layers, num_kv_heads, head_dim: sizes of the whole KV.
        method: the prefill method that ran.
        exact: whether its KV is that of full attention.

    Raises:
        StorageError: a value is impossible.
    """

    num_tokens: int
    tokens_sha256: str
    positions_sha256: str
    position_rule: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    method: str
    exact: bool

    def __post_init__(self):
        if self.dtype not in _DTYPES:
            raise malformed("dtype")
        for name in ("num_tokens", "num_layers", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise malformed(name)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype of keys and values."""
        return getattr(torch, self.dtype)

    @property
    def num_bytes(self) -> int:
        """The bytes of all keys and values."""
        rows = self.num_layers * self.num_kv_heads * self.num_tokens
        return 2 * rows * self.head_dim * self.torch_dtype.itemsize


def malformed(name: str) -> StorageError:
    """Return the error for a malformed field."""
    return StorageError(
        f"the description of the KV is malformed: its {name} is not what it must be"
    )


def from_json(kind: Any, value: Any, name: str = "") -> Any:
    """Build a value of an annotated type, such as a dataclass of tuples of dataclasses, from parsed
    JSON.

    Raises:
        StorageError: the value is of another type, or an object lacks fields or has unknown ones.
    """
    arguments = get_args(kind)
    if get_origin(kind) is UnionType:
        (inner,) = (each for each in arguments if each is not NoneType)
        return None if value is None else from_json(inner, value, name)
    if get_origin(kind) is tuple and isinstance(value, (list, tuple)):
        kinds = repeat(arguments[0], len(value)) if arguments[-1] is Ellipsis else arguments
        if len(value) == len(arguments) or arguments[-1] is Ellipsis:
            return tuple(
                from_json(each, item, name) for each, item in zip(kinds, value, strict=True)
            )
    if is_dataclass(kind) and isinstance(value, dict):
        known = get_type_hints(kind)
        if set(value) != set(known):
            wrong = ", ".join(sorted(set(map(str, value)) ^ set(known)))
            raise StorageError(f"the KV description has missing or unknown fields: {wrong:.200}")
        return kind(
            **{field: from_json(known[field], item, field) for field, item in value.items()}
        )
    if type(value) is not kind:
        raise malformed(name)
    return value


def digest_of_tokens(token_ids: Tensor | Sequence[int]) -> str:
    """Compute the SHA-256 of token ids ``[n]`` as little-endian int64."""
    return _digest(torch.as_tensor(token_ids, dtype=torch.int64))


def digest_of_positions(positions: Tensor) -> str:
    """Compute the SHA-256 of rotary positions, ``[3, n]`` or ``[n]``, row by row as little-endian
    int64."""
    return _digest(positions.to(torch.int64))


def _digest(numbers: Tensor) -> str:
    values = numbers.detach().cpu().contiguous().numpy().astype("<i8", copy=False)
    return hashlib.sha256(values.tobytes()).hexdigest()


def length(run: Run) -> int:
    """Count the tokens of a run ``[start, stop)``."""
    return run[1] - run[0]


def rows_of(runs: Sequence[Run], wanted: Sequence[range]) -> Iterator[tuple[slice, slice]]:
    """Yield which rows of a shard belong to the wanted tokens, and their places among these.

    Args:
        runs: the shard's token numbers, ascending; its rows are these runs one after the other.
    """
    row = 0
    for run in runs:
        place = 0
        for tokens in wanted:
            common = intersect(range(*run), tokens)
            if common:
                start = row + common.start - run[0]
                at = place + common.start - tokens.start
                yield slice(start, start + len(common)), slice(at, at + len(common))
            place += len(tokens)
        row += length(run)


def cover_once(shards: Iterable[tuple[Sequence[Run], Run]], kv_heads: range, tokens: range) -> bool:
    """Return whether shards hold every one of some tokens, of every one of some KV heads, exactly
    once.

    Args:
        shards: of each the runs of tokens and the range of KV heads, all within those asked about.
    """
    shards = list(shards)
    num_heads = kv_heads.stop - kv_heads.start
    num_tokens = tokens.stop - tokens.start
    cells = sum(length(heads) * sum(map(length, runs)) for runs, heads in shards)
    if cells != num_heads * num_tokens:  # checked before memory is allocated
        return False
    held = torch.zeros(num_heads, num_tokens, dtype=torch.bool)
    for runs, heads in shards:
        for start, stop in runs:
            of_heads = slice(heads[0] - kv_heads.start, heads[1] - kv_heads.start)
            held[of_heads, start - tokens.start : stop - tokens.start] = True
    return bool(held.all())
