"""Runs prefills of one model on real or simulated hosts, and measures them."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from tqdm import tqdm
from transformers import InternVLConfig

from apbv import Engine, HostGroup, ModelInputs, PrefillConfig, prefill
from apbv.allocator import keep_freed_memory, return_freed_memory
from apbv.model.parts import inspect_model
from apbv.stats import StageTimer

from ..arguments import DEFAULT_DTYPES
from ..workloads import CONFIGS, build_model, internvl_prompt, text_prompt, video_prompt
from .presets import Case
from support.simulated import share_weights, simulate

# Prefills a workload once on these hosts, with this model and these settings, and returns :func:`figures`.
Job = Callable[[HostGroup, torch.nn.Module, PrefillConfig], dict]


@dataclass(frozen=True)
class Workload:
    """A workload is one prompt: a synthetic text or video, or the frames of a file.

    Attributes:
        tokens: length of a text.
        frames, height, width: number and size in pixels of a video's frames.
        video: the file.
    """

    tokens: int | None = None
    frames: int | None = None
    height: int | None = None
    width: int | None = None
    video: Path | None = None


@dataclass
class Measured:
    """The runs of one case on one workload: the last one's figures, and those of all that count."""

    case: Case
    workload: Workload
    run: dict
    samples: list[dict] = field(default_factory=list)

    @property
    def ttft_ms(self) -> list[float]:
        """Return the time to first token of every run."""
        return [sample["ttft_ms"] for sample in self.samples]


class Bench:
    """A model that prefills workloads on real or simulated hosts.

    Args:
        options: the command line.
        hosts: the hosts that torchrun started, or this process alone, which simulates hosts.
    """

    def __init__(self, options: argparse.Namespace, hosts: HostGroup):
        self.options, self.hosts = options, hosts
        if hosts.device.type == "cpu":
            keep_freed_memory()
        self.simulated = hosts.size == 1
        self.threads = torch.get_num_threads()
        dtype = getattr(torch, options.dtype or DEFAULT_DTYPES[hosts.device.type])
        if options.model in CONFIGS:
            self.processor = None
            self.model = build_model(CONFIGS[options.model], dtype, hosts.device)
        else:
            engine = Engine.from_pretrained(options.model, hosts=hosts, dtype=dtype)
            self.model, self.processor = engine.model, engine.processor
        self.twins: list = [self.model]

    def prepare(self, workload: Workload) -> Job:
        """Read or draw a workload's prompt, and return the function that prefills it."""
        options = self.options
        if workload.video is not None:

            def from_file(hosts, model, config):
                engine = Engine(model, self.processor, hosts, config)
                hosts.barrier()
                state = engine.prefill(options.question, video=workload.video, num_frames=workload.frames)
                return figures(state)

            return from_file
        if workload.tokens is not None:
            prompt = text_prompt(workload.tokens, options.query_len, options.seed)
        elif isinstance(self.model.config, InternVLConfig):
            prompt = internvl_prompt(self.model.config, workload.frames, options.query_len, options.seed)
        else:
            prompt = video_prompt(
                workload.frames, workload.height, workload.width, options.query_len, options.seed
            )

        def from_batch(hosts, model, config):
            parts = inspect_model(model)
            inputs = ModelInputs.from_processor(
                parts, prompt.batch, hosts, config.frame_parallel, prompt.query_start
            )
            hosts.barrier()
            return figures(prefill(model, inputs, hosts=hosts, config=config, timer=StageTimer(hosts)))

        return from_batch

    def run(self, case: Case, job: Job, paces=None) -> dict:
        """Run a case once, and return its figures on every host that ran it.

        Args:
            case: the method and its hosts.
            job: what :meth:`prepare` returned.
            paces: see :func:`support.simulated.simulate`.
        """
        config = replace(case.config, kv="sharded")
        if self.hosts.device.type == "cpu" and not self.simulated:
            return_freed_memory()  # so that peak memory is that of one run
        if case.hosts == 1:
            return self._run_alone(config, job)
        if not self.simulated:
            return job(self.hosts, self.model, config)
        while len(self.twins) < case.hosts:
            self.twins.append(share_weights(self.model))
        device = self.hosts.device

        def host_job(hosts):
            summary = job(hosts, self.twins[hosts.rank], config)
            return summary, hosts.laps

        made = simulate(case.hosts, host_job, network=case.network, device=device, paces=paces)
        summaries, laps = zip(*made, strict=True)
        return {**summaries[0], "laps": laps}

    def _run_alone(self, config: PrefillConfig, job: Job) -> dict:
        """Run on host 0 with the CPU threads of all hosts, while the others wait."""
        result: dict = {}
        if self.hosts.rank == 0:
            torch.set_num_threads(self.threads * self.hosts.size)
            try:
                result = job(HostGroup.single(self.hosts.device), self.model, config)
            finally:
                torch.set_num_threads(self.threads)
        self.hosts.barrier()
        return result


def figures(state) -> dict:
    """Return a prefill's times, and the method and lengths that really ran."""
    layout = state.layout
    return {
        **state.timer.summary(),
        "method": state.method,
        "num_input_tokens": state.num_tokens,
        "num_video_tokens": state.inputs.num_visual_tokens,
        "anchor_len": layout.anchor_len,
        "passing_len": layout.passing_len,
    }


def measure(bench: Bench, workload: Workload, cases: list[Case], bar: tqdm) -> list[Measured]:
    """Run all cases of a workload in turn, round after round."""
    job = bench.prepare(workload)
    measured = [Measured(case, workload, {}) for case in cases]
    for index in range(bench.options.warmup + bench.options.rounds):
        for entry in measured:
            bar.set_postfix_str(f"{entry.case.label}, {entry.case.hosts} hosts", refresh=True)
            summary = bench.run(entry.case, job)
            bar.update()
            if index >= bench.options.warmup and summary:
                entry.run = summary
                entry.samples.append(summary)
    return measured
