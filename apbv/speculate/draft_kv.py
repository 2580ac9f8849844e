"""The prompt as a draft sees it: fewer tokens at their old positions, or a smaller copy of the target's KV."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from ..hosts import HostGroup
from ..input.model_inputs import ModelInputs
from ..kv.cache import ShardedCache
from ..model.parts import ModelParts
from ..prefilling.encode import LocalVisual


@torch.no_grad()
def prefill_draft(
    parts: ModelParts, inputs: ModelInputs, kept_visual: Tensor, hosts: HostGroup, rows: Tensor | None
) -> DynamicCache | None:
    """Run the draft over the prompt's text and some of its visual tokens, on the leader; collective.

    Only the embeddings of kept tokens travel.

    Args:
        parts: the draft.
        inputs: the target's prompt.
        kept_visual: numbers among the visual tokens, ascending; the same on every host.
        rows: what the draft's vision tower made of this host's frames; None where nothing visual is kept.

    Returns:
        The KV of the kept tokens on the leader, None elsewhere.
    """
    is_visual = parts.is_visual(inputs.input_ids[0])
    kept = torch.cat([(~is_visual).nonzero().flatten(), is_visual.nonzero().flatten()[kept_visual]]).sort().values
    rows = _collect_rows(rows, inputs, kept_visual, hosts) if len(kept_visual) else None
    if not hosts.is_leader:
        return None
    return run_prompt(parts, inputs.input_ids[:, kept], inputs.position_ids[..., kept], rows)


@torch.no_grad()
def run_prompt(parts: ModelParts, input_ids: Tensor, position_ids: Tensor, rows: Tensor | None) -> DynamicCache:
    """The KV of a prompt ``[1, n]`` whose visual tokens, if there are any, are these rows."""
    embeds, extra = LocalVisual(rows).merge_into(parts, input_ids.to(parts.device))
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
    """The kept rows, in order, on host 0."""
    if inputs.visual.replicated or hosts.size == 1:
        return rows[kept_visual.to(rows.device)]
    wanted = [
        kept_visual[(kept_visual >= p.start) & (kept_visual < p.stop)] - p.start for p in inputs.visual.pieces
    ]
    mine = rows[wanted[hosts.rank].to(rows.device)]
    nothing = rows.new_empty(0)
    parts_to_send = [mine if host == 0 else nothing for host in range(hosts.size)]
    shapes = [(len(w), rows.shape[1]) if hosts.rank == 0 else (0,) for w in wanted]
    received = hosts.all_to_all(parts_to_send, shapes).wait()
    return torch.cat(received) if hosts.rank == 0 else None


def select_kv(cache: DynamicCache, kept: Sequence[Tensor]) -> DynamicCache:
    """A copy of some of a cache's tokens.

    Args:
        cache: ``[1, Hkv, n, D]`` per layer.
        kept: per layer ``[Hkv, T]``, ascending token numbers, which may differ between KV heads; of fewer layers
            for a cache of only these.
    """
    chosen = DynamicCache()
    for index, (layer, tokens) in enumerate(zip(cache.layers, kept, strict=False)):
        rows = tokens.to(layer.keys.device)[None, :, :, None].expand(-1, -1, -1, layer.keys.shape[3])
        chosen.update(layer.keys.gather(2, rows), layer.values.gather(2, rows), index)
    return chosen


def forget_prompt(cache: DynamicCache, kept: Tensor, num_new: int) -> DynamicCache:
    """A copy with these rows of the prompt, ``[T]`` ascending, and all of the ``num_new`` tokens behind it."""
    length, heads = cache.get_seq_length(), cache.layers[0].keys.shape[1]
    rows = torch.cat([kept, torch.arange(length - num_new, length)])
    return select_kv(cache, [rows.expand(heads, -1)] * len(cache.layers))


def collect_kv(shards: ShardedCache, kept: Sequence[Tensor], hosts: HostGroup) -> DynamicCache | None:
    """:func:`select_kv` of KV that is spread over the hosts, on host 0; collective. Only what is kept travels.

    Args:
        kept: as there; the same on every host.

    Returns:
        The chosen KV on host 0, None elsewhere.
    """
    length = shards.get_seq_length()
    owner, row = torch.empty(length, dtype=torch.long), torch.empty(length, dtype=torch.long)
    for host in range(hosts.size):
        spans = [torch.arange(span.start, span.stop) for span in shards.owned_spans(host)]
        tokens = torch.cat([*spans, torch.empty(0, dtype=torch.long)])
        owner[tokens], row[tokens] = host, torch.arange(len(tokens))
    chosen = DynamicCache()
    for index, (layer, tokens) in enumerate(zip(shards.layers, kept, strict=False)):
        heads, places = (owner[tokens] == hosts.rank).nonzero(as_tuple=True)
        rows = row[tokens[heads, places]]
        share = torch.stack([states[0, heads, rows] for states in (layer.keys, layer.values)])
        dim = share.shape[2]
        counts = [int((owner[tokens] == host).sum()) for host in range(hosts.size)]
        parts = [share if host == 0 else share.new_empty(0) for host in range(hosts.size)]
        shapes = [(2, count, dim) if hosts.rank == 0 else (0,) for count in counts]
        received = hosts.all_to_all(parts, shapes).wait()
        if hosts.rank == 0:
            states = share.new_empty(2, *tokens.shape, dim)
            for host, theirs in enumerate(received):
                states[:, owner[tokens] == host] = theirs
            chosen.update(*states[:, None], index)
    return chosen if hosts.rank == 0 else None
