"""The settings of a reduction, in Python and on the command line."""

import pytest

from apbv import ReduceConfig
from apbv.launch import infer, serve
from apbv.launch.options import prefill_config

INFER = ["--model", "demo"]
SERVE = ["--model", "demo", "--reduce", "hippo"]


def test_options_become_a_config():
    assert prefill_config(infer.parse_arguments(INFER)).reduce is None
    options = infer.parse_arguments([*INFER, "--reduce", "dycoke"])
    assert prefill_config(options).reduce == ReduceConfig(method="dycoke", ratio=0.5)
    options = infer.parse_arguments([*INFER, "--reduce", "fastv", "--reduce-ratio", "0.25", "--reduce-layer", "2"])
    assert prefill_config(options).reduce == ReduceConfig(method="fastv", ratio=0.25, layer=2)


def test_settings_that_are_wrong():
    for ratio in (0, 1.01, float("nan"), True, "0.5"):
        with pytest.raises(ValueError, match="must lie in 0 < ratio <= 1"):
            ReduceConfig(method="hippo", ratio=ratio)
    for layer in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="must be an integer of at least 1"):
            ReduceConfig(method="fastv", layer=layer)


@pytest.mark.parametrize(
    ("main", "options", "says"),
    [
        (infer, [*INFER, "--reduce-ratio", "0.5"], "--reduce-ratio needs --reduce"),
        (infer, [*INFER, "--reduce-layer", "2"], "--reduce-layer needs --reduce"),
        (infer, [*INFER, "--reduce", "hippo", "--reduce-layer", "2"], "hippo leaves tokens out before"),
        (infer, [*INFER, "--reduce", "hippo", "--reduce-ratio", "0"], "0 < ratio <= 1, not 0.0"),
        (serve, [*SERVE, "--kv-transfer", "tcp"], "--kv-transfer hands whole prompts over"),
        (serve, [*SERVE, "--reuse", "kv"], "it works with --reuse exact only"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_options_that_are_wrong_are_one_line(main, options, says, capsys):
    with pytest.raises(SystemExit) as ended:
        main.parse_arguments(options)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and says in said and said.startswith("error: ") and said.count("\n") == 1
