"""Speculative sampling is lossless: counted, token by token, against the target's own distribution."""

import math
from collections import Counter
from itertools import product

import pytest
import torch

from apbv import HostGroup
from apbv.config import SamplingConfig
from apbv.decode.sampling import PURPOSE_DRAFT, draw, probabilities, uniform
from apbv.speculate import serial
from apbv.speculate.drafters import Proposal
from apbv.speculate.serial import generate_speculatively
from apbv.speculate.verify import Verdict, verify_greedy, verify_sampled

NUM_TOKENS, NUM_SAMPLES = 3, 3000


class TableModel:
    """A target and a draft whose next-token distributions depend on the last token only."""

    def __init__(self, p_logits, q_logits, top_p=1.0, greedy_draft=False):
        self.p_logits, self.q_logits = p_logits, q_logits
        self.top_p, self.greedy_draft = top_p, greedy_draft
        self.said: list[int] = []

    def advance(self, tokens):
        self.said += tokens
        return self.p_logits[torch.tensor(tokens)]

    def take_back(self, count):
        del self.said[len(self.said) - count :]

    def propose(self, tokens, count, index=None):
        drafted, rows = [], []
        index = len(tokens) if index is None else index
        for place in range(count):
            row = probabilities(self.q_logits[[*tokens, *drafted][-1]], 1.0, self.top_p)
            number = uniform(self.seed, index + place, PURPOSE_DRAFT)
            drafted.append(int(row.argmax()) if self.greedy_draft else draw(row, number))
            rows.append(row)
        return Proposal(drafted, None if self.greedy_draft or not rows else torch.stack(rows))

    def generate(self, seed: int, num_draft_tokens: int = 2) -> tuple[int, ...]:
        self.seed, self.said = seed, []
        config = SamplingConfig(max_new_tokens=NUM_TOKENS, temperature=1.0, top_p=self.top_p, seed=seed)
        tokens, _ = generate_speculatively(
            self, self, self.p_logits[0], 0, HostGroup.single(), config, (), num_draft_tokens
        )
        assert self.said == tokens[:-1]
        return tuple(tokens)

    def exact(self) -> dict[tuple[int, ...], float]:
        """The target's own distribution of whole sequences."""
        p = probabilities(self.p_logits, 1.0, self.top_p)
        chances = {}
        for sequence in product(range(p.shape[1]), repeat=NUM_TOKENS):
            chances[sequence] = math.prod(float(p[a, b]) for a, b in zip((0, *sequence), sequence, strict=False))
        return chances


def surprise(model: TableModel, num_draft_tokens: int = 2) -> float:
    """How many standard deviations the χ² of the joint of three tokens lies above its mean (Wilson-Hilferty)."""
    return surprise_of(Counter(model.generate(seed, num_draft_tokens) for seed in range(NUM_SAMPLES)), model)


def surprise_of(counts: Counter, model: TableModel) -> float:
    expected = {sequence: counts.total() * chance for sequence, chance in model.exact().items()}
    impossible = [sequence for sequence in counts if not expected[sequence]]
    if impossible:
        return float("inf")
    rare = [sequence for sequence, number in expected.items() if 0 < number < 5]
    cells = [(counts[sequence], number) for sequence, number in expected.items() if number >= 5]
    if rare:
        cells.append((sum(counts[s] for s in rare), sum(expected[s] for s in rare)))
    statistic = sum((seen - number) ** 2 / number for seen, number in cells)
    freedom = len(cells) - 1
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


def tables(size: int, seed: int = 0) -> torch.Tensor:
    return 1.5 * torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 5])
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
    monkeypatch.setattr(serial, "verify_sampled", bug)
    assert surprise(CASES[case]()) > 8


def test_the_count_finds_a_number_that_is_used_twice(monkeypatch):
    """Once to draw the drafted token, and again to decide on it."""
    monkeypatch.setattr(serial, "PURPOSE_ACCEPT", PURPOSE_DRAFT)
    assert surprise(CASES["different"]()) > 8


def test_greedy_verification():
    logits = torch.eye(5)[[3, 1, 4, 2]]
    assert verify_greedy([3, 1, 4], logits) == Verdict(3, 2)
    assert verify_greedy([3, 0, 4], logits) == Verdict(1, 1)
    assert verify_greedy([0, 1, 4], logits) == Verdict(0, 3)
    assert verify_greedy([], logits[:1]) == Verdict(0, 3)
