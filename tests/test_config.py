"""Settings are validated once, where they are made; a message names the setting and what was
given."""

import dataclasses
import inspect
import pickle

import pytest
import torch

from apbv import Engine, PrefillConfig, SparseConfig, SpeculativeConfig, config
from apbv.config import AblationConfig
from apbv.input.prompts.rendering import Question, QuestionArguments
from apbv.kernels.backends import BACKENDS
from apbv.prefilling.methods import METHODS, resolve_method
from apbv.speculate import STRATEGIES

from apbv_tests.configs import prefill_config

# fields(): the name of every switch, so that one added later is covered.
SWITCHES = {
    field.name: kind
    for kind in (PrefillConfig, AblationConfig)
    for field in dataclasses.fields(kind)
    if field.type in (bool, "bool")
}


def test_defaults_are_the_method_of_the_paper():
    settings = PrefillConfig()
    assert (settings.method, settings.importance, settings.kv) == ("apbv", "peak", "gathered")
    assert settings.anchor_len is None and settings.passing_len is None
    on = {"overlap", "fused_query", "zigzag", "frame_parallel"}
    assert {name for name, kind in SWITCHES.items() if getattr(kind(), name)} == on
    assert set(SWITCHES) - on == {"anchor_query", "on_single_host"}


def test_parts_of_the_method_are_a_group_and_have_their_former_names_until_the_next_release():
    with pytest.warns(DeprecationWarning, match=r"PrefillConfig\(ablation=AblationConfig\(zigzag="):
        former = PrefillConfig(zigzag=False)
    assert former == PrefillConfig(ablation=AblationConfig(zigzag=False))
    with pytest.warns(DeprecationWarning, match=r"is now PrefillConfig\.ablation\.zigzag$"):
        assert not former.zigzag
    # A part that was left out before stays so.
    with pytest.warns(DeprecationWarning):
        assert dataclasses.replace(former, overlap=False) == prefill_config(
            zigzag=False, overlap=False
        )
    with pytest.raises(ValueError, match=r"^overlap must be true or false, not 1$"):
        PrefillConfig(overlap=1)
    assert not former.shared["ablation"]["zigzag"], "it must be the same on every host"


@pytest.mark.parametrize("name", ["anchor_len", "passing_len"])
def test_lengths(name):
    for value in (0, 2**31 - 1):
        assert getattr(PrefillConfig(**{name: value}), name) == value
    for value in (-1, 2**31, 1.0, "128", True):
        with pytest.raises(ValueError) as raised:
            PrefillConfig(**{name: value})
        assert str(raised.value) == f"{name} must be an integer in 0 .. 2^31-1, not {value!r}"


def test_budgets_and_schedules_of_passing():
    with pytest.raises(ValueError, match=r"^passing_budget must lie in 0 < budget <= 1, not 0$"):
        PrefillConfig(passing_budget=0)
    for weights in (
        (),
        (0, 0),
        (1, -1),
        (float("nan"),),
        (float("inf"),),
        [1, 2],
        (True,),
        ("1",),
        257 * (1,),
    ):
        with pytest.raises(ValueError, match=r"^passing_weights must be a tuple of .*, not all 0"):
            PrefillConfig(passing_weights=weights)
    for both in (
        {"passing_len": 8, "passing_budget": 0.5},
        {"early_passing_len": 8, "passing_weights": (2, 1)},
    ):
        with pytest.raises(ValueError, match=" and ".join(both)):
            PrefillConfig(**both)
    assert PrefillConfig(passing_len=8, passing_weights=(2, 1)).passing_weights == (2, 1)


