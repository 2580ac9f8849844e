"""The settings that one strategy has alone, or one choice of visual tokens, in Python and on the
command line."""

import dataclasses
import pickle
import warnings

import pytest

from apbv import InvalidConfigError, SpeculativeConfig
from apbv.config import (
    HippoConfig,
    LayerSkipConfig,
    SpeculativeAblationConfig,
    TabedConfig,
    UVPruneConfig,
)
from apbv.hosts.agreement import describe_difference
from apbv.launch import infer
from apbv.launch.options import speculative_config

WITHOUT_ATTENTION = HippoConfig(terms=("time", "space"))
# By field: a group whose settings are not the defaults, drafts that have it, and drafts that do
# not, with the reason.
GROUPS = {
    "hippo": (
        WITHOUT_ATTENTION,
        [{"strategy": "hippo"}, {"keep": "hippo"}, {"strategy": "tabed", "keep": "hippo"}],
        [
            ({"strategy": "specvlm"}, "specvlm does not rank visual tokens by HIPPO's scores"),
            (
                {"strategy": "hippo", "keep": "even"},
                "keep='even' does not rank visual tokens by HIPPO's scores",
            ),
            ({"strategy": "ngram"}, "ngram does not rank visual tokens by HIPPO's scores"),
        ],
    ),
    "uv_prune": (
        UVPruneConfig(layer=7),
        [{"strategy": "parallelvlm"}, {"keep": "uv_prune"}],
        [
            ({"strategy": "hippo"}, "hippo does not select visual tokens as UV-Prune"),
            (
                {"strategy": "parallelvlm", "keep": "random"},
                "keep='random' does not select visual tokens as UV-Prune",
            ),
        ],
    ),
    "layerskip": (
        LayerSkipConfig(layer_ratio=0.25),
        [{"strategy": "layerskip"}],
        [({"strategy": "std"}, "std runs all layers of its draft: layer_ratio does not apply")],
    ),
    "tabed": (
        TabedConfig(ensemble="MTP"),
        [{"strategy": "tabed"}, {"strategy": "tabed", "keep": "hippo"}],
        [({"strategy": "vanilla"}, "vanilla drafts from one prompt")],
    ),
}


@pytest.mark.parametrize("name", GROUPS)
def test_settings_of_another_draft_are_refused(name):
    group, owners, others = GROUPS[name]
    for draft in owners:
        config = SpeculativeConfig(**draft, **{name: group})
        assert config.settings_of(type(group)) == group
        assert SpeculativeConfig(**draft).settings_of(type(group)) == type(group)()
        assert pickle.loads(pickle.dumps(config)) == config
    for draft, reason in others:
        with pytest.raises(InvalidConfigError, match=rf"^{reason}"):
            SpeculativeConfig(**draft, **{name: group})
        # Also where they are the defaults: that they have no effect is the same.
        with pytest.raises(InvalidConfigError, match=rf"^{reason}"):
            SpeculativeConfig(**draft, **{name: type(group)()})


FORMER = {
    "hippo_terms": ("hippo", "hippo", HippoConfig, "terms", ("time",)),
    "uv_layer": ("parallelvlm", "uv_prune", UVPruneConfig, "layer", 7),
    "layer_ratio": ("layerskip", "layerskip", LayerSkipConfig, "layer_ratio", 0.25),
    "ensemble": ("tabed", "tabed", TabedConfig, "ensemble", "MT"),
    "keep_losing_draft": (
        "specvlm",
        "ablation",
        SpeculativeAblationConfig,
        "keep_losing_draft",
        True,
    ),
}


@pytest.mark.parametrize("former", FORMER)
def test_settings_have_their_former_names_until_the_next_release(former):
    strategy, group, kind, name, value = FORMER[former]
    expected = SpeculativeConfig(strategy=strategy, **{group: kind(**{name: value})})
    default = getattr(kind(), name)
    with pytest.warns(DeprecationWarning) as warned:
        assert SpeculativeConfig(strategy=strategy, **{former: value}) == expected
    (warning,) = warned
    assert str(warning.message) == (
        f"SpeculativeConfig({former}=…) is now SpeculativeConfig({group}={kind.__name__}({name}=…))"
    )
    assert warning.filename == __file__
    path = group if group == "ablation" else f"settings_of({kind.__name__})"
    for config, found in ((expected, value), (SpeculativeConfig(strategy=strategy), default)):
        with pytest.warns(DeprecationWarning) as warned:
            assert getattr(config, former) == found
        (warning,) = warned
        said = f"SpeculativeConfig.{former} is now SpeculativeConfig.{path}.{name}"
        assert str(warning.message) == said and warning.filename == __file__
    with pytest.warns(DeprecationWarning):
        replaced = dataclasses.replace(expected, **{former: default})
    assert getattr(replaced, group) == kind()


def test_defaults_under_former_names_are_no_settings_of_another_draft():
    """They had no effect before."""
    former = {"hippo_terms": HippoConfig().terms, "uv_layer": 20, "layer_ratio": 0.5}
    with pytest.warns(DeprecationWarning):
        assert SpeculativeConfig(**former, ensemble="MT*") == SpeculativeConfig()
    with (
        pytest.warns(DeprecationWarning),
        pytest.raises(InvalidConfigError, match="specvlm runs all layers of its draft"),
    ):
        SpeculativeConfig(layer_ratio=0.4)


