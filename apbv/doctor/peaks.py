"""What GPUs can do at most by their data sheets: dense bf16 arithmetic with sums in fp32, and memory bandwidth."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Peak:
    """A Peak is what one GPU is sold for.

    Attributes:
        flops: operations per second of tensor cores, without sparsity.
        bandwidth: bytes per second of its memory.
    """

    flops: float
    bandwidth: float


# By words of a GPU's name, the more particular first.
_PEAKS = {
    "GB200": Peak(2500e12, 8.0e12),
    "B200": Peak(2250e12, 8.0e12),
    "GH200 144G": Peak(989e12, 4.9e12),
    "GH200": Peak(989e12, 4.0e12),
    "H200 NVL": Peak(836e12, 4.8e12),
    "H200": Peak(989e12, 4.8e12),
    "H100 NVL": Peak(836e12, 3.9e12),
    "H100 PCIe": Peak(756e12, 2.0e12),
    "H100": Peak(989e12, 3.35e12),
    "H800": Peak(989e12, 3.35e12),
    "H20": Peak(148e12, 4.0e12),
    "A100-PCIE-40GB": Peak(312e12, 1.555e12),
    "A100-SXM4-40GB": Peak(312e12, 1.555e12),
    "A100": Peak(312e12, 2.0e12),
    "A800": Peak(312e12, 2.0e12),
    "L40S": Peak(362e12, 0.864e12),
    "L40": Peak(181e12, 0.864e12),
    "L4": Peak(121e12, 0.3e12),
    "A40": Peak(150e12, 0.696e12),
    "A10G": Peak(70e12, 0.6e12),
    "A10": Peak(125e12, 0.6e12),
    "RTX A6000": Peak(155e12, 0.768e12),
    "RTX 6000 Ada": Peak(364e12, 0.96e12),
    "RTX 5090": Peak(210e12, 1.79e12),
    "RTX 4090": Peak(165e12, 1.008e12),
    "RTX 3090": Peak(71e12, 0.936e12),
}
# Parts of a GPU, and GPUs that share a name with a faster one.
_LESS = ("MIG", "Laptop", "Max-Q", "4090 D", "5090 D")


def published(name: str) -> Peak | None:
    """Return the peak of a GPU of this name; None where it is not known here."""
    if any(word in name for word in _LESS):
        return None
    return next((peak for known, peak in _PEAKS.items() if re.search(rf"\b{known}\b", name)), None)
