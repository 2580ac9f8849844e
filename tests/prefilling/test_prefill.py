"""Sequence-parallel prefill against plain one-process attention, by real gloo processes."""

import pytest
import torch

from apbv import HostGroup, PrefillConfig, prefill
from apbv.hosts.simulated import share_weights, simulate

import families
from families import TEXT_FAMILIES
from oracle import as_double, oracle_of, run_oracle
from pairs import each_choice
from prompts import (
    ALL_FAMILIES,
    EXAMPLES,
    UNCOMPRESSED,
    as_inputs,
    batch_of,
    build,
    hugging_face,
    hugging_face_on,
    relative_error,
    reset_rope,
    text_batch,
    video_batch,
)

TEXT_CONTEXT = 90  # tokens before the question of a text prompt


def prompts(family: str, num_hosts: int, method: str) -> list[tuple]:
    """(tokens of a text, its first query token, anchor length), for contexts of several lengths modulo 2H.

    Every remainder for one text and one video family on up to four hosts: what is left over when a context is cut
    is a matter of integers, in which families do not differ. Otherwise two that are H apart: with one of them,
    blocks before the last differ in length.
    """
    every = family in EXAMPLES and num_hosts <= 3
    extras = range(2 * num_hosts) if every else (0, num_hosts)
    if family in TEXT_FAMILIES:
        return [(TEXT_CONTEXT + 12 + extra, TEXT_CONTEXT + extra, None) for extra in extras]
    # A video prompt has one length; the anchor's shifts the remainder of its context instead.
    return [(None, None, 20 + extra) for extra in extras] if method == "apbv" else [(None, None, None)]


# ---- nothing compressed: equal to Hugging Face ----


def uncompressed_job(hosts: HostGroup, family: str, dtype: torch.dtype, method: str) -> list[tuple]:
    """Logits and, on host 0, the gathered KV, of every prompt."""
    model, results = build(family, dtype), []
    for num_tokens, query_start, anchor_len in prompts(family, hosts.size, method):
        config = PrefillConfig(method=method, passing_len=UNCOMPRESSED, anchor_len=anchor_len, on_single_host=True)
        inputs = as_inputs(family, batch_of(family, num_tokens), query_start, hosts, dtype)
        state = prefill(model, inputs, hosts=hosts, config=config)
        gathered = state.to_dynamic_cache()
        assert state.layout.is_split and state.method == method
        kv = None if gathered is None else [(layer.keys, layer.values) for layer in gathered.layers]
        results.append((state.logits, kv))
    return results


EXACT = [("apbv", family, (2, 3)[row % 2]) for row, family in enumerate(ALL_FAMILIES)]
EXACT += [("apbv", EXAMPLES[0], 1), ("apbv", EXAMPLES[1], 8)]
EXACT += [("zigzag_ring", EXAMPLES[0], 3), ("zigzag_ring", EXAMPLES[1], 2)]
EXACT += [("ulysses", EXAMPLES[0], 4), ("ulysses", EXAMPLES[1], 3)]


@pytest.mark.parametrize(("method", "family", "num_hosts"), EXACT)
def test_what_is_exact_equals_hugging_face(on_hosts, family, num_hosts, method):
    """With APB-V where passing_len >= longest block, for every H and remainder."""
    first, *others = on_hosts(num_hosts, uncompressed_job, family, torch.float32, method)
    asked = prompts(family, num_hosts, method)
    for place, ((num_tokens, *_), (logits, kv)) in enumerate(zip(asked, first, strict=True)):
        expected, cache = hugging_face_on(family, torch.float32, num_tokens)
        assert relative_error(logits, expected) < 1e-4
        for (keys, values), layer in zip(kv, cache.layers, strict=True):
            assert keys.shape == layer.keys.shape
            assert relative_error(keys, layer.keys) < 1e-4
            assert relative_error(values, layer.values) < 1e-4
        for results in others:
            # Computed by every host, amid rows of which others have another number.
            assert relative_error(results[place][0], logits) < 1e-4 and results[place][1] is None


def small_job(hosts: HostGroup, model, batch: dict, method: str):
    before = model.config._attn_implementation
    state = prefill(share_weights(model), batch, hosts=hosts, config=PrefillConfig(method=method))
    assert model.config._attn_implementation == before
    return state.method, state.logits


@pytest.mark.filterwarnings("ignore:a prompt of")
@pytest.mark.parametrize(
    ("family", "num_hosts", "method", "used"),
    [
        # 8 query heads in groups of 2, over three hosts: the second has heads 3, 4 and 5.
        ("llama", 3, "ulysses", "ulysses"),
        ("llama", 8, "apbv", "full"),  # there are too few tokens to split
        ("qwen2_vl", 2, "apbv", "full"),
        ("internvl", 2, "apbv", "apbv"),
    ],
)
def test_small_prompts_equal_hugging_face(family, num_hosts, method, used):
    """Of few tokens, and of a single frame; and the model is left as it was."""
    model = families.build_model(family, **({"heads": 8, "kv_heads": 4} if family == "llama" else {}))
    batch = text_batch(40 if num_hosts < 8 else 9) if family == "llama" else video_batch(family, frames=1)
    with torch.no_grad():
        expected = model(**batch).logits[:, -1]
    for found, logits in simulate(num_hosts, small_job, model, batch, method):
        assert found == used and relative_error(logits, expected) < 1e-4


# ---- any passing length: equal to the dense definition ----

VARIANTS = {
    "default": {},
    "anchor 0": {"anchor_len": 0},
    "passing 0": {"passing_len": 0},
    "passing 1": {"passing_len": 1},
    "softmax": {"importance": "softmax"},
    "dot": {"importance": "dot"},
    "received": {"importance": "received"},
    "no overlap": {"overlap": False},
    "separate query": {"fused_query": False},
    "no zigzag": {"zigzag": False},
    "APB": {"method": "apb"},
    "Star Attention": {"method": "star"},
}


