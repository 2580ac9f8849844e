"""Runs prefills of one model on real or simulated hosts, and measures them."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from tqdm import tqdm

from apbv import HostGroup, ModelInputs, PrefillConfig, prefill
from apbv.allocator import keep_freed_memory, return_freed_memory
from apbv.model.parts import ModelParts, inspect_model
from apbv.stats import StageTimer

from .arguments import DEFAULT_DTYPES
from .simulated import Lap, Network, SimulatedHost, share_weights, simulate
from .workloads import load_model, text_prompt, video_prompt

# Prefills a workload once on these hosts, with this model and these settings; returns times, and
# what really ran.
Job = Callable[[HostGroup, ModelParts, PrefillConfig], dict]


@dataclass(frozen=True)
class Workload:
    """A random prompt: a text of given length, or a video with a given number of frames and
    resolution."""

    tokens: int | None = None
    frames: int | None = None
    height: int | None = None
    width: int | None = None


@dataclass(frozen=True)
class Case:
    """One way to prefill.

    Attributes:
        label: its name in tables and plots.
    """

    label: str
    config: PrefillConfig
    hosts: int = 1


class Bench:
    """A model that prefills workloads on real or simulated hosts.

    Args:
        options: the command line: ``model``, ``dtype``, ``query_len``, and ``bandwidth`` and
            ``latency`` of links.
        hosts: the hosts that torchrun started, or this process alone, which simulates hosts.
        num_runs: how often it will run, which it shows.
    """

    def __init__(self, options: argparse.Namespace, hosts: HostGroup, num_runs: int):
        self._bar = tqdm(total=num_runs, unit="prefill", disable=None if hosts.rank == 0 else True)
        self._query_len = options.query_len
        self.hosts = hosts
        self.network = Network(options.bandwidth, options.latency)
        if hosts.device.type == "cpu":
            keep_freed_memory()
        self.simulated = hosts.size == 1
        self.threads = torch.get_num_threads()
        dtype = getattr(torch, options.dtype or DEFAULT_DTYPES[hosts.device.type])
        self.model = load_model(options.model, dtype, hosts)
        self._parts: dict[tuple[int, str], ModelParts] = {}

    def prepare(self, workload: Workload) -> Job:
        """Draw a workload's prompt, and return the function that prefills it."""
        if workload.tokens is not None:
            prompt = text_prompt(self.model.config, workload.tokens, self._query_len)
        else:
            shape = workload.frames, workload.height, workload.width
            prompt = video_prompt(self.model.config, *shape, self._query_len)

        def job(hosts, parts, config):
            inputs = ModelInputs.from_processor(
                parts,
                prompt.batch,
                hosts,
                prompt.query_start,
                frame_parallel=config.frame_parallel,
            )
            hosts.barrier()
            first_lap = len(hosts.laps) if isinstance(hosts, SimulatedHost) else None
            state = prefill(parts, inputs, hosts=hosts, config=config, timer=StageTimer(hosts))
            return {
                **state.timer.summary(),
                "first_lap": first_lap,
                "method": state.method,
                "num_input_tokens": state.num_tokens,
                "num_video_tokens": state.inputs.num_visual_tokens,
                "anchor_len": state.layout.anchor_len,
                "passing_len": state.layout.passing_len,
                "early_passing_len": state.layout.early.passing_len,
            }

        return job

    def run(self, case: Case, job: Job, paces=None) -> dict:
        """Run a case once, and return its figures on every host that ran it.

        Of simulated hosts also their ``laps``, and the most ``busy_ms`` that a host's CPU and its
        GPU had with the prefill, whichever was the other's reason to wait.

        Args:
            job: what :meth:`prepare` returned.
            paces: see :func:`support.simulated.simulate`.
        """
        self._bar.set_postfix_str(f"{case.label}, {case.hosts} hosts", refresh=True)
        found = self._run(case, job, paces)
        self._bar.update()
        return found

    def _run(self, case: Case, job: Job, paces) -> dict:
        config = replace(case.config, kv="sharded")
        if self.hosts.device.type == "cpu" and not self.simulated:
            return_freed_memory()  # so that peak memory is that of one run
        if case.hosts == 1:
            return self._run_alone(config, job)
        if not self.simulated:
            return job(self.hosts, self.parts(config), config)
        twins = [self.parts(config, rank) for rank in range(case.hosts)]

        def host_job(hosts):
            return job(hosts, twins[hosts.rank], config), hosts.laps

        device = self.hosts.device
        made = simulate(case.hosts, host_job, network=self.network, device=device, paces=paces)
        busy = [
            [1e3 * sum(times) for times in zip(*laps[found["first_lap"] :], strict=True)]
            for found, laps in made
        ]
        return {
            **made[0][0],
            "laps": [laps for _, laps in made],
            "busy_ms": dict(zip(Lap._fields, map(max, zip(*busy, strict=True)), strict=True)),
        }

    def parts(self, config: PrefillConfig, rank: int = 0) -> ModelParts:
        """Return the model as a prefill takes it, made once as by an engine; simulated hosts share
        weights."""
        key = rank, config.backend
        if key not in self._parts:
            self._parts[key] = inspect_model(
                share_weights(self.model) if rank else self.model, config.backend
            )
        return self._parts[key]

    def _run_alone(self, config: PrefillConfig, job: Job) -> dict:
        """Run on host 0 with the CPU threads of all hosts, while the others wait."""
        result: dict = {}
        if self.hosts.rank == 0:
            torch.set_num_threads(self.threads * self.hosts.size)
            try:
                result = job(HostGroup.single(self.hosts.device), self.parts(config), config)
            finally:
                torch.set_num_threads(self.threads)
        self.hosts.barrier()
        return result


def measure(
    bench: Bench, workload: Workload, cases: list[Case], rounds: int, warmup: int
) -> list[list[dict]]:
    """Run all cases of a workload in turn, round after round; return each case's figures, on host
    0."""
    job = bench.prepare(workload)
    samples: list[list[dict]] = [[] for _ in cases]
    for index in range(warmup + rounds):
        for case, own in zip(cases, samples, strict=True):
            found = bench.run(case, job)
            own += [found] if index >= warmup else []
    return samples
