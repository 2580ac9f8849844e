"""Measures one way through one stage of a video's road, in processes that do nothing else.

A stage is everything from the opening of the file to its result: the frames in memory, the vision
tower's embeddings, or the first token's logits.
"""

import os
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import apbv  # noqa: F401  (before transformers: see apbv.compat.torchvision_guard)

# isort: split
import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoProcessor
from transformers.image_utils import SizeDict

from apbv import Engine, HostGroup, PrefillConfig, VideoConfig, demo
from apbv.device.allocator import keep_freed_memory, return_freed_memory
from apbv.input.media.video import probe, read_frames, sample_uniform
from apbv.input.prompts.model_inputs import ModelInputs
from apbv.input.prompts.prompt_reader import PromptReader
from apbv.model.loading.load import read_config
from apbv.model.parts import inspect_model
from apbv.prefilling.encoding.placeholder_exchange import encode_and_exchange
from apbv.prefilling.encoding.vision import tower_rows
from apbv.prefilling.methods import METHODS
from apbv.prefilling.prefiller import Prefiller
from apbv.request.request import Question, Request
from apbv.stats import StageTimer, peak_memory_bytes, reset_peak_memory
from apbv.testing.random_models import build_model, config_like

from ..processes import end_children_with_this, pin_host, synchronize
from .clips import READERS

STAGES = ("frames", "embeddings", "first_token")
QUESTION = "name the letters in order"
# What a processor's placeholders are called in a model's config.
_TOKENS = ("video_token_id", "image_token_id", "vision_start_token_id", "vision_end_token_id")
_SECONDS_TO_WAIT = 600.0  # for another host
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Job:
    """One measurement.

    Attributes:
        stage: one of :data:`STAGES`.
        way: a library's name in :data:`.clips.READERS` (for frames only), ``"transformers"`` or
            ``"apbv"``.
        hosts: the processes, of which each reads its share.
        num_frames, sampling: how many frames are read; ``"sparse"`` ones are spread over the clip,
            ``"dense"`` ones adjoin in its middle.
        reader: the library that decodes for ``"transformers"``.
        settings: video.py's other options, and the video files ``clip`` and ``warm_up``, a short
            one that is read first, for what is only done once.
    """

    stage: str
    way: str
    hosts: int
    num_frames: int
    sampling: str
    reader: str
    settings: Namespace

    def choose(self, num_frames: int) -> list[int]:
        """Choose frames of a video with ``n`` frames; ascending."""
        if self.sampling == "sparse":
            return sample_uniform(num_frames, self.num_frames)
        count = min(num_frames, self.num_frames)
        first = (num_frames - count) // 2
        stop = (num_frames + count) // 2
        return list(range(first, stop))


@dataclass(frozen=True)
class Measured:
    """Measurement of one host.

    Attributes:
        seconds, cpu_seconds: by the wall clock, and of all of the process's threads.
        peak_memory_bytes: of the process.
        stage_seconds: time at work by stage, all runs of a stage together; none where a library
            does not tell.
        num_visual_tokens: of the prompt; None if there is no prompt.
    """

    seconds: float
    cpu_seconds: float
    peak_memory_bytes: int
    stage_seconds: dict[str, float]
    num_visual_tokens: int | None


@dataclass(frozen=True)
class Outcome:
    """Result of a stage.

    Attributes:
        values: ``[rows, ...]`` on any device: frames, visual tokens or logits.
        num_visual_tokens: of the prompt.
        timer: timed the stages.
    """

    values: Any
    num_visual_tokens: int | None = None
    timer: StageTimer | None = None


def in_processes_of_their_own(count: int, function: Callable[..., Result], *args) -> list[Result]:
    """Call ``function(rank, *args)`` in several new processes at once; return each result.

    They are forked from a server that has imported the libraries and done nothing else.

    Raises:
        ValueError: a process was killed.
    """
    end_children_with_this()
    context = get_context("forkserver")
    context.set_forkserver_preload(["apbv.engine"])
    with ProcessPoolExecutor(count, context) as pool:
        try:
            # All are started before the first is waited for.
            futures = [pool.submit(function, rank, *args) for rank in range(count)]
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            raise ValueError(
                "a process was killed, perhaps because the memory did not suffice"
            ) from error


