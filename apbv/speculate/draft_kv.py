"""This module prefills draft models on some of a prompt's tokens, which stay at their positions."""

import torch
from torch import Tensor
from transformers import DynamicCache

from ..hosts import HostGroup
from ..input.model_inputs import ModelInputs
from ..kv.select import select_kv
from ..model.parts import ModelParts
from ..prefilling.exchange import LocalVisual


@torch.no_grad()
def prefill_draft(
    parts: ModelParts, inputs: ModelInputs, kept_visual: Tensor, hosts: HostGroup, rows: Tensor | None
) -> DynamicCache | None:
    """Run the draft over the prompt's text and some of its visual tokens, on the leader; collective.

    Only the embeddings of kept visual tokens are sent.

    Args:
        parts: the draft.
        inputs: the target's prompt.
        kept_visual: the kept visual tokens, by their numbers among all visual tokens, ascending; on every host.
        rows: the draft's visual embeddings of this host's frames; None where no visual token is kept.

    Returns:
        The KV of the text and the kept visual tokens on the leader, None elsewhere.
    """
    is_visual = parts.is_visual(inputs.input_ids[0])
    text, visual = (~is_visual).nonzero().flatten(), is_visual.nonzero().flatten()[kept_visual]
    tokens = torch.cat([text, visual]).sort().values
    rows = _collect_rows(rows, inputs, kept_visual, hosts) if len(kept_visual) else None
    if not hosts.is_leader:
        return None
    return run_prompt(parts, inputs.input_ids[:, tokens], inputs.position_ids[..., tokens], rows)


@torch.no_grad()
def run_prompt(parts: ModelParts, input_ids: Tensor, position_ids: Tensor, rows: Tensor | None) -> DynamicCache:
    """Run a model over a prompt ``[1, n]`` with these rows in place of visual tokens; return its KV."""
    embeds, extra = LocalVisual.of_rows(rows, parts).merge_into(parts, input_ids)
    cache = DynamicCache()
    parts.language_model(
        inputs_embeds=embeds,
        position_ids=position_ids.to(parts.device),
        past_key_values=cache,
        use_cache=True,
        **extra,
    )
    return cache


def _collect_rows(rows: Tensor, inputs: ModelInputs, kept_visual: Tensor, hosts: HostGroup) -> Tensor | None:
    """Gather the rows of the kept visual tokens, in order, on host 0; collective."""
    if inputs.visual.replicated or hosts.size == 1:
        return rows[kept_visual.to(rows.device)]
    wanted = [
        kept_visual[(kept_visual >= p.start) & (kept_visual < p.stop)] - p.start for p in inputs.visual.pieces
    ]
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
