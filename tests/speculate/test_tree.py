"""Draft trees: the tokens of autoregressive decoding, drawn ones too, and the cache that it would leave."""

import copy
import json

import pytest
import torch

from apbv import Engine, HostGroup, PrefillConfig, SpeculativeConfig, prefill
from apbv.config import SamplingConfig
from apbv.decode.answer import generate_tokens
from apbv.kernels import reference, verify_attention
from apbv.model.parts import inspect_model
from apbv.speculate import STRATEGIES
from apbv.speculate.pace import Pace
from apbv.speculate.tree import Tree, verify_tree
from apbv.speculate.tree_decoding import generate_by_tree
from apbv.speculate.tree_drafter import TreeDrafter

import families
from answers import answer_by, decoder_behind
from attention_cases import LSE_TOLERANCE, OUT_TOLERANCE, assert_lse_close, assert_out_close, dtypes, make_inputs
from device import DEVICE
from drafters import ScriptedTree, decoders
from engines import QUESTION
from prompts import as_inputs, build, text_batch, video_batch
from scripts import infer

STEPS = 24
VOCABULARY = 250
TREE = Tree.of(25, 5)
SAMPLED = {"temperature": 1.0, "top_p": 0.95, "seed": 5}

# Which child of a node on the right path is the right one; None: no child is. By the place in the answer.
PATTERNS = {
    "no child": lambda place: None,
    "the first": lambda place: 0,
    "the second": lambda place: 1,
    "alternating": lambda place: place % 2,
    "another each time": lambda place: (2, 0, 1, 0, None, 0, 0)[place % 7],
}


# ---- the shape ----


def ancestors(tree: Tree, node: int) -> set[int]:
    return {node} | (ancestors(tree, tree.parents[node]) if node else set())


@pytest.mark.parametrize(("nodes", "depth"), [(1, 1), (2, 1), (7, 1), (25, 5), (40, 3), (256, 256)])
def test_a_tree_is_closed_ordered_and_cut_by_levels(nodes, depth):
    tree = Tree.of(nodes, depth)
    assert len(tree) == nodes + 1 and tree.parents[0] == -1 and tree.depth == min(nodes, depth)
    assert list(tree.parents[1:]) == sorted(tree.parents[1:]) and list(tree.depths) == sorted(tree.depths)
    for node in range(len(tree)):
        assert tree.visible[node].nonzero().flatten().tolist() == sorted(ancestors(tree, node))
        assert all(tree.parents[child] == node for child in tree.children[node])
    assert sum(map(len, tree.children)) == nodes
    inner = {n for level in tree.inner_levels for n in level}
    assert inner == {n for n, children in enumerate(tree.children) if children}
    for most in range(tree.depth + 2):
        shorter = tree.cut(most)
        assert shorter.parents == tree.parents[: len(shorter)] and shorter.depth == min(most, tree.depth)


@pytest.mark.parametrize(("nodes", "depth", "vocabulary"), [(40, 5, 3), (256, 5, 25), (40, 2, 2), (9, 4, 1)])
def test_a_tree_has_no_more_children_than_there_are_tokens(nodes, depth, vocabulary):
    tree = Tree.of(nodes, depth, vocabulary)
    assert max(map(len, tree.children)) <= vocabulary
    # As many nodes as were asked for, where so many fit in.
    assert tree.num_drafted == min(nodes, sum(vocabulary**level for level in range(1, depth + 1)))
    assert list(tree.parents[1:]) == sorted(tree.parents[1:])


def small_vocabulary_job(hosts: HostGroup, num_tree_nodes: int):
    """Greedy tokens of a target and a draft of few tokens, without and with trees wider than the vocabulary."""
    found = []
    for speculate in (None, {"strategy": "sd_tree", "num_tree_nodes": num_tree_nodes, "num_draft_tokens": 2}):
        models = [families.build_model("llama", dtype=torch.float64, seed=seed) for seed in (0, 1)]
        draft = models[1] if speculate else None
        for model in models:
            model.set_output_embeddings(narrowed(model.get_output_embeddings(), 4))
        engine = Engine(
            models[0],
            families.build_processor("llama"),
            hosts,
            speculate=speculate and SpeculativeConfig(**speculate),
            draft=draft,
        )
        answer = engine.generate(QUESTION, max_new_tokens=12)
        found.append((answer.token_ids, answer.stats["speculation"]))
    return found


def narrowed(head: torch.nn.Linear, count: int) -> torch.nn.Linear:
    """A head of the first tokens only."""
    narrow = torch.nn.Linear(head.in_features, count, bias=False, dtype=head.weight.dtype)
    narrow.weight.data = head.weight.data[:count].clone()
    return narrow


