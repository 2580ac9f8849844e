"""From logits to a token: the distribution that is drawn from, and numbers that depend on their
keys only."""

import itertools
import math
import re

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper

from apbv import Engine, HostGroup, SamplingParams, demo
from apbv.decode import sampling
from apbv.decode.sampling import (
    PURPOSE_NEXT_TOKEN,
    NotFiniteError,
    Penalties,
    biased,
    choose_each,
    probabilities,
    uniform,
)

from apbv_tests.configs import speculative_config


def sample(logits, config, position):
    return choose_each(logits[None], [config], [position])[0].read()[0]


def random_logits(seed, size, spread=2.0):
    return (
        torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        * spread
    )


REFUSED = {
    "max_new_tokens": ([0, 2**20 + 1, 1.5], "must be an integer in 1 .. 2^20"),
    "temperature": ([-0.1, math.inf, math.nan], "must be 0 (greedy) or more"),
    "top_p": ([0.0, -0.5, 1.0001, math.nan], "must lie in (0, 1]"),
    "top_k": ([-1, 1.5], "must be an integer in 0 .. 2^20"),
    "min_p": ([-0.1, 1.1, math.nan], "must lie in 0 .. 1"),
    "repetition_penalty": ([0.0, 11], "must lie in (0, 10]"),
    "presence_penalty": ([-2.1], "must lie in -2 .. 2"),
    "logit_bias": ([[(1, 2.0)]], "must be a tuple"),
    "seed": ([-1, 2**64], "must be an integer in 0 .. 2^64-1"),
    "min_tokens": ([-1, 1.5], "must "),
    "ignore_eos": ([1], "must "),
}


def test_what_is_out_of_range_is_refused():
    for name, (values, message) in REFUSED.items():
        for value in values:
            with pytest.raises(
                ValueError, match=f"^{name} {re.escape(message)}.*, not {re.escape(repr(value))}$"
            ):
                SamplingParams(**{name: value})
    with pytest.raises(
        ValueError, match=r"^min_tokens must lie in 0 .. max_new_tokens \(5\), not 6$"
    ):
        SamplingParams(max_new_tokens=5, min_tokens=6)
    config = SamplingParams(max_new_tokens=2**20, temperature=1e-3, top_p=1e-9, seed=2**64 - 1)
    assert sample(torch.tensor([0.0, 3.0, 1.0]), config, position=2**40) == 1


# ---- numbers ----


def test_numbers_are_a_function_of_their_keys_and_stay_what_they_were():
    """A seed draws the same answer as it did in earlier versions."""
    calls = list(itertools.product((0, 1, 2**64 - 1), (0, 1, 2, 2**33), (0, 1)))
    first = {call: uniform(*call) for call in calls}
    assert first == {call: uniform(*call) for call in reversed(calls)}
    assert len(set(first.values())) == len(calls)
    assert all(0.0 <= number < 1.0 for number in first.values())
    assert (uniform(0, 0, 0), uniform(7, 272, 0)) == (0.011546754286331562, 0.7292900204044579)
    assert uniform(7, 272, 1) == 0.18702180569014648
    assert uniform(2**64 - 1, 2**33, 2) == 0.1725574004888618


# ---- the distribution ----


def by_sorting_all(p: torch.Tensor, top_p: float) -> torch.Tensor:
    """What top-p keeps, by its definition, of rows of probabilities."""
    ordered, order = p.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1).roll(1, -1)
    before[:, 0] = 0
    kept = torch.zeros_like(p).scatter(-1, order, ordered.where(before < top_p, 0.0))
    return kept / kept.sum(dim=-1, keepdim=True)


@pytest.mark.parametrize(
    ("dtype", "top_p"), [(torch.float16, 1.0), (torch.bfloat16, 0.9), (torch.float32, 1e-6)]
)
def test_probabilities_are_the_softmax_and_top_p_the_fewest_tokens_that_suffice(dtype, top_p):
    logits = random_logits(1, (3, 64), spread=8.0).to(dtype)
    weights = np.exp(logits.double().numpy() / 0.7)
    expected = torch.from_numpy(weights / weights.sum(axis=-1, keepdims=True))
    p = probabilities(logits, 0.7, top_p)
    assert p.dtype == torch.float64
    torch.testing.assert_close(
        p, by_sorting_all(expected, top_p if top_p < 1 else 2), rtol=1e-12, atol=0
    )


