"""Visual tokens dropped inside the model, against a dense definition layer by layer, by real gloo processes."""

from functools import cache

import pytest
import torch
from late_oracle import full_attention, run_reduced

from apbv import HostGroup, SamplingParams
from apbv.config import ReduceConfig
from apbv.prefilling.reduction import attention, choosing

import families
from answers import plain_tokens
from oracle import oracle_of
from pairs import each_choice
from prompts import (
    UNCOMPRESSED,
    as_inputs,
    build,
    check_prefill,
    kv_of,
    prefilled,
    processed,
    relative_error,
    video_batch,
)

NUM_NEW = 6
# Behind so many of the tiny model's three layers: (--reduce-layer, where tokens are dropped).
STEPS = {"fastv": (1, [1]), "pdrop": (1, [1, 2]), "sparsevlm": (1, [1, 2])}
STEPS |= {"hippo_attention": (2, [2]), "fastv, question": (1, [1]), "pdrop, question": (1, [1, 2])}


@cache
def prompt_of(family: str, is_mixed: bool = False) -> dict:
    """A video, or two videos and an image with text between them."""
    if not is_mixed:
        return video_batch(family)
    first, last = (families.synthetic_video(frames, 56, 70) for frames in (12, 20))
    return processed(family, first, "a video, ", families.synthetic_image(84, 56), "an image, ", last, "a video, ")


@cache
def expected(family: str, name: str, ratio: float, drops: tuple[int, ...], is_mixed: bool):
    reduced = run_reduced(family, prompt_of(family, is_mixed), name, ratio, list(drops))
    return reduced.logits, kv_of(reduced.cache), reduced.continuation(NUM_NEW)


def reduced_job(hosts: HostGroup, family: str, reduce: dict, settings: dict, is_mixed: bool = False):
    settings = settings | {"reduce": ReduceConfig(**reduce)}
    state, result = prefilled(hosts, family, prompt_of(family, is_mixed), None, settings)
    sampling = SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True)
    result.tokens = plain_tokens(state, build(family, torch.float64), sampling)
    return result


def check(results, logits, states, tokens=None):
    check_prefill(results, logits, states, 1e-9)
    assert not any(result.exact or (tokens and result.tokens != tokens) for result in results)


QWEN = "qwen2_5_vl"


@pytest.mark.shows("late reduction")
@pytest.mark.parametrize(
    ("name", "num_hosts", "settings", "family", "is_mixed"),
    [
        ("fastv", 3, {"method": "apb", "kv": "sharded"}, QWEN, False),
        ("pdrop", 3, {"method": "ulysses", "kv": "sharded"}, QWEN, False),
        ("sparsevlm", 3, {"method": "zigzag_ring", "kv": "sharded"}, QWEN, False),
        ("fastv", 2, {"method": "full"}, QWEN, False),
        # HIPPO's terms of time and space are of frames, wherever these were encoded.
        ("hippo_attention", 3, {"frame_parallel": False}, QWEN, False),
        *((name, 2, {}, QWEN, True) for name in ("pdrop", "sparsevlm", "hippo_attention", "fastv, question")),
        ("pdrop, question", 3, {"method": "apb"}, QWEN, False),
        ("pdrop", 2, {"anchor_len": 20}, "qwen3_vl", False),
        ("fastv", 2, {"anchor_len": 20}, "internvl", False),
        ("sparsevlm", 2, {"anchor_len": 20}, "qwen3_vl", False),
        ("pdrop", 2, {}, "llava_onevision", False),
        ("fastv", 2, {}, "qwen2_vl", False),
        ("sparsevlm", 2, {}, "qwen3_vl_moe", False),
        ("pdrop", 2, {}, families.OMNI, False),
        ("fastv", 2, {}, "glm4v", False),
        ("sparsevlm", 2, {}, "glm46v", False),
        ("pdrop", 2, {}, "glm4v_moe", False),
        ("fastv", 2, {}, "video_llama_3", False),
    ],
)
def test_every_method_equals_the_dense_definition(pool, name, num_hosts, settings, family, is_mixed):
    """In every family; and text between videos and images stays."""
    layer, drops = STEPS[name]
    method, _, asked_by = name.partition(", ")
    reduce = {"method": method, "ratio": 0.4, "layer": layer, "asked_by": asked_by or None}
    settings = settings | {"passing_len": UNCOMPRESSED}
    results = pool.run(num_hosts, reduced_job, family, reduce, settings, is_mixed)
    check(results, *expected(family, name, 0.4, tuple(drops), is_mixed))


