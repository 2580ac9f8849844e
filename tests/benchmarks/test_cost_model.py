"""The cost model: real prefills' arithmetic, bytes and KV, and what is known of its figures."""

from collections import Counter
from functools import cache
from math import prod

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from apbv import HostGroup, ModelInputs, PrefillConfig, prefill
from apbv.layout import ContextLayout, single_host_layout
from apbv.model.parts import inspect_model
from apbv.prefilling import methods
from apbv.prefilling.encoding.vision import encode_visual

from apbv_tests import families
from apbv_tests.configs import prefill_config
from apbv_tests.prompts import text_batch
from support.cost_model import ATTENTION, Shape, Video, cost, explain, flop_ratio, work_ratio

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def flash_flops(q, k, v, dropout_p=0.0, is_causal=False, **kwargs) -> int:
    """Of torch's fused CPU attention, which its counter does not know; causal attention has no
    pairs to spare."""
    batch, heads, queries, dim = q
    assert not is_causal or queries == k[2]
    return 4 * batch * heads * dim * (queries * (queries + 1) // 2 if is_causal else queries * k[2])


def solver_flops(a, b, upper, left=True, unitriangular=False, **kwargs) -> int:
    """Of a triangular system, counted as the product with a whole matrix, as a GPU computes it."""
    *batch, rows, columns = b
    return 2 * prod(batch) * rows * rows * columns


def flop_counter() -> FlopCounterMode:
    mapping = {FLASH: flash_flops, torch.ops.aten.linalg_solve_triangular: solver_flops}
    return FlopCounterMode(display=False, custom_mapping=mapping)


# The small model of apbv/testing/models.toml.
SMALL = Shape(
    layers=4,
    hidden=512,
    intermediate=1536,
    heads=8,
    kv_heads=2,
    head_dim=64,
    vocab=32000,
    bytes_per_number=4,
)


def planned(
    method: str, num_hosts: int, num_tokens: int, query: int = 32, **options
) -> ContextLayout:
    return methods.METHODS[method].plan(
        num_hosts, num_tokens, 0, num_tokens - query, prefill_config(**options)
    )


# ---- against real prefills ----


def prefill_job(hosts: HostGroup, options: dict, dtype: torch.dtype):
    """Attention wider than the hidden states, and 6 query heads, which 8 hosts cannot share
    evenly."""
    model = families.build_model("qwen3", dtype=dtype, layers=2, heads=6)
    ids = torch.randint(0, 250, (1, 151), generator=torch.Generator().manual_seed(0))
    inputs = ModelInputs.from_processor(
        inspect_model(model), {"input_ids": ids}, hosts, query_start=140
    )
    config = prefill_config(
        kv="sharded", on_single_host=True, **{"anchor_len": 11, "passing_len": 3, **options}
    )
    with flop_counter() as counter:
        state = prefill(model, inputs, hosts=hosts, config=config)
    flops = Counter()
    for name, counts in counter.get_flop_counts().items():
        flops[name.split(".")[-1]] += sum(counts.values())
    flops["attention"] = counter.flop_counts["Global"][FLASH]
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in state.kv.cache.layers)
    return flops, model.config, state.layout, state.timer.summary()["comm_bytes"][hosts.rank], kept


@pytest.mark.parametrize(
    ("num_hosts", "options", "dtype"),
    [
        (2, {"method": "full"}, torch.float32),
        (3, {"method": "zigzag_ring"}, torch.float32),
        (4, {"method": "ulysses"}, torch.float32),
        (3, {"method": "apb"}, torch.float32),
        (3, {}, torch.bfloat16),
        (3, {"method": "star"}, torch.float32),
        (3, {"early_passing_len": 7}, torch.float32),
        (3, {"passing_weights": (2, 1)}, torch.float32),
        (3, {"split_anchor": True}, torch.float32),
        (3, {"split_anchor": True, "method": "apb"}, torch.float32),
        (3, {"split_anchor": True, "method": "star"}, torch.float32),
        (3, {"anchor_len": 139}, torch.float32),  # a context too short for blocks
    ],
    ids=str,
)
def test_arithmetic_bytes_and_kv_of_a_prefill(pool, num_hosts, options, dtype):
    measured = pool.run(num_hosts, prefill_job, options, dtype)
    _, config, layout, *_ = measured[0]
    shape = Shape.from_config(config, bytes_per_number=dtype.itemsize)
    costs = cost(shape, options.get("method", "apbv"), layout)
    for predicted, (torchs, *_, received, kv_bytes) in zip(costs, measured, strict=True):
        flops = predicted.flops
        projections = sum(torchs[f"{letter}_proj"] for letter in "qkvo")
        assert (
            flops["projections"] + flops["mlp"] + flops["query_pass"] == projections + torchs["mlp"]
        )
        assert flops["projections"] * torchs["mlp"] == flops["mlp"] * projections
        assert flops["lm_head"] == torchs["Linear"]
        assert flops["scoring"] == torchs["self_attn"] - projections - torchs["attention"]
        assert sum(flops[part] for part in ATTENTION) == torchs["attention"]
        # The whole may also have rotary frequencies, which some versions of transformers make by a
        # product.
        assert predicted.flops.total() == pytest.approx(torchs["Global"], rel=5e-3)
        assert (sum(predicted.received.values()), predicted.kv_bytes) == (received, kv_bytes)