def measure(rank: int, job: Job, rendezvous: str, kept: Path | None) -> Measured:
    """Measure one host's part of a job; collective over the job's processes.

    Args:
        rendezvous: a file by which the hosts meet.
        kept: the file in which what the stage makes is saved, outside the measurement; None: it is
            not.
    """
    os.environ.update(OMP_NUM_THREADS=str(job.settings.threads), LOCAL_RANK=str(rank))
    torch.set_num_threads(job.settings.threads)
    if job.settings.pinned:
        pin_host(rank, job.settings.threads)
    hosts = _join(rank, job.hosts, rendezvous)
    try:
        if hosts.device.type == "cpu":
            # As launch/infer.py does; here for every way.
            keep_freed_memory()
        if job.way in READERS:
            run = partial(_read_only, job)
        else:
            run = ROADS[job.way](job, hosts).run
        with hosts.collective_stage("measuring"), torch.no_grad():
            # Warm up.
            run(job.settings.warm_up)
            return_freed_memory()
            hosts.barrier()
            # Measure.
            measured, outcome = _measure(hosts, run, job.settings.clip)
            # Save.
            if kept is not None:
                values = outcome.values.cpu()
                if job.stage != "frames":
                    values = values.float()
                np.save(kept, values)
        return measured
    finally:
        hosts.close()


def _read_only(job: Job, clip: Path) -> Outcome:
    """Read a clip's frames with the library of the job's way."""
    read = READERS[job.way]
    frames, _ = read(str(clip), job.settings.threads, job.choose)
    return Outcome(torch.from_numpy(frames))


def _join(rank: int, size: int, rendezvous: str) -> HostGroup:
    if size == 1:
        return HostGroup.single()
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    return HostGroup.from_process_group(dist.group.WORLD, timeout=_SECONDS_TO_WAIT, owns_group=True)


def _measure(
    hosts: HostGroup, run: Callable[[Path], Outcome], clip: Path
) -> tuple[Measured, Outcome]:
    """Run a stage on a clip once; return this host's measurement, and what came out."""
    reset_peak_memory(hosts.device)
    cpu_began = time.process_time()
    began = time.perf_counter()
    outcome = run(clip)
    synchronize(hosts.device)
    seconds = time.perf_counter() - began
    cpu_seconds = time.process_time() - cpu_began
    peak_bytes = peak_memory_bytes(hosts.device)

    stage_seconds: dict[str, float] = {}
    if outcome.timer is not None:
        for name, stage_began, stage_ended in outcome.timer.runs():
            before = stage_seconds.get(name, 0.0)
            stage_seconds[name] = before + stage_ended - stage_began
    measured = Measured(seconds, cpu_seconds, peak_bytes, stage_seconds, outcome.num_visual_tokens)
    return measured, outcome


class Model:
    """A model with random weights that both ways share, and its processor.

    It is narrow, and of Qwen2.5-VL's layout.
    """

    def __init__(self, job: Job, hosts: HostGroup):
        self._job = job
        self._hosts = hosts
        settings = job.settings

        # The processor.
        self._processor = AutoProcessor.from_pretrained(demo.model_path(), trust_remote_code=False)
        self._processor.video_processor.size = SizeDict(
            shortest_edge=56 * 56, longest_edge=settings.max_pixels
        )

        # The model. As in Qwen2.5-VL, every eighth layer attends to whole frames.
        depth = settings.vision_depth
        hidden = settings.vision_hidden
        vision = {
            "depth": depth,
            "hidden_size": hidden,
            "fullatt_block_indexes": list(range(min(8, depth) - 1, depth, 8)),
            "intermediate_size": hidden * 3420 // 1280,
        }
        config = config_like("qwen2.5-vl-narrow", vision=vision)
        demo_config = read_config(demo.model_path())
        for name in _TOKENS:
            setattr(config, name, getattr(demo_config, name))
        self._model = build_model(config, getattr(torch, settings.dtype), hosts.device)

    def run(self, clip: Path) -> Outcome:
        """Run the job's stage on a clip, by the method that is named after it."""
        run_stage = getattr(self, f"_{self._job.stage}")
        return run_stage(str(clip), StageTimer(self._hosts))


