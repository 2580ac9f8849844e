"""Chains and trees of scripted drafts: the tokens of decoding without, and the cache that it would
leave."""

from functools import partial

import pytest
import torch

from apbv import HostGroup, prefill
from apbv.config import SamplingParams
from apbv.decode.answer import generate_tokens
from apbv.speculate.drafters.tree import Tree
from apbv.speculate.loops.pace import Pace
from apbv.speculate.loops.serial import generate_speculatively

from apbv_tests.answers import answer_by, decoder_behind
from apbv_tests.drafters import PATTERNS, ScriptedDrafter, ScriptedTree, decoders
from apbv_tests.families import TEXT_FAMILIES
from apbv_tests.prompts import ALL_FAMILIES, ATTENDING, as_inputs, build, text_batch, video_batch

STEPS = 19
SAMPLED = {"temperature": 1.0, "top_p": 0.95, "seed": 5}
# Every pattern of errors with lengths of a window, the last one such that something has to be taken
# back.
CHAINS = [("none", 5), ("all", 5), ("all", 1), ("alternating", 13), ("all but the first", 2)]
CHAINS += [("all but the last", 5)]
TREE = Tree.of(25, 5)
# Which child of a node on the right path is the right one; None: no child is. By the place in the
# answer.
BRANCHES = {
    "no child": lambda place: None,
    "the first": lambda place: 0,
    "alternating": lambda place: place % 2,
    "another each time": lambda place: (2, 0, 1, 0, None, 0, 0)[place % 7],
}


class LearningDrafter(ScriptedDrafter):
    def learn(self, new: list[int], rows: torch.Tensor) -> None:
        """Row i is what the target says where token i is."""
        assert rows.argmax(dim=-1).tolist() == new


def chain(answer, plain: list[int], pattern: str, gamma: int):
    return generate_speculatively(answer, LearningDrafter(plain, PATTERNS[pattern]), Pace(gamma))


def tree(answer, plain: list[int], pattern: str, shape: Tree = TREE):
    return generate_speculatively(
        answer, ScriptedTree(plain, BRANCHES[pattern]), Pace(shape.depth), shape
    )


def prompt(family: str):
    return (
        (text_batch(60), 48) if family in TEXT_FAMILIES else (video_batch(family, frames=6), None)
    )


def loops_job(hosts: HostGroup, family: str, kv: str, drawn: dict):
    """Tokens and the KV that they have left, of a chain and a tree to their end, and to an end
    token."""
    model = build(family, torch.float64)
    fresh = partial(decoders, model, hosts, *prompt(family), kv)
    decoder, state, _ = fresh()
    # Some tokens more than are asked for: what a draft says of places that are never reached.
    plain = generate_tokens(
        answer_by(decoder, state, SamplingParams(max_new_tokens=STEPS + 8, **drawn))
    )

    def check(loop, *shape, most: int = STEPS, end: tuple[int, ...] = ()):
        decoder, state, look = fresh()
        shown = []
        by = SamplingParams(max_new_tokens=most, **drawn)
        tokens, stats = loop(answer_by(decoder, state, by, end, shown.append), plain, *shape)
        expected = plain[: plain.index(end[0]) + 1] if end else plain[:most]
        assert tokens == shown == expected, (loop, shape)
        cache = look()
        if cache is None:
            return stats, tokens, None
        return stats, tokens, [(layer.keys, layer.values) for layer in cache.layers]

    left = []
    ends = [place for place in range(1, 10) if plain[place] not in plain[:place]]
    loops = {tree: [(pattern,) for pattern in BRANCHES]}
    if not drawn:  # a chain draws with other numbers
        loops = {chain: CHAINS, **loops}
    for loop, shapes in loops.items():
        runs = {shape: check(loop, *shape) for shape in shapes}
        left.append(runs[shapes[-1]][1:])
        for most in (1, 5, 7):  # before, in and behind a window, or a tree
            check(loop, *shapes[-1], most=most)
        for place in ends[:2]:
            to_an_end = check(loop, *shapes[-1], end=(plain[place],))
        left.append(to_an_end[1:])
        worst, best = (runs[shape][0] for shape in shapes[:2])
        assert best.num_target_forwards == -(-(STEPS - 1) // 6)
        assert worst.num_target_forwards == STEPS - 1 and worst.num_accepted == 0
    check(tree, "alternating", Tree.of(6, 3))
    return left


@pytest.mark.parametrize(
    ("family", "num_hosts", "kv", "drawn"),
    [("qwen2_5_vl", 2, "sharded", {}), ("llama", 1, "gathered", SAMPLED)],
)
def test_speculation_changes_no_token_and_leaves_the_right_kv(pool, family, num_hosts, kv, drawn):
    left, *others = pool.run(num_hosts, loops_job, family, kv, drawn)
    without_kv = [(tokens, None) for tokens, _ in left]
    assert all(result == without_kv for result in others)
    # The KV of a prefill of the same tokens, the last one aside, by the model itself.
    model = build(family, torch.float64)
    (batch, query_start) = prompt(family)
    inputs = as_inputs(family, batch, query_start, HostGroup.single(), torch.float64)
    for tokens, states in left:
        state = prefill(model, inputs, hosts=HostGroup.single())
        decoder_behind(state, model).advance(tokens[:-1])
        for (keys, values), layer in zip(states, state.kv.cache.layers, strict=True):
            torch.testing.assert_close(keys, layer.keys, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(values, layer.values, rtol=1e-9, atol=1e-9)


@pytest.mark.shows("drafts")
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_family_takes_wrong_drafts_back(family):
    """Hybrids draft chains alone."""
    model = build(family, torch.float64)
    fresh = partial(decoders, model, HostGroup.single(), *prompt(family), "gathered")
    decoder, state, _ = fresh()
    plain = generate_tokens(answer_by(decoder, state, SamplingParams(max_new_tokens=STEPS + 8)))
    assert len(set(plain)) > 2
    loops = [(chain, ("alternating", 3))]
    if family in ATTENDING:
        loops.append((tree, ("another each time", Tree.of(6, 3))))
    for loop, shape in loops:
        decoder, state, _ = fresh()
        tokens, stats = loop(
            answer_by(decoder, state, SamplingParams(max_new_tokens=STEPS)), plain, *shape
        )
        assert tokens == plain[:STEPS] and 0 < stats.num_accepted < stats.num_drafted
