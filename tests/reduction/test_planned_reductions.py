"""What is estimated of a reduction, against what a prefill then leaves and holds."""

import pytest

from apbv import HostGroup, PrefillConfig, ReduceConfig, plan, prefill
from apbv.config import REDUCER_NAMES
from apbv.launch.plan import main

from apbv_tests import families
from apbv_tests.configs import prefill_config
from apbv_tests.pairs import each_choice
from apbv_tests.prompts import video_batch

LAYERS = 6
FRAMES = 50
SIZE = (56, 70)


@each_choice(
    name=REDUCER_NAMES,
    method=["apbv", "star", "zigzag_ring", "full"],
    ratio=[0.6, 0.3],
    num_hosts=[1, 2, 2],
)
def test_about_as_many_tokens_are_left_and_as_much_kv(
    pool, tmp_path, name, method, ratio, num_hosts
):
    reduce = ReduceConfig(method=name, ratio=ratio)
    config = prefill_config(method=method, kv="sharded", on_single_host=True, reduce=reduce)
    path = families.save_checkpoint("qwen2_5_vl", tmp_path, layers=LAYERS)
    memory = 10**7  # the less it is, the sooner it is found how many frames would fit
    planned = plan(
        path,
        num_frames=FRAMES,
        resolution=SIZE,
        hosts=num_hosts,
        prefill=config,
        device_memory=memory,
    )
    results = pool.run(num_hosts, kept_job, config)
    assert planned.num_left == pytest.approx(results[0][0], rel=0.3)
    held = sum(kv for _, kv in results)
    estimate = sum(host.kv for host in planned.hosts)
    assert estimate == pytest.approx(held, rel=0.3)


def kept_job(hosts: HostGroup, config: PrefillConfig) -> tuple[int, int]:
    """How many tokens the language model reads, and how much KV the host holds."""
    batch = video_batch("qwen2_5_vl", FRAMES, 60 * "q")
    model = families.build_model("qwen2_5_vl", layers=LAYERS)
    state = prefill(model, batch, hosts=hosts, config=config)
    gone = state.reduction.num_before - state.reduction.num_after
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in state.kv.cache.layers)
    return batch["input_ids"].shape[1] - gone, kept


def test_the_command_plans_reductions(capsys):
    asked = ["--model", "demo", "--frames", "64", "--device-memory", "0.5"]
    assert main([*asked, "--reduce", "dycoke", "--reduce-ratio", "0.125"]) == 0
    assert "1,104 tokens, 1,024 of them visual; about 208 are left" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*asked, "--reduce-ratio", "0.5"])
    assert capsys.readouterr().err.startswith("error: --reduce-ratio needs --reduce")


def test_a_text_is_not_reduced():
    with pytest.raises(ValueError, match="give the frames of a video"):
        plan("demo", tokens=500, prefill=PrefillConfig(reduce=ReduceConfig(method="dycoke")))
