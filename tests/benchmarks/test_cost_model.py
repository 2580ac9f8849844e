"""The cost model against real prefills: arithmetic that torch dispatches, bytes that arrive, KV that is kept."""

from collections import Counter
from contextlib import contextmanager
from functools import cache

import pytest
import torch
import transformers as tf
from flops import FLASH, flop_counter

import apbv.model.attention
import apbv.prefilling.methods.base
from apbv import HostGroup, ModelInputs, PrefillConfig, prefill
from apbv.layout import single_host_layout
from apbv.model.parts import inspect_model
from apbv.prefilling.encode import encode_visual

import families
from support.cost_model.costs import ATTENTION, HostCost, Shape, Video, cost

# ---- against real prefills ----

NUM_TOKENS, QUERY_START = 151, 140
CASES = {
    "full": {"method": "full"},
    "zigzag ring": {"method": "zigzag_ring"},
    "ulysses": {"method": "ulysses"},
    "star": {"method": "star"},
    "apb": {"method": "apb"},
    "apbv": {},
    "no anchor": {"anchor_len": 0},
    "nothing passed": {"passing_len": 0},
    "all passed": {"passing_len": 1000},
    "separate query": {"fused_query": False},
    "no zigzag": {"zigzag": False},
    "too short": {"anchor_len": QUERY_START - 1},
}
RUNS = [(num_hosts, case, torch.float32) for num_hosts in (1, 2, 3) for case in CASES]
RUNS += [(8, case, torch.float32) for case in ("full", "zigzag ring", "ulysses", "star", "apb", "apbv")]
RUNS += [(3, case, dtype) for case in ("apbv", "apb", "ulysses") for dtype in (torch.bfloat16, torch.float64)]


@cache
def build_llama(dtype: torch.dtype):
    """Attention wider than the hidden states, and 6 query heads, which 8 hosts cannot share evenly."""
    config = tf.LlamaConfig(
        vocab_size=260,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
    )
    return tf.LlamaForCausalLM(config).to(dtype).eval()


@contextmanager
def recorded(module, name: str, flops):
    """The FLOPs of every call of an operator by a module."""
    calls, original = [], getattr(module, name)

    def record(*args, **kwargs):
        calls.append(flops(*args, **kwargs))
        return original(*args, **kwargs)

    setattr(module, name, record)
    try:
        yield calls
    finally:
        setattr(module, name, original)


