"""Settings are validated once, where they are made; a message names the setting and what was given."""

import dataclasses

import pytest
import torch

from apbv import HostGroup, PrefillConfig, SparseConfig, SpeculativeConfig, config
from apbv.kernels.backends import BACKENDS
from apbv.prefilling.methods import METHODS, resolve_method
from apbv.prefilling.methods.importance import IMPORTANCE
from apbv.speculate import STRATEGIES

# fields(): the name of every switch, so that one added later is covered.
SWITCHES = [field.name for field in dataclasses.fields(PrefillConfig) if field.type in (bool, "bool")]


def test_defaults_are_the_method_of_the_paper():
    settings = PrefillConfig()
    assert (settings.method, settings.importance, settings.kv) == ("apbv", "peak", "gathered")
    assert settings.anchor_len is None and settings.passing_len is None
    assert {name: getattr(settings, name) for name in SWITCHES} == {
        "anchor_query": False,
        "overlap": True,
        "fused_query": True,
        "zigzag": True,
        "frame_parallel": True,
        "on_single_host": False,
    }


@pytest.mark.parametrize("name", ["anchor_len", "passing_len"])
@pytest.mark.parametrize("value", [None, 0, 1, 2**31 - 1])
def test_lengths_in_range_are_taken_as_they_are(name, value):
    assert getattr(PrefillConfig(**{name: value}), name) == value


@pytest.mark.parametrize("name", ["anchor_len", "passing_len"])
@pytest.mark.parametrize("value", [-1, 2**31, -(2**40)])
def test_lengths_out_of_range(name, value):
    with pytest.raises(ValueError, match=rf"^{name} must lie in 0 .. 2\^31-1, not {value}$"):
        PrefillConfig(**{name: value})