def test_a_tree_may_be_asked_for_that_is_wider_than_the_vocabulary(pool):
    for (plain, _), (tokens, figures) in pool.run(2, small_vocabulary_job, 40):
        assert tokens == plain and figures["num_tree_nodes"] == 4 + 16


def test_the_default_tree_is_five_deep_and_wide_at_the_top():
    assert [TREE.depths.count(depth) for depth in range(6)] == [1, 4, 6, 9, 5, 1]
    # No node outside is likelier than one inside.
    inside = {ranks(TREE, node) for node in range(1, len(TREE))}
    largest = ranks_of_tree(Tree.of(256, 5)) - inside
    assert min(len(r) + sum(r) for r in largest) >= max(len(r) + sum(r) for r in inside)


def ranks(tree: Tree, node: int) -> tuple[int, ...]:
    parent = tree.parents[node]
    return () if parent < 0 else (*ranks(tree, parent), tree.children[parent].index(node))


def ranks_of_tree(tree: Tree) -> set:
    return {ranks(tree, node) for node in range(1, len(tree))}


# ---- attention ----


@pytest.mark.parametrize("past", [0, 1, 129])
@pytest.mark.parametrize("near", ["none", "tree", "level", "blind"])
@dtypes
def test_tree_attention_equals_its_definition(past, near, dtype):
    visible = {
        "none": TREE.visible[:, :0],  # a host that does not hold the new tokens
        "tree": TREE.visible,
        "level": TREE.visible[list(TREE.inner_levels[2])],
        "blind": TREE.visible & (torch.arange(len(TREE)) > 3)[:, None],
    }[near].to(DEVICE)
    q, [(k, v)] = make_inputs(len(visible), [past + visible.shape[1]], dtype=dtype)
    out, lse = verify_attention(q, k, v, 0.2, visible=visible)
    exact_out, exact_lse = reference.verify_attention(q.double(), k.double(), v.double(), 0.2, visible=visible)
    assert out.dtype == dtype and out.shape == q.shape
    assert_out_close(out, exact_out, OUT_TOLERANCE[dtype])
    assert_lse_close(lse, exact_lse, LSE_TOLERANCE[dtype])


def test_the_reference_is_masked_attention():
    q, [(k, v)] = make_inputs(len(TREE), [40 + len(TREE)])
    visible = TREE.visible.to(DEVICE)
    mask = torch.cat([visible.new_ones(len(TREE), 40), visible], dim=1)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=0.2, enable_gqa=True)
    assert_out_close(reference.verify_attention(q, k, v, 0.2, visible=visible)[0], expected, 1e-14)
    with pytest.raises(ValueError, match="8 query heads are not a multiple of 3"):
        verify_attention(q, k.new_zeros(2, 3, 4, 80), k.new_zeros(2, 3, 4, 80), 0.2, visible=visible[:, :0])


# ---- verification ----


def test_verification_goes_down_the_right_branch_only():
    tree = Tree((-1, 0, 0, 1, 1, 2, 2, 5))  # 0 -> 1 2, 1 -> 3 4, 2 -> 5 6, 5 -> 7
    tokens = [9, 1, 2, 3, 4, 3, 5, 6]
    logits = torch.zeros(8, 10)
    for node, says in {0: 2, 2: 3, 5: 6, 7: 8}.items():
        logits[node, says] = 9.0
    greedy = SamplingConfig()
    assert verify_tree(tree, tokens, logits, 7, greedy) == ([0, 2, 5, 7], 8)
    logits[5, 4] = 99.0  # what another branch has at this depth
    assert verify_tree(tree, tokens, logits, 7, greedy) == ([0, 2, 5], 4)
    logits[0, 7] = 99.0
    assert verify_tree(tree, tokens, logits, 7, greedy) == ([0], 7)


def test_a_drawn_token_is_accepted_as_often_as_the_children_are_likely():
    tree, p = Tree.of(3, 1), torch.tensor([0.4, 0.1, 0.2, 0.05, 0.25], dtype=torch.float64)
    config = SamplingConfig(temperature=1.0, seed=1)
    logits, counts, accepted, count = p.log().expand(4, -1), torch.zeros(5), 0, 2000
    for index in range(count):
        path, token = verify_tree(tree, [0, 2, 3, 1], logits, 2 * index, config)
        accepted += len(path) - 1
        counts[[0, 2, 3, 1][path[1]] if len(path) > 1 else token] += 1
    assert accepted / count == pytest.approx(0.35, abs=0.04)
    assert float(((counts / count - p) ** 2 / p).sum()) * count < 30  # chi square, 4 degrees of freedom


# ---- decoding ----


