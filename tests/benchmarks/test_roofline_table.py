"""What is predicted of the operators' speed, against the counts of the benchmark that measures them."""

import pytest
import roofline
import torch

from apbv.kernels.roofline import cost_of

from support.operators import attention
from support.operators.presets import PRESETS


@pytest.mark.parametrize("preset", ["quick", "h200"])
def test_the_calls_are_those_that_the_benchmark_measures(preset):
    sizes = PRESETS[preset].sizes
    predicted = {
        what: cost_of(operator, shapes, torch.bfloat16)
        for what, (operator, shapes) in roofline.shapes(sizes).items()
    }
    for what, case in (
        ("the whole prompt, `full`", attention.causal(sizes)),
        ("a block behind anchor and passing blocks", attention.block(sizes)),
        ("one new token", attention.verify(sizes, 1)),
        ("8 new tokens", attention.verify(sizes, 8)),
    ):
        # The benchmark of verification does not count the log-sum-exp.
        lse = 4 * case.sizes["queries"] * sizes.heads if case.op == "verify_attention" else 0
        assert predicted[what] == (case.flops, case.bytes(torch.bfloat16) + lse), what


def test_a_column_for_each_gpu(capsys):
    assert roofline.main(["--gpus", "H100", "L4", "--tokens", "131072"]) == 0
    header, _, full, *_ = capsys.readouterr().out.splitlines()
    assert header == "| of a layer | GFLOP | MB | H100 | L4 |"
    # 28 heads of 128 numbers, 989 and 121 TFLOP/s.
    operations = 4 * 28 * 128 * 131072 * 131073 // 2
    assert f"| {operations / 989e9:.3g} ms (arithmetic) | {operations / 121e9:.3g} ms (arithmetic) |" in full


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "H100", "TPU"], "the peak of TPU is not known"),
        (["--tokens", "511"], "at least 64 for each host"),
    ],
)
def test_what_cannot_be_predicted_is_refused(options, message, capsys):
    with pytest.raises(SystemExit):
        roofline.main(options)
    assert message in capsys.readouterr().err
