"""Description of a prompt's KV, for saved KV, tickets and consumers; and the rows of its parts.

Other engines' processes import this module: it needs only torch and the standard library.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from ..errors import StorageError
from ..layout import intersect

Run = tuple[int, int]  # [start, stop)

_DTYPES = ("float32", "float16", "bfloat16", "float64")


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
    def of(cls, other: "ModelIdentity") -> Self:
        """Take this class's fields from a larger description."""
        values = {field.name: getattr(other, field.name) for field in fields(cls)}
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class KVFacts(ModelIdentity):
    """Everything that decides whether a consumer may use a prompt's KV.

    Attributes:
        num_tokens: n, the number of tokens.
        tokens_sha256: the digest of the prompt's tokens (:func:`digest_of_tokens`).
        positions_sha256: the digest of its rotary positions (:func:`digest_of_positions`).
        position_rule: the rule that gave the positions, ``"transformers"`` or ``"vllm"``.
        dtype: torch's name for the dtype of keys and values.
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
    """Build a value of an annotated type from parsed JSON.

    Args:
        kind: a plain type, a dataclass, a tuple type, or one of these or None.
        name: the value's name in errors.

    Raises:
        StorageError: the value is of another type, or an object lacks fields or has unknown ones.
    """
    if get_origin(kind) is UnionType:
        if value is None:
            return None
        return from_json(_without_none(kind), value, name)
    if get_origin(kind) is tuple and isinstance(value, (list, tuple)):
        item_kinds = get_args(kind)
        if item_kinds[-1] is Ellipsis:
            item_kinds = (item_kinds[0],) * len(value)
        if len(item_kinds) != len(value):
            raise malformed(name)
        items = zip(item_kinds, value, strict=True)
        return tuple(from_json(item_kind, item, name) for item_kind, item in items)
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        return _dataclass_from_json(kind, value)
    if type(value) is not kind:
        raise malformed(name)
    return value


def _without_none(union: UnionType) -> Any:
    """Return the other alternative of a type that may be None."""
    return next(kind for kind in get_args(union) if kind is not NoneType)


def _dataclass_from_json(kind: type, record: dict[Any, Any]) -> Any:
    """Build a dataclass from an object of parsed JSON."""
    kinds = get_type_hints(kind)
    if set(record) != set(kinds):
        names = {str(name) for name in record}
        wrong = ", ".join(sorted(names ^ set(kinds)))
        raise StorageError(f"the KV description has missing or unknown fields: {wrong:.200}")
    values = {name: from_json(kinds[name], value, name) for name, value in record.items()}
    return kind(**values)


def digest_of_tokens(token_ids: Tensor | Sequence[int]) -> str:
    """Compute the SHA-256 of token ids ``[n]`` as little-endian int64."""
    return _digest(torch.as_tensor(token_ids, dtype=torch.int64))


def digest_of_positions(positions: Tensor) -> str:
    """Compute the SHA-256 of rotary positions ``[3, n]`` or ``[n]``, as little-endian int64."""
    return _digest(positions.to(torch.int64))


def _digest(numbers: Tensor) -> str:
    values = numbers.detach().cpu().contiguous().numpy().astype("<i8", copy=False)
    return hashlib.sha256(values.tobytes()).hexdigest()


def length(run: Run) -> int:
    """Count the tokens of a run ``[start, stop)``."""
    return run[1] - run[0]


def rows_of(runs: Sequence[Run], token_ranges: Sequence[range]) -> Iterator[tuple[slice, slice]]:
    """Yield a shard's rows with requested tokens, and the places of these among all requested ones.

    Args:
        runs: the shard's token numbers, ascending; its rows are these runs one after the other.
        token_ranges: the requested tokens, one range after the other.
    """
    first_row = 0
    for run in runs:
        first_place = 0
        for tokens in token_ranges:
            common = intersect(range(*run), tokens)
            if common:
                row = first_row + common.start - run[0]
                place = first_place + common.start - tokens.start
                yield slice(row, row + len(common)), slice(place, place + len(common))
            first_place += len(tokens)
        first_row += length(run)


def cover_once(shards: Iterable[tuple[Sequence[Run], Run]], kv_heads: range, tokens: range) -> bool:
    """Return whether shards hold every one of some tokens' KV heads exactly once.

    Args:
        shards: each shard's runs of tokens and range of KV heads, within the following ones.
        kv_heads: the KV heads that have to be covered.
        tokens: the tokens that have to be covered.
    """
    shards = list(shards)
    # Not by len, which raises OverflowError beyond 64 bits: a manifest may have any number.
    num_heads = kv_heads.stop - kv_heads.start
    num_tokens = tokens.stop - tokens.start

    # Compare how many are covered, before memory is allocated.
    num_covered = 0
    for runs, heads in shards:
        num_covered += length(heads) * sum(length(run) for run in runs)
    if num_covered != num_heads * num_tokens:
        return False

    # Mark which are covered.
    is_covered = torch.zeros(num_heads, num_tokens, dtype=torch.bool)
    for runs, heads in shards:
        rows = slice(heads[0] - kv_heads.start, heads[1] - kv_heads.start)
        for start, stop in runs:
            is_covered[rows, start - tokens.start : stop - tokens.start] = True
    return bool(is_covered.all())