def test_top_p_ends_with_the_token_that_reaches_it_exactly():
    p = probabilities(torch.zeros(1, 8), 1.0, 0.5)  # of a quarter of an eighth each, sums are exact
    assert torch.equal(p, torch.tensor([[0.25] * 4 + [0.0] * 4], dtype=torch.float64))


@pytest.mark.parametrize(("spread", "top_p"), [(0.0, 0.3), (12.0, 0.9)])
def test_top_p_of_a_long_vocabulary_is_that_of_sorting_it(spread, top_p):
    logits = random_logits(7, (2, 20000), spread).bfloat16().double()  # of many equals
    whole = torch.softmax(logits, dim=-1)
    torch.testing.assert_close(
        probabilities(logits, 1.0, top_p), by_sorting_all(whole, top_p), rtol=1e-12, atol=0
    )
    for lead in (
        8191,
        8192,
        8193,
    ):  # so many are equal; it takes them all, or one of them is not to be left out
        logits = torch.zeros(20000)
        logits[5000 : 5000 + lead] = 9.0
        whole = torch.softmax(logits.double(), dim=-1)
        wanted = float(whole[5000] * (lead - 1.5 if spread else lead + 1e-3))
        found = probabilities(logits, 1.0, wanted)
        expected = by_sorting_all(whole[None], wanted)[0]
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("top_k", "min_p", "top_p"), [(5, 0.0, 1.0), (0, 0.2, 1.0), (7, 0.05, 0.8), (10**4, 0.0, 0.5)]
)
def test_what_is_cut_is_what_transformers_cuts(top_k, min_p, top_p):
    """In vLLM's order: min-p, top-k, top-p, of the distribution at the temperature."""
    logits = random_logits(2, (4, 300), spread=3.0)
    expected = logits / 0.7
    if min_p:
        expected = MinPLogitsWarper(min_p)(None, expected)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    expected = by_sorting_all(torch.softmax(expected, dim=-1), top_p if top_p < 1 else 2)
    torch.testing.assert_close(
        probabilities(logits, 0.7, top_p, top_k, min_p), expected, rtol=1e-12, atol=0
    )
    assert probabilities(torch.zeros(9), 1.0, 1.0, top_k=3).count_nonzero() == 9, (
        "of equals all stay"
    )


def test_penalties_and_biases_are_those_of_transformers_and_of_openai():
    logits = random_logits(3, 50, spread=4.0)
    prompt = torch.tensor([4, 7, 7, 9])
    tokens = [7, 3, 3, 11]
    settings = SamplingParams(repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=-0.25)
    seen = torch.cat([prompt, torch.tensor(tokens)])[None]
    expected = RepetitionPenaltyLogitsProcessor(1.7)(seen, logits[None].clone())[0]
    for token in set(tokens):
        expected[token] -= 0.5 - 0.25 * tokens.count(token)
    found = Penalties(settings, prompt, 50, logits.device).penalised(logits[None], tokens)[0]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    one = Penalties(SamplingParams(presence_penalty=1.0), prompt, 50, logits.device)
    assert torch.equal(one.penalised(logits[None], []), logits[None])
    assert biased(torch.zeros(2, 3), ((2, 1.5), (0, -9.0))).tolist() == [[-9.0, 0.0, 1.5]] * 2


def test_each_drafted_place_is_penalised_for_the_tokens_before_it():
    """In a chain, in a tree, after a token that is still on its way; a draft's vocabulary may be
    shorter."""
    settings = SamplingParams(repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.25)
    prompt = torch.tensor([4, 7, 9, 60])
    tokens = [7, 3, 49]
    drafted = [3, 5, 5]
    penalties = Penalties(settings, prompt, 50, prompt.device)
    logits = random_logits(3, (4, 50), spread=4.0)
    is_ancestor = torch.tensor([[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 0, 1]]).bool()
    cases = [
        (4, None, [[], [0], [0, 1], [0, 1, 2]]),
        (1, None, [[0, 1, 2]]),
        (4, is_ancestor, [[], [0], [1], [0, 2]]),
    ]
    for vocab_size, (num_rows, precede, before) in itertools.product((50, 40), cases):
        rows = logits[:num_rows, :vocab_size]
        found = penalties.penalised(rows, tokens, torch.tensor(drafted), precede)
        for row, of_row, places in zip(rows, found, before, strict=True):
            alone = penalties.penalised(row[None], [*tokens, *(drafted[place] for place in places)])
            assert torch.equal(of_row, alone[0])


