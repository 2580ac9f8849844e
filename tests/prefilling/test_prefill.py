"""Sequence-parallel prefill against plain one-process attention, by real gloo processes."""

from itertools import chain

import pytest
import torch

from apbv import HostGroup, PrefillConfig, prefill
from apbv.prefilling.methods import METHODS
from apbv.testing.simulated import share_weights, simulate

from apbv_tests import families
from apbv_tests.families import TEXT_FAMILIES
from apbv_tests.oracle import as_double, oracle_of, run_oracle
from apbv_tests.pairs import each_choice
from apbv_tests.prompts import (
    ALL_FAMILIES,
    EXAMPLES,
    UNCOMPRESSED,
    batch_of,
    build,
    check_prefill,
    hugging_face,
    hugging_face_on,
    kv_of,
    prefill_job,
    relative_error,
    reset_rope,
    text_batch,
    video_batch,
)

TEXT_CONTEXT = 90  # tokens before the question of a text prompt


def prompts(family: str, num_hosts: int, method: str) -> list[tuple]:
    """(tokens of a text, its first query token, anchor length), for contexts of several lengths
    modulo 2H.

    Every remainder for one text and one video family on up to four hosts: what is left over when a
    context is cut is a matter of integers, in which families do not differ. Otherwise two that are
    H apart: with one of them, blocks before the last differ in length.
    """
    every = family in EXAMPLES and num_hosts <= 3
    extras = range(2 * num_hosts) if every else (0, num_hosts)
    if family in TEXT_FAMILIES:
        return [(TEXT_CONTEXT + 12 + extra, TEXT_CONTEXT + extra, None) for extra in extras]
    # A video prompt has one length; the anchor's shifts the remainder of its context instead.
    return (
        [(None, None, 20 + extra) for extra in extras] if method == "apbv" else [(None, None, None)]
    )


# ---- nothing compressed: equal to Hugging Face ----


def uncompressed_job(hosts: HostGroup, family: str, method: str) -> list:
    """What is made of every prompt."""
    results = []
    for num_tokens, query_start, anchor_len in prompts(family, hosts.size, method):
        settings = {"method": method, "passing_len": UNCOMPRESSED, "anchor_len": anchor_len}
        batch = batch_of(family, num_tokens)
        results.append(prefill_job(hosts, family, batch, query_start, settings, torch.float32))
    return results


EXACT = [("apbv", family, (2, 3)[row % 2]) for row, family in enumerate(ALL_FAMILIES)]
EXACT += [("apbv", EXAMPLES[0], 1), ("apbv", EXAMPLES[1], 8)]
EXACT += [("zigzag_ring", EXAMPLES[0], 3), ("zigzag_ring", EXAMPLES[1], 2)]
EXACT += [("ulysses", EXAMPLES[0], 4), ("ulysses", EXAMPLES[1], 3)]
OTHERS = [family for family in ALL_FAMILIES if family not in EXAMPLES]
EXACT += [(("zigzag_ring", "ulysses")[row % 2], family, 2) for row, family in enumerate(OTHERS)]


@pytest.mark.shows("{method}")
@pytest.mark.parametrize(("method", "family", "num_hosts"), EXACT)
def test_what_is_exact_equals_hugging_face(on_hosts, family, num_hosts, method):
    """With APB-V where passing_len >= longest block, for every H and remainder."""
    every = on_hosts(num_hosts, uncompressed_job, family, method)
    for (num_tokens, *_), *results in zip(prompts(family, num_hosts, method), *every, strict=True):
        expected, cache = hugging_face_on(family, torch.float32, num_tokens)
        check_prefill(results, expected, kv_of(cache), 1e-4)
        assert all(result.method == method for result in results)


def small_job(hosts: HostGroup, model, batch: dict, method: str):
    before = model.config._attn_implementation
    state = prefill(share_weights(model), batch, hosts=hosts, config=PrefillConfig(method=method))
    assert model.config._attn_implementation == before
    return state.method, state.logits


@pytest.mark.filterwarnings("ignore:a prompt of")
@pytest.mark.parametrize(
    ("family", "num_hosts", "method", "used"),
    [
        # 8 query heads in groups of 2, over three hosts: the second has heads 3, 4 and 5.
        ("llama", 3, "ulysses", "ulysses"),
        ("llama", 8, "apbv", "full"),  # there are too few tokens to split
        ("qwen2_vl", 2, "apbv", "full"),
        ("internvl", 2, "apbv", "apbv"),
    ],
)
def test_small_prompts_equal_hugging_face(family, num_hosts, method, used):
    """Of few tokens, and of a single frame; and the model is left as it was."""
    if family == "llama":
        model = families.build_model(family, heads=8, kv_heads=4)
        batch = text_batch(40 if num_hosts < 8 else 9)
    else:
        model = families.build_model(family)
        batch = video_batch(family, frames=1)
    with torch.no_grad():
        expected = model(**batch).logits[:, -1]
    for found, logits in simulate(num_hosts, small_job, model, batch, method):
        assert found == used
        assert relative_error(logits, expected) < 1e-4


