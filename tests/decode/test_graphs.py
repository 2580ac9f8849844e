"""Steps at fixed addresses, as CUDA graphs repeat them, say what ordinary steps say."""

import random

import pytest
import torch

from apbv import HostGroup, ModelInputs, PrefillConfig, prefill
from apbv.kv import cache as kv_cache
from apbv.model.parts import inspect_model
from apbv.runner import graphs
from apbv.runner.decoder import Decoder
from apbv.speculate.drafters.tree import Tree

from apbv_tests import families
from apbv_tests.families import TEXT_FAMILIES
from apbv_tests.pretend_gpu import Machine, rehearsal, to_gpu
from apbv_tests.prompts import build, text_batch, video_batch
from apbv_tests.rehearsals import on_gpus

TREES = Tree.of(6, 3), Tree((-1, 0, 0, 1, 1, 2, 2))  # of as many nodes, so that they share a graph


def decoder_of(family: str, gpu: Machine | None = None) -> Decoder:
    batch, query_start = (
        (text_batch(40), 30) if family in TEXT_FAMILIES else (video_batch(family, 4), None)
    )
    hosts = HostGroup.single("cpu")
    model = families.build_model(family, layers=2)
    if gpu is not None:
        hosts = on_gpus(hosts)
        model = to_gpu(model, gpu)
    parts = inspect_model(model)
    inputs = ModelInputs.from_processor(parts, batch, hosts, query_start=query_start)
    state = prefill(parts, inputs, hosts=hosts, config=PrefillConfig())
    return Decoder(parts, state.kv, state.next_position)


NUM_STEPS = 14


def walk(
    decoder: Decoder, seed: int, num_steps: int, rolls_back: bool = True
) -> list[torch.Tensor]:
    """Step, roll back, and grow trees at random; return all logits, and the KV of the new
    tokens."""
    chance = random.Random(seed)
    said = []
    length = 0
    device = decoder.cache.layers[-1].keys.device
    for _ in range(num_steps):
        count = chance.choice([1, 1, 1, 3, 4])
        if rolls_back and chance.random() < 0.3:
            tree = chance.choice(TREES)
            drafted = [chance.randrange(250) for _ in range(len(tree))]
            said.append(decoder.advance(drafted, tree.depths, tree.visible))
            node = 0
            path = [0]
            while tree.children[node] and chance.random() < 0.7:
                node = chance.choice(tree.children[node])
                path.append(node)
            decoder.take_back(len(tree), path)
            length += len(path)
            continue
        tokens = [chance.randrange(250) for _ in range(count)]
        # As a GPU gets a token that the host does not know yet.
        given = torch.tensor(tokens, device=device) if chance.random() < 0.5 else tokens
        said.append(decoder.advance(given, last_only=chance.random() < 0.3))
        rejected = chance.randrange(count) if rolls_back else 0
        decoder.take_back(rejected)
        length += count - rejected
    for keys_and_values in decoder.newest_kv(length):
        said += keys_and_values
    return said


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_next"])
def test_a_walk_says_the_same(family, monkeypatch):
    monkeypatch.setattr(kv_cache, "GROWTH_ROWS", 12)  # so that buffers are left for new ones
    rolls_back = family == "qwen2_5_vl"
    expected = walk(decoder_of(family), 0, NUM_STEPS, rolls_back)
    with rehearsal() as gpu:
        found = [states.cpu() for states in walk(decoder_of(family, gpu), 0, NUM_STEPS, rolls_back)]
        replayed = len(gpu.events.of("replay"))
    assert replayed >= 4
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_what_keeps_steps_from_being_recorded(monkeypatch):
    parts = inspect_model(build("llama", torch.float32), "triton")
    other = inspect_model(build("llama", torch.float32), "torch")
    assert not graphs.may_record(parts, None)  # on a CPU, and without a word
    assert graphs.capture_obstacle(parts, None) is None
    assert "sharded" in graphs.capture_obstacle(parts, HostGroup.single())
    assert "torch attention" in graphs.capture_obstacle(other, None)
    monkeypatch.setitem(vars(parts), "tensor_parallel", (0, 2))
    assert "members of a host" in graphs.capture_obstacle(parts, None)