@pytest.mark.parametrize("name", ["fastv", "sparsevlm", "hippo_attention"])
def test_attention_is_the_same_however_few_scores_are_in_memory(monkeypatch, name):
    monkeypatch.setattr(attention, "MOST_SCORES", 300)
    monkeypatch.setattr(choosing, "MOST_DISTANCES", 20)
    layer, drops = STEPS[name]
    reduce = {"method": name, "ratio": 0.4, "layer": layer}
    result = reduced_job(HostGroup.single("cpu"), QWEN, reduce, {"passing_len": UNCOMPRESSED})
    check([result], *expected(QWEN, name, 0.4, tuple(drops), False))


COMPRESSED = {
    "apbv": {"passing_len": 4, "anchor_len": 21},
    "no anchor": {"passing_len": 4, "anchor_len": 0},
    "an anchor longer than what is left": {"passing_len": 1, "anchor_len": 55},
    "separate query": {"passing_len": 4, "anchor_len": 21, "fused_query": False},
    "apb": {"method": "apb", "passing_len": 4, "anchor_len": 21},
    "star": {"method": "star"},
    "too little to split": {"passing_len": 4, "anchor_len": 21},
    # The question's own hidden states go on from here, only where they were computed apart.
    "too little to split, apb": {"method": "apb", "passing_len": 4, "anchor_len": 21},
    "too little to split, star": {"method": "star"},
}


@each_choice(variant=COMPRESSED, name=["sparsevlm", "fastv", "hippo_attention", "pdrop"], num_hosts=[2, 3])
def test_compressed_blocks_are_cut_anew_from_what_is_left(pool, variant, name, num_hosts):
    """Once there are too few tokens to split, host 0 goes on alone, with the question's own hidden states."""
    family, settings = "qwen2_5_vl", COMPRESSED[variant]
    ratio = 0.02 if "too little" in variant else 0.4
    if "too little" in variant:
        name = {"sparsevlm": "fastv"}.get(name, name)
    inputs = as_inputs(family, video_batch(family), None, HostGroup.single("cpu"), torch.float64)

    def attend_before(query_start):
        lengths = dict(settings)
        if lengths.get("anchor_len", 0) >= query_start:  # the default
            lengths["anchor_len"] = (query_start + inputs.num_tokens - inputs.query_start) // 4
        oracle = oracle_of(lengths, num_hosts, query_start, inputs.context_start)
        if query_start - oracle.anchor_len < oracle.num_blocks:
            return full_attention
        return lambda q, k, v, scale: oracle.attend(None, q, k, v, None, scaling=scale)[0]

    layer, drops = STEPS[name]
    two_passes = settings.get("method") in ("apb", "star") or not settings.get("fused_query", True)
    reduced = run_reduced(family, video_batch(family), name, ratio, drops, attend_before, two_passes)
    exact = expected(family, name, ratio, tuple(drops), False)[0]
    # Star Attention's only block but the anchor sees all before it on two hosts.
    assert (relative_error(reduced.logits, exact) > 1e-4) == (settings.get("method") != "star" or num_hosts > 2)
    results = pool.run(num_hosts, reduced_job, family, {"method": name, "ratio": ratio, "layer": layer}, settings)
    check(results, reduced.logits, kv_of(reduced.cache))
