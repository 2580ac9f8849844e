"""Hosts of several processes: the results of hosts of one, with an equal share of the language
model on each."""

import random
import time
from pathlib import Path
from shutil import copytree
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from apbv import Engine, HostGroup, PrefillConfig, ReduceConfig, load
from apbv.kv.export.prefilled import own_heads
from apbv.model import row_chunks
from apbv.model.parts import inspect_model

from apbv_tests import families
from apbv_tests.configs import speculative_config
from apbv_tests.engines import QUESTION
from apbv_tests.fresh_hosts import Store, described, run_fresh
from apbv_tests.patience import GROUP_TIMEOUT, HANGING

# fp32 sums over a layer's columns, in another order
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def joined(processes: HostGroup, size: int) -> HostGroup:
    """The processes of a group with so many of them to a host."""
    return HostGroup.from_process_group(
        processes.process_group, "cpu", GROUP_TIMEOUT, tensor_parallel=size
    )


# Matrices that every process has: of routers, and of the short convolution.
REPLICATED = ("mlp.gate.weight", "shared_expert_gate.weight", "conv1d.weight")


def num_matrix_elements(model) -> int:
    """Numbers in the language model's and its head's matrices, of experts too, that are here."""
    count = 0
    for module in (model.get_decoder(), model.get_output_embeddings()):
        for name, weight in module.named_parameters():
            if weight.ndim > 1 and not name.endswith(REPLICATED):
                here = weight.to_local() if hasattr(weight, "to_local") else weight
                count += here.numel()
    return count


def prefill_job(
    processes: HostGroup,
    size: int,
    path: str,
    settings: dict,
    request: dict,
    chunked=False,
    expert_parallel=False,
) -> dict:
    """What a process is left with: its place, logits, the KV of its heads, and how the answer goes
    on."""
    hosts = joined(processes, size) if size > 1 else processes
    engine = Engine.from_pretrained(
        path, prefill=PrefillConfig(**settings), hosts=hosts, expert_parallel=expert_parallel
    )
    with mock.patch.dict(row_chunks.CHUNK_BYTES, {"cpu": 1} if chunked else {}):
        state = engine.prefill(QUESTION, **request)
    cache = state.to_dynamic_cache()
    plain = state.generate_inputs()
    if plain:
        plain = engine.model.generate(**plain, max_new_tokens=3, do_sample=False)[
            0, state.num_tokens :
        ].tolist()
    answer = engine.decode(state, max_new_tokens=3)
    kv = None
    if cache is not None:
        attending = [layer for layer in cache.layers if hasattr(layer, "keys")]
        kv = [torch.stack([layer.keys, layer.values]) for layer in attending]
    return {
        "place": (hosts.rank, hosts.tensor_parallel_rank),
        "logits": state.logits.clone(),
        "kv": kv,
        "kv_heads": list(own_heads(inspect_model(engine.model).sizes.kv_heads, hosts)),
        "plain": plain,
        "tokens": answer.token_ids,
        "stats": answer.stats,
        "elements": num_matrix_elements(engine.model),
    }


SENTENCE = "the quick brown fox jumps over the lazy dog. "


