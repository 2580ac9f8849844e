"""Speculative sampling is lossless: counted, token by token, against the target's own
distribution."""

import itertools
import random
from collections import Counter

import pytest
import torch

from apbv.decode.sampling import NotFiniteError, draw, probabilities
from apbv.speculate.verify import Verdict, decide_greedy, decide_sampled, verdict_of

from apbv_tests.table_model import NUM_SAMPLES, TableModel, surprise_of, tables

CASES = {
    "another vocabulary": lambda: TableModel(tables(5), tables(5, 1)[:, :4]),
    "top-p": lambda: TableModel(tables(5), tables(5) + tables(5, 1) / 2, top_p=0.8),
    "a greedy draft": lambda: TableModel(tables(4), tables(4, 1), greedy_draft=True),
}


def verify_sampled(drafted, q, p, accept_draws, next_draws) -> Verdict:
    return verdict_of(
        decide_sampled(torch.tensor(drafted).long(), q, p, accept_draws, next_draws), len(p)
    )


def verify_greedy(drafted, logits) -> Verdict:
    return verdict_of(decide_greedy(torch.tensor(drafted).long(), logits), len(logits))


@pytest.mark.parametrize("case", CASES)
def test_whole_sequences_are_distributed_as_the_targets_own(case):
    model = CASES[case]()
    assert surprise_of(Counter(model.generate(seed) for seed in range(NUM_SAMPLES)), model) < 4


def one_after_the_other(drafted, q, p, accept_draws, next_draws) -> Verdict:
    """Speculative sampling as its authors write it."""
    for place, token in enumerate(drafted):
        row = p[place].tolist()
        p_token = row[token] if token < len(row) else 0.0
        if accept_draws[place] * (1.0 if q is None else float(q[place, token])) < p_token:
            continue
        if q is None:  # one-hot: all is left but that one token
            weights = [0.0 if number == token else a for number, a in enumerate(row)]
        else:
            theirs = q[place].tolist()
            theirs += [0.0] * (len(row) - len(theirs))
            weights = [max(0.0, a - b) for a, b in zip(row, theirs, strict=False)]
        return Verdict(place, drawn(weights if any(weights) else row, next_draws[place]))
    if len(p) == len(drafted):
        return Verdict(len(drafted), None)
    return Verdict(len(drafted), drawn(p[-1].tolist(), next_draws[len(drafted)]))


def drawn(weights: list[float], number: float) -> int:
    sums = list(itertools.accumulate(weights))
    return next(token for token, total in enumerate(sums) if total > number * sums[-1])


def test_a_window_is_decided_as_token_after_token():
    chance = random.Random(0)
    verdicts = Counter()
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        count = chance.randrange(5)
        bonus = chance.random() < 0.7
        p_size = chance.choice([4, 6])
        q_size = chance.choice([4, 6])
        if not count + bonus:
            continue
        spread = chance.choice([0.5, 3.0])
        p_logits = spread * torch.randn(count + bonus, p_size, generator=generator)
        p = probabilities(p_logits, 1.0, chance.choice([0.8, 1.0]))
        q_logits = spread * torch.randn(count, q_size, generator=generator)
        q = probabilities(q_logits, 1.0, chance.choice([0.8, 1.0]))
        if chance.random() < 0.2 and p_size == q_size:
            p[:count] = q
        drafted = [draw(row[None], [chance.random()]).read()[0] for row in q]
        places = range(count + bonus)
        accepting = [chance.random() for _ in places]
        drawing = [chance.random() for _ in places]
        for theirs in (q if count else None, None):
            verdict = verify_sampled(drafted, theirs, p, accepting, drawing)
            assert verdict == one_after_the_other(drafted, theirs, p, accepting, drawing)
            verdicts[verdict.num_accepted, verdict.next_token is None] += 1
    assert len(verdicts) >= 8  # all kinds


def test_greedy_verification():
    logits = torch.eye(5)[[3, 1, 4, 2]]
    assert verify_greedy([3, 1, 4], logits) == Verdict(3, 2)
    assert verify_greedy([3, 0, 4], logits) == Verdict(1, 1)
    assert verify_greedy([0, 1, 4], logits) == Verdict(0, 3)
    assert verify_greedy([], logits[:1]) == Verdict(0, 3)
    logits[2] = torch.nan
    assert verify_greedy([3, 0, 4], logits) == Verdict(1, 1)
    for drafted in ([3, 1, 4], [3, 1, 0]):
        with pytest.raises(NotFiniteError):
            verify_greedy(drafted, logits)


def test_rows_that_differ_by_rounding_alone_or_are_not_finite():
    q = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
    # Nowhere more than q: drawn from p itself.
    p = torch.tensor([[0.5 - 2.0**-54, 0.5]], dtype=torch.float64)
    for number, token in ((0.1, 0), (0.9, 1)):
        assert verify_sampled([0], q, p, [1 - 2.0**-53], [number]) == Verdict(0, token)
    p = torch.tensor([[0.5, 0.5], [torch.nan, torch.nan], [0.5, 0.5]], dtype=torch.float64)
    assert verify_sampled([0, 0], None, p, [0.9, 0.0], [0.0, 0.0, 0.0]) == Verdict(0, 1)
    for drafted, rows in (([0, 0], p), ([0], p[:2])):
        with pytest.raises(NotFiniteError):
            verify_sampled(drafted, None, rows, [0.1, 0.0], [0.0, 0.0, 0.0])
    assert verify_sampled([0], None, p[:1], [0.1], [0.0]) == Verdict(1, None)
    # Of a draft: the token is rejected, and p drawn from.
    unknown = torch.full((1, 1), torch.nan, dtype=torch.float64)
    for number, token in ((0.1, 0), (0.9, 1)):
        assert verify_sampled([0], unknown, p[:1], [0.0], [number]) == Verdict(0, token)
