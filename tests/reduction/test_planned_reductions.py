"""What is estimated of a reduction, against what a prefill then leaves and holds."""

import threading

import pytest

from apbv import HostGroup, PrefillConfig, ReduceConfig, plan, prefill
from apbv.config import LATE_REDUCER_NAMES, REDUCER_NAMES
from apbv.launch.plan import main
from apbv.model.parts import inspect_model
from apbv.prefilling import forward
from apbv.prefilling.memory import host_memory

import families
from live_tensors import LiveTensors
from pairs import each_choice
from prompts import video_batch
from support.simulated import share_weights, simulate

LAYERS, FRAMES, SIZE = 6, 50, (56, 70)


@each_choice(
    name=REDUCER_NAMES, method=["apbv", "star", "zigzag_ring", "full"], ratio=[0.6, 0.3], num_hosts=[1, 2, 2]
)
def test_about_as_many_tokens_are_left_and_as_much_kv(pool, tmp_path, name, method, ratio, num_hosts):
    reduce = ReduceConfig(method=name, ratio=ratio)
    config = PrefillConfig(method=method, kv="sharded", on_single_host=True, reduce=reduce)
    path = families.save_checkpoint("qwen2_5_vl", tmp_path, layers=LAYERS)
    memory = 10**7  # the less it is, the sooner it is found how many frames would fit
    planned = plan(path, num_frames=FRAMES, resolution=SIZE, hosts=num_hosts, prefill=config, device_memory=memory)
    results = pool.run(num_hosts, kept_job, config)
    assert planned.num_left == pytest.approx(results[0][0], rel=0.3)
    held, estimate = sum(kv for _, kv in results), sum(host.kv for host in planned.hosts)
    # What is left out between layers is estimated as if it were not.
    assert estimate == pytest.approx(held, rel=0.3) if not reduce.is_late else held < estimate


def kept_job(hosts: HostGroup, config: PrefillConfig) -> tuple[int, int]:
    """How many tokens the last layer reads, and how much KV the host holds."""
    batch, model = video_batch("qwen2_5_vl", FRAMES, 60 * "q"), families.build_model("qwen2_5_vl", layers=LAYERS)
    state = prefill(model, batch, hosts=hosts, config=config)
    gone = state.reduction.num_before - state.reduction.num_after
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in state.kv.cache.layers)
    return batch["input_ids"].shape[1] - gone, kept


@each_choice(name=LATE_REDUCER_NAMES, num_hosts=[1, 2])
def test_the_unreduced_prompt_is_an_upper_bound(monkeypatch, name, num_hosts):
    counted, batch = threading.local(), video_batch("qwen2_5_vl", frames=100)
    config = PrefillConfig(reduce=ReduceConfig(method=name, ratio=0.3, layer=2), kv="sharded")
    original = forward._forward

    def counting(*args):
        with LiveTensors() as live:
            result = original(*args)
        counted.peak = live.peak
        return result

    monkeypatch.setattr(forward, "_forward", counting)

    def job(hosts: HostGroup):
        parts = inspect_model(share_weights(families.build_model("qwen2_5_vl", layers=LAYERS)))
        layout = prefill(parts, batch, hosts=hosts, config=config).kv.cache.layouts[0]
        options = {"itemsize": parts.dtype.itemsize, "device": parts.device, "certain_depth": 2}
        return counted.peak, host_memory(parts.sizes, layout, hosts.rank, "sharded", **options)

    for peak, memory in simulate(num_hosts, job):
        assert memory.certain["prefill"] <= peak <= sum(memory.stages["prefill"].values()) < 2 * peak


def test_the_command_plans_reductions(capsys):
    asked = ["--model", "demo", "--frames", "64", "--device-memory", "0.5"]
    assert main([*asked, "--reduce", "pdrop", "--reduce-ratio", "0.125"]) == 0
    assert "1,104 tokens, 1,024 of them visual; about 208 are left" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*asked, "--reduce-ratio", "0.5"])
    assert capsys.readouterr().err.startswith("error: --reduce-ratio needs --reduce")


def test_what_cannot_be_reduced_is_not_planned():
    for settings, reduce, message in (
        ({"num_frames": 64}, {"method": "fastv", "layer": 99}, "the model has 4, and at least one must follow"),
        ({"tokens": 500}, {"method": "dycoke"}, "give the frames of a video"),
    ):
        with pytest.raises(ValueError, match=message):
            plan("demo", prefill=PrefillConfig(reduce=ReduceConfig(**reduce)), **settings)
