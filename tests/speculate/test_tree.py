"""Draft trees: their shape, what sees what, which branch is right, and what a model drafts from
what stood."""

import copy
from functools import partial
from itertools import chain

import pytest
import torch

from apbv import HostGroup
from apbv.config import SamplingParams
from apbv.decode.answer import generate_tokens
from apbv.kernels import reference
from apbv.model.parts import inspect_model
from apbv.speculate.drafters.drafters import ModelDrafter, ReadPrompt
from apbv.speculate.drafters.tree import Tree
from apbv.speculate.loops.pace import Pace
from apbv.speculate.loops.serial import generate_speculatively

from apbv_tests import families
from apbv_tests.answers import answer_by
from apbv_tests.attention_cases import assert_out_close, make_inputs
from apbv_tests.device import DEVICE
from apbv_tests.drafters import decoders
from apbv_tests.prompts import text_batch, video_batch

STEPS = 19
TREE = Tree.of(25, 5)


# ---- the shape ----


def ancestors(tree: Tree, node: int) -> set[int]:
    """A node and those above it."""
    if node == 0:
        return {0}
    return {node, *ancestors(tree, tree.parents[node])}


@pytest.mark.parametrize(
    ("nodes", "depth", "vocabulary"),
    [(2, 1, 9), (25, 5, 250), (40, 5, 3), (40, 2, 2), (9, 4, 1), (256, 256, 250)],
)
def test_a_tree_is_closed_ordered_and_cut_by_levels(nodes, depth, vocabulary):
    tree = Tree.of(nodes, depth, vocabulary)
    # As many nodes as were asked for, where so many fit in; of a node no more children than there
    # are tokens.
    nodes = min(nodes, sum(vocabulary**level for level in range(1, depth + 1)))
    assert len(tree) == nodes + 1 and tree.parents[0] == -1 and tree.depth == min(nodes, depth)
    assert max(map(len, tree.children)) <= vocabulary and tree.num_drafted == nodes
    assert list(tree.parents[1:]) == sorted(tree.parents[1:])
    assert list(tree.depths) == sorted(tree.depths)
    for node in range(len(tree)):
        assert tree.visible[node].nonzero().flatten().tolist() == sorted(ancestors(tree, node))
        assert all(tree.parents[child] == node for child in tree.children[node])
    assert sum(map(len, tree.children)) == nodes
    inner = set(chain.from_iterable(tree.inner_levels))
    assert inner == {node for node, children in enumerate(tree.children) if children}
    for most in range(tree.depth + 2):
        shorter = tree.cut(most)
        assert shorter.parents == tree.parents[: len(shorter)]
        assert shorter.depth == min(most, tree.depth)


def test_the_reference_is_masked_attention():
    q, [(k, v)] = make_inputs(len(TREE), [40 + len(TREE)])
    visible = TREE.visible.to(DEVICE)
    mask = torch.cat([visible.new_ones(len(TREE), 40), visible], dim=1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, mask, scale=0.2, enable_gqa=True
    )
    assert_out_close(reference.verify_attention(q, k, v, 0.2, visible=visible)[0], expected, 1e-14)


# ---- drafting ----


class Checked(ModelDrafter):
    """Compares what it proposes with what a drafter without a past would."""

    def __init__(self, parts, prompt, *args):
        kept = copy.deepcopy(prompt)
        self._fresh = lambda: ModelDrafter(parts, copy.deepcopy(kept), *args, drafts_trees=True)
        super().__init__(parts, prompt, *args, drafts_trees=True)

    def propose(self, tokens, tree):
        proposed = super().propose(tokens, tree)
        assert proposed == self._fresh().propose(tokens, tree)
        return proposed


@pytest.mark.parametrize(("family", "noise"), [("qwen2_5_vl", 0.01), ("llama", 0.0)])
def test_a_model_drafts_from_what_stood_of_its_last_tree(family, noise):
    model = families.build_model(family, dtype=torch.float64)
    draft = families.build_model(family, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    for weight in draft.get_decoder().parameters():
        weight.data += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    if family == "llama":
        batch = text_batch(60)
        query_start = 48
    else:
        batch = video_batch(family, frames=12)
        query_start = None
    config = SamplingParams(max_new_tokens=STEPS, temperature=float(noise > 0), seed=5)
    fresh = partial(decoders, hosts=HostGroup.single(), kv="gathered")
    plain = fresh(model, batch=batch, query_start=query_start)
    by_tree = fresh(model, batch=batch, query_start=query_start)
    _, drafts, look = fresh(draft, batch=batch, query_start=query_start)
    expected = generate_tokens(answer_by(*plain[:2], config))
    length = look().get_seq_length()
    prompt = ReadPrompt(look())
    drafter = Checked(inspect_model(draft), prompt, drafts.next_position, length, config, 256)
    tokens, stats = generate_speculatively(
        answer_by(*by_tree[:2], config), drafter, Pace(TREE.depth), TREE
    )
    assert tokens == expected
    best = -(-(STEPS - 1) // 6)
    # Of a draft that is not the target branches are left, and taken.
    assert (
        best < stats.num_target_forwards < STEPS - 4 if noise else stats.num_target_forwards == best
    )