def decode_job(hosts: HostGroup, family: str, batch: dict, query_start, kv: str):
    model = build(family, torch.float64)
    results = {}
    for way in ({}, SAMPLED):
        decoder, state, _ = decoders(model, hosts, batch, query_start, kv)
        config = SamplingConfig(max_new_tokens=STEPS + 8, **way)
        # Some tokens more than are asked for: what the tree says of places that are never reached.
        plain = generate_tokens(answer_by(decoder, state, config))

        def speculate(pattern, tree=TREE, end=(), most=STEPS, plain=plain, way=way):
            decoder, state, look = decoders(model, hosts, batch, query_start, kv)
            drafter = ScriptedTree(plain, PATTERNS[pattern]) if hosts.rank == 0 else None
            shown, config = [], SamplingConfig(max_new_tokens=most, **way)
            answer = answer_by(decoder, state, config, end, shown.append)
            tokens, stats = generate_by_tree(answer, drafter, tree, Pace(tree.depth))
            assert shown == tokens
            cache = look()
            return tokens, stats, None if cache is None else [(layer.keys, layer.values) for layer in cache.layers]

        stats = {}
        for pattern in PATTERNS:
            tokens, stats[pattern], kv_states = speculate(pattern)
            assert tokens == plain[:STEPS], pattern
        assert speculate("alternating", Tree.of(6, 3))[0] == plain[:STEPS]
        assert stats["the first"].num_target_forwards == -(-(STEPS - 1) // 6)
        assert stats["the second"].num_target_forwards < STEPS / 2
        assert stats["no child"].num_target_forwards == STEPS - 1 and stats["no child"].num_accepted == 0
        # The pattern with gaps, last: branches were left at every depth.
        results[bool(way)] = tokens, kv_states
        for most in range(1, 10):  # every offset in a tree
            assert speculate("alternating", most=most)[0] == plain[:most]
        ends = [place for place in range(1, 10) if plain[place] not in plain[:place]]
        assert len(ends) > 4
        for place in ends:
            tokens, _, kv_states = speculate("alternating", end=(plain[place],))
            assert tokens == plain[: place + 1]
        results[bool(way), "ended"] = tokens, kv_states
    return results


@pytest.mark.parametrize(
    ("family", "num_hosts", "kv"),
    [
        pytest.param("qwen2_5_vl", 1, "gathered", marks=pytest.mark.exhaustive),
        ("qwen2_5_vl", 2, "sharded"),
        ("llama", 2, "gathered"),
        pytest.param("llama", 3, "sharded", marks=pytest.mark.thorough),
    ],
)
def test_a_tree_changes_no_token_and_leaves_the_right_kv(pool, family, num_hosts, kv):
    batch = text_batch(60) if family == "llama" else video_batch(family, frames=12)
    query_start = 48 if family == "llama" else None
    first, *others = pool.run(num_hosts, decode_job, family, batch, query_start, kv)
    assert all(result[key] == (first[key][0], None) for result in others for key in first)
    assert first[False][0] != first[True][0]
    model = build(family, torch.float64)
    inputs = as_inputs(family, batch, query_start, HostGroup.single(), torch.float64)
    for tokens, states in first.values():
        # The KV of a prefill of the same tokens, the last one aside, by the model itself.
        state = prefill(model, inputs, hosts=HostGroup.single())
        decoder_behind(state, model).advance(tokens[:-1])
        for (keys, values), layer in zip(states, state.kv.cache.layers, strict=True):
            torch.testing.assert_close(keys, layer.keys, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(values, layer.values, rtol=1e-9, atol=1e-9)


class Checked(TreeDrafter):
    """Compares what it proposes with what a drafter without a past would."""

    def __init__(self, parts, cache, *args):
        self._fresh = lambda: TreeDrafter(parts, copy.deepcopy(prompt), *args)
        prompt = copy.deepcopy(cache)
        super().__init__(parts, cache, *args)

    def propose(self, tokens, tree):
        proposed = super().propose(tokens, tree)
        assert proposed == self._fresh().propose(tokens, tree)
        return proposed


@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl"])
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_a_model_drafts_from_what_stood_of_its_last_tree(family, noise):
    model, hosts = families.build_model(family, dtype=torch.float64), HostGroup.single()
    draft = families.build_model(family, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    for weight in draft.get_decoder().parameters():
        weight.data += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    batch = text_batch(60) if family == "llama" else video_batch(family, frames=12)
    query_start = 48 if family == "llama" else None
    for way in ({}, SAMPLED):
        config = SamplingConfig(max_new_tokens=STEPS, **way)
        decoder, state, _ = decoders(model, hosts, batch, query_start, "gathered")
        plain = generate_tokens(answer_by(decoder, state, config))
        decoder, state, _ = decoders(model, hosts, batch, query_start, "gathered")
        _, drafts, look = decoders(draft, hosts, batch, query_start, "gathered")
        drafter = Checked(inspect_model(draft), look(), drafts.next_position, 256)
        tokens, stats = generate_by_tree(answer_by(decoder, state, config), drafter, TREE, Pace(TREE.depth))
        assert tokens == plain
        best = -(-(STEPS - 1) // 6)
        if noise:
            assert best < stats.num_target_forwards < STEPS - 4  # branches are left, and taken
        elif not way:
            assert stats.num_target_forwards == best


# ---- through the engine ----


def engine_job(hosts: HostGroup, kv: str, ways: list, draft_seed: int, request: dict):
    answers = []
    for way in ways:
        speculate = None if way is None else SpeculativeConfig(keep_losing_draft=True, **way)
        needs_draft = speculate and STRATEGIES[speculate.strategy].needs_draft_model
        draft = families.build_model("qwen2_5_vl", dtype=torch.float64, seed=draft_seed) if needs_draft else None
        model = families.build_model("qwen2_5_vl", dtype=torch.float64)
        engine = Engine(
            model,
            families.build_processor("qwen2_5_vl"),
            hosts,
            PrefillConfig(kv=kv),
            speculate=speculate,
            draft=draft,
        )
        answer = engine.generate(QUESTION, max_new_tokens=24, **request)
        answers.append((answer.token_ids, answer.stats["speculation"]))
    return answers


SEES_ALL = [
    {"strategy": "sd_tree"},
    {"strategy": "specvlm", "keep_ratio": 1.0, "num_tree_nodes": 25},
    {"strategy": "std", "keep_ratio": 1.0, "num_tree_nodes": 25},
    {"strategy": "layerskip", "layer_ratio": 1.0, "num_tree_nodes": 25},
]


@pytest.mark.parametrize(
    "sampled",
    [pytest.param({}, marks=pytest.mark.thorough), pytest.param(SAMPLED, marks=pytest.mark.exhaustive)],
    ids=["greedy", "sampled"],
)
def test_every_drafting_model_can_draft_a_tree(pool, clip, sampled):
    request = {"video": str(clip), "num_frames": 12, **sampled}
    names = [name for name, strategy in STRATEGIES.items() if strategy.drafts_trees]
    asked = [None, *({"strategy": name, "num_tree_nodes": 12, "keep_ratio": 0.3} for name in names), *SEES_ALL]
    for answers in pool.run(2, engine_job, "gathered", asked, 0, request):
        for way, (tokens, figures) in zip(asked[1:], answers[1:], strict=True):
            assert tokens == answers[0][0], way
            assert figures["num_tree_nodes"] == way.get("num_tree_nodes", 25)
            if way in SEES_ALL and not sampled:
                assert figures["num_target_forwards"] == 4, way  # 23 tokens, up to 6 at once
    for answers in pool.run(3, engine_job, "sharded", [None, {"strategy": "sd_tree"}], 1, request):
        assert answers[0][0] == answers[1][0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "ngram", "num_tree_nodes": 8}, "ngram drafts a chain of tokens: it cannot draft a tree"),
        ({"num_tree_nodes": 0}, "num_tree_nodes must lie in 1 .. 256, not 0"),
        ({"num_tree_nodes": True}, "num_tree_nodes must lie in 1 .. 256, not True"),
    ],
)
def test_what_cannot_be_a_tree_is_refused(settings, message):
    parts = families.build_model("llama"), families.build_processor("llama"), HostGroup.single()
    with pytest.raises(ValueError, match=message):
        Engine(*parts, speculate=SpeculativeConfig(**settings))


def beside_job(hosts: HostGroup):
    with pytest.raises(ValueError, match="a draft host drafts a chain of tokens: it cannot draft a tree"):
        Engine(None, None, hosts, speculate=SpeculativeConfig(strategy="sd_tree", draft_host=True))


def test_a_draft_host_drafts_no_tree(pool):
    pool.run(2, beside_job)


def test_the_command_line_drafts_a_tree(clip, tmp_path):
    families.save_checkpoint("qwen2_5_vl", tmp_path / "model")
    options = ["--model", tmp_path / "model", "--video", clip, "--frames", 12, "--prompt", QUESTION]
    options += ["--max-new-tokens", 9, "--draft-model", tmp_path / "model", "--speculate", "vanilla"]
    result = infer(
        *options, "--num-tree-nodes", 8, "--keep-losing-draft", "--json", tmp_path / "figures.jsonl", hosts=1
    )
    assert result.returncode == 0, result.stderr
    figures = json.loads((tmp_path / "figures.jsonl").read_text())["speculation"]
    assert figures["keep_losing_draft"] is True and figures["switched_off"] is None
    assert figures["num_tree_nodes"] == 8 and figures["num_drafted"] > figures["num_accepted"] > 0
