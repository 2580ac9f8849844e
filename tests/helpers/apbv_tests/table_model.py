"""A target and a draft whose distributions are tables, so that samples can be counted against exact
chances."""

import math
from collections import Counter
from itertools import product

import torch

from apbv import HostGroup
from apbv.config import SamplingParams
from apbv.decode.answer import Answer
from apbv.decode.sampling import PURPOSE_DRAFT, draw, probabilities, uniform
from apbv.speculate.drafters.drafters import Drafter, Proposal
from apbv.speculate.loops.pace import Pace
from apbv.speculate.loops.serial import generate_speculatively

NUM_TOKENS = 3
NUM_SAMPLES = 800


class TableModel(Drafter):
    """A target and a draft whose next-token distributions depend on the last token only."""

    def __init__(self, p_logits, q_logits, top_p=1.0, greedy_draft=False):
        self.p_logits = p_logits
        self.q_logits = q_logits
        self.top_p = top_p
        self.greedy_draft = greedy_draft
        self.said: list[int] = []

    def advance(self, tokens):
        self.said += tokens
        return self.p_logits[torch.tensor(tokens)]

    def take_back(self, count, kept=()):
        del self.said[len(self.said) - count + len(kept) :]

    def propose(self, tokens, tree, index=None):
        drafted = []
        rows = []
        index = len(tokens) if index is None else index
        for place in range(tree.depth):
            row = probabilities(self.q_logits[[*tokens, *drafted][-1]], 1.0, self.top_p)
            number = uniform(self.seed, index + place, PURPOSE_DRAFT)
            drafted.append(
                int(row.argmax()) if self.greedy_draft else draw(row[None], [number]).read()[0]
            )
            rows.append(row)
        return Proposal(drafted, None if self.greedy_draft or not rows else torch.stack(rows))

    def generate(self, seed: int) -> tuple[int, ...]:
        self.seed = seed
        self.said = []
        config = SamplingParams(
            max_new_tokens=NUM_TOKENS, temperature=1.0, top_p=self.top_p, seed=seed
        )
        tokens, _ = generate_speculatively(self.answer(config), self, Pace(2))
        assert self.said == tokens[:-1]
        return tuple(tokens)

    def answer(self, config: SamplingParams, hosts: HostGroup | None = None) -> Answer:
        self.hosts = hosts or HostGroup.single()
        return Answer(self, self.p_logits[0], 0, config)

    def exact(self) -> dict[tuple[int, ...], float]:
        """The target's own distribution of whole sequences."""
        p = probabilities(self.p_logits, 1.0, self.top_p)
        chances = {}
        for sequence in product(range(p.shape[1]), repeat=NUM_TOKENS):
            chances[sequence] = math.prod(
                float(p[a, b]) for a, b in zip((0, *sequence), sequence, strict=False)
            )
        return chances


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
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(
        2 / (9 * freedom)
    )


def tables(size: int, seed: int = 0) -> torch.Tensor:
    return 1.5 * torch.randn(
        size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
