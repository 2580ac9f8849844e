"""The cost model against real prefills: arithmetic that torch dispatches, bytes that arrive, KV that is kept."""

import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers as tf
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import apbv.model.attention
import apbv.prefilling.methods.base
from apbv import HostGroup, ModelInputs, PrefillConfig, prefill
from apbv.layout import ContextLayout, single_host_layout
from apbv.model.parts import inspect_model
from apbv.prefilling.encode import encode_visual
from apbv.prefilling.methods import METHODS

import families

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from cost_model import (
    ATTENTION,
    PARTS,
    HostCost,
    Machine,
    Shape,
    Video,
    cost,
    explain,
    flop_ratio,
    paper_attention_flops,
    predict,
    share_beyond_paper,
    work_ratio,
)

# ---- against real prefills ----

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
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


def flash_flops(q, k, v, dropout_p=0.0, is_causal=False, **kwargs) -> int:
    """Of torch's fused CPU attention, which its counter does not know; causal attention has no pairs to spare."""
    batch, heads, queries, dim = q
    assert not is_causal or queries == k[2]
    return 4 * batch * heads * dim * (queries * (queries + 1) // 2 if is_causal else queries * k[2])


def flop_counter() -> FlopCounterMode:
    return FlopCounterMode(display=False, custom_mapping={FLASH: flash_flops})


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


def flops_of_segments(q, segments, scale, causal_last, rows_alone=0, backend="auto") -> dict[str, int]:
    """Of all but the last segment, and of the last one: rows before the queries, and the queries themselves."""
    _, heads, rows, dim = q.shape
    *earlier, last = (k.shape[2] for k, _ in segments)
    before = [(rows - rows_alone) * length for length in earlier]
    pairs = {"alone": rows_alone * (rows_alone + 1) // 2, "to_alone": rows_alone * (rows - rows_alone)}
    pairs["to_self"] = rows * last - (rows * (rows - 1) // 2 if causal_last else 0) - sum(pairs.values())
    factor = 4 * heads * dim
    return {"before": [factor * count for count in before]} | {part: factor * n for part, n in pairs.items()}


def flops_of_new_tokens(q, k, v, scale, visible=None, backend="auto") -> int:
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
    for predicted, measured in hosts_of_a_run:
        if measured["method"] not in ("apbv", "apb", "star"):
            continue
        found, calls = Counter(), measured["in_context_pass"]
        blocks, layers = measured["layout"].virtual_hosts(0), build_llama(torch.float32).config.num_hidden_layers
        per_layer = len(calls) // layers
        for first in range(0, len(calls), per_layer):
            # A layer's calls: the query's, maybe to single blocks, then one per block, the first with the anchor.
            *of_query, of_anchor = calls[first : first + per_layer - len(blocks) + 1]
            of_blocks = [of_anchor, *calls[first + per_layer - len(blocks) + 1 : first + per_layer]]
            found["query"] += sum(sum(call["before"]) + call["to_self"] for call in of_query)
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
        "frames": inputs.num_visual_tokens // inputs.visual.rows_per_unit,
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


# ---- known figures ----


def planned(method: str, num_hosts: int, num_tokens: int, query: int = 32, **options) -> ContextLayout:
    return METHODS[method].plan(num_hosts, num_tokens, 0, num_tokens - query, PrefillConfig(**options))


# The model of benchmarks/prefill.py.
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


@pytest.mark.parametrize(
    ("num_tokens", "same_cores", "own_cores"), [(32768, 2.45, 4.90), (131072, 3.05, 6.10), (10**12, 3.37, 6.74)]
)
def test_known_ratios_on_two_hosts(num_tokens, same_cores, own_cores):
    """The first is what two hosts of one thread gain over one of two threads; the last is the limit."""
    full = cost(SMALL, "full", single_host_layout(2, num_tokens))
    costs = cost(SMALL, "apbv", planned("apbv", 2, num_tokens))
    assert work_ratio(full, costs) == pytest.approx(same_cores, abs=0.005)
    assert flop_ratio(full, costs) == pytest.approx(own_cores, abs=0.005)
    # On two hosts, both of which have as much to do but for the query's own square.
    assert flop_ratio(full, costs) == pytest.approx(2 * work_ratio(full, costs), rel=1e-3)


def host_with(**flops: int) -> HostCost:
    return HostCost(
        flops=dict.fromkeys(PARTS, 0) | flops, memory={}, received={}, exchanges={}, kv_bytes=0, weight_bytes=0
    )


def test_ratios_of_hosts_that_are_not_alike():
    costs, others = [host_with(mlp=8), host_with(mlp=4, query=20)], [host_with(mlp=2), host_with(mlp=3, anchor=3)]
    assert flop_ratio(costs, others) == 24 / 6
    assert work_ratio(costs, others) == 32 / 8


def test_share_beyond_paper_counts_the_terms_that_it_lacks():
    attention = dict(anchor=1, block_to_anchor=2, block_to_passing=4, block_to_self=8, query=16, scoring=32)
    assert share_beyond_paper(host_with(mlp=100, lm_head=100, **attention)) == (2 + 16 + 32) / 63
    (host, _) = cost(SMALL, "apbv", planned("apbv", 2, 32768))
    assert share_beyond_paper(host) == pytest.approx(0.111, abs=5e-4)


@pytest.mark.parametrize("num_hosts", [1, 2, 8, 64])
def test_paper_equation_is_what_it_says_it_counts(num_hosts):
    """Anchor, passing blocks and blocks themselves, as half squares; per host, all hosts alike."""
    layout, width = planned("apbv", num_hosts, 2**20), SMALL.heads * SMALL.head_dim
    for host in cost(SMALL, "apbv", layout):
        counted = sum(host.flops[part] for part in ("anchor", "block_to_passing", "block_to_self"))
        in_paper = SMALL.layers * paper_attention_flops(layout, width)
        assert in_paper == pytest.approx(counted, rel=1e-3)
        assert 1 - in_paper / host.attention_flops == pytest.approx(share_beyond_paper(host), abs=1e-3)


def test_paper_equation_by_hand():
    layout = ContextLayout(2, range(10), tuple(range(a, a + 20) for a in (10, 30, 50, 70)), range(90, 95), 3)
    assert paper_attention_flops(layout, 7) == 2 * 10 * 10 * 7 + 4 * 20 * 20 * 7 + 4 * 3 * 3 * 20 * 7
    assert paper_attention_flops(replace(layout, passing_len=99), 7) == 7 * (200 + 1600 + 4 * 3 * 20 * 20)
    with pytest.raises(ValueError, match="two blocks"):
        paper_attention_flops(planned("apb", 2, 1000), 7)


# ---- properties ----

prompts = {"num_hosts": st.integers(1, 9), "num_tokens": st.integers(2, 3000), "heads": st.sampled_from([1, 4, 6])}


@given(method=st.sampled_from(["full", "zigzag_ring", "ulysses"]), **prompts)
def test_exact_methods_compute_every_pair_once(method, num_hosts, num_tokens, heads):
    shape = replace(SMALL, heads=heads, kv_heads=1 if heads == 1 else 2)
    costs = cost(shape, method, planned(method, num_hosts, num_tokens, query=1))
    pairs = num_tokens * (num_tokens + 1) // 2
    assert sum(host.attention_flops for host in costs) == 4 * shape.layers * heads * shape.head_dim * pairs
    assert sum(host.kv_bytes for host in costs) == shape.kv_bytes * num_tokens
    assert sum(host.flops["mlp"] for host in costs) == 2 * 3 * 512 * 1536 * shape.layers * num_tokens


@given(zigzag=st.booleans(), anchor_len=st.sampled_from([None, 0, 100]), **prompts)
def test_uncompressed_apbv_computes_every_pair_once_but_the_anchors(zigzag, anchor_len, heads, **sizes):
    """With all KV passed on it is full attention, in which every host repeats the anchor's."""
    if anchor_len == 100 and sizes["num_tokens"] <= 101:
        anchor_len = None
    layout = planned("apbv", **sizes, query=1, anchor_len=anchor_len, passing_len=9999, zigzag=zigzag)
    costs = cost(replace(SMALL, heads=heads, kv_heads=1), "apbv", layout)
    n, l_a = layout.num_tokens, len(layout.anchor)
    pairs = n * (n + 1) // 2 + (layout.num_hosts - 1) * l_a * (l_a + 1) // 2
    assert sum(host.attention_flops for host in costs) == 4 * SMALL.layers * heads * SMALL.head_dim * pairs


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="unknown method 'ring'"):
        cost(SMALL, "ring", planned("apbv", 2, 1000))
    for method in METHODS:
        for other in METHODS:
            fits = method == other or {method, other} in ({"apb", "apbv"}, {"apb", "star"})
            fits = fits or (method, other) == ("apbv", "star") or other == "full"
            if not fits:
                with pytest.raises(ValueError, match="not a layout of"):
                    cost(SMALL, method, planned(other, 2, 1000))
    with pytest.raises(ValueError, match="no vision tower"):
        cost(SMALL, "full", single_host_layout(1, 100), video=Video(range(10, 50), 4))


# ---- time ----

# Rates at which one thing alone takes time.
IDEAL = Machine(matmul_flops=1e30, attention_flops=1e30, memory_bytes=1e30, link_bytes=1e30)


def test_a_part_takes_its_arithmetic_or_its_memory_traffic():
    costs = cost(SMALL, "apbv", planned("apbv", 2, 32768), fused_query=False)
    attention = max(sum(host.flops[part] for part in ATTENTION) for host in costs)
    assert predict(costs, replace(IDEAL, attention_flops=1e9)).compute_seconds == pytest.approx(attention / 1e9)
    matmul = max(sum(host.flops[part] for part in PARTS if part not in ATTENTION) for host in costs)
    assert predict(costs, replace(IDEAL, matmul_flops=1e9)).compute_seconds == pytest.approx(matmul / 1e9)
    # 32 rows are too few to keep arithmetic busy: the query's pass reads all layers' weights once more (B.1).
    gpu = replace(IDEAL, matmul_flops=1e15, memory_bytes=4e12)
    layer = 2 * 512 * (8 + 2) * 64 + 3 * 512 * 1536
    seconds = predict(costs, gpu).parts[0]["query_pass"]
    assert seconds == pytest.approx(4 * layer * 4 / 4e12) and seconds > costs[0].flops["query_pass"] / 1e15
    fused = cost(SMALL, "apbv", planned("apbv", 2, 32768))
    assert predict(fused, gpu).parts[0]["query_pass"] == 0


def test_scores_and_the_query_are_bound_by_memory():
    layout = planned("apbv", 2, 32768)
    costs = cost(SMALL, "apbv", layout)
    times = predict(costs, replace(IDEAL, memory_bytes=1e9))
    ranked = [8 * 32 * (len(layout.blocks[0])), 8 * 32 * (len(layout.blocks[1]) + len(layout.blocks[2]))]
    assert times.parts[1]["scoring"] == pytest.approx(4 * ranked[1] * 16 / 1e9)
    assert times.parts[0]["scoring"] == pytest.approx(4 * ranked[0] * 16 / 1e9)  # the last block ranks nothing
    assert times.parts[0]["query"] == pytest.approx(costs[0].kv_bytes / 1e9)


@pytest.mark.parametrize("method", ["zigzag_ring", "apbv"])
def test_links_within_and_between_groups(method):
    """Four hosts in groups of two: a ring crosses at hosts 0 and 2 only, a gather brings two of three parts."""
    costs = cost(SMALL, method, planned(method, 4, 32768))
    kinds = {"zigzag_ring": ["ring"], "apbv": ["passing", "query_merge"]}[method]
    near = replace(IDEAL, link_bytes=1e9, link_latency=1e-3)
    far = replace(near, group_size=2, group_link_bytes=1e8, group_link_latency=5e-3)
    for host in range(4):
        count = sum(costs[host].received[kind] for kind in kinds)
        exchanges = sum(costs[host].exchanges[kind] for kind in kinds)

        def seconds(machine, host=host):
            return sum(predict(costs, machine).links[host][kind] for kind in kinds)

        assert seconds(near) == pytest.approx(count / 1e9 + exchanges * 1e-3)
        share = 2 / 3 if method == "apbv" else (1, 0, 1, 0)[host]
        expected = count * ((1 - share) / 1e9 + share / 1e8) + exchanges * (5e-3 if share else 1e-3)
        assert seconds(far) == pytest.approx(expected)
    assert predict(costs, replace(near, group_size=2)) == predict(costs, near)


@pytest.mark.parametrize("link_bytes", [1e6, 1e12])
@pytest.mark.parametrize("method", METHODS)
def test_overlap_hides_at_most_what_it_can(method, link_bytes):
    machine = Machine(60e9, 40e9, 10e9, link_bytes)
    times = predict(cost(SMALL, method, planned(method, 3, 8192)), machine)
    computing = [sum(parts.values()) for parts in times.parts]
    receiving = [sum(links.values()) for links in times.links]
    assert times.slowest == computing.index(max(computing))
    assert (times.compute_seconds, times.communication_seconds) == (max(computing), max(receiving))
    assert times.total_seconds == max(a + b for a, b in zip(computing, receiving, strict=True))
    assert max(*computing, *receiving) <= times.floor_seconds <= times.total_seconds
    assert times.exposed_seconds == times.floor_seconds - times.compute_seconds


def test_exchanges_before_and_after_the_decoder_are_never_hidden():
    shape = Shape.from_config(tf.Qwen2VLConfig())
    layout = planned("zigzag_ring", 2, 8192)
    costs = cost(shape, "zigzag_ring", layout, video=Video(range(20, 8000), 95))
    machine = Machine(1e15, 1e15, 1e12, 1e9)
    times = predict(costs, machine)
    links, parts = times.links[1], times.parts[1]
    assert links["embeddings"] > 0 and links["ring"] > 0 and parts["vision"] > 0
    decoder = max(sum(parts.values()) - parts["vision"], links["ring"])
    assert times.floor_seconds == pytest.approx(parts["vision"] + links["embeddings"] + links["logits"] + decoder)


def test_explanation_names_what_it_found():
    layout = planned("apbv", 2, 32768)
    usual = Machine(60e9, 40e9, 10e9, 1e9)
    text = explain(SMALL, "apbv", layout, usual)
    assert "apbv, 2 hosts, 32768 tokens: anchor 512, 4 blocks, passing 256, query 32" in text
    assert "busiest host 4.90, all hosts together 2.45" in text
    times = predict(cost(SMALL, "apbv", layout), usual)
    share = times.parts[1]["block_to_self"] / times.compute_seconds
    (row,) = (line for line in text.splitlines() if "block_to_self" in line)
    assert f"{share:.1%}" in row and row.endswith("attention")
    assert f"{times.floor_seconds * 1e3:.2f} ms with perfect overlap" in text
    assert "passing 2.10 MB" in text and "KV: 67.2, 67.0 MB" in text
    for machine, bound in (
        (usual, "attention"),
        (replace(usual, matmul_flops=1e9), "matrix products"),
        (replace(usual, memory_bytes=1e6), "memory"),
        (replace(usual, link_bytes=1e3), "links"),
    ):
        assert explain(SMALL, "apbv", layout, machine).endswith(f"bound by {bound}")