def test_a_whole_answer_with_a_penalty_is_that_of_transformers():
    """Prompt included; and with a draft."""
    hosts = HostGroup.single("cpu")
    question = "describe the clip shot by shot"
    video = demo.video_path()
    engine = Engine.from_pretrained("demo", hosts=hosts, dtype="float32")
    state = engine.prefill(question, video=video)
    settings = {"do_sample": False, "max_new_tokens": 16, "repetition_penalty": 6.0}
    expected = engine.model.generate(**state.generate_inputs(), **settings)[
        0, state.num_tokens :
    ].tolist()
    penalty = SamplingParams(max_new_tokens=16, repetition_penalty=6.0)
    assert engine.generate(question, video=video, sampling=penalty).token_ids == expected
    assert engine.generate(question, video=video, max_new_tokens=16).token_ids != expected
    for nodes in (None, 12):  # where the draft is the target, it must penalise as the target does
        own = {"draft_model": demo.model_path(), "num_tree_nodes": nodes, "keep_losing_draft": True}
        own = speculative_config(strategy="vanilla", **own)
        drafting = Engine.from_pretrained("demo", hosts=hosts, dtype="float32", speculate=own)
        told = drafting.generate(question, video=video, sampling=penalty)
        figures = told.stats["speculation"]
        assert told.token_ids == expected and 2 <= figures["num_target_forwards"] <= 3
        assert nodes or figures["num_accepted"] == figures["num_drafted"]


# ---- tokens ----


def test_every_row_is_chosen_by_its_own_settings():
    """In whatever order those come; and draws depend on seed and position, not on history."""
    configs = [
        SamplingParams(temperature=t, top_p=p, seed=seed)
        for t, p, seed in (
            (1.0, 0.9, 1),
            (0.0, 1.0, 0),
            (2.0, 1.0, 1),
            (1.0, 0.9, 2),
            (0.0, 0.5, 3),
        )
    ]
    logits = random_logits(4, (5, 1000), 0.5)
    positions = [3, 3, 9, 3, 4]
    for order in itertools.permutations(range(5)):
        rows = list(order)
        chosen = choose_each(
            logits[rows], [configs[row] for row in rows], [positions[row] for row in rows]
        )[0].read()
        assert chosen == [sample(logits[row], configs[row], positions[row]) for row in rows]


def test_token_without_probability_is_never_drawn(monkeypatch):
    asked = []

    def always(number: float):
        def uniform(*key) -> float:
            asked.append(key)
            return number

        return uniform

    never = -math.inf
    logits = torch.tensor([never, never, 0.0, never, 0.0, 0.0, never, 0.0, never])
    for number, expected in (
        (0.0, 2),
        (0.25, 4),
        (0.5, 5),
        (0.75, 7),
        (math.nextafter(1.0, 0.0), 7),
    ):
        monkeypatch.setattr(sampling, "uniform", always(number))
        assert sample(logits, SamplingParams(temperature=1.0, seed=9), position=4) == expected
    assert asked == [(9, 4, PURPOSE_NEXT_TOKEN)] * 5


def test_what_is_ruled_out_is_not_broken():
    """Vocabularies are padded, and tokens forbidden, with minus infinity."""
    logits = torch.tensor([-torch.inf, 1.0, 2.0, -torch.inf])
    assert sample(logits, SamplingParams(), 0) == 2 and probabilities(logits, 1.0, 1.0).sum() == 1
    for value, temperature, top_p in itertools.product(
        (torch.nan, torch.inf, -torch.inf), (0.0, 1.0), (1.0, 0.5)
    ):
        with pytest.raises(NotFiniteError):
            sample(torch.full((4,), value), SamplingParams(temperature=temperature, top_p=top_p), 0)
