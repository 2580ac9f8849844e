"""Attention whose scores are scaled by nothing, or turned round, which the fused kernels of a GPU
cannot."""

import pytest
import torch

from apbv.kernels import PackedSequences, segmented_attention, varlen_attention, verify_attention

from apbv_tests.pretend_gpu import rehearsal

ENDS = torch.tensor([0, 5, 9], dtype=torch.int32)


def results(device: str, scale: float) -> list[torch.Tensor]:
    generator = torch.Generator("cpu").manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 9, 16, generator=generator).half().to(device)
    segments = [(k[:, :, :4], v[:, :, :4]), (k, v)]
    rows = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
    found = [
        *segmented_attention(q, segments, scale, True, backend="torch"),
        *verify_attention(q, k, v, scale, backend="torch"),
        varlen_attention(*rows, PackedSequences(ENDS.to(device), 5), scale),
    ]
    return [x.float().cpu() for x in found]


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_a_scale_at_or_below_zero_gives_the_numbers_of_the_cpu(scale):
    expected = results("cpu", scale)
    with rehearsal():
        found = results("cuda:0", scale)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-3)