class Transformers(Model):
    """Runs the processor and the model as transformers has them, on the whole video at once."""

    def _embeddings(self, clip: str, timer: StageTimer) -> Outcome:
        batch = self._batch(clip, timer)
        with timer.stage("encode"):
            batch = batch.to(self._hosts.device)
            pixels = batch["pixel_values_videos"]
            grid = batch["video_grid_thw"]
            features = self._model.model.get_video_features(pixels, grid, return_dict=True)
            rows = torch.cat(list(features.pooler_output))
        return self._outcome(rows, batch, timer)

    def _first_token(self, clip: str, timer: StageTimer) -> Outcome:
        batch = self._batch(clip, timer).to(self._hosts.device)
        # This stage includes the vision tower.
        with timer.stage("prefill"):
            outputs = self._model(**batch, use_cache=True, logits_to_keep=1)
            logits = outputs.logits[:, -1]
        return self._outcome(logits, batch, timer)

    def _batch(self, clip: str, timer: StageTimer) -> Any:
        """Return the processor's tensors of the question about a clip."""
        with timer.stage("decode_video"):
            read = READERS[self._job.reader]
            frames, metadata = read(clip, self._job.settings.threads, self._job.choose)
        with timer.stage("preprocess"):
            content = [{"type": "video"}, {"type": "text", "text": QUESTION}]
            messages = [{"role": "user", "content": content}]
            text = self._processor.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
            return self._processor(
                text=[text],
                videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)],
                video_metadata=[metadata],
                do_sample_frames=False,
                return_tensors="pt",
            )

    def _outcome(self, values: torch.Tensor, batch, timer: StageTimer) -> Outcome:
        is_visual = batch["input_ids"] == self._model.config.video_token_id
        return Outcome(values, int(is_visual.sum()), timer)


class Apbv(Model):
    """Does what an engine does with a request, up to the end of the stage."""

    def __init__(self, job: Job, hosts: HostGroup):
        super().__init__(job, hosts)
        config = PrefillConfig(video=VideoConfig(threads=job.settings.threads))
        self._config = config
        self._parts = inspect_model(self._model, config.backend)
        self._engine = Engine(self._model, self._processor, hosts, config)
        reader = PromptReader(self._parts, self._processor, job.num_frames, config)
        self._prefiller = Prefiller(reader, hosts, config)

    def _frames(self, clip: str, timer: StageTimer) -> Outcome:
        with timer.stage("decode_video"):
            info = probe(clip)
            indices = self._job.choose(info.num_frames)
            frames = read_frames(info, indices, self._job.settings.threads)
        return Outcome(torch.from_numpy(frames), timer=timer)

    def _embeddings(self, clip: str, timer: StageTimer) -> Outcome:
        inputs = self._read(clip, timer)
        layout = METHODS["apbv"].plan(
            self._hosts.size,
            inputs.num_tokens,
            inputs.context_start,
            inputs.query_start,
            self._config,
        )
        source = partial(tower_rows, self._parts, inputs.visual, timer)
        local = encode_and_exchange(self._parts, inputs, source, layout, self._hosts, timer)
        # A model with deepstack, which this is not, has more streams.
        (rows,) = local.streams
        return Outcome(rows, inputs.num_visual_tokens, timer)

    def _first_token(self, clip: str, timer: StageTimer) -> Outcome:
        state = self._engine.prefill(QUESTION, video=clip, num_frames=self._job.num_frames)
        return Outcome(state.logits, state.inputs.num_visual_tokens, state.timer)

    def _read(self, clip: str, timer: StageTimer) -> ModelInputs:
        """Read the prompt; its pixels are still to come."""
        return self._prefiller.read(Request(Question(QUESTION, clip), timer)).inputs


ROADS = {"apbv": Apbv, "transformers": Transformers}
