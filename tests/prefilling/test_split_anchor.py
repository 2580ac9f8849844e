"""An anchor in parts, one on each host, against one that every host computes."""

import pytest
import torch

from apbv import HostGroup, PrefillConfig, SparseConfig, prefill
from apbv.config import METHOD_FACTS, AblationConfig
from apbv.layout import plan_layout
from apbv.model.parts import inspect_model
from apbv.prefilling.methods.anchor import saves_by_splitting, share_anchor

from apbv_tests import families
from apbv_tests.configs import prefill_config
from apbv_tests.prompts import (
    as_inputs,
    batch_of,
    build,
    kv_of,
    relative_error,
    unwritten_memory_is_nan,
)

TOKENS = 130
CLOSE = 1e-9
CLOSE_TO_FP32 = 1e-4  # linear attention is computed in fp32


def both_job(hosts: HostGroup, family: str, settings: dict) -> list[tuple]:
    """What a prefill makes of a prompt with every host computing the anchor, and in parts."""
    is_text = family in families.TEXT_FAMILIES
    batch = batch_of(family, TOKENS if is_text else None)
    query_start = TOKENS - 7 if is_text else None
    found = []
    for is_split in (False, True):
        inputs = as_inputs(family, batch, query_start, hosts, torch.float64)
        config = prefill_config(**settings, split_anchor=is_split, kv="sharded")
        with unwritten_memory_is_nan():
            state = prefill(build(family, torch.float64), inputs, hosts=hosts, config=config)
        assert state.layout.splits_anchor == (is_split and state.layout.anchor_len > 0)
        found.append((state.logits, kv_of(state.kv.cache)))
    return found


def check(on_hosts, num_hosts: int, family: str, tolerance: float = CLOSE, **settings):
    """Both give the same logits, and the same KV on every host."""
    for whole, in_parts in on_hosts(num_hosts, both_job, family, settings):
        (expected, expected_kv), (logits, kv) = whole, in_parts
        assert relative_error(logits, expected) < tolerance
        for states, expected_states in zip(kv, expected_kv, strict=True):
            for ours, theirs in zip(states, expected_states, strict=True):
                assert ours.shape == theirs.shape
                if ours.numel():
                    assert relative_error(ours, theirs) < tolerance


LAYOUTS = [
    {"anchor_len": 0},
    {"anchor_len": 1},
    {"anchor_len": 2},  # fewer than hosts
    {"anchor_len": 37},
    {"anchor_len": 37, "zigzag": False},
    {"anchor_len": 37, "overlap": False},
    {"anchor_len": 37, "fused_query": False},
    {"anchor_len": 37, "passing_len": 0},
    {"anchor_len": 37, "early_passing_len": 9},
    {"anchor_len": 37, "passing_weights": (2, 0)},
    {"anchor_len": 37, "sparse": SparseConfig(method="xattention", block_size=32)},
    {"anchor_len": 31, "anchor_query": True},
    {"anchor_len": 31, "anchor_query": True, "fused_query": False},
    {"anchor_len": 31, "method": "apb", "anchor_query": True},
    {"anchor_len": 31, "method": "apb"},
    {"method": "star"},
]


@pytest.mark.parametrize("num_hosts", [2, 3, 4, 8])
@pytest.mark.parametrize("settings", LAYOUTS, ids=str)
def test_parts_of_an_anchor_are_the_anchor(on_hosts, num_hosts, settings):
    check(on_hosts, num_hosts, "llama", **{"passing_len": 4, **settings})


@pytest.mark.parametrize("num_hosts", [2, 3])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "llava_onevision"])
def test_an_anchor_with_visual_tokens(on_hosts, num_hosts, family):
    check(on_hosts, num_hosts, family, passing_len=4, anchor_len=30)
    check(on_hosts, num_hosts, family, passing_len=4, anchor_len=30, anchor_query=True)


@pytest.mark.parametrize("num_hosts", [2, 3, 8])
@pytest.mark.parametrize("anchor_query", [False, True])
def test_the_states_of_hybrids_go_through_the_parts(on_hosts, num_hosts, anchor_query):
    for anchor_len in (2, 31):
        settings = {"anchor_len": anchor_len, "anchor_query": anchor_query, "passing_len": 4}
        check(on_hosts, num_hosts, "qwen3_next", CLOSE_TO_FP32, **settings)


@pytest.mark.parametrize("num_hosts", [16, 64])
def test_on_as_many_hosts_as_blocks_allow(num_hosts):
    """Of a longer text: simulated, as no machine runs them as processes."""
    from apbv.testing.simulated import simulate

    def run(count, job, *args):
        return simulate(count, job, *args)

    check(run, num_hosts, "llama", passing_len=1, anchor_len=1 if num_hosts == 64 else 20)


def layout_of(num_hosts: int, num_tokens: int, anchor_len: int | None = None):
    return plan_layout(
        num_hosts=num_hosts,
        num_tokens=num_tokens,
        context_start=0,
        query_start=num_tokens - 32,
        anchor_len=anchor_len,
        passing_len=None,
        zigzag=True,
    )


def shared(method: str, layout, switch: bool | None = None):
    sizes = inspect_model(families.build_model("llama")).sizes
    config = PrefillConfig(ablation=AblationConfig(split_anchor=switch))
    return share_anchor(layout, METHOD_FACTS[method], config, sizes, torch.device("cpu"), 4)


def test_the_authors_methods_compute_all_of_it_unless_asked():
    layout = layout_of(4, 2**17)
    # A tiny model saves nothing; what is asked for is done.
    assert not shared("apbv", layout).splits_anchor
    for method in ("apbv", "apb", "star"):
        assert shared(method, layout, True).splits_anchor
        assert not shared(method, layout, False).splits_anchor
    assert not shared("apbv", layout_of(1, 2**17), True).splits_anchor
    assert not shared("apbv", layout_of(4, 2**17, anchor_len=0), True).splits_anchor


def test_long_anchors_of_large_models_are_split_and_short_ones_are_not():
    from transformers import Qwen2_5_VLConfig

    from apbv.model.families import family_of

    config = Qwen2_5_VLConfig(
        text_config={
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
        }
    )
    sizes = family_of(config).sizes
    gpu = torch.device("cuda")
    assert saves_by_splitting(layout_of(8, 131_072), sizes, gpu, 2)
    assert saves_by_splitting(layout_of(64, 131_072), sizes, gpu, 2)
    assert not saves_by_splitting(layout_of(8, 131_072, anchor_len=64), sizes, gpu, 2)
