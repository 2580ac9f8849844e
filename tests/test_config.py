"""Settings are validated once, where they are made; a message names the setting and what was given."""

import dataclasses

import pytest

from apbv import HostGroup, PrefillConfig
from apbv.prefill import resolve_method

# fields(): the name of every switch, so that one added later is covered.
SWITCHES = [field.name for field in dataclasses.fields(PrefillConfig) if field.type in (bool, "bool")]


def test_defaults_are_the_method_of_the_paper():
    config = PrefillConfig()
    assert (config.method, config.importance, config.kv) == ("apbv", "peak", "gathered")
    assert config.anchor_len is None and config.passing_len is None
    assert {name: getattr(config, name) for name in SWITCHES} == {
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


@pytest.mark.parametrize(("name", "known"), [("method", ("apbv", "full")), ("importance", ("softmax", "dot"))])
def test_unknown_names_are_refused_before_anything_runs(name, known):
    with pytest.raises(ValueError, match=f"unknown {name} 'nonsense'") as raised:
        resolve_method(PrefillConfig(**{name: "nonsense"}), HostGroup.single("cpu"))
    assert all(choice in str(raised.value) for choice in known)


def test_one_host_runs_full_unless_asked_otherwise():
    hosts = HostGroup.single("cpu")
    assert resolve_method(PrefillConfig(), hosts).name == "full"
    assert resolve_method(PrefillConfig(on_single_host=True), hosts).name == "apbv"


def test_settings_are_frozen_and_named():
    config = PrefillConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.anchor_len = 3
    with pytest.raises(TypeError):
        PrefillConfig("apbv")
    with pytest.raises(ValueError, match="anchor_len"):
        dataclasses.replace(config, anchor_len=-1)
