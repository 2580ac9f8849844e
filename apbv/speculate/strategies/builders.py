"""Builds the draft of every strategy from a prefilled prompt."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ...config import KEEP_FACTS, HippoConfig, LayerSkipConfig, TabedConfig
from ...prefilling.encoding.vision import encode_visual
from ...prefilling.reduction.choosing import keep_best, keep_even
from ..drafters.draft import Draft, DraftTask, Successor, prefill_draft, run_prompt
from ..drafters.drafters import Drafter, NgramDrafter, ReadPrompt
from .ensemble import EnsembleDrafter, read_contexts
from .frame_selection import keep_from_frames
from .hippo import local_semantics, with_relevance


def kept_visual_tokens(task: DraftTask, rows: Tensor | None) -> Tensor:
    """Select the visual tokens that the draft sees, ascending; the same on every host. Collective.

    Args:
        rows: the draft's embeddings of the frames that this host encoded.
    """
    keep = task.keep
    count = task.num_kept
    total = task.inputs.num_visual_tokens
    assert keep is not None, "the strategy has a choice of visual tokens"
    facts = KEEP_FACTS[keep]
    if not total or not facts.prunes:
        return torch.arange(total)
    if facts.ranks_by_prefill:
        return _BY_SCORES[keep](task.read_scores(), count)
    if keep in _BY_NUMBER:
        return _BY_NUMBER[keep](total, count, task.sampling.seed)
    assert rows is not None, "the draft has embedded the visual tokens"
    if facts.selects_frames:
        return keep_from_frames(task.draft_parts, task.inputs, rows, task.hosts, keep, count)
    # HIPPO's Eq. 7: attention, change over time, variety in space, z-scored by frame.
    terms = task.config.settings_of(HippoConfig).terms
    scores = local_semantics(task.draft_parts, task.inputs, rows, task.hosts, terms)
    if "attention" in terms:
        scores = with_relevance(task.draft_parts, task.inputs, scores, task.read_scores())
    return keep_best(scores, count)


def draft_by_model(task: DraftTask) -> Draft:
    """Draft with the draft model, on all text and sound, and on visual tokens by ``task.keep``."""
    rows = encode_visual(task.draft_parts, task.inputs.visual)
    all_visual = torch.arange(task.inputs.num_visual_tokens)
    assert task.keep is not None, "the strategy has a choice of visual tokens"
    if not len(all_visual) or not KEEP_FACTS[task.keep].prunes:
        return _draft_on_tokens(task, rows, all_visual)
    if task.config.prune == "prompt":
        return _draft_on_tokens(task, rows, kept_visual_tokens(task, rows))
    # Read the whole prompt, and prune the KV once the scores are known.
    first = _draft_on_tokens(task, rows, all_visual)
    if task.awaited is None:
        return _prune_kv(task, rows, first)
    successor = Successor(task.awaited, partial(_prune_kv, task, rows, first))
    return replace(first, successor=successor)


def _draft_on_tokens(task: DraftTask, rows: Tensor | None, kept: Tensor) -> Draft:
    """Draft prefill on all text and these visual tokens."""
    parts = task.draft_parts
    prompt = prefill_draft(
        parts, task.inputs, kept, task.hosts, rows, task.decode_host, task.leave_last
    )
    return Draft(task.drafter(parts, prompt), len(kept), kept)


def _prune_kv(task: DraftTask, rows: Tensor | None, draft: Draft) -> Draft:
    """Prune the KV of a draft that has read the whole prompt to the kept visual tokens."""
    kept = kept_visual_tokens(task, rows)
    if draft.drafter is not None:
        visual = task.is_visual.nonzero().flatten()[kept]
        text = (~task.is_visual).nonzero().flatten()
        if task.leave_last:  # the KV lacks the last token
            text = text[:-1]
        draft.model_drafter.prune_prompt(torch.cat([text, visual]).sort().values)
    return Draft(draft.drafter, len(kept), kept)


def draft_text_only(task: DraftTask) -> Draft:
    """Draft with the draft model, on the prompt's text alone, and on its sound if it hears."""
    nothing = torch.empty(0, dtype=torch.long)
    parts = task.draft_parts
    if parts.sees or not task.target.sees:
        prompt = prefill_draft(
            parts, task.inputs, nothing, task.hosts, None, task.decode_host, task.leave_last
        )
        return Draft(task.drafter(parts, prompt), 0, nothing)
    # A text-only model knows neither placeholders nor the target's positions: it reads the text as
    # a whole prompt.
    text = task.text_ids[None]
    # As ModelDrafter does for tokens outside its vocabulary.
    text = text.where(text < parts.vocab_size, 0)
    assert not task.leave_last, "on a draft host the draft reads the target's prompts"
    num_tokens = text.shape[1]
    prompt = None
    if task.is_decode_host:
        prompt = run_prompt(parts, text, torch.arange(num_tokens)[None])
    return Draft(task.drafter(parts, prompt, next_position=num_tokens), 0, nothing)


