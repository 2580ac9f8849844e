"""What is foretold of a reduction, against what a prefill then leaves and holds."""

import operator
import threading
from functools import cache

import pytest
import torch

from apbv import HostGroup, ModelInputs, PrefillConfig, ReduceConfig, plan, prefill
from apbv.config import LATE_REDUCER_NAMES, REDUCER_NAMES
from apbv.config.names import EARLY_REDUCER_NAMES
from apbv.hosts.simulated import share_weights, simulate
from apbv.launch.plan import main
from apbv.model.parts import inspect_model
from apbv.prefilling import forward
from apbv.prefilling.memory import Share, host_memory
from apbv.prefilling.reduction import early
from apbv.prefilling.reduction.forecast import Forecast, reduction_memory, shape_left
from apbv.prefilling.reduction.shape import PromptShape

import families
from live_tensors import LiveTensors
from pairs import each_choice
from prompts import kv_of, processed, video_batch

LAYERS, FRAMES, SIZE = 6, 28, (56, 70)


@cache
def batch_of(family: str) -> dict:
    """A video between as many tokens of text as a plan takes to be there: 16, and 64."""
    before = behind = ""
    for _ in range(2):
        batch = processed(family, before, families.synthetic_video(FRAMES, *SIZE), behind)
        where = inspect_model(families.build_model(family)).is_visual(batch["input_ids"][0]).nonzero().flatten()
        before += "b" * (16 - int(where[0]))
        behind += "q" * (64 - (batch["input_ids"].shape[1] - 1 - int(where[-1])))
    return batch


def prefill_job(hosts: HostGroup, family: str, config: PrefillConfig):
    """How many tokens are read and left, and how much KV the host holds."""
    model = families.build_model(family, layers=LAYERS)
    state = prefill(model, batch_of(family), hosts=hosts, config=config)
    gathered = None
    if config.kv == "gathered":
        cache = state.to_dynamic_cache()
        gathered = cache and sum(states.nbytes for layer in kv_of(cache) for states in layer)
    held = state.shards.nbytes() if config.kv == "sharded" else None
    return batch_of(family)["input_ids"].shape[1], state.num_tokens, state.reduction, held, gathered


@each_choice(
    name=REDUCER_NAMES,
    family=["qwen2_5_vl", "llava_onevision"],
    method=["apbv", "star", "zigzag_ring", "full"],
    ratio=[0.6, 0.3, 0.01],
    num_hosts=[1, 2, 2],
    kv=["sharded", "gathered"] * 4,
)
def test_tokens_and_kv_are_those_of_the_prefill(pool, tmp_path, name, family, method, ratio, num_hosts, kv):
    """One family has positions in space, the other a row that ends the video."""
    reduce = ReduceConfig(method=name, ratio=ratio)
    config = PrefillConfig(method=method, kv=kv, on_single_host=True, reduce=reduce)
    path = families.save_checkpoint(family, tmp_path, layers=LAYERS)
    memory = 10**7  # the less it is, the sooner it is found how many frames would fit
    planned = plan(path, frames=FRAMES, resolution=SIZE, hosts=num_hosts, prefill=config, device_memory=memory)
    left, results = planned.reduction, pool.run(num_hosts, prefill_job, family, config)
    for host, (num_tokens, num_first, reduction, held, gathered) in enumerate(results):
        assert planned.num_tokens == num_tokens and planned.num_visual_tokens == reduction.num_before
        by_layer = reduction.by_layer or (reduction.num_after,) * LAYERS
        assert left.is_bound == (name == "sparsevlm")
        at_most = operator.le if left.is_bound else operator.eq
        assert all(map(at_most, by_layer, left.by_layer)) and left.by_layer[0] == by_layer[0]
        assert not left.is_bound or num_first == num_tokens
        assert held is None or at_most(held, planned.hosts[host].kv)
        assert gathered is None or at_most(gathered, planned.hosts[0].gathered_kv or planned.hosts[0].kv)
    assert left.num_tokens - left.num_visual_tokens == planned.num_tokens - planned.num_visual_tokens