def test_new_names_warn_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, (group, owners, _) in GROUPS.items():
            for draft in owners:
                config = SpeculativeConfig(**draft, **{name: group})
                assert dataclasses.replace(config, num_draft_tokens=3).settings_of(type(group))
                assert config.shared


WRONG = [
    (lambda: HippoConfig(terms=()), "hippo terms must be some of attention, time, space, not ()"),
    (lambda: HippoConfig(terms="time"), "hippo terms must be some of attention, time, space, not "),
    (lambda: HippoConfig(terms=("time", [])), "hippo terms must be some of "),
    (lambda: UVPruneConfig(layer=0), "uv_prune layer must be an integer in 1 .. 2^31-1, not 0"),
    (lambda: UVPruneConfig(layer=True), "uv_prune layer must be an integer in 1 .. 2^31-1, not "),
    (lambda: LayerSkipConfig(layer_ratio=0), "layerskip layer_ratio must lie in (0, 1], not 0"),
    (lambda: LayerSkipConfig(layer_ratio="all"), "layerskip layer_ratio must lie in (0, 1], not "),
    (lambda: TabedConfig(ensemble="M*"), "tabed ensemble must be different letters of MTCP, with "),
    (lambda: TabedConfig(ensemble=5), "tabed ensemble must be different letters of MTCP, with "),
    (
        lambda: SpeculativeAblationConfig(keep_losing_draft=1),
        "keep_losing_draft must be true or false, not 1",
    ),
    (lambda: SpeculativeConfig(hippo="time"), "hippo must be a HippoConfig, not 'time'"),
    (lambda: SpeculativeConfig(tabed=HippoConfig()), "tabed must be a TabedConfig, not HippoConf"),
    (
        lambda: SpeculativeConfig(ablation=None),
        "ablation must be a SpeculativeAblationConfig, ",
    ),
]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_wrong_values_are_one_error(make, message):
    with pytest.raises(InvalidConfigError) as raised:
        make()
    assert str(raised.value).startswith(message)


OPTIONS = {
    "hippo --hippo-terms time space": {"strategy": "hippo", "hippo": WITHOUT_ATTENTION},
    "specvlm --keep hippo --hippo-terms attention": {
        "strategy": "specvlm",
        "keep": "hippo",
        "hippo": HippoConfig(terms=("attention",)),
    },
    "layerskip --layer-ratio 0.25": {
        "strategy": "layerskip",
        "layerskip": LayerSkipConfig(layer_ratio=0.25),
    },
    "tabed --ensemble MTP": {"strategy": "tabed", "tabed": TabedConfig(ensemble="MTP")},
    "tabed": {"strategy": "tabed"},
    "vanilla --keep-losing-draft": {
        "strategy": "vanilla",
        "ablation": SpeculativeAblationConfig(keep_losing_draft=True),
    },
}


def options_of(words: str):
    return infer.parse_arguments(["--model", "demo", *words.split()])


@pytest.mark.parametrize("words", OPTIONS)
def test_options_become_settings_of_their_draft(words):
    options = options_of(f"--speculate {words}")
    assert speculative_config(options) == SpeculativeConfig(**OPTIONS[words])


OTHERS = {
    "--hippo-terms time": "--hippo-terms needs --speculate",
    "--ensemble MT": "--ensemble needs --speculate",
    "--layer-ratio 0.5": "--layer-ratio needs --speculate",
    "--keep-losing-draft": "--keep-losing-draft needs --speculate",
    "--captioner a:b": "--captioner needs --speculate",
    "--speculate specvlm --hippo-terms time": "specvlm does not rank visual tokens by HIPPO's",
    "--speculate std --layer-ratio 0.5": "std runs all layers of its draft: layer_ratio does not",
    "--speculate vanilla --ensemble MT*": "vanilla drafts from one prompt: the ensemble does not",
    "--speculate tabed --ensemble MM": "argument --ensemble: must be different letters of MTCP",
    "--speculate hippo --hippo-terms weight": "argument --hippo-terms: invalid choice: 'weight'",
}


@pytest.mark.parametrize("words", OTHERS)
def test_options_of_another_draft_are_one_line(words, capsys):
    with pytest.raises(SystemExit) as ended:
        options_of(words)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    assert said.startswith(f"error: {OTHERS[words]}")


def test_hosts_agree_on_the_settings_in_force():
    """Whether they are given or the defaults; the message has their names and both values."""
    plain = SpeculativeConfig(strategy="hippo")
    given = SpeculativeConfig(strategy="hippo", hippo=HippoConfig())
    other = SpeculativeConfig(strategy="hippo", hippo=WITHOUT_ATTENTION)
    assert plain.shared == given.shared and plain.shared["tabed"] is None
    settings = [{"settings": {"speculate": config.shared}} for config in (plain, other)]
    assert describe_difference(*settings, "host 0", "host 1") == (
        "settings must be the same on every host: speculate.hippo.terms is ('time', 'space') on "
        "host 1, but ('attention', 'time', 'space') on host 0"
    )
