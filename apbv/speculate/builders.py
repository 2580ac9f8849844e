"""This module builds the draft of every strategy from a prefilled prompt."""

from collections.abc import Collection
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from transformers import DynamicCache

from ..kernels.backends import choose
from ..kv.growing import empty_cache
from ..model.attention import ChosenKV
from ..model.some_layers import some_layers
from ..prefilling.encode import encode_visual
from ..prefilling.reduction import EARLY_REDUCERS
from ..prefilling.reduction.choosing import keep_best, keep_even
from ..prefilling.reduction.early import choose_rows
from ..prefilling.reduction.frames import num_in_frames
from ..prefilling.reduction.hippo import local_semantics, with_relevance
from . import preserve
from .draft import Draft, DraftTask, Successor
from .draft_kv import prefill_draft, prefill_observed, run_prompt
from .drafters import Drafter, NgramDrafter
from .ensemble import EnsembleDrafter, make_weights, read_contexts
from .observers import AttentionScores


def kept_visual_tokens(task: DraftTask, rows: Tensor | None) -> Tensor:
    """Choose the visual tokens that the draft sees, ascending; the same on every host. Collective.

    Args:
        rows: the draft's embeddings of the frames that this host encoded.
    """
    keep, count, total = task.keep, task.num_kept, task.num_visual
    if not total or keep == "full":
        return torch.arange(total)
    if keep in EARLY_REDUCERS and keep != "hippo":
        count -= total - num_in_frames(task.draft, task.inputs)  # what belongs to no frame is always kept
        return choose_rows(task.draft, task.inputs, rows, task.hosts, EARLY_REDUCERS[keep], max(0, count)).kept
    if keep in ("attention", "attention_variation", "draft_guided", "uv_prune", "similarity"):
        return keep_best(task.observer.result(), count)
    if keep == "specvlm":
        return preserve.keep_specvlm(task.observer.result(), count)
    if keep == "attention_per_frame":
        return preserve.keep_best_per_frame(task.observer.result(), task.inputs.visual.frames, count)
    if keep == "even":
        return keep_even(total, count)
    if keep == "random":
        return preserve.keep_random(total, count, task.sampling.seed)
    if keep == "uniform_frames":
        return preserve.keep_uniform_frames(task.inputs.visual.frames, count)
    return keep_best(_hippo_scores(task, rows, task.config.hippo_terms), count)


def _hippo_scores(task: DraftTask, rows: Tensor, terms: Collection[str]) -> Tensor:
    """Score visual tokens by HIPPO's Eq. 7: attention, change over time, variety in space, z-scored by frame."""
    scores = local_semantics(task.draft, task.inputs, rows, task.hosts, terms)
    if "attention" not in terms:
        return scores
    return with_relevance(task.draft, task.inputs, scores, task.observer.result())


def draft_by_model(task: DraftTask) -> Draft:
    """Draft with the draft model, on all text and sound, and the visual tokens that ``task.keep`` chooses."""
    rows = encode_visual(task.draft, task.inputs.visual)
    if not task.num_visual or task.keep == "full":
        return _draft_on_tokens(task, rows, torch.arange(task.num_visual))
    if task.keep == "draft_guided":
        task, cache = _watching_itself(task, rows)
        if task.config.prune == "prompt":
            return _draft_on_kept_tokens(task, rows)
        return _prune_kv(task, rows, Draft(task.drafter(task.draft, cache), task.num_visual))
    # A draft host gets the scores of the target's prefill only later.
    scores_come_later = task.leave_last and task.observer is not None
    if task.config.prune == "kv":
        first = _draft_on_tokens(task, rows, torch.arange(task.num_visual))
        rest = partial(_prune_kv, task, rows, first)
    elif scores_come_later and task.config.vision_first:
        terms = set(task.config.hippo_terms) - {"attention"}
        first = _draft_on_tokens(task, rows, keep_best(_hippo_scores(task, rows, terms), task.num_kept))
        rest = partial(_draft_on_kept_tokens, task, rows)
    else:
        return _draft_on_kept_tokens(task, rows)
    if not scores_come_later:
        return rest()
    return replace(first, successor=Successor(task.observer.have_come, task.observer.wait, rest))


def _watching_itself(task: DraftTask, rows: Tensor) -> tuple[DraftTask, DynamicCache | None]:
    """Let the draft read the whole prompt, scored by its own attention in place of the target's; collective.

    Returns:
        The task with these scores, and the KV of the whole prompt on the leader.
    """
    observer = AttentionScores(task.draft)
    cache = prefill_observed(task.draft, task.inputs, task.hosts, rows, observer)
    return replace(task, observer=observer), cache


def _draft_on_kept_tokens(task: DraftTask, rows: Tensor) -> Draft:
    return _draft_on_tokens(task, rows, kept_visual_tokens(task, rows))


def _draft_on_tokens(task: DraftTask, rows: Tensor, kept: Tensor) -> Draft:
    """Let the draft model read all text and these visual tokens."""
    cache = prefill_draft(task.draft, task.inputs, kept, task.hosts, rows)
    return Draft(task.drafter(task.draft, cache), len(kept), kept)


def _prune_kv(task: DraftTask, rows: Tensor, draft: Draft) -> Draft:
    """Drop the KV of visual tokens that are not kept from a draft that has read the whole prompt."""
    kept = kept_visual_tokens(task, rows)
    if draft.drafter is not None:
        visual, text = task.is_visual.nonzero().flatten()[kept], (~task.is_visual).nonzero().flatten()
        text = text[: len(text) - task.leave_last]
        draft.drafter.prune_prompt(torch.cat([text, visual]).sort().values)
    return Draft(draft.drafter, len(kept), kept)


