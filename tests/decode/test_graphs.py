"""Steps at fixed addresses, as CUDA graphs repeat them, say what ordinary steps say."""

import random

import pytest
import torch

from apbv import DecodeConfig, Engine, HostGroup, PrefillConfig, SpeculativeConfig, demo, prefill
from apbv.decode import graphs
from apbv.decode.runner import Decoder
from apbv.kv import cache as kv_cache
from apbv.model.parts import inspect_model
from apbv.speculate.tree import Tree

from families import TEXT_FAMILIES
from prompts import as_inputs, build, text_batch, video_batch
from recorded import recorded_on_a_cpu

QUESTION, FRAMES = "name the letters in order", 16
TREES = Tree.of(6, 3), Tree((-1, 0, 0, 1, 1, 2, 2))  # of as many nodes, so that they share a graph


def decoder_of(family: str) -> Decoder:
    batch, query_start = (text_batch(40), 30) if family in TEXT_FAMILIES else (video_batch(family), None)
    hosts, model = HostGroup.single(), build(family, torch.float64)
    inputs = as_inputs(family, batch, query_start, hosts, torch.float64)
    state = prefill(model, inputs, hosts=hosts)
    return Decoder(inspect_model(model), state.kv, state.next_position)


def walk(decoder: Decoder, seed: int, num_steps: int, rolls_back: bool = True) -> list[torch.Tensor]:
    """Step, roll back, and grow trees at random; return all logits, and the KV of the new tokens."""
    chance, said, length = random.Random(seed), [], 0
    for _ in range(num_steps):
        count = chance.choice([1, 1, 1, 3, 4])
        if rolls_back and chance.random() < 0.3:
            tree = chance.choice(TREES)
            drafted = [chance.randrange(250) for _ in range(len(tree))]
            said.append(decoder.advance(drafted, tree.depths, tree.visible))
            node, path = 0, [0]
            while tree.children[node] and chance.random() < 0.7:
                node = chance.choice(tree.children[node])
                path.append(node)
            decoder.take_back(len(tree), path)
            length += len(path)
            continue
        tokens = [chance.randrange(250) for _ in range(count)]
        # As a GPU gets a token that the host does not know yet.
        given = torch.tensor(tokens) if chance.random() < 0.5 else tokens
        said.append(decoder.advance(given, last_only=chance.random() < 0.3))
        rejected = chance.randrange(count) if rolls_back else 0
        decoder.take_back(rejected)
        length += count - rejected
    return said + [states for layer in decoder.newest_kv(length) for states in layer]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llama", "qwen3_5"])
def test_a_walk_says_the_same(family, monkeypatch):
    monkeypatch.setattr(kv_cache, "GROWTH_ROWS", 24)  # so that buffers are left for new ones
    rolls_back = family != "qwen3_5"
    expected = walk(decoder_of(family), 0, 30, rolls_back)
    with recorded_on_a_cpu() as repeated:
        decoder = decoder_of(family)
        found = walk(decoder, 0, 30, rolls_back)
    assert len(repeated) > 10 and len(set(repeated)) > 2
    close = 1e-9 if rolls_back else 1e-4  # a hybrid's rule computes in fp32
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=close, atol=close)


# A cache that changes, a tree, and drafts on the target's KV, read where that lies.
DRAFT = {"draft_model": "demo"}
WAYS = [("auto", {"strategy": "hippo", "prune": "kv", **DRAFT}), ("auto", {"strategy": "sd_tree", **DRAFT})]
WAYS += [("triton", {"strategy": "std", "keep_tokens": 60})]


def answer(engine: Engine) -> list[int]:
    request = {"video": demo.video_path(), "num_frames": FRAMES, "max_new_tokens": 8}
    return engine.generate(QUESTION, **request, temperature=1.3, top_p=0.9, seed=3).token_ids


@pytest.mark.parametrize("number", [0, 1, pytest.param(2, marks=pytest.mark.thorough)])
def test_answers_are_the_same(number):
    backend, way = WAYS[number]
    speculate, config = SpeculativeConfig(keep_losing_draft=True, **way), PrefillConfig(backend=backend)
    settings = {"dtype": "float32", "prefill": config, "speculate": speculate}
    expected = answer(Engine.from_pretrained("demo", **settings))
    with recorded_on_a_cpu() as repeated:
        assert answer(Engine.from_pretrained("demo", **settings)) == expected
    assert repeated
    engine = Engine.from_pretrained("demo", dtype="float32", decode=DecodeConfig(cuda_graphs="off"))
    with recorded_on_a_cpu() as repeated:
        answer(engine)
    assert not repeated


def test_a_kept_prompt_is_answered_again():
    """The answer before has left rows behind the prompt's, and buffers with them."""
    engine = Engine.from_pretrained("demo", dtype="float32")
    with recorded_on_a_cpu() as repeated:
        state = engine.prefill(QUESTION, video=demo.video_path(), num_frames=FRAMES)
        first, *others = (engine.decode(state, max_new_tokens=8).token_ids for _ in range(3))
    assert others == [first] * 2 and repeated
    assert engine.decode(state, max_new_tokens=8).token_ids == first


def test_what_keeps_steps_from_being_recorded(monkeypatch):
    parts, other = (inspect_model(build("llama", torch.float32), backend) for backend in ("triton", "torch"))
    assert not parts.wants_graphs  # on a CPU, and without a word
    assert graphs.why_not_captured(parts, None) is None
    assert "sharded" in graphs.why_not_captured(parts, HostGroup.single())
    assert "torch attention" in graphs.why_not_captured(other, None)
    monkeypatch.setitem(vars(parts), "tensor_parallel", (0, 2))
    assert "members of a host" in graphs.why_not_captured(parts, None)
