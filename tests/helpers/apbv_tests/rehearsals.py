"""Answers on a pretended GPU, beside those on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torchvision.transforms.v2.functional import _geometry

from apbv import Engine, HostGroup, ReuseConfig

from apbv_tests.configs import speculative_config
from apbv_tests.engines import QUESTION, build_engine
from apbv_tests.interpreting import keep_replaced
from apbv_tests.patience import GROUP_TIMEOUT
from apbv_tests.pretend_gpu import GLOO, GLOO_AND_NCCL, Machine, callers_group, to_gpu

FURTHER_QUESTION = "And then?"
keep_replaced()  # also in the processes of a pool


@dataclass(frozen=True)
class Case:
    """What is asked, and how it is answered.

    Attributes:
        family: the model's, from ``families``.
        dtype: of its weights.
        prefill, speculate: fields of the configs.
        reuse: of ReuseConfig; then a second question follows.
        request: further arguments of ``Engine.generate``.
    """

    family: str = "qwen2_5_vl"
    dtype: torch.dtype = torch.float32
    prefill: dict[str, Any] = field(default_factory=dict)
    speculate: dict[str, Any] | None = None
    reuse: str | None = None
    request: dict[str, Any] = field(default_factory=dict)

    def engine(self, hosts: HostGroup, gpu: Machine | None = None) -> Engine:
        """An engine on these hosts; the models are put on this host's GPU."""
        speculate = None if self.speculate is None else speculative_config(**self.speculate)
        return build_engine(
            hosts,
            self.family,
            speculate=speculate,
            captioner=(lambda prompt: "a clip of something")
            if speculate and speculate.needs_caption
            else None,
            reuse=ReuseConfig(mode=self.reuse, max_bytes=1 << 30) if self.reuse else None,
            dtype=self.dtype,
            layers=2,
            to_device=lambda model: (
                model if gpu is None else to_gpu(model, gpu, hosts.device.index)
            ),
            **self.prefill,
        )

    def ask(self, engine: Engine, clip: Path) -> list[int]:
        """The tokens of the answer, or of both answers."""
        request = {"video": clip, "num_frames": 6, "max_new_tokens": 4, **self.request}
        questions = [QUESTION, FURTHER_QUESTION] if self.reuse else [QUESTION]
        tokens = []
        for question in questions:
            tokens += engine.generate(question, **request).token_ids
        return tokens


def on_gpus(hosts: HostGroup, shares_gpu: bool = False) -> HostGroup:
    """These hosts, each with a GPU of its own and NCCL, or all with the first; collective, in a
    rehearsal."""
    device = torch.device("cuda", 0 if shares_gpu else hosts.rank)
    torch.cuda.set_device(device)
    if hosts.size == 1:
        return HostGroup.single(device)
    if shares_gpu:
        return join(hosts, device)
    return HostGroup.from_process_group(_group_of(hosts, GLOO_AND_NCCL), device, GROUP_TIMEOUT)


def join(hosts: HostGroup, device: str | torch.device, **options) -> HostGroup:
    """The hosts that from_env would make of these processes, where torchrun had started them."""
    group = _group_of(hosts, GLOO)
    return HostGroup.from_process_group(group, device, GROUP_TIMEOUT, owns_group=True, **options)


def _group_of(hosts: HostGroup, backend: str) -> dist.ProcessGroup:
    like = hosts.groups.of_some(range(hosts.size), GROUP_TIMEOUT, has_data=False).control
    ranks = dist.get_process_group_ranks(hosts.groups.control)
    return callers_group(like, ranks, timedelta(seconds=GROUP_TIMEOUT), backend)


@contextmanager
def resizing_as_on_gpu() -> Iterator[None]:
    """Let torchvision resize frames on the CPU in floats, as on a GPU; else it takes integers, and
    rounds more."""
    with patch.object(_geometry, "_do_native_uint8_resize_on_cpu", lambda interpolation: False):
        yield
