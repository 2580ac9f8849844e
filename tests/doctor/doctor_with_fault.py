"""The doctor on a machine with something wrong:
``doctor_with_fault.py FAULT[,FAULT...] OPTION...``."""

import os
import sys

os.environ.pop("TRITON_INTERPRET", None)  # as on a machine without GPUs, where Triton does not run

import apbv  # noqa: F401  (before transformers: see apbv.compat.torchvision_guard)

# isort: split
import torch

from apbv import HostGroup
from apbv.doctor import __main__ as doctor
from apbv.doctor import machine
from apbv.hosts import Pending
from apbv.kernels import torch_attention

HERE = int(os.environ.get("RANK", "0"))


def nothing() -> None:
    """All is well."""


def blind() -> None:
    """No token sees any other."""
    right = torch_attention.segmented_attention

    def attend(q, segments, *settings, **more):
        out, lse = right(q, segments, *settings, **more)
        return out.zero_(), lse

    torch_attention.segmented_attention = attend


def unnoticed() -> None:
    """What was never sent arrives all the same, as far as the hosts can tell."""
    HostGroup.all_gather = lambda self, tensor: Pending(
        lambda: tensor.expand(self.size, *tensor.shape)
    )


def hosts_mixed_up() -> None:
    """On every host, gathered tensors stand in another order."""
    right = HostGroup.all_gather

    def gather(self, tensor):
        exchange = right(self, tensor)
        wait = exchange.wait
        exchange.wait = lambda: wait().flip(0)
        return exchange

    HostGroup.all_gather = gather


def raising_host() -> None:
    """Host 1 fails in the middle of an exchange."""
    right = HostGroup.shift

    def shift(self, tensor, shape):
        if HERE == 1:
            raise RuntimeError("the link is down\nand more")
        return right(self, tensor, shape)

    HostGroup.shift = shift


def dying_host() -> None:
    """Host 1's process ends within a check."""
    right = machine.processor
    machine.processor = lambda: os._exit(3) if HERE == 1 else right()


def other_version() -> None:
    """Host 1 has another torch."""
    if HERE == 1:
        torch.__version__ = "1.0.0"


if __name__ == "__main__":
    for fault in sys.argv.pop(1).split(","):
        globals()[fault]()
    sys.exit(doctor.main(sys.argv[1:]))