def draft_text_only(task: DraftTask) -> Draft:
    """Draft with the draft model, on the prompt's text alone, and on its sound where the draft hears."""
    nothing = torch.empty(0, dtype=torch.long)
    if task.draft.is_video_model or not task.target.is_video_model:
        cache = prefill_draft(task.draft, task.inputs, nothing, task.hosts, None)
        return Draft(task.drafter(task.draft, cache), 0, nothing)
    # A text-only model knows neither placeholders nor the target's positions: it reads the text as a whole prompt.
    text = task.text_ids[None]
    text = text.where(text < task.draft.vocab_size, 0)  # as ModelDrafter reads what it has no token for
    count, cache = text.shape[1], None
    if task.hosts.is_leader:
        cache = run_prompt(task.draft, text, torch.arange(count)[None])
    return Draft(task.drafter(task.draft, cache, next_position=count), 0, nothing)


def draft_by_ensemble(task: DraftTask) -> Draft:
    """Draft with one model that reads the prompt in several ways (TABED); a prompt of text as ``vanilla`` does."""
    if not task.num_visual:
        return draft_by_model(task)
    ensemble = task.config.ensemble
    rows, kept = None, torch.empty(0, dtype=torch.long)
    if set(ensemble) & set("MP"):  # the others are text
        rows = encode_visual(task.draft, task.inputs.visual)
        if task.keep == "draft_guided":
            task, _ = _watching_itself(task, rows)
        kept = kept_visual_tokens(task, rows)
    contexts = read_contexts(
        ensemble.rstrip("*"),
        task.draft,
        task.inputs,
        kept,
        rows,
        task.hosts,
        task.tokenize,
        task.caption,
    )
    drafter = contexts and EnsembleDrafter(
        task.draft,
        contexts,
        make_weights(ensemble),
        task.inputs.num_tokens,
        task.sampling,
        task.vocab_size,
    )
    return Draft(drafter, len(kept), kept)


def draft_on_attended_kv(task: DraftTask) -> Draft:
    """Draft with the target on all text and each layer's and head's most attended visual KV (STD)."""
    scores = task.observer.result() if task.num_visual else []
    return _draft_on_best_kv(task, scores, task.num_kept)


def draft_on_passed_kv(task: DraftTask) -> Draft:
    """Draft with the target on all text and the visual KV that the prefill passed on between hosts.

    A head that passed on fewer visual tokens than another (text is passed on, too) sees the latest ones as well.
    """
    passed = task.observer.result() if task.num_visual else []
    count = max((int(layer.sum(dim=1).max()) for layer in passed), default=0)
    recency = torch.linspace(0, 0.5, task.num_visual)
    return _draft_on_best_kv(task, [layer + recency for layer in passed], count)


def _draft_on_best_kv(task: DraftTask, scores: list[Tensor], count: int) -> Draft:
    """Draft with the target on all text and each head's best visual KV by scores ``[Hkv, visual tokens]``."""
    nothing = torch.empty(task.target.num_kv_heads, 0, dtype=torch.long)
    best = [layer.topk(count, dim=1).indices for layer in scores] or [nothing] * task.target.num_layers
    return Draft(_own_kv_drafter(task, best), count, takes_target_kv=True)


def draft_on_latest_kv(task: DraftTask) -> Draft:
    """Draft with the target on its own KV of all text and the latest visual tokens."""
    count = task.num_kept
    latest = torch.arange(task.num_visual - count, task.num_visual)
    heads = task.target.num_kv_heads
    drafter = _own_kv_drafter(task, [latest.expand(heads, -1)] * task.target.num_layers)
    return Draft(drafter, count, latest, takes_target_kv=True)


def _own_kv_drafter(task: DraftTask, visual: list[Tensor]) -> Drafter | None:
    """Return a drafter of the target on all text and, per layer and head, these visual tokens ``[Hkv, T]``."""
    visual_tokens, text = task.is_visual.nonzero().flatten(), (~task.is_visual).nonzero().flatten()
    text = text.expand(task.target.num_kv_heads, -1)
    selected = [torch.cat([text, visual_tokens[chosen]], dim=1).sort(dim=1).values for chosen in visual]
    in_place = _kv_in_place(task, selected)
    if in_place is None:
        return task.drafter(task.target, task.state.kv.select(selected))
    return task.drafter(task.target, empty_cache(keys for keys, _, _ in in_place.layers), in_place)


def _kv_in_place(task: DraftTask, selected: list[Tensor]) -> ChosenKV | None:
    """Return the selected tokens' KV without a copy, on host 0; None where a copy is needed, or costs less."""
    cache = task.state.kv.whole
    if cache is None or task.drafts_tree:
        return None
    # Only the Triton kernel reads scattered rows. Torch would gather them again for every token, which costs more
    # than one copy.
    if choose(task.target.backend, cache.layers[0].keys) != "triton":
        return None
    layers = [
        (layer.keys, layer.values, rows.to(layer.keys.device, torch.int32)[None])
        for layer, rows in zip(cache.layers, selected, strict=True)
    ]
    return ChosenKV(layers)


def draft_by_first_layers(task: DraftTask) -> Draft:
    """Draft with the target's first layers and its head, on the KV that these layers already have (LayerSkip)."""
    num_layers = max(1, round(task.config.layer_ratio * task.target.num_layers))
    shallow = replace(task.target, language_model=some_layers(task.target.language_model, range(num_layers)))
    cache = task.state.kv.first_layers(num_layers)
    return Draft(task.drafter(shallow, cache), task.num_visual)


def draft_by_ngrams(task: DraftTask) -> Draft:
    """Draft without a model, by looking up n-grams of the prompt's text."""
    text = task.text_ids.tolist()
    return Draft(NgramDrafter(text) if task.hosts.is_leader else None, 0)
