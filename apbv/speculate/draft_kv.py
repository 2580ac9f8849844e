"""This module prefills draft models on some of a prompt's tokens, which stay at their positions."""

import torch
from torch import Tensor
from transformers import DynamicCache

from ..config import PrefillConfig
from ..hosts import HostGroup
from ..input.audio import AudioInput
from ..input.model_inputs import ModelInputs
from ..input.visual import VisualInput
from ..kv.select import select_kv
from ..layout import single_host_layout
from ..model.attention import LayerAttention, apbv_attention
from ..model.parts import ModelParts
from ..prefilling.encode_audio import encode_audio
from ..prefilling.exchange import LocalVisual
from ..prefilling.methods.full import FullMethod
from ..prefilling.observer import ObservedAttention, PrefillObserver


@torch.no_grad()
def prefill_draft(
    parts: ModelParts, inputs: ModelInputs, kept_visual: Tensor, hosts: HostGroup, rows: Tensor | None
) -> DynamicCache | None:
    """Run the draft over the prompt's text and sound and some of its visual tokens, on the leader; collective.

    Only the embeddings of kept visual tokens are sent, and all of the sound's: of that nothing is left out, as in
    HIPPO's experiments with a model that hears.

    Args:
        parts: the draft.
        inputs: the target's prompt.
        kept_visual: the kept visual tokens, by their numbers among all visual tokens, ascending; on every host.
        rows: the draft's visual embeddings of this host's frames; None where no visual token is kept.

    Returns:
        The KV of the text, the sound and the kept visual tokens on the leader, None elsewhere.
    """
    is_visual = parts.is_visual(inputs.input_ids[0])
    text, visual = (~is_visual).nonzero().flatten(), is_visual.nonzero().flatten()[kept_visual]
    tokens = torch.cat([text, visual]).sort().values
    merged = _collect(parts, inputs, kept_visual, hosts, rows)
    if not hosts.is_leader:
        return None
    return run_prompt(parts, inputs.input_ids[:, tokens], inputs.position_ids[..., tokens], merged)


@torch.no_grad()
def prefill_observed(
    parts: ModelParts, inputs: ModelInputs, hosts: HostGroup, rows: Tensor, observer: PrefillObserver
) -> DynamicCache | None:
    """Run the draft over the whole prompt, on the leader, with an observer of its attention; collective.

    Args:
        parts, inputs, rows: as for :func:`prefill_draft`.
        observer: its scores are every host's afterwards.

    Returns:
        The KV of the prompt on the leader, None elsewhere.
    """
    layout = single_host_layout(hosts.size, inputs.num_tokens)
    observer.begin(inputs, layout, hosts)
    merged = _collect(parts, inputs, torch.arange(inputs.num_visual_tokens), hosts, rows)
    if not hosts.is_leader:
        return None
    method = FullMethod(layout, hosts, PrefillConfig(backend=parts.backend))
    question = range(inputs.query_start, inputs.num_tokens)
    attention = ObservedAttention(method, observer, question, layout.cache_spans(0))
    with apbv_attention(parts.language_model):
        return run_prompt(parts, inputs.input_ids, inputs.position_ids, merged, attention)


@torch.no_grad()
def run_prompt(
    parts: ModelParts,
    input_ids: Tensor,
    position_ids: Tensor,
    merged: LocalVisual | None = None,
    attention: LayerAttention | None = None,
) -> DynamicCache:
    """Run a model over a prompt ``[1, n]`` with rows in place of visual and audio tokens; return its KV.

    Args:
        attention: what takes the place of the model's own, where apbv's attention is in force.
    """
    embeds, extra = (merged or LocalVisual()).merge_into(parts, input_ids)
    cache = DynamicCache()
    parts.language_model(
        inputs_embeds=embeds,
        position_ids=position_ids.to(parts.device),
        past_key_values=cache,
        use_cache=True,
        apbv=attention,
        **extra,
    )
    return cache


def _collect(
    parts: ModelParts, inputs: ModelInputs, kept_visual: Tensor, hosts: HostGroup, rows: Tensor | None
) -> LocalVisual:
    """Gather the rows of the kept visual tokens, and of all sound, in order, on host 0; collective."""
    shown = sound = None
    if len(kept_visual):
        shown = _collect_rows(rows, inputs.visual, kept_visual, hosts)
    if inputs.audio is not None:
        everything = torch.arange(inputs.num_audio_tokens)
        sound = _collect_rows(encode_audio(parts, inputs.audio), inputs.audio, everything, hosts)
    return LocalVisual.of_rows(shown, parts, sound)


def _collect_rows(rows: Tensor, source: VisualInput | AudioInput, kept: Tensor, hosts: HostGroup) -> Tensor | None:
    """Gather the rows of kept tokens, by their numbers among those of their kind, on host 0; collective."""
    if source.replicated or hosts.size == 1:
        return rows[kept.to(rows.device)]
    wanted = [kept[(kept >= p.start) & (kept < p.stop)] - p.start for p in source.pieces]
    local = rows[wanted[hosts.rank].to(rows.device)]
    nothing = rows.new_empty(0)
    outgoing = [local if host == 0 else nothing for host in range(hosts.size)]
    shapes = [(len(w), rows.shape[1]) if hosts.rank == 0 else (0,) for w in wanted]
    received = hosts.all_to_all(outgoing, shapes).wait()
    return torch.cat(received) if hosts.rank == 0 else None


def prune_prompt(cache: DynamicCache, rows: Tensor, num_new: int) -> DynamicCache:
    """Copy a cache with only these rows of the prompt, ``[T]`` ascending, and all ``num_new`` tokens after it."""
    length, heads = cache.get_seq_length(), cache.layers[0].keys.shape[1]
    rows = torch.cat([rows, torch.arange(length - num_new, length)])
    return select_kv(cache, [rows.expand(heads, -1)] * len(cache.layers))