def flops_of_segments(q, segments, scale, causal_last, rows_alone=0, out=None, backend="auto") -> dict:
    """Of all but the last segment, and of the last one: rows before the queries, and the queries themselves."""
    _, heads, rows, dim = q.shape
    *earlier, last = (k.shape[2] for k, _ in segments)
    before = [(rows - rows_alone) * length for length in earlier]
    pairs = rows * last - (rows * (rows - 1) // 2 if causal_last else 0)
    factor = 4 * heads * dim
    call = {"before": [factor * count for count in before], "to_self": factor * pairs}
    return with_rows_alone(call | {"rows": rows, "factor": factor}, rows_alone)


def with_rows_alone(call: dict, rows_alone: int) -> dict:
    """The same call, of whose last segment the first rows are told apart, with the others' view of them."""
    alone = call["factor"] * rows_alone * (rows_alone + 1) // 2
    to_alone = call["factor"] * rows_alone * (call["rows"] - rows_alone)
    return call | {"alone": alone, "to_alone": to_alone, "to_self": call["to_self"] - alone - to_alone}


def flops_of_new_tokens(q, k, v, scale, visible=None, num_keys=None, backend="auto") -> int:
    _, heads, rows, dim = q.shape
    return 4 * heads * dim * (rows * k.shape[2] - (rows * (rows - 1) // 2 if visible is None else 0))


@contextmanager
def counted_exchanges(hosts: HostGroup):
    """How often a host starts each kind of data exchange."""
    counts, names = Counter(), ("all_gather", "all_to_all", "broadcast")

    def counting(name):
        original = getattr(hosts, name)

        def count(*args):
            counts[name] += 1
            return original(*args)

        return count

    for name in names:
        setattr(hosts, name, counting(name))
    try:
        yield counts
    finally:
        for name in names:
            delattr(hosts, name)


def prefill_job(hosts: HostGroup, options: dict, dtype: torch.dtype) -> dict:
    model = build_llama(dtype)
    ids = torch.randint(0, 250, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(0))
    inputs = ModelInputs.from_processor(inspect_model(model), {"input_ids": ids}, hosts, query_start=QUERY_START)
    config = PrefillConfig(kv="sharded", on_single_host=True, **{"anchor_len": 11, "passing_len": 3, **options})
    with (
        recorded(apbv.prefilling.methods.base, "segmented_attention", flops_of_segments) as in_context_pass,
        recorded(apbv.model.attention, "verify_attention", flops_of_new_tokens) as in_query_pass,
        counted_exchanges(hosts) as exchanges,
        flop_counter() as counter,
    ):
        state = prefill(model, inputs, hosts=hosts, config=config)
    by_module = Counter()
    for name, counts in counter.get_flop_counts().items():
        by_module[name.split(".")[-1]] += sum(counts.values())
    projections = sum(by_module[f"{letter}_proj"] for letter in "qkvo")
    attention = counter.flop_counts["Global"][FLASH]
    return {
        "method": state.method,
        "layout": state.layout,
        "projections": projections,
        "mlp": by_module["mlp"],
        "lm_head": by_module["Linear"],
        "attention": attention,
        "scoring": by_module["self_attn"] - projections - attention,  # what is left of a layer's products
        "total": counter.get_total_flops(),
        "in_context_pass": in_context_pass,
        "in_query_pass": in_query_pass,
        "exchanges": exchanges,
        "received": state.timer.comm_bytes,
        "kv_bytes": state.shards.nbytes(),
    }


@pytest.fixture(scope="module", params=RUNS, ids=lambda run: f"{run[0]}-{run[1]}-{str(run[2])[6:]}")
def hosts_of_a_run(request, pool) -> list[tuple[HostCost, dict]]:
    """What the model says of every host, and what the host did."""
    num_hosts, case, dtype = request.param
    options = CASES[case]
    measured = pool.run(num_hosts, prefill_job, options, dtype)
    shape = Shape.from_config(build_llama(dtype).config, bytes_per_number=dtype.itemsize)
    costs = cost(
        shape,
        options.get("method", "apbv"),
        measured[0]["layout"],
        fused_query=options.get("fused_query", True),
    )
    return list(zip(costs, measured, strict=True))


def test_flops_are_those_that_torch_counts(hosts_of_a_run):
    for predicted, measured in hosts_of_a_run:
        flops = predicted.flops
        assert (
            flops["projections"] + flops["mlp"] + flops["query_pass"] == measured["projections"] + measured["mlp"]
        )
        assert flops["projections"] * measured["mlp"] == flops["mlp"] * measured["projections"]
        assert flops["lm_head"] == measured["lm_head"]
        assert flops["scoring"] == measured["scoring"]
        assert sum(flops[part] for part in ATTENTION) == measured["attention"]
        # The whole may also have rotary frequencies, which some versions of transformers make by a product.
        assert predicted.total_flops == pytest.approx(measured["total"], rel=5e-3)


def test_attention_falls_into_the_parts_that_the_method_computes(hosts_of_a_run):
    for host, (predicted, measured) in enumerate(hosts_of_a_run):
        if measured["method"] not in ("apbv", "apb", "star"):
            continue
        layout, found, calls = measured["layout"], Counter(), measured["in_context_pass"]
        blocks, layers = layout.virtual_hosts(host), build_llama(torch.float32).config.num_hidden_layers
        # While the first block's passing block travels, the block attends to itself and to the anchor; apb waits.
        has_triangle = blocks[0] > 0 and layout.max_passed > 0 and measured["method"] == "apbv"
        per_layer = len(calls) // layers
        num_of_query = per_layer - len(blocks) - has_triangle
        for first in range(0, len(calls), per_layer):
            # A layer's calls: the query's, maybe to single blocks, then the blocks', the first with the anchor.
            of_layer = calls[first : first + per_layer]
            found["query"] += sum(sum(call["before"]) + call["to_self"] for call in of_layer[:num_of_query])
            of_blocks = of_layer[num_of_query:]
            if has_triangle:
                triangle, passed, *of_blocks = of_blocks
                found["block_to_passing"] += sum(passed["before"]) + passed["to_self"]
                of_blocks = [with_rows_alone(triangle, len(layout.anchor)), *of_blocks]
            for place, call in enumerate(of_blocks):
                to_anchor = [call["to_alone"]] if place == 0 else call["before"][:1]
                to_passing = call["before"] if place == 0 else call["before"][1:]
                found.update(anchor=call["alone"], block_to_anchor=sum(to_anchor))
                found.update(block_to_passing=sum(to_passing), block_to_self=call["to_self"])
        found["query"] += sum(measured["in_query_pass"])
        assert {part: predicted.flops[part] for part in ATTENTION} == {part: found[part] for part in ATTENTION}


def test_bytes_received_are_the_timers(hosts_of_a_run):
    for predicted, measured in hosts_of_a_run:
        assert sum(predicted.received.values()) == measured["received"]


def test_exchanges_are_those_that_the_hosts_start(hosts_of_a_run):
    for predicted, measured in hosts_of_a_run if len(hosts_of_a_run) > 1 else ():
        count, started = predicted.exchanges, measured["exchanges"]
        assert count["passing"] + count["query_merge"] == started["all_gather"]
        assert count["ring"] + count["all_to_all"] == started["all_to_all"]
        assert count["logits"] == started["broadcast"]


def test_kv_bytes_are_the_shards(hosts_of_a_run):
    for predicted, measured in hosts_of_a_run:
        assert predicted.kv_bytes == measured["kv_bytes"]


# ---- video ----


@cache
def video_batch(family: str) -> dict:
    """A clip of 14 frames of 56 x 56 pixels: 2 x 2 tokens a frame, or pair of frames, which also fill a window."""
    from transformers.video_utils import VideoMetadata

    processor = families.build_processor(family)
    content = [{"type": "video"}, {"type": "text", "text": "What happens?"}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    metadata = VideoMetadata(total_num_frames=28, fps=8.0, frames_indices=list(range(0, 28, 2)))
    clip = families.synthetic_video(14, 56, 56)
    options = {"video_metadata": [metadata], "do_sample_frames": False, "return_tensors": "pt"}
    return dict(processor(text=[text], videos=[clip], **options))


def video_job(hosts: HostGroup, family: str, options: dict) -> dict:
    model = families.build_model(family)
    parts = inspect_model(model)
    config = PrefillConfig(kv="sharded", passing_len=3, anchor_len=20, **options)
    inputs = ModelInputs.from_processor(parts, video_batch(family), hosts, config.frame_parallel)
    with flop_counter() as counter:
        encode_visual(parts, inputs.visual)
    state = prefill(model, inputs, hosts=hosts, config=config)
    where = parts.is_visual(inputs.input_ids[0]).nonzero().flatten()
    return {
        "tokens": range(int(where[0]), int(where[-1]) + 1),
        "num_placeholders": len(where),
        "frames": inputs.num_visual_tokens // inputs.visual.rows_per_frame,
        "config": model.config,
        "layout": state.layout,
        "vision": counter.get_total_flops(),
        "received": state.timer.comm_bytes,
    }


@pytest.mark.parametrize("options", [{}, {"zigzag": False}, {"frame_parallel": False}], ids=str)
@pytest.mark.parametrize("num_hosts", [2, 3])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "llava_onevision"])
def test_a_video_is_exchanged_and_encoded_as_predicted(pool, family, num_hosts, options):
    """Families whose placeholders are one run of tokens, as ``Video`` takes them to be."""
    frame_parallel = options.get("frame_parallel", True)
    measured = pool.run(num_hosts, video_job, family, options)
    assert len(measured[0]["tokens"]) == measured[0]["num_placeholders"]
    video = Video(measured[0]["tokens"], measured[0]["frames"], frame_parallel)
    shape = Shape.from_config(measured[0]["config"], bytes_per_number=4)
    costs = cost(shape, "apbv", measured[0]["layout"], video=video)
    for predicted, host in zip(costs, measured, strict=True):
        assert sum(predicted.received.values()) == host["received"]
        assert (predicted.received["embeddings"] > 0) == frame_parallel
        assert predicted.flops["vision"] == pytest.approx(host["vision"], rel=1e-3)


REAL_CONFIGS = {
    "llama": tf.LlamaConfig,
    "qwen3": tf.Qwen3Config,
    "qwen2_vl": tf.Qwen2VLConfig,
    "qwen2_5_vl": tf.Qwen2_5_VLConfig,
    "qwen3_vl": tf.Qwen3VLConfig,
    "internvl": tf.InternVLConfig,
    "llava_onevision": tf.LlavaOnevisionConfig,
}


@pytest.mark.parametrize("family", REAL_CONFIGS)
def test_weights_and_kv_of_real_sizes(family):
    """Real configurations, on the meta device: what a checkpoint would hold, biases, norms and projector apart."""
    config = REAL_CONFIGS[family]()
    auto = tf.AutoModelForCausalLM if family in families.TEXT_FAMILIES else tf.AutoModelForImageTextToText
    with torch.device("meta"):
        model = auto.from_config(config)
    shape = Shape.from_config(config)
    weights = sum(weight.numel() for weight in model.parameters())
    projector = sum(
        weight.numel() for name, weight in model.named_parameters() if "merger" in name or "projector" in name
    )
    assert shape.weights == pytest.approx(weights - projector, rel=2e-3)
    keys = model.get_decoder().layers[0].self_attn.k_proj.weight.shape[0]
    assert shape.kv_bytes == 2 * 2 * keys * config.get_text_config().num_hidden_layers
    everything = cost(shape, "full", single_host_layout(2, 10))
    assert [host.weight_bytes for host in everything] == [2 * shape.weights] * 2


@pytest.mark.parametrize("family", families.VIDEO_FAMILIES)
def test_vision_flops_in_every_family(family):
    """One process encodes the clip; the frames are of one window, so that Qwen2.5-VL's windows are frames."""
    measured = video_job(HostGroup.single("cpu"), family, {})
    frames, tokens = measured["frames"], measured["num_placeholders"]
    video = Video(range(tokens), frames)
    shape = Shape.from_config(measured["config"])
    (host,) = cost(shape, "full", single_host_layout(1, tokens + 10), video=video)
    assert host.flops["vision"] == pytest.approx(measured["vision"], rel=1e-3)


def test_configs_that_the_model_does_not_know():
    with pytest.raises(ValueError, match="experts"):
        Shape.from_config(tf.MixtralConfig())
    with pytest.raises(ValueError, match="vision tower of llava"):
        Shape.from_config(tf.LlavaConfig())
