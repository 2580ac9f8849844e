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
    options = infer.parse_arguments([*INFER, "--reduce", "fastvid", "--reduce-ratio", "0.25"])
    assert prefill_config(options).reduce == ReduceConfig(method="fastvid", ratio=0.25)


def test_settings_that_are_wrong():
    for ratio in (0, 1.01, float("nan"), True, "0.5"):
        with pytest.raises(ValueError, match="must lie in 0 < ratio <= 1"):
            ReduceConfig(method="fastvid", ratio=ratio)


def test_options_that_are_wrong_are_one_line(capsys):
    for main, options, says in (
        (infer, ["--reduce-ratio", "0.5"], "--reduce-ratio needs --reduce"),
        (
            serve,
            ["--reduce", "dycoke", "--kv-transfer", "tcp"],
            "--kv-transfer transfers whole prompts",
        ),
        (serve, ["--reduce", "dycoke", "--reuse", "kv"], "use reuse='exact'"),
    ):
        with pytest.raises(SystemExit) as ended:
            main.parse_arguments([*INFER, *options])
        said = capsys.readouterr().err
        assert (
            ended.value.code == 2
            and says in said
            and said.startswith("error: ")
            and said.count("\n") == 1
        )
