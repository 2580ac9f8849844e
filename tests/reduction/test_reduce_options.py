"""The settings of a reduction, in Python and on the command line."""

import pytest

from apbv import ReduceConfig
from apbv.launch import infer, serve
from apbv.launch.options import prefill_config

INFER = ["--model", "demo"]


def test_options_become_a_config():
    assert prefill_config(infer.parse_arguments(INFER)).reduce is None
    options = infer.parse_arguments([*INFER, "--reduce", "dycoke"])
    assert prefill_config(options).reduce == ReduceConfig(method="dycoke", ratio=0.5)
    options = infer.parse_arguments([*INFER, "--reduce", "fastv", "--reduce-ratio", "0.25", "--reduce-layer", "2"])
    assert prefill_config(options).reduce == ReduceConfig(method="fastv", ratio=0.25, layer=2)
    options = infer.parse_arguments([*INFER, "--reduce", "pdrop", "--reduce-asked-by", "question"])
    assert prefill_config(options).reduce == ReduceConfig(method="pdrop", asked_by="question")


def test_settings_that_are_wrong():
    for name, wrong, message in (
        ("ratio", (0, 1.01, float("nan"), True, "0.5"), "must lie in 0 < ratio <= 1"),
        ("layer", (0, 1.5, True), r"must be an integer in 1 .. 2\^31-1"),
    ):
        for value in wrong:
            with pytest.raises(ValueError, match=message):
                ReduceConfig(method="fastv", **{name: value})


def test_options_that_are_wrong_are_one_line(capsys):
    for main, options, says in (
        (infer, ["--reduce-ratio", "0.5"], "--reduce-ratio needs --reduce"),
        (infer, ["--reduce-layer", "2"], "--reduce-layer needs --reduce"),
        (infer, ["--reduce-asked-by", "last"], "--reduce-asked-by needs --reduce"),
        (infer, ["--reduce", "sparsevlm", "--reduce-asked-by", "last"], "sparsevlm does not"),
        (infer, ["--reduce", "dycoke", "--reduce-layer", "2"], "dycoke prunes before"),
        (serve, ["--reduce", "dycoke", "--kv-transfer", "tcp"], "--kv-transfer transfers whole prompts"),
        (serve, ["--reduce", "dycoke", "--reuse", "kv"], "use reuse='exact'"),
    ):
        with pytest.raises(SystemExit) as ended:
            main.parse_arguments([*INFER, *options])
        said = capsys.readouterr().err
        assert ended.value.code == 2 and says in said and said.startswith("error: ") and said.count("\n") == 1