@pytest.mark.parametrize(
    ("settings", "name", "known"),
    [
        (PrefillConfig, "method", config.METHOD_NAMES),
        (PrefillConfig, "importance", config.IMPORTANCE_NAMES),
        (PrefillConfig, "backend", config.BACKEND_NAMES),
        (PrefillConfig, "kv", ("gathered", "sharded")),
        (SpeculativeConfig, "strategy", config.STRATEGY_NAMES),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(settings, name, known):
    for value in ("nonsense", "", "Gathered", None, ["full"]):
        with pytest.raises(ValueError) as raised:
            settings(**{name: value})
        assert str(raised.value) == f"{name} must be one of {', '.join(known)}, not {value!r}"


def test_the_names_are_those_of_the_registries():
    """The command line offers them without importing what they stand for."""
    assert {name: method.facts for name, method in METHODS.items()} == config.METHOD_FACTS
    assert list(METHODS) == list(config.METHOD_NAMES)
    assert tuple(BACKENDS) == config.BACKEND_NAMES
    assert list(STRATEGIES) == list(config.STRATEGY_NAMES)
    assert {name: way.facts for name, way in STRATEGIES.items()} == config.STRATEGY_FACTS
    for name in config.DTYPE_NAMES:
        assert name == "auto" or isinstance(getattr(torch, name), torch.dtype)


def test_sparse_attention_of_one_host_is_the_method_of_its_name():
    sparse = {"method": "apbv", "sparse": SparseConfig()}
    for settings, num_hosts, name in (
        ({}, 1, "full"),
        ({"on_single_host": True}, 1, "apbv"),
        ({"method": "xattention"}, 1, "xattention"),
        ({"method": "full", "sparse": SparseConfig(method="spargeattn")}, 4, "spargeattn"),
        (sparse, 1, "xattention"),
        (sparse, 2, "apbv"),
        ({**sparse, "on_single_host": True}, 1, "apbv"),
    ):
        assert resolve_method(prefill_config(**settings), num_hosts).name == name


def test_thresholds_are_those_of_the_papers():
    assert PrefillConfig().sparse_attention is None
    papers = (("xattention", 0.9, 128), ("spargeattn", 0.96, 64), ("flexprefill", 0.95, 128))
    for method, threshold, key_block in papers:
        sparse = PrefillConfig(method=method).sparse_attention
        assert (sparse.share, sparse.block_size, sparse.key_block) == (threshold, 128, key_block)
        assert not sparse.computes_all and SparseConfig(method=method, threshold=1).computes_all


OUT_OF_RANGE = {
    "threshold": ("sparse threshold must lie in 0 < threshold <= 1", 0, 1.1, "high", True),
    "block_size": ("sparse block_size must be one of 32, 64, 128, 256", 16, 64.0),
    "similarity": ("sparse similarity must lie in -1 .. 1", 2, None),
    "divergence": ("sparse divergence must lie in 0 .. 1", -0.1, "low"),
    "min_blocks": ("sparse min_blocks must be an integer in 1 .. 2^31-1", 0, 1.0),
    "method": ("sparse method must be one of xattention, spargeattn, flexprefill", "dense"),
}


OWNERS = {"divergence": "flexprefill", "min_blocks": "flexprefill"}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_sparse_settings_out_of_range(name):
    message, *values = OUT_OF_RANGE[name]
    for value in values:
        with pytest.raises(ValueError) as raised:
            SparseConfig(**{"method": OWNERS.get(name, "spargeattn"), name: value})
        assert str(raised.value) == f"{message}, not {value!r}"


def test_every_sparse_method_has_a_config_with_its_own_settings():
    assert tuple(config.SPARSE_CONFIGS) == config.SPARSE_NAMES
    for name, kind in config.SPARSE_CONFIGS.items():
        made = SparseConfig(method=name, block_size=64)
        assert type(made) is kind and made == kind(block_size=64)
        for copied in (dataclasses.replace(made), pickle.loads(pickle.dumps(made))):
            assert type(copied) is kind and copied == made
        others = {"stride": 8, "similarity": 0.5, "divergence": 0.5, "min_blocks": 2}
        own = {field.name for field in dataclasses.fields(kind)}
        for setting, value in others.items():
            if setting in own:
                assert getattr(SparseConfig(method=name, **{setting: value}), setting) == value
                continue
            with pytest.raises(ValueError, match=rf"^sparse {setting} is a setting of .*: {name} "):
                SparseConfig(method=name, **{setting: value})
    with pytest.raises(
        ValueError, match=r"^sparse method must be one of xattention, not 'spargeat"
    ):
        config.XAttentionConfig(method="spargeattn")


def test_a_stride_divides_a_block():
    with pytest.raises(ValueError, match=r"^the stride 24 does not divide blocks of 128 tokens$"):
        SparseConfig(stride=24)
    with pytest.raises(ValueError, match=r"^sparse stride must be an integer in 1 .. 256, not 0$"):
        SparseConfig(stride=0)


def test_a_question_has_the_same_arguments_in_every_call():
    """generate() names them; prefill() and generate_all() take them by these names."""
    of_generate = [*inspect.signature(Engine.generate).parameters]
    named = of_generate[of_generate.index("video") : of_generate.index("max_new_tokens")]
    assert named == [*QuestionArguments.__annotations__]
    assert set(named) < {field.name for field in dataclasses.fields(Question)}
