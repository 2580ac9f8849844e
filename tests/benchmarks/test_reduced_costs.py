"""The cost of reduced and of sparse prefills, against the arithmetic that torch dispatches."""

from collections import Counter
from functools import cache

import pytest
import torch
from flops import FLASH, flop_counter

from apbv import HostGroup, ModelInputs, PrefillConfig, ReduceConfig, SparseConfig, prefill
from apbv.model.parts import inspect_model
from apbv.prefilling import forward
from apbv.prefilling.memory import Share
from apbv.prefilling.methods import METHODS
from apbv.prefilling.reduction.forecast import Forecast, shape_left
from apbv.prefilling.reduction.shape import PromptShape

import families
from prompts import video_batch
from support.cost_model.costs import ATTENTION, Shape, Video, cost
from support.cost_model.reduced import reduced_cost

LAYERS = 5


def reduced_job(hosts: HostGroup, config: PrefillConfig):
    """What the layers of a host compute, and the runs and the cost that are foretold."""
    model, counts = families.build_model("qwen2_5_vl", layers=LAYERS), Counter()
    parts = inspect_model(model)
    inputs = ModelInputs.from_processor(parts, video_batch("qwen2_5_vl"), hosts)
    original = forward._forward

    def counted(*args, **kwargs):
        with flop_counter() as counter:
            result = original(*args, **kwargs)
        counts["attention"] = counter.flop_counts["Global"][FLASH]
        for name, of_module in counter.get_flop_counts().items():
            counts[name.split(".")[-1]] += sum(of_module.values())
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "_forward", counted)
        state = prefill(parts, inputs, hosts=hosts, config=config)
    shape = PromptShape.of(parts, inputs, config.reduce)
    left = shape if config.reduce.is_late else shape_left(config.reduce, shape)
    method = METHODS[config.method]
    layout = method.plan(hosts.size, left.num_tokens, left.context_start, left.query_start, config)
    runs = Forecast.of(config, Share.of(parts).sizes, method, layout, left).most
    return counts, reduced_cost(Shape.from_config(model.config, 4), config.method, runs), state.shards.nbytes()


@pytest.mark.parametrize("num_hosts", [1, 2, 3])
@pytest.mark.parametrize("method", ["apbv", "star", "zigzag_ring", "full"])
@pytest.mark.parametrize("name", ["fastv", "pdrop", "uv_prune", "hippo"])
@pytest.mark.each_choice
def test_every_run_of_layers_computes_its_own_tokens(pool, name, method, num_hosts):
    lengths = {"anchor_len": 11, "passing_len": 3} if method == "apbv" else {}
    reduce = ReduceConfig(method=name, ratio=0.5)
    config = PrefillConfig(method=method, kv="sharded", on_single_host=True, reduce=reduce, **lengths)
    for host, (counts, costs, kv_bytes) in enumerate(pool.run(num_hosts, reduced_job, config)):
        flops = costs[host].flops
        assert flops["projections"] + flops["mlp"] + flops["query_pass"] == sum(
            counts[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj", "mlp")
        )
        assert sum(flops[part] for part in ATTENTION) == counts["attention"]
        assert (flops["lm_head"] > 0) == (counts["Linear"] > 0)
        assert costs[host].kv_bytes == kv_bytes


@cache
def build_llama():
    return families.build_model("llama", layers=2)


def sparse_job(hosts: HostGroup, config: PrefillConfig):
    """The attention that a host computes, its layout, and the share of scores that all hosts compute."""
    ids = torch.randint(0, 250, (1, 500), generator=torch.Generator().manual_seed(0))
    inputs = ModelInputs.from_processor(inspect_model(build_llama()), {"input_ids": ids}, hosts, query_start=480)
    with flop_counter() as counter:
        state = prefill(build_llama(), inputs, hosts=hosts, config=config)
    return counter.flop_counts["Global"][FLASH], state.layout, state.density


@pytest.mark.parametrize(("method", "num_hosts"), [("full", 1), ("apbv", 2), ("star", 3)])
def test_sparse_attention_computes_its_density(pool, method, num_hosts):
    sparse = SparseConfig(block_size=32, threshold=0.3, stride=8)
    config = PrefillConfig(method=method, sparse=sparse, kv="sharded", passing_len=8)
    measured = pool.run(num_hosts, sparse_job, config)
    computed, (_, layout, density), shape = sum(each[0] for each in measured), measured[0], Shape.from_config
    dense, costs = (
        sum(
            host.flops[part]
            for host in cost(shape(build_llama().config), method, layout, density=share)
            for part in ATTENTION
        )
        for share in (1.0, density)
    )
    assert density < 0.9 and costs < dense
    assert costs == pytest.approx(computed, rel=1e-6)


def test_a_reduced_video_is_encoded_whole_and_exchanged_in_part():
    shape = Shape.from_config(families.build_config("qwen2_5_vl"), 4)
    layout = METHODS["zigzag_ring"].plan(2, 150, 10, 110, PrefillConfig(method="zigzag_ring"))
    whole = Video(range(10, 110), 10)
    left = Video(range(10, 110), 10, frame_tokens=40)
    (few, _), (many, _) = (cost(shape, "zigzag_ring", layout, video=video) for video in (whole, left))
    assert many.flops["vision"] == 5 * shape.vision.frame_flops(40) > few.flops["vision"]
    assert many.received == few.received


@pytest.mark.parametrize(("method", "density"), [("ulysses", 0.5), ("full", 0.0), ("full", 1.5)])
def test_densities_that_there_are_not(method, density):
    shape = Shape.from_config(families.build_config("llama"))
    layout = METHODS[method].plan(2, 500, 0, 480, PrefillConfig(method=method))
    with pytest.raises(ValueError, match="does not compute"):
        cost(shape, method, layout, density=density)
