"""Runs prefills of one model on real or simulated hosts, and measures them."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import apbv  # noqa: F401  (before transformers: see apbv.compat.torchvision_guard)

# isort: split
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from apbv import Engine, HostGroup, ModelInputs, PrefillConfig, prefill
from apbv.device.allocator import keep_freed_memory, return_freed_memory
from apbv.model.parts import ModelParts, inspect_model
from apbv.stats import StageTimer
from apbv.testing.random_models import CONFIGS, build_model, text_prompt, video_prompt
from apbv.testing.simulated import Lap, Network, SimulatedHost, share_weights, simulate

from .arguments import DEFAULT_DTYPES

# Prefills a workload once on these hosts, with this model and these settings; returns times, and
# what really ran.
Job = Callable[[HostGroup, ModelParts, PrefillConfig], dict]
# Every simulated host's laps.
Paces = Sequence[Sequence[Lap]]


@dataclass(frozen=True)
class Workload:
    """A random prompt: a text, or a video.

    Attributes:
        tokens: the length of a text; None: it is a video.
        frames, height, width: of a video; the resolution is in pixels.
    """

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


def load_model(name: str, dtype: torch.dtype, hosts: HostGroup) -> PreTrainedModel:
    """Build one of :data:`CONFIGS` with random weights, or load the demo or a checkpoint."""
    if name in CONFIGS:
        return build_model(CONFIGS[name], dtype, hosts.device)
    return Engine.from_pretrained(name, hosts=hosts, dtype=dtype).model


class Bench:
    """A model that prefills workloads on real or simulated hosts.

    Args:
        options: the command line: ``model``, ``dtype``, ``query_len``, and ``bandwidth`` and
            ``latency`` of links.
        hosts: the hosts that torchrun started, or this process alone, which simulates hosts.
        num_runs: how often it will run, which it shows.
    """

    def __init__(self, options: argparse.Namespace, hosts: HostGroup, num_runs: int):
        # None: shown only in a terminal.
        hides_progress = None if hosts.rank == 0 else True
        self._bar = tqdm(total=num_runs, unit="prefill", disable=hides_progress)
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
            prompt = video_prompt(
                self.model.config,
                workload.frames,
                workload.height,
                workload.width,
                self._query_len,
            )

        def job(hosts: HostGroup, parts: ModelParts, config: PrefillConfig) -> dict:
            inputs = ModelInputs.from_processor(
                parts,
                prompt.batch,
                hosts,
                prompt.query_start,
                frame_parallel=config.ablation.frame_parallel,
            )
            hosts.barrier()
            first_lap = None
            if isinstance(hosts, SimulatedHost):
                first_lap = len(hosts.laps)
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

    def run(self, case: Case, job: Job, paces: Paces | None = None) -> dict:
        """Run a case once, and return its figures on every host that ran it.

        Of simulated hosts they include ``laps``, each host's, and ``busy_ms``: the longest times
        that a host's CPU and a host's GPU were busy with the prefill, also while the other waited.

        Args:
            job: what :meth:`prepare` returned.
            paces: see :func:`apbv.testing.simulated.simulate`.
        """
        self._bar.set_postfix_str(f"{case.label}, {case.hosts} hosts", refresh=True)
        figures = self._run(case, job, paces)
        self._bar.update()
        return figures

    def _run(self, case: Case, job: Job, paces: Paces | None) -> dict:
        config = replace(case.config, kv="sharded")
        if self.hosts.device.type == "cpu" and not self.simulated:
            # So that peak memory is that of one run.
            return_freed_memory()
        if case.hosts == 1:
            return self._run_alone(config, job)
        if not self.simulated:
            return job(self.hosts, self.parts(config), config)
        return self._run_simulated(case.hosts, config, job, paces)

    def _run_simulated(
        self, num_hosts: int, config: PrefillConfig, job: Job, paces: Paces | None
    ) -> dict:
        parts_of_hosts = [self.parts(config, rank) for rank in range(num_hosts)]

        def host_job(hosts: SimulatedHost) -> tuple[dict, list[Lap]]:
            figures = job(hosts, parts_of_hosts[hosts.rank], config)
            return figures, hosts.laps

        results = simulate(
            num_hosts, host_job, network=self.network, device=self.hosts.device, paces=paces
        )
        leader_figures, _ = results[0]
        cpu_ms = []
        gpu_ms = []
        for figures, laps in results:
            laps_of_prefill = laps[figures["first_lap"] :]
            cpu_ms.append(1e3 * sum(lap.cpu for lap in laps_of_prefill))
            gpu_ms.append(1e3 * sum(lap.gpu for lap in laps_of_prefill))
        return {
            **leader_figures,
            "laps": [laps for _, laps in results],
            "busy_ms": {"cpu": max(cpu_ms), "gpu": max(gpu_ms)},
        }

    def parts(self, config: PrefillConfig, rank: int = 0) -> ModelParts:
        """Return the model as a prefill takes it, made once, as by an engine.

        Args:
            rank: the simulated host's; hosts share weights.
        """
        key = (rank, config.backend)
        if key not in self._parts:
            model = self.model if rank == 0 else share_weights(self.model)
            self._parts[key] = inspect_model(model, config.backend)
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
    """Run all cases of a workload in turn, round after round.

    Args:
        rounds: that are measured.
        warmup: rounds before, which are not.

    Returns:
        each case's figures, by round, on host 0.
    """
    job = bench.prepare(workload)
    samples: list[list[dict]] = [[] for _ in cases]
    for number in range(warmup + rounds):
        for case, samples_of_case in zip(cases, samples, strict=True):
            figures = bench.run(case, job)
            if number >= warmup:
                samples_of_case.append(figures)
    return samples
