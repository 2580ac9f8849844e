"""Reads a saved prefill's KV from a directory, on any number of hosts."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache

from ...errors import StorageError
from ...hosts import HostGroup
from ...input.prompts.model_inputs import ModelInputs
from ...input.prompts.visual import VisualInput, VisualItem
from ...layout import ContextLayout, can_share_kv_heads, plan_layout, split_evenly
from ...model.linear_attention import LinearStates
from ...model.parts import ModelParts
from ..cache import ShardedCache
from ..placement import GatheredKV, PlacedKV, ShardedKV
from ..storage import MANIFEST_NAME, Manifest, SavedKV
from .prefilled import identify, own_heads


@dataclass(frozen=True)
class StoredPrefill:
    """A prefill as it was read, on one process.

    Attributes:
        manifest: what the directory says of it.
        logits: ``[1, V]`` of the last prompt token.
        layout: which host keeps which tokens here.
        inputs: the prompt, without pixels.
        kv: the KV, on one host or sharded.
    """

    manifest: Manifest
    logits: Tensor
    layout: ContextLayout
    inputs: ModelInputs
    kv: PlacedKV


def read_saved(path: Path, parts: ModelParts | None, hosts: HostGroup, kv: str) -> StoredPrefill:
    """Read a directory's contents, again if another save has replaced it meanwhile.

    Args:
        parts: the model that will read the KV, checked to be the one that wrote it; None: any.
        kv: where the KV goes, as in :class:`apbv.PrefillConfig`.

    Raises:
        StorageError: there is no saved KV, or it is incomplete, changed, or of another model.
    """
    while True:
        before = _content_of(path / MANIFEST_NAME)
        try:
            saved = SavedKV.open(path)
            return _read(saved, parts, hosts, kv)
        except Exception as error:  # a manifest edited by hand may fail anywhere
            if _content_of(path / MANIFEST_NAME) != before:
                continue
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"the saved KV in {path} cannot be used: {error}") from error


def _content_of(path: Path) -> bytes | None:
    """Return a file's content; None if it cannot be read."""
    with suppress(OSError):
        return path.read_bytes()
    return None


def _read(saved: SavedKV, parts: ModelParts | None, hosts: HostGroup, kv: str) -> StoredPrefill:
    """Read the tensors of a prefill."""
    manifest = saved.manifest
    if parts is not None:
        _require_written_by(parts, saved)
    prompt = saved.prompt()
    layout = _layout(manifest, hosts.size)
    states = LinearStates.of_named(prompt, hosts.device)
    kv_here: PlacedKV
    if kv == "sharded":
        layers = _read_layers(saved, layout.cache_spans(hosts.rank), hosts)
        kv_here = ShardedKV(ShardedCache.of_shares(layers, layout, hosts.rank), hosts, states)
    else:
        cache = None
        if hosts.rank == 0:
            cache = DynamicCache(_read_layers(saved, None, hosts))
        kv_here = GatheredKV(cache, manifest.num_tokens, hosts, states=states)
    return StoredPrefill(
        manifest=manifest,
        logits=prompt["logits"].to(hosts.device),
        layout=layout,
        inputs=_stored_inputs(manifest, prompt["position_ids"], hosts),
        kv=kv_here,
    )


def _require_written_by(parts: ModelParts, saved: SavedKV) -> None:
    """Reject KV of another model or dtype.

    Raises:
        StorageError: the KV is rejected; the message says why.
    """
    writer = saved.manifest
    reader = identify(parts)
    # The digest of the weights is of the first KV head, which only the first TP rank has.
    has_digest = parts.tensor_parallel[0] == 0
    other = None
    if writer.family != reader.family:
        other = "a model of another family"
    elif writer.config_sha256 != reader.config_sha256:
        other = "a model with another configuration"
    elif has_digest and writer.weights_sha256 != reader.weights_sha256:
        other = "a model with other weights"
    if other is not None:
        raise StorageError(
            f"the KV in {saved.path} was computed by {other}: {writer.model} ({writer.family}), "
            f"not {reader.model} ({reader.family})"
        )
    if saved.manifest.torch_dtype != parts.dtype:
        raise StorageError(
            f"the KV in {saved.path} is {saved.manifest.dtype}, but the model is {parts.dtype}"
        )


def _stored_inputs(manifest: Manifest, position_ids: Tensor, hosts: HostGroup) -> ModelInputs:
    """Return the stored prompt.

    Args:
        position_ids: ``[3, n]`` for M-RoPE models, else ``[n]``.
    """
    visual = None
    if manifest.visual is not None:
        patches = tuple(split_evenly(range(1), hosts.size))
        items = (VisualItem(manifest.visual.kind, manifest.visual.num_tokens),)
        visual = VisualInput(items, patches, hosts.rank, (0, manifest.visual.num_tokens))
    uses_mrope = position_ids.dim() == 2
    return ModelInputs(
        input_ids=torch.tensor([manifest.token_ids]),
        position_ids=position_ids[:, None] if uses_mrope else position_ids[None],
        context_start=manifest.context_start,
        query_start=manifest.query_start,
        visual=visual,
        position_rule=manifest.position_rule,
    )


def _layout(manifest: Manifest, num_hosts: int) -> ContextLayout:
    """Cut the prompt into blocks for this number of hosts."""
    query_start = min(manifest.query_start, manifest.num_tokens - 1)
    # An anchor of all that comes before the question, as Star Attention's on one host, would leave
    # nothing to cut.
    anchor_len = manifest.anchor_len if manifest.anchor_len < query_start else 0
    return plan_layout(
        num_hosts=num_hosts,
        num_tokens=manifest.num_tokens,
        context_start=manifest.context_start,
        query_start=query_start,
        anchor_len=anchor_len,
        passing_len=manifest.passing_len,
        zigzag=True,
    )


def _read_layers(
    saved: SavedKV, spans: Sequence[range] | None, hosts: HostGroup
) -> list[tuple[Tensor, Tensor]]:
    """Read every layer's keys and values ``[1, Hkv, T, D]``, for this process's KV heads.

    Args:
        spans: the tokens to read; None: all.
    """
    num_kv_heads = saved.manifest.num_kv_heads
    num_processes = hosts.tensor_parallel_size
    if not can_share_kv_heads(num_kv_heads, num_processes):
        raise StorageError(
            f"the KV in {saved.path} has {num_kv_heads} KV heads, which can neither be split "
            f"evenly across {num_processes} processes nor be replicated evenly"
        )
    heads = own_heads(num_kv_heads, hosts)
    layers = []
    for index in range(saved.manifest.num_layers):
        keys, values = saved.layer(index, spans, heads)
        layers.append((keys[None].to(hosts.device), values[None].to(hosts.device)))
    return layers