def draft_by_ensemble(task: DraftTask) -> Draft:
    """Draft with one model that reads the prompt in several contexts (TABED).

    A prompt of text is read as by ``vanilla``.
    """
    if not task.inputs.num_visual_tokens:
        return draft_by_model(task)
    rows = None
    kept = torch.empty(0, dtype=torch.long)
    letters = task.config.settings_of(TabedConfig).contexts
    if "M" in letters or "P" in letters:  # the other contexts are text
        rows = encode_visual(task.draft_parts, task.inputs.visual)
        kept = kept_visual_tokens(task, rows)
    contexts = read_contexts(task, kept, rows)
    drafter = EnsembleDrafter(task, contexts) if contexts else None
    return Draft(drafter, len(kept), kept)


def draft_on_attended_kv(task: DraftTask) -> Draft:
    """Draft with the target on all text and every head's most attended visual KV (STD)."""
    count = task.num_kept
    if task.inputs.num_visual_tokens:
        best = [scores.topk(count, dim=1).indices for scores in task.read_scores()]
    else:
        nothing = torch.empty(task.target.num_kv_heads, 0, dtype=torch.long)
        best = [nothing] * task.target.num_kv_layers
    return Draft(_own_kv_drafter(task, best), count)


def draft_on_latest_kv(task: DraftTask) -> Draft:
    """Draft with the target on all text and the latest visual KV (StreamingLLM).

    The text has the first tokens.
    """
    num_visual = task.inputs.num_visual_tokens
    latest = torch.arange(num_visual - min(task.num_kept, num_visual), num_visual)
    of_every_head = latest.expand(task.target.num_kv_heads, -1)
    drafter = _own_kv_drafter(task, [of_every_head] * task.target.num_kv_layers)
    return Draft(drafter, len(latest), latest)


def _own_kv_drafter(task: DraftTask, visual: list[Tensor]) -> Drafter | None:
    """Return a drafter that is the target on all text and some visual tokens.

    Args:
        visual: for each layer of KV, and each head, the visual tokens by number, ``[Hkv, T]``.
    """
    visual_tokens = task.is_visual.nonzero().flatten()
    text_tokens = (~task.is_visual).nonzero().flatten().expand(task.target.num_kv_heads, -1)
    chosen = []
    for numbers in visual:
        tokens = torch.cat([text_tokens, visual_tokens[numbers]], dim=1)
        chosen.append(tokens.sort(dim=1).values)
    kv = task.prefilled.kv
    cache = kv.select(chosen)
    prompt = None if cache is None else ReadPrompt(cache, kv.states)
    return task.drafter(task.target, prompt)


def draft_by_first_layers(task: DraftTask) -> Draft:
    """Draft with the target's first layers and its head, on these layers' KV (LayerSkip).

    The authors train a model for that; here, as in STD's paper, it is any model.
    """
    ratio = task.config.settings_of(LayerSkipConfig).layer_ratio
    # At least one of them has attention.
    fewest = 1 + task.target.sizes.attention_layers[0]
    num_layers = max(fewest, round(ratio * task.target.num_layers))
    kv = task.prefilled.kv
    shallow = task.target.with_first_layers(num_layers)
    cache = kv.first_layers(shallow.num_kv_layers)
    prompt = None
    if cache is not None:
        states = None if kv.states is None else kv.states.of_first_layers(num_layers)
        prompt = ReadPrompt(cache, states)
    return Draft(task.drafter(shallow, prompt), task.inputs.num_visual_tokens)


def draft_by_ngrams(task: DraftTask) -> Draft:
    """Draft without a model, by looking up n-grams of the prompt's text."""
    drafter = NgramDrafter(task.text_ids.tolist()) if task.is_decode_host else None
    return Draft(drafter, 0)


def keep_specvlm(attention: Tensor, count: int) -> Tensor:
    """Return SpecVLM's selection: the most attended tokens, and evenly spaced ones of the rest.

    The first stage keeps the fewest tokens that together hold 40% of the attention (of these at
    most ``count``, the best), as in the authors' code (github.com/zju-jiyicheng/SpecVLM). The
    second fills up to ``count`` with tokens evenly spaced among the others. The most attended
    tokens are in few frames; the spaced ones cover all.

    Args:
        attention: ``[visual tokens]``, at least 0.
    """
    order = attention.argsort(descending=True, stable=True)
    cumulative = attention[order].double().cumsum(dim=0)
    num_below = int((cumulative < 0.4 * cumulative[-1]).sum())
    num_attended = min(count, num_below + 1)
    attended = order[:num_attended]
    others = order[num_attended:].sort().values
    spaced = others[keep_even(len(others), count - num_attended)]
    return torch.cat([attended, spaced]).sort().values


def keep_random(num_tokens: int, count: int, seed: int) -> Tensor:
    """Return random places, ascending."""
    order = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(seed))
    return order[:count].sort().values


def _keep_even(num_tokens: int, count: int, seed: int) -> Tensor:
    """Return evenly spaced places, ascending."""
    return keep_even(num_tokens, count)


# Policies that rank visual tokens by scores of the target's prefill, and those that look at neither
# scores nor frames.
_BY_SCORES = {"specvlm": keep_specvlm, "attention": keep_best, "uv_prune": keep_best}
_BY_NUMBER = {"even": _keep_even, "random": keep_random}
