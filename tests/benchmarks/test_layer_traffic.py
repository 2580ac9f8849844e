"""What one layer's attention moves beside attention: a needless copy of its result would exceed the bounds."""

import layer_traffic
import pytest
import torch


@pytest.mark.parametrize(
    ("method", "most"),
    [
        # Of three partial results of a context token two are merged; and the question's scores are among it.
        ("apbv", 10.5),
        # The anchor and the block are one triangle, copied to its place, and the question's has another.
        ("star", 2.5),
        # In each step but the first, two results are read and one is written.
        ("zigzag_ring", 6.5),
    ],
)
def test_results_are_written_where_they_are_wanted(method, most):
    for row in layer_traffic.main(["--method", method, "--tokens", "4096"]):
        assert row["attention_calls"] and row["seconds"] > 0
        assert row["other_bytes"] <= most * row["output_bytes"], row


def test_traffic_is_of_operands_and_results():
    x, y = torch.zeros(10, 10), torch.zeros(10, 10)
    with layer_traffic.Traffic() as traffic:
        z = (x.t() + y)[:5].clone()  # views are free
        x.add_(1)
        torch.add(x, y, out=torch.empty(10, 10))
    assert traffic.bytes == {"add": 400 * 3 * 2, "clone": 200 * 2, "add_": 400} and z.shape == (5, 10)