def compressed_job(hosts: HostGroup, family: str, batch: dict, query_start, settings: dict):
    model = build(family, torch.float64)
    inputs = as_inputs(family, batch, query_start, hosts, torch.float64)
    state = prefill(model, inputs, hosts=hosts, config=PrefillConfig(on_single_host=True, **settings))
    gathered = state.to_dynamic_cache()
    kv = None if gathered is None else [(layer.keys, layer.values) for layer in gathered.layers]
    return state.logits, kv, state.layout


# Choosing other keys within a block is the same work however many hosts there are.
CASES = [(variant, 2 + row % 2) for row, variant in enumerate(VARIANTS)]
CASES += [("default", 1), ("default", 8), ("Star Attention", 4)]


@pytest.mark.parametrize(("variant", "num_hosts"), CASES)
def test_compressed_equals_dense_oracle(on_hosts, variant, num_hosts):
    """On a text model in fp64, where no rounding can change a selection."""
    settings = {"passing_len": 3, "anchor_len": 11, **VARIANTS[variant]}
    for length in (131, 132 + num_hosts)[variant != "default" :]:
        check_against_oracle(on_hosts, num_hosts, "qwen2", text_batch(length), length - 10, settings)


@each_choice(num_hosts=[2, 3], family=["qwen2_5_vl", "qwen3_vl", "internvl"])
def test_compressed_equals_dense_oracle_of_videos(on_hosts, family, num_hosts):
    settings = {"passing_len": 4, "anchor_len": 21}
    check_against_oracle(on_hosts, num_hosts, family, video_batch(family), None, settings)


def check_against_oracle(on_hosts, num_hosts, family, batch, query_start, settings):
    results = on_hosts(num_hosts, compressed_job, family, batch, query_start, settings)
    if query_start is None:
        inputs = as_inputs(family, batch, None, HostGroup.single("cpu"), torch.float64)
        query_start, prefix = inputs.query_start, inputs.context_start
    else:
        prefix = 0
    model = build(family, torch.float64)
    reset_rope(model)
    oracle = oracle_of(settings, num_hosts, query_start, prefix)
    expected = run_oracle(model, as_double(batch), oracle)
    exact, _ = hugging_face(family, torch.float64, as_double(batch))
    # One block alone passes nothing on; otherwise a test without compression would prove nothing.
    assert (relative_error(expected, exact) > 1e-4) == (oracle.num_blocks > 1)
    logits, kv, _ = results[0]
    assert relative_error(logits, expected) < 1e-6
    for layer, (keys, values) in enumerate(kv):
        assert relative_error(keys, oracle.keys[layer]) < 1e-6
        assert relative_error(values, oracle.values[layer]) < 1e-6
    assert all(relative_error(result[0], logits) < 1e-6 for result in results)


# ---- what travels ----


def traffic_job(hosts: HostGroup, settings: dict):
    model = build("qwen2_5_vl", torch.bfloat16)
    batch = video_batch("qwen2_5_vl", frames=40)
    inputs = as_inputs("qwen2_5_vl", batch, None, hosts, torch.bfloat16)
    state = prefill(model, inputs, hosts=hosts, config=PrefillConfig(kv="sharded", **settings))
    prefilled = state.timer.comm_bytes
    state.to_dynamic_cache()
    return prefilled, state.timer.comm_bytes - prefilled, state.layout, inputs.context_start


@each_choice(
    num_hosts=[2, 3], settings=[{"passing_len": 5}, {"passing_len": 0}, {"passing_len": 5, "zigzag": False}]
)
def test_comm_bytes_are_what_the_layout_predicts(on_hosts, num_hosts, settings):
    layers, kv_heads, heads, dim, width, itemsize = 3, 2, 4, 16, 64, 2
    for host, (prefilled, gathered, layout, first_row) in enumerate(on_hosts(num_hosts, traffic_job, settings)):
        queries = len(layout.query)
        per_exchange = 2 * kv_heads * min(settings["passing_len"], max(map(len, layout.blocks))) * dim * itemsize
        exchanges = 1 if settings.get("zigzag") is False else 2
        partials = heads * queries * (dim * itemsize + 4)
        layerwise = layers * (num_hosts - 1) * (exchanges * per_exchange + partials)
        # Frames: 20 temporal patches of 4 tokens, 20 // H or one more on each host.
        encoded, start = [], first_row
        for other in range(num_hosts):
            count = 4 * (20 // num_hosts + (other < 20 % num_hosts))
            encoded.append(set(range(start, start + count)))
            start += count
        wanted = {token for span in layout.local_spans(host) for token in span} & set.union(*encoded)
        rows = len(wanted - encoded[host])
        assert prefilled == layerwise + rows * width * itemsize
        share = sum(map(len, layout.cache_spans(0)))
        others = layers * 2 * kv_heads * (layout.num_tokens - share) * dim * itemsize
        assert gathered == (others if host == 0 else 0)


# ---- manners ----


def test_the_model_is_left_as_it_was_after_an_error():
    """And a single host may go on with the next prompt."""
    model = families.build_model("llama")
    hosts = HostGroup.single("cpu")
    inputs = as_inputs("llama", text_batch(100), 90, hosts)

    def fail(*_):
        raise RuntimeError("a layer failed")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="a layer failed"):
        prefill(model, inputs, hosts=hosts)
    assert model.config._attn_implementation == "sdpa"
    hook.remove()
    expected, _ = hugging_face("llama", torch.float32, text_batch(100))
    assert relative_error(prefill(model, inputs, hosts=hosts).logits, expected) < 1e-5