def hybrid_job(hosts: HostGroup, method: str):
    """Blocks, and the rest of a prompt, in whole chunks of the rule, so that nothing is padded."""
    model = families.build_model("qwen3_next", layers=2)
    inputs = ModelInputs.from_processor(
        inspect_model(model),
        text_batch(512 if method == "zigzag_ring" else 384),
        hosts,
        query_start=320,
    )
    config = PrefillConfig(method=method, kv="sharded", anchor_len=64, passing_len=3)
    with flop_counter() as counter:
        state = prefill(model, inputs, hosts=hosts, config=config)
    # None on a host that computes nothing.
    counts = counter.get_flop_counts().get("Global", Counter())
    rule = counts[torch.ops.aten.bmm] + counts[torch.ops.aten.linalg_solve_triangular]
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in state.kv.cache.layers)
    return rule, model.config, state.layout, state.timer.summary()["comm_bytes"][hosts.rank], kept


@pytest.mark.parametrize("method", ["apbv", "zigzag_ring", "full"])
def test_arithmetic_and_bytes_of_linear_attention(pool, method):
    measured = pool.run(2, hybrid_job, method)
    _, config, layout, *_ = measured[0]
    shape = Shape.from_config(config, bytes_per_number=4)
    # The maps of all blocks, in order.
    folded = 2 * len(layout.blocks) * shape.linear.state * shape.linear.key_dim
    for predicted, (rule, *_, received, kv_bytes) in zip(
        cost(shape, method, layout), measured, strict=True
    ):
        assert rule == predicted.flops["linear"] + predicted.flops["scoring"] + folded
        assert (sum(predicted.received.values()), predicted.kv_bytes) == (received, kv_bytes)


@cache
def clip_batch(family: str) -> dict:
    """A clip of 14 frames of 56 x 56 pixels: 2 x 2 tokens a frame, or pair of frames, which also
    fill a window."""
    from transformers.video_utils import VideoMetadata

    processor = families.build_processor(family)
    content = [{"type": "video"}, {"type": "text", "text": "What happens?"}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    metadata = VideoMetadata(total_num_frames=28, fps=8.0, frames_indices=list(range(0, 28, 2)))
    options = {"video_metadata": [metadata], "do_sample_frames": False, "return_tensors": "pt"}
    return dict(processor(text=[text], videos=[families.synthetic_video(14, 56, 56)], **options))


def video_job(hosts: HostGroup, family: str, options: dict):
    model = families.build_model(family)
    parts = inspect_model(model)
    config = prefill_config(kv="sharded", passing_len=3, anchor_len=20, **options)
    inputs = ModelInputs.from_processor(parts, clip_batch(family), hosts)
    with flop_counter() as counter:
        encode_visual(parts, inputs.visual)
    state = prefill(model, inputs, hosts=hosts, config=config)
    where = parts.is_visual(inputs.input_ids[0]).nonzero().flatten().tolist()
    frames = len(inputs.visual.frames)
    return (
        model.config,
        state.layout,
        where,
        frames,
        counter.get_total_flops(),
        state.timer.summary()["comm_bytes"][hosts.rank],
    )


@pytest.mark.parametrize(
    ("family", "num_hosts", "options"),
    [
        ("qwen2_vl", 2, {}),
        ("qwen2_5_vl", 3, {}),
        ("llava_onevision", 2, {"zigzag": False}),
        ("internvl", 1, {}),
        ("llava_next_video", 1, {}),
        ("glm4v", 1, {}),
        ("video_llama_3", 1, {}),
        ("qwen3_vl_moe", 1, {}),
    ],
)
def test_a_video_is_exchanged_and_encoded_as_predicted(pool, family, num_hosts, options):
    measured = pool.run(num_hosts, video_job, family, options)
    config, layout, where, frames, *_ = measured[0]
    shape = Shape.from_config(config, bytes_per_number=4)
    if num_hosts > 1:  # ``Video`` takes placeholders to be one run of tokens
        assert where == list(range(where[0], where[-1] + 1))
        video = Video(range(where[0], where[-1] + 1), frames)
        costs = cost(shape, "apbv", layout, video=video)
    else:
        costs = cost(
            shape,
            "full",
            single_host_layout(1, len(where) + 10),
            video=Video(range(len(where)), frames),
        )
    for predicted, (*_, vision, received) in zip(costs, measured, strict=True):
        assert predicted.flops["vision"] == pytest.approx(vision, rel=1e-3)
        assert sum(predicted.received.values()) == received
        assert (predicted.received["embeddings"] > 0) == (num_hosts > 1)


# ---- known figures ----


@pytest.mark.parametrize(
    ("num_tokens", "same_cores", "own_cores"), [(32768, 2.45, 4.90), (10**12, 3.37, 6.74)]
)
def test_known_ratios_on_two_hosts(num_tokens, same_cores, own_cores):
    """The first is what two hosts of one thread gain over one of two threads; the last is the
    limit."""
    full = cost(SMALL, "full", single_host_layout(2, num_tokens))
    costs = cost(SMALL, "apbv", planned("apbv", 2, num_tokens))
    assert work_ratio(full, costs) == pytest.approx(same_cores, abs=0.005)
    assert flop_ratio(full, costs) == pytest.approx(own_cores, abs=0.005)


def test_what_the_busiest_host_does_is_listed():
    layout = planned("apbv", 2, 32768)
    costs = cost(SMALL, "apbv", layout)
    full = cost(SMALL, "full", single_host_layout(1, 32768))
    text = explain("apbv", layout, costs, full)
    assert "apbv, 2 hosts, 32768 tokens: anchor 512, 4 blocks, passing 256, query 32" in text
    assert "busiest host 4.90, all hosts together 2.45" in text and "passing 2.10 MB" in text


def test_a_method_without_sparse_attention_has_no_density():
    with pytest.raises(ValueError, match="does not compute"):
        cost(SMALL, "ulysses", planned("ulysses", 2, 500), density=0.5)