@pytest.mark.parametrize("name", ["anchor_len", "passing_len"])
@pytest.mark.parametrize("value", [1.0, 0.5, "128", True, False, [4]], ids=repr)
def test_lengths_that_are_no_integers(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be an integer number of tokens, not ") as raised:
        PrefillConfig(**{name: value})
    assert str(raised.value).endswith(repr(value))


@pytest.mark.parametrize("kv", ["", "Gathered", "host0", None])
def test_unknown_kv_placement_names_the_known_ones(kv):
    with pytest.raises(ValueError, match=r"^kv must be one of gathered, sharded, not ") as raised:
        PrefillConfig(kv=kv)
    assert str(raised.value).endswith(repr(kv))


@pytest.mark.parametrize(
    ("settings", "name", "known"),
    [
        (PrefillConfig, "method", config.METHOD_NAMES),
        (PrefillConfig, "importance", config.IMPORTANCE_NAMES),
        (PrefillConfig, "backend", config.BACKEND_NAMES),
        (SpeculativeConfig, "strategy", config.STRATEGY_NAMES),
    ],
)
@pytest.mark.parametrize("value", ["nonsense", "", None, ["full"]], ids=repr)
def test_unknown_names_are_refused_with_the_known_ones(settings, name, known, value):
    with pytest.raises(ValueError, match=f"^{name} must be one of ") as raised:
        settings(**{name: value})
    assert str(raised.value) == f"{name} must be one of {', '.join(known)}, not {value!r}"


def test_the_names_are_those_of_the_registries():
    """The command line offers them without importing what they stand for."""
    assert tuple(METHODS) == config.METHOD_NAMES
    assert tuple(IMPORTANCE) == config.IMPORTANCE_NAMES
    assert tuple(BACKENDS) == config.BACKEND_NAMES
    assert tuple(STRATEGIES) == config.STRATEGY_NAMES
    for name in config.DTYPE_NAMES:
        assert name == "auto" or isinstance(getattr(torch, name), torch.dtype)


def test_one_host_runs_full_unless_asked_otherwise():
    hosts = HostGroup.single("cpu")
    assert resolve_method(PrefillConfig(), hosts.size).name == "full"
    assert resolve_method(PrefillConfig(on_single_host=True), hosts.size).name == "apbv"


@pytest.mark.parametrize(
    ("settings", "num_hosts", "name"),
    [
        ({"method": "xattention"}, 1, "xattention"),
        ({"method": "spargeattn"}, 4, "spargeattn"),
        ({"method": "flexprefill"}, 2, "flexprefill"),
        ({"method": "full", "sparse": SparseConfig(method="spargeattn")}, 4, "spargeattn"),
        ({"method": "apbv", "sparse": SparseConfig()}, 1, "xattention"),
        ({"method": "apbv", "sparse": SparseConfig()}, 2, "apbv"),
        ({"method": "apbv", "sparse": SparseConfig(), "on_single_host": True}, 1, "apbv"),
    ],
)
def test_sparse_attention_of_one_host_is_the_method_of_its_name(settings, num_hosts, name):
    assert resolve_method(PrefillConfig(**settings), num_hosts).name == name


def test_thresholds_are_those_of_the_papers():
    assert PrefillConfig().sparse_attention is None
    for method, threshold, key_block in (
        ("xattention", 0.9, 128),
        ("spargeattn", 0.96, 64),
        ("flexprefill", 0.95, 128),
    ):
        sparse = PrefillConfig(method=method).sparse_attention
        assert (sparse.share, sparse.block_size, sparse.key_block) == (threshold, 128, key_block)
        assert not sparse.computes_all and SparseConfig(method=method, threshold=1).computes_all
    assert not SparseConfig(method="spargeattn", threshold=1, skip_margin=9.0).computes_all


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "dense"}, "sparse must be one of xattention, spargeattn, flexprefill, not 'dense'"),
        ({"threshold": 0}, "the threshold of sparse attention must lie in 0 < threshold <= 1, not 0"),
        ({"threshold": 1.1}, "the threshold of sparse attention must lie in 0 < threshold <= 1, not 1.1"),
        ({"threshold": "high"}, "the threshold of sparse attention must lie in 0 < threshold <= 1, not 'high'"),
        ({"threshold": True}, "the threshold of sparse attention must lie in 0 < threshold <= 1, not True"),
        ({"block_size": 16}, "the block size of sparse attention must be one of 32, 64, 128, 256, not 16"),
        ({"block_size": 64.0}, "the block size of sparse attention must be one of 32, 64, 128, 256, not 64.0"),
        ({"stride": 24}, "the stride 24 does not divide blocks of 128 tokens"),
        ({"stride": 0}, "the stride 0 does not divide blocks of 128 tokens"),
        ({"similarity": 2}, "the similarity of a block must lie in -1 .. 1, not 2"),
        ({"similarity": None}, "the similarity of a block must lie in -1 .. 1, not None"),
        (
            {"method": "spargeattn", "skip_margin": 0},
            "the skip margin of sparse attention must be above 0, not 0",
        ),
        (
            {"method": "spargeattn", "skip_margin": float("nan")},
            "the skip margin of sparse attention must be above 0, not nan",
        ),
        ({"skip_margin": 9.0}, "values are skipped by spargeattn: xattention has no skip margin"),
        ({"divergence": -0.1}, "the divergence of a query-aware head must lie in 0 .. 1, not -0.1"),
        ({"divergence": "low"}, "the divergence of a query-aware head must lie in 0 .. 1, not 'low'"),
        ({"min_blocks": 0}, "min_blocks must be an integer in 1 .. 2^31-1, not 0"),
        ({"min_blocks": 1.0}, "min_blocks must be an integer in 1 .. 2^31-1, not 1.0"),
    ],
)
def test_sparse_settings_out_of_range(values, message):
    with pytest.raises(ValueError) as raised:
        SparseConfig(**values)
    assert str(raised.value) == message


def test_settings_are_frozen_and_named():
    settings = PrefillConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.anchor_len = 3
    with pytest.raises(TypeError):
        PrefillConfig("apbv")
    with pytest.raises(ValueError, match="anchor_len"):
        dataclasses.replace(settings, anchor_len=-1)