# ---- memory ----


def measured(monkeypatch, family: str, dtype: torch.dtype, num_hosts: int, reduce: ReduceConfig) -> list:
    """Of every host the peak of its layers, and of what chooses before them, with what is foretold of both."""
    counted, batch = threading.local(), video_batch(family, frames=200)
    config = PrefillConfig(reduce=reduce, kv="sharded")

    def counting(module, name: str) -> None:
        original = getattr(module, name)

        def run(*args, **kwargs):
            with LiveTensors() as live:
                result = original(*args, **kwargs)
            setattr(counted, name, live.peak)
            if name == "choose_rows":
                counted.encoded = args[2].nbytes
            return result

        monkeypatch.setattr(module, name, run)

    counting(forward, "_forward")
    counting(early, "choose_rows")

    def job(hosts: HostGroup):
        parts = inspect_model(share_weights(families.build_model(family, layers=LAYERS, dtype=dtype)))
        inputs = ModelInputs.from_processor(parts, batch, hosts)
        share, shape, reduction = Share.of(parts), PromptShape.of(parts, inputs, reduce), None
        prefill(parts, inputs, hosts=hosts, config=config)
        left = shape if reduce.is_late else shape_left(reduce, shape)
        if not reduce.is_late:
            reduction = reduction_memory(reduce, share, shape, inputs.visual.pieces, hosts.rank)
        runs = Forecast.of_shape(config, share.sizes, hosts.size, left).most
        memory = host_memory(share, runs, hosts.rank, "sharded", reduction=reduction)
        return vars(counted), memory

    return simulate(num_hosts, job)


MODELS = [("qwen2_5_vl", torch.float32), ("qwen3_vl", torch.bfloat16)]


@each_choice(name=[*EARLY_REDUCER_NAMES, "pdrop", "sparsevlm"], num_hosts=[1, 2], model=MODELS)
def test_the_peak_is_foretold(monkeypatch, name, num_hosts, model):
    """Of layers that of those with most tokens; of choosing before them a bound, as frames may lie on one host."""
    layer = 2 if name in LATE_REDUCER_NAMES else None
    reduce, model = ReduceConfig(method=name, ratio=0.3, layer=layer), model if layer is None else MODELS[0]
    for peaks, memory in measured(monkeypatch, *model, num_hosts, reduce):
        if layer:
            assert memory.least <= peaks["_forward"] and memory.kv_by_then < memory.kv
            assert 0.75 < memory.prefill / peaks["_forward"] < 1.25
        else:
            assert memory.reduction.encoded == peaks["encoded"]
            assert 0.95 < memory.reduction.choosing / peaks["choose_rows"] < 3
            assert memory.encoding >= memory.reduction.encoded + memory.reduction.choosing


# ---- the command, and what cannot be planned ----


def test_the_command_plans_reductions_and_sparse_attention(capsys):
    asked = ["--model", "demo", "--frames", "64", "--device-memory", "0.5"]
    assert main([*asked, "--reduce", "pdrop", "--reduce-ratio", "0.125"]) == 0
    assert "pdrop 0.125: 1,024 visual tokens, 512 behind layer 1, 256 behind" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*asked, "--reduce-ratio", "0.5"])
    assert capsys.readouterr().err.startswith("error: --reduce-ratio needs --reduce")


def test_what_cannot_be_reduced_is_not_planned():
    for settings, reduce, message in (
        ({"frames": 64}, {"method": "fastv", "layer": 99}, "the model has 4, and at least one must follow"),
        ({"tokens": 500}, {"method": "hippo"}, "it needs the frames of a video"),
    ):
        with pytest.raises(ValueError, match=message):
            plan("demo", prefill=PrefillConfig(reduce=ReduceConfig(**reduce)), **settings)