CASES = [
    ("qwen2_5_vl", {"method": "ulysses", "kv": "sharded"}, 4, 0),
    ("qwen3_vl", {}, 2, 0),  # for which transformers has no plan
    ("llama", {"method": "apb", "passing_len": 6, "anchor_len": 8, "kv": "sharded"}, 4, 6),
    ("llama", {}, 2, 30),  # whose norms and MLPs get 512 rows at a time
    *(
        (f, {}, 2, 0)
        for f in ("qwen2_vl", "internvl", "llava_onevision", "llava_next_video", "video_llama_3")
    ),
    *((f, {}, 2, 0) for f in (families.OMNI, *families.IMAGE_FAMILIES)),
    *((f, {}, 2, 6) for f in ("qwen2", "qwen3", "mistral", "smollm3")),
    # Joint MLPs, experts, linear attention.
    *((f, {}, 2, 0) for f in ("glm4v", "glm46v", "glm_ocr", "glm4v_moe", "qwen3_vl_moe")),
    ("glm4", {}, 2, 30),
    ("qwen3_moe", {"kv": "sharded"}, 4, 30),
    ("qwen3_5", {}, 4, 0),
    ("qwen3_5_moe", {"kv": "sharded"}, 4, 0),
    *((f, {}, 2, 6) for f in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")),
]


@pytest.mark.shows("tensor parallelism")
@pytest.mark.parametrize(("family", "settings", "num_processes", "repeated"), CASES)
def test_it_is_what_whole_hosts_compute(
    pool, checkpoints, clip, family, settings, num_processes, repeated
):
    """Uncompressed it is full attention of one process."""
    request = {"video": str(clip), "num_frames": 13}
    if repeated:
        request = {"context": SENTENCE * repeated}
    elif family in families.IMAGE_FAMILIES:
        request = {"images": [families.synthetic_image(84, 112, seed=seed) for seed in range(4)]}
    path = str(checkpoints(family))
    chunked = repeated > 6
    num_hosts = num_processes // 2
    is_exact = "passing_len" not in settings
    whole, *_ = pool.run(
        1 if is_exact else num_hosts, prefill_job, 1, path, {} if is_exact else settings, request
    )
    assert whole["stats"]["method"] == ("full" if is_exact else settings["method"])
    settings = {"passing_len": 10_000, **settings}
    shares = pool.run(num_processes, prefill_job, 2, path, settings, request, chunked)
    for process, share in enumerate(shares):
        assert share["place"] == divmod(process, 2)
        torch.testing.assert_close(share["logits"], whole["logits"], **CLOSE)
        assert share["tokens"] == whole["tokens"]
        # 269 rows of the embedding do not halve.
        assert abs(share["elements"] / whole["elements"] - 0.5) < 0.01
        stats = share["stats"]
        assert (stats["hosts"], stats["tensor_parallel_size"]) == (num_hosts, 2)
        assert len(stats["comm_bytes"]) == len(stats["peak_memory_bytes"]) == len(shares)
    for share in shares[:2]:
        assert share["plain"] == whole["plain"]
        for here, all_heads in zip(share["kv"], whole["kv"], strict=True):
            torch.testing.assert_close(here, all_heads[:, :, share["kv_heads"]], **CLOSE)
    assert shares[0]["kv_heads"] + shares[1]["kv_heads"] == whole["kv_heads"]
    assert all(share["kv"] is None and not share["plain"] for share in shares[2:])


REPLICATED_KV = [
    ("qwen2", {}),
    ("qwen3_next", {"kv": "sharded"}),
    ("llama", {"passing_len": 6, "anchor_len": 8}),
    ("llama", {"passing_len": 6, "anchor_len": 8, "importance": "softmax", "kv": "sharded"}),
    ("qwen3", {"passing_len": 6, "anchor_len": 8, "importance": "dot"}),
    ("glm4", {"method": "ulysses"}),
]


@pytest.mark.parametrize(("family", "settings"), REPLICATED_KV)
def test_processes_with_the_same_kv_head_are_what_whole_hosts_compute(
    pool, tmp_path, family, settings
):
    """Four query heads share one KV head, of two processes with two query heads each.

    They have to pass on the same pairs.
    """
    path = str(families.save_checkpoint(family, tmp_path, kv_heads=1))
    request = {"context": SENTENCE * 6}
    if "passing_len" not in settings:
        settings = {**settings, "passing_len": 10_000}
    whole, _ = pool.run(2, prefill_job, 1, path, settings, request)
    shares = pool.run(4, prefill_job, 2, path, settings, request)
    for share in shares:
        torch.testing.assert_close(share["logits"], whole["logits"], **CLOSE)
        assert share["tokens"] == whole["tokens"]
    for share in shares[:2]:
        assert share["plain"] == whole["plain"]
        assert share["kv_heads"] == [0]
        for here, there in zip(share["kv"], whole["kv"], strict=True):
            torch.testing.assert_close(here, there, **CLOSE)


def fresh_job(processes: HostGroup, *args) -> dict:
    """Little, and lists: a tensor's memory would be that of the process, which ends, and it would
    wait for more to be read before that."""
    result = prefill_job(processes, *args)
    latest = [layer[..., -1, :].tolist() for layer in result["kv"] or ()]
    names = ("tokens", "kv_heads")
    return {
        **{name: result[name] for name in names},
        "logits": result["logits"].tolist(),
        "latest": latest,
    }


@pytest.mark.thorough
def test_of_two_kv_heads_each_of_four_processes_has_its_own(pool, tmp_path):
    """Processes 0 and 1 have the first, 2 and 3 the second."""
    path = str(families.save_checkpoint("llama", tmp_path, kv_heads=2))
    request = {"context": SENTENCE * 6}
    settings = {"passing_len": 6, "anchor_len": 8}
    whole, _ = pool.run(2, prefill_job, 1, path, settings, request)
    outcomes = run_fresh(Store(tmp_path), 8, fresh_job, 4, path, settings, request)
    shares = [outcome.result for outcome in outcomes]
    for share in shares:
        torch.testing.assert_close(torch.tensor(share["logits"]), whole["logits"], **CLOSE)
        assert share["tokens"] == whole["tokens"]
    for share, head in zip(shares[:4], (0, 0, 1, 1), strict=True):  # of the first host
        assert share["kv_heads"] == [head]
        for here, there in zip(share["latest"], whole["kv"], strict=True):
            latest = there[:, :, [head], -1]
            torch.testing.assert_close(torch.tensor(here), latest, **CLOSE)


def saving_job(processes: HostGroup, path: str, folder: str, kv: str) -> dict:
    """Save KV, and load it."""
    hosts = joined(processes, 2)
    engine = Engine.from_pretrained(path, hosts=hosts, prefill=PrefillConfig(kv=kv))
    state = engine.prefill(QUESTION, context=SENTENCE * 6)
    state.save(folder)
    loaded = load(folder, model=engine.model, hosts=hosts, kv=kv)
    return {
        "tokens": engine.decode(state, max_new_tokens=3).token_ids,
        "of_loaded": engine.decode(loaded, max_new_tokens=3).token_ids,
    }


def loading_job(hosts: HostGroup, path: str, folder: str) -> list[int]:
    engine = Engine.from_pretrained(path, hosts=hosts)
    return engine.decode(load(folder, model=engine.model, hosts=hosts), max_new_tokens=3).token_ids


@pytest.mark.parametrize("kv", ["gathered", "sharded"])
def test_replicated_kv_is_saved_once(pool, tmp_path, kv):
    """One process can load it, and so can several with the same KV head."""
    path = str(families.save_checkpoint("llama", tmp_path, kv_heads=1))
    folder = str(tmp_path / "kv")
    for process in pool.run(4, saving_job, path, folder, kv):
        assert process["of_loaded"] == process["tokens"]
    (alone,) = pool.run(1, loading_job, path, folder)
    assert alone == process["tokens"]


WITH_EXPERTS = ["qwen3_moe", "glm4v_moe", "qwen3_5_moe", "qwen3_next"]


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_whole_experts_are_what_whole_hosts_compute(pool, checkpoints, clip, family):
    """Each of two processes has three of six experts."""
    request = {"context": SENTENCE * 6}
    if family in families.VISION_FAMILIES:
        request = {"video": str(clip), "num_frames": 13}
    path = str(checkpoints(family))
    (whole,) = pool.run(1, prefill_job, 1, path, {}, request)
    settings = {"passing_len": 10_000}
    for share in pool.run(4, prefill_job, 2, path, settings, request, False, True):
        torch.testing.assert_close(share["logits"], whole["logits"], **CLOSE)
        assert share["tokens"] == whole["tokens"]
        assert abs(share["elements"] / whole["elements"] - 0.5) < 0.01


def test_experts_whose_weights_are_transposed_are_the_same(pool, checkpoints, clip, tmp_path):
    """Checkpoints of Qwen3-VL with experts have them so; those that transformers saves do not."""
    request = {"video": str(clip), "num_frames": 13}
    path = checkpoints("qwen3_vl_moe")
    transposed = tmp_path / "transposed"
    copytree(path, transposed)
    weights = load_file(path / "model.safetensors")
    for name, weight in weights.items():
        if ".mlp.experts." in name:
            weights[name] = weight.transpose(1, 2).contiguous()
    save_file(weights, transposed / "model.safetensors", metadata={"format": "pt"})
    (whole,) = pool.run(1, prefill_job, 1, str(path), {}, request)
    for share in pool.run(2, prefill_job, 2, str(transposed), {}, request):
        torch.testing.assert_close(share["logits"], whole["logits"], **CLOSE)
        assert share["tokens"] == whole["tokens"]


def rejected_job(processes: HostGroup, paths: list[str]) -> list[str]:
    hosts = joined(processes, 2)
    refused = []
    for path in paths:
        refused.append(described(lambda path=path: Engine.from_pretrained(path, hosts=hosts)))
    return refused


def test_what_two_processes_cannot_share_is_refused(pool, tmp_path):
    """The message names the number."""
    sizes_of_family = {
        "qwen3_moe": {"moe_intermediate_size": 45},
        "qwen3_next": {"shared_expert_intermediate_size": 45},
        "qwen3_vl_moe": {"num_experts": 5},
        "glm4v_moe": {"intermediate_size": 45},
        "qwen3_5_text": {"num_attention_heads": 3, "num_key_value_heads": 1},
    }
    expected = [
        "45 columns in each expert",
        "45 columns in its shared expert",
        "5 experts",
        "45 columns in its MLP",
        "3 attention heads",
    ]
    paths = []
    for family, sizes in sizes_of_family.items():
        config = families.build_config(family)
        for name, size in sizes.items():
            setattr(config.get_text_config(), name, size)
        folder = tmp_path / family
        config.save_pretrained(folder)
        paths.append(str(folder))
    for process in pool.run(2, rejected_job, paths):
        for message, size in zip(process, expected, strict=True):
            assert message == (
                f"UnsupportedModelError: the model's {size} cannot be split evenly across 2 "
                "processes"
            )


def without_experts_job(processes: HostGroup, paths: list[str]) -> list[str]:
    ways = ((paths[0], joined(processes, 2)), (paths[1], processes))
    return [
        described(
            lambda path=path, hosts=hosts: Engine.from_pretrained(
                path, hosts=hosts, expert_parallel=True
            )
        )
        for path, hosts in ways
    ]


def test_expert_parallelism_needs_experts_and_processes(pool, checkpoints):
    paths = [str(checkpoints("llama")), str(checkpoints("qwen3_moe"))]
    for no_experts, one_process in pool.run(2, without_experts_job, paths):
        assert no_experts == (
            "InvalidConfigError: llama models have no experts for expert parallelism"
        )
        assert one_process.startswith("InvalidConfigError: expert parallelism shares out experts")


def ways_job(
    processes: HostGroup,
    size: int,
    paths: list[str],
    clip: str,
    ways: list[tuple[dict, dict, dict]],
):
    """For each way an answer's tokens, what was left out, and how many drafted tokens were
    right."""
    hosts = joined(processes, size) if size > 1 else processes
    found = []
    for prefill, speculate, sampled in ways:
        config = speculative_config(draft_model=paths[1], **speculate) if speculate else None
        engine = Engine.from_pretrained(
            paths[0], prefill=PrefillConfig(**prefill), speculate=config, hosts=hosts
        )
        answer = engine.generate(QUESTION, video=clip, num_frames=21, max_new_tokens=7, **sampled)
        accepted = (answer.stats.get("speculation") or {}).get("num_accepted")
        found.append((answer.token_ids, answer.stats.get("reduction"), accepted))
    return found


REDUCED = {"reduce": ReduceConfig(method="fastvid", ratio=0.3)}
SHARED = {"method": "zigzag_ring", "kv": "sharded"}
COMPRESSED = {"passing_len": 6, "anchor_len": 8}
DRAFT = {"num_draft_tokens": 3, "keep_losing_draft": True}
DRAFTED = [{"strategy": "sd_tree", **DRAFT}, {"strategy": "specvlm", "keep_ratio": 0.4, **DRAFT}]


@pytest.mark.thorough
def test_tokens_are_left_out_and_drafted_as_by_whole_hosts(pool, checkpoints, clip, tmp_path):
    """Each process has the attention of its own heads, and all have to choose alike; sampled, host
    0 drafts."""
    paths = [
        str(checkpoints("qwen2_5_vl")),
        str(families.save_checkpoint("qwen2_5_vl", tmp_path, layers=1)),
    ]
    drafted = [(COMPRESSED, way, {"temperature": 0.8, "seed": 3}) for way in DRAFTED]
    whole, _ = pool.run(2, ways_job, 1, paths, str(clip), drafted)
    whole += pool.run(1, ways_job, 1, paths, str(clip), [(REDUCED, {}, {})])[0]
    ways = [*drafted, ({**REDUCED, **SHARED}, {}, {})]
    for share in pool.run(4, ways_job, 2, paths, str(clip), ways):
        for way, here, there in zip(ways, share, whole, strict=True):
            assert here == there, way


def refused_job(processes: HostGroup, path: str, odd_path: str):
    hosts = joined(processes, 2)
    whole = Engine.from_pretrained(path, hosts=HostGroup.single("cpu"))
    too_many = joined(processes, 4)
    refused = [
        described(Engine(whole.model, whole.processor, hosts).prefill, QUESTION),
        described(joined, processes, 3),
        described(lambda: Engine.from_pretrained(odd_path, hosts=too_many)),
        described(hosts.subgroup, [0]),
    ]
    assert not too_many.is_broken  # it was refused before the processes worked together
    assert too_many.gather_json(too_many.tensor_parallel_rank) == [0, 1, 2, 3]
    for speculate in (
        {"strategy": "std"},
        {"strategy": "vanilla", "draft_model": path, "draft_host": True},
    ):
        config = speculative_config(**speculate)
        refused.append(
            described(
                lambda config=config: Engine(None, whole.processor, hosts, None, None, config)
            )
        )
    return refused


def test_what_cannot_be_is_refused(pool, checkpoints, tmp_path):
    path = str(checkpoints("llama"))
    odd_path = str(families.save_checkpoint("qwen3", tmp_path, heads=12, kv_heads=3))
    for whole, odd_group, odd, subgroup, own_kv, draft_host in pool.run(
        4, refused_job, path, odd_path
    ):
        assert whole.startswith(
            "InvalidConfigError: the model is shard 0 of 1, but this process is TP rank "
        )
        assert odd_group.startswith("InvalidConfigError: 4 process(es) cannot form hosts of 3 each")
        assert "3 KV heads can neither be split evenly across 4 processes nor be replicated" in odd
        assert subgroup.startswith("InvalidConfigError: subgroups are not supported")
        assert own_kv.startswith(
            "InvalidConfigError: std, with which the target drafts itself, is not supported"
        )
        assert draft_host.startswith("InvalidConfigError: a draft host is not supported")


def failing_job(processes: HostGroup, path: str, told: Path):
    """One process fails in a layer, while the others of its host wait for it."""
    hosts = joined(processes, 2)
    engine = Engine.from_pretrained(
        path, hosts=hosts, prefill=PrefillConfig(passing_len=6, anchor_len=8)
    )

    def fail(*args) -> None:
        raise ValueError("out of luck")

    if processes.rank == 0:
        engine.model.get_decoder().layers[1].mlp.register_forward_pre_hook(fail)
    failure = described(lambda: engine.generate(QUESTION, context=SENTENCE * 6, max_new_tokens=2))
    (told / str(processes.rank)).touch()
    while len(list(told.iterdir())) < processes.size:
        time.sleep(0.05)  # nobody learns of the failure by this process's end
    return failure


def test_a_failing_process_ends_all(checkpoints, tmp_path):
    told = tmp_path / "told"
    told.mkdir()
    outcomes = run_fresh(Store(tmp_path), 2, failing_job, str(checkpoints("llama")), told)
    assert all(outcome.seconds < HANGING and outcome.exit_status == 0 for outcome in outcomes)
    failure = "ValueError: out of luck"
    passed_on = f"HostError: host 0, member 0 failed in prefill: {failure}"
    assert [outcome.result for outcome in outcomes] == [failure, passed_on]


OTHER_LAYERS = (
    "glm4v",
    "glm4v_moe",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "glm4",
    "qwen3_moe",
    "qwen3_next",
)
NUM_PROMPTS = 30


def many_job(processes: HostGroup, size: int, path: str, clip: str, reads_video: bool) -> list:
    """Answers to prompts of many lengths, about a text or about some frames."""
    hosts = joined(processes, size) if size > 1 else processes
    engine = Engine.from_pretrained(path, hosts=hosts, prefill=PrefillConfig(passing_len=10_000))
    chance = random.Random(7)
    answers = []
    for number in range(NUM_PROMPTS):
        request = {"context": SENTENCE * chance.randint(1, 12)}
        if reads_video and number % 2:
            request = {"video": clip, "num_frames": chance.randint(2, 16)}
        answer = engine.generate(QUESTION, max_new_tokens=chance.randint(1, 5), **request)
        answers.append(answer.token_ids)
    return answers


@pytest.mark.thorough
@pytest.mark.parametrize("family", OTHER_LAYERS)
def test_many_answers_are_those_of_one_process(pool, checkpoints, clip, family):
    path = str(checkpoints(family))
    reads_video = family in families.VIDEO_FAMILIES
    (whole,) = pool.run(1, many_job, 1, path, str(clip), reads_video)
    for share in pool.run(4, many_job, 2, path, str(clip), reads_video):
        assert share == whole