@pytest.mark.parametrize("decoder", ["qwen3", "qwen3_moe"])
def test_internvl_may_have_another_decoder(decoder):
    """As InternVL3.5 has."""
    model = families.build_model("internvl", decoder=decoder)
    batch = video_batch("internvl", frames=8)
    assert model.config.text_config.model_type == decoder
    with torch.no_grad():
        expected = model(**batch).logits[:, -1]
    for found, logits in simulate(2, small_job, model, batch, "zigzag_ring"):
        assert found == "zigzag_ring" and relative_error(logits, expected) < 1e-4


# ---- any passing length: equal to the dense definition ----

VARIANTS = {
    "default": {},
    "anchor 0": {"anchor_len": 0},
    "passing 0": {"passing_len": 0},
    "passing 1": {"passing_len": 1},
    "early": {"early_passing_len": 8},
    "a schedule": {"passing_weights": (3, 0, 1)},
    "early alone": {"passing_len": 0, "early_passing_len": 3, "method": "apb"},
    "softmax": {"importance": "softmax"},
    "dot": {"importance": "dot"},
    "no overlap": {"overlap": False},
    "separate query": {"fused_query": False},
    "no zigzag": {"zigzag": False},
    "APB": {"method": "apb"},
    "Star Attention": {"method": "star"},
    "Triton": {"backend": "triton"},
}


# Choosing other keys within a block is the same work however many hosts there are.
CASES = [(variant, 2 + row % 2) for row, variant in enumerate(VARIANTS)]
CASES += [("default", 1), ("default", 8), ("Star Attention", 4)]


@pytest.mark.parametrize(("variant", "num_hosts"), CASES)
def test_compressed_equals_dense_oracle(on_hosts, variant, num_hosts):
    """On a text model in fp64, where no rounding can change a selection."""
    settings = {"passing_len": 3, "anchor_len": 11, **VARIANTS[variant]}
    lengths = [132 + num_hosts]
    if variant == "default":
        lengths.append(131)
    elif variant == "Triton":
        lengths = [45]
    for length in lengths:
        check_against_oracle(
            on_hosts, num_hosts, "qwen2", text_batch(length), length - 10, settings
        )


@each_choice(num_hosts=[2, 3], family=["qwen2_5_vl", "qwen3_vl", "internvl"])
def test_compressed_equals_dense_oracle_of_videos(on_hosts, family, num_hosts):
    settings = {"passing_len": 4, "anchor_len": 21}
    check_against_oracle(on_hosts, num_hosts, family, video_batch(family), None, settings)


def check_against_oracle(on_hosts, num_hosts, family, batch, query_start, settings):
    dtype, tolerance = (torch.float32, 1e-4) if "backend" in settings else (torch.float64, 1e-6)
    results = on_hosts(num_hosts, prefill_job, family, batch, query_start, settings, dtype)
    model = build(family, torch.float64)
    batch = as_double(batch)
    reset_rope(model)
    oracle = oracle_of(settings, num_hosts, results[0].query_start, results[0].start)
    expected = run_oracle(model, batch, oracle)
    (exact, _) = hugging_face(family, torch.float64, batch)
    # One block alone passes nothing on; otherwise a test without compression would prove nothing.
    assert (relative_error(expected, exact) > 1e-4) == (oracle.num_blocks > 1)
    check_prefill(results, expected, zip(oracle.keys, oracle.values, strict=True), tolerance)


@pytest.mark.parametrize(
    ("lengths", "exact"),
    [
        ({"passing_len": 20}, True),
        ({"passing_len": 19}, False),
        ({"passing_len": 19, "early_passing_len": 20}, False),
        ({"passing_len": 30, "passing_weights": (1, 2)}, True),
        ({"passing_len": 20, "passing_weights": (1, 2)}, False),
        ({"passing_budget": 2 * 20 / 60}, True),
        ({"passing_budget": 2 * 19 / 60}, False),
    ],
    ids=str,
)
def test_only_what_passes_whole_blocks_on_is_exact(pool, lengths, exact):
    """Two blocks of 20 tokens lie between the anchor and the question."""
    settings = {"method": "apb", "anchor_len": 8, **lengths}
    for result in pool.run(2, prefill_job, "llama", text_batch(60), 48, settings):
        assert result.exact == exact


def ring_job(hosts: HostGroup, states: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """Which tokens this host has, and their attention."""
    config = PrefillConfig(method="zigzag_ring")
    tokens = states.shape[3]
    layout = METHODS["zigzag_ring"].plan(hosts.size, tokens, 0, tokens - 1, config)
    method = METHODS["zigzag_ring"](layout, hosts, config, 1)
    rows = list(chain.from_iterable(method.layout.local_spans(hosts.rank)))
    return rows, method(*states[:, :, :, rows], 0.25, 0)


def test_a_ring_rounds_its_result_once_however_long_it_is():
    states = torch.randn(3, 1, 2, 512, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    q, k, v = states.double()
    scores = (q @ k.mT * 0.25).masked_fill(torch.ones(512, 512).triu(1).bool(), -torch.inf)
    exact = scores.softmax(dim=-1) @ v
    out = torch.empty_like(states[0])
    for rows, found in simulate(32, ring_job, states):
        out[:, :, rows] = found
    # The partial results of the hosts are rounded, too, and their errors are averaged.
    rounded_once = (exact.bfloat16().double() - exact).abs().mean()
    assert (out.double() - exact).abs().mean() < 2.4 * rounded_once
