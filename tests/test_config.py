"""Settings are validated once, where they are made; a message names the setting and what was given."""

import dataclasses

import pytest
import torch

from apbv import HostGroup, PrefillConfig, SpeculativeConfig, config
from apbv.kernels.backends import BACKENDS
from apbv.prefilling.forward import resolve_method
from apbv.prefilling.methods import METHODS
from apbv.prefilling.methods.importance import IMPORTANCE
from apbv.speculate import STRATEGIES

# fields(): the name of every switch, so that one added later is covered.
SWITCHES = [field.name for field in dataclasses.fields(PrefillConfig) if field.type in (bool, "bool")]


def test_defaults_are_the_method_of_the_paper():
    settings = PrefillConfig()
    assert (settings.method, settings.importance, settings.kv) == ("apbv", "peak", "gathered")
    assert settings.anchor_len is None and settings.passing_len is None
    assert {name: getattr(settings, name) for name in SWITCHES} == {
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


def test_settings_are_frozen_and_named():
    settings = PrefillConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.anchor_len = 3
    with pytest.raises(TypeError):
        PrefillConfig("apbv")
    with pytest.raises(ValueError, match="anchor_len"):
        dataclasses.replace(settings, anchor_len=-1)
