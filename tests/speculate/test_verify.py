"""Speculative sampling is lossless: counted, token by token, against the target's own distribution."""

from collections import Counter

import pytest
import torch

from apbv.decode.sampling import PURPOSE_DRAFT, draw, probabilities
from apbv.speculate import verify
from apbv.speculate.verify import Verdict, verify_greedy, verify_sampled

from table_model import NUM_SAMPLES, TableModel, surprise_of, tables


def surprise(model: TableModel, num_draft_tokens: int = 2) -> float:
    """How many standard deviations the χ² of the joint of three tokens lies above its mean (Wilson-Hilferty)."""
    return surprise_of(Counter(model.generate(seed, num_draft_tokens) for seed in range(NUM_SAMPLES)), model)


def disjoint() -> TableModel:
    """The draft says what the target never does."""
    p, q = tables(6), tables(6, 1)
    p[:, :3], q[:, 3:] = -torch.inf, -torch.inf
    return TableModel(p, q)


CASES = {
    "different": lambda: TableModel(tables(4), tables(4, 1)),
    "equal": lambda: TableModel(tables(4), tables(4)),
    "disjoint": disjoint,
    "greedy draft": lambda: TableModel(tables(4), tables(4, 1), greedy_draft=True),
    "top-p": lambda: TableModel(tables(5), tables(5, 1), top_p=0.7),
    "16 tokens": lambda: TableModel(tables(16), tables(16, 1)),
    "a longer draft vocabulary": lambda: TableModel(tables(5)[:, :4], tables(5, 1)),
    "a longer target vocabulary": lambda: TableModel(tables(5), tables(5, 1)[:, :4]),
}


@pytest.mark.parametrize(
    "num_draft_tokens",
    [pytest.param(1, marks=pytest.mark.thorough), 2, pytest.param(5, marks=pytest.mark.thorough)],
)
@pytest.mark.parametrize("case", CASES)
def test_whole_sequences_are_distributed_as_the_targets_own(case, num_draft_tokens):
    assert surprise(CASES[case](), num_draft_tokens) < 4


def soft_q_for_a_greedy_draft(drafted, q, p, accept_draws, next_draws):
    return verify_sampled(drafted, probabilities(tables(4, 1)[drafted], 1.0, 1.0), p, accept_draws, next_draws)


def resampling_from_p(drafted, q, p, accept_draws, next_draws):
    verdict = verify_sampled(drafted, q, p, accept_draws, next_draws)
    place = verdict.num_accepted
    return Verdict(place, draw(p[place], next_draws[place]))


@pytest.mark.parametrize(
    ("bug", "case"), [(soft_q_for_a_greedy_draft, "greedy draft"), (resampling_from_p, "different")]
)
def test_the_count_finds_planted_bugs(monkeypatch, bug, case):
    monkeypatch.setattr(verify, "verify_sampled", bug)
    assert surprise(CASES[case]()) > 8


def test_the_count_finds_a_number_that_is_used_twice(monkeypatch):
    """Once to draw the drafted token, and again to decide on it."""
    monkeypatch.setattr(verify, "PURPOSE_ACCEPT", PURPOSE_DRAFT)
    assert surprise(CASES["different"]()) > 8


def test_greedy_verification():
    logits = torch.eye(5)[[3, 1, 4, 2]]
    assert verify_greedy([3, 1, 4], logits) == Verdict(3, 2)
    assert verify_greedy([3, 0, 4], logits) == Verdict(1, 1)
    assert verify_greedy([0, 1, 4], logits) == Verdict(0, 3)
    assert verify_greedy([], logits[:1]) == Verdict(0, 3)
