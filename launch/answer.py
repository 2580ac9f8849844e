"""Runs launch/infer.py: reads the sources, loads the engine, answers, and prints the metrics."""

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TextStreamer

from apbv import GenerateResult, HostGroup, SamplingParams
from apbv.errors import InvalidRequestError, StorageError
from apbv.input.media.audio import AudioError, has_audio
from apbv.input.media.images import Picture
from apbv.input.media.video.file import VideoFile
from apbv.launch.options import given, load_engine, prepare_process
from apbv.launch.progress import ProgressBars
from apbv.reporting import raised_as
from apbv.stats import append_json_lines

_SHOWN_OVERLAP_MS = 0.1
_MIB = 2**20


def run(options: argparse.Namespace, hosts: HostGroup, progress_delay: float = 2.0) -> None:
    """Answer the question, and print the answer and its metrics; collective.

    Args:
        progress_delay: seconds before a progress bar is shown.

    Raises:
        ApbvError: a source cannot be read, a file cannot be written, or the engine rejects the
            request.
        HostError: another host failed.
    """
    prepare_process(options, hosts)
    with hosts.local_stage("reading the options"):
        context = read_sources(options)
        if hosts.is_leader and options.json is not None:
            require_writable(Path(options.json))
    progress = ProgressBars(enabled=hosts.is_leader and sys.stderr.isatty(), delay=progress_delay)
    with closing(progress):  # removes the bars from the screen, also on errors
        engine = load_engine(options, hosts)
        progress.watch(engine)
        with streamed(engine.tokenizer, enabled=hosts.is_leader) as show:
            answer = engine.generate(
                options.prompt,
                video=options.video,
                images=options.image,
                audio=options.audio,
                audio_in_video=options.audio_in_video,
                context=context,
                num_frames=options.frames,
                fps=options.fps,
                sampling=SamplingParams(**given(options, SamplingParams)),
                on_token=show,
                on_stage=progress.begin,
                on_progress=progress.advance,
            )
    # The hosts that answered: a draft host has its own group.
    with engine.hosts.local_stage("writing the figures"):
        if hosts.is_leader:
            print(table(answer, hosts.size), file=sys.stderr, flush=True)
            if options.json:
                append_json_lines(options.json, [answer.stats])


@contextmanager
def streamed(tokenizer: PreTrainedTokenizerBase, enabled: bool) -> Iterator[Callable[[int], None]]:
    """Stream tokens to stdout, and hold warnings back until the answer's line has ended.

    The line is always ended, so that an error follows on its own line.
    """
    streamer = TextStreamer(tokenizer, skip_special_tokens=True)
    shown_tokens = []

    def show(token: int) -> None:
        if enabled:
            streamer.put(torch.tensor([token]))
            shown_tokens.append(token)

    pending_warnings = []
    try:
        with warnings.catch_warnings(record=True) as pending_warnings:
            yield show
    finally:
        if shown_tokens:
            streamer.end()
        for warning in pending_warnings:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )


def read_sources(options: argparse.Namespace) -> str | None:
    """Return the text of ``--context``.

    Also make sure that videos, images and audio files can be opened.

    A video's frames are not listed yet: that takes long for long videos, and is part of answering.

    Raises:
        StorageError: a file cannot be read, or is not a video, image or audio file.
    """
    for path in options.image or ():
        Picture.of(path)
    for path in options.video or ():
        with VideoFile(path):
            pass
    for path in options.audio or ():
        if not has_audio(path):
            raise AudioError(f"{path}: has no audio track")
    if not options.context:
        return None
    with raised_as(
        InvalidRequestError,
        f"cannot read the context {options.context}",
        OSError,
        UnicodeDecodeError,
    ):
        return Path(options.context).read_text(encoding="utf-8")


def require_writable(path: Path) -> None:
    """Check before the work starts, and without leaving a file, that the metrics can be written.

    Raises:
        StorageError: they cannot.
    """
    to_write = path if path.exists() else path.parent
    if path.is_dir() or not os.access(to_write, os.W_OK):
        raise StorageError(f"--json {path} cannot be written")


def table(answer: GenerateResult, num_hosts: int) -> str:
    """Format the most important metrics as a table.

    Args:
        num_hosts: the number of hosts that take part, a draft host included.
    """
    stats = answer.stats
    rows = [("method", f"{stats['method']} on {_hosts(stats, num_hosts)}")]
    rows += _prompt(answer)
    rows += _prefill(stats)

    # Times.
    for name, milliseconds in stats["stages_ms"].items():
        if milliseconds:
            rows.append((name, f"{milliseconds:.1f} ms"))
    if stats["overlap_ms"] >= _SHOWN_OVERLAP_MS:
        rows.append(("overlap", f"{stats['overlap_ms']:.1f} ms of these, overlapping other stages"))
    rows.append(("time to first token", f"{stats['ttft_ms']:.1f} ms"))
    if stats["output_throughput"] is not None and len(stats["token_ids"]) > 1:
        rows.append(("decoding", f"{stats['output_throughput']:.1f} tokens/s"))
    if stats["speculation"] is not None:
        rows += _speculation(stats["speculation"], on_draft_host=num_hosts > stats["hosts"])

    # Bytes.
    if stats["comm_bytes_total"]:
        rows.append(("communication", f"{stats['comm_bytes_total'] / _MIB:.2f} MiB"))
    peak = max(stats["peak_memory_bytes"])
    rows.append(("peak memory", f"{peak / _MIB:.0f} MiB (max over processes)"))
    return "\n".join(f"  {name:<20} {value}" for name, value in rows)


def _hosts(stats: dict[str, Any], num_hosts: int) -> str:
    """Format the hosts, their device and dtype."""
    num_prefilling = stats["hosts"]
    num_processes = stats["tensor_parallel_size"]
    text = "1 host" if num_prefilling == 1 else f"{num_prefilling} hosts"
    if num_processes > 1:
        text += f" of {num_processes} processes"
    if num_hosts > num_prefilling:
        text += " and a draft host"
    return f"{text}, {stats['device']}, {stats['dtype']}"


def _prompt(answer: GenerateResult) -> list[tuple[str, str]]:
    """Format the videos and the tokens of the prompt."""
    rows = []
    for number, video in enumerate(answer.videos, start=1):
        name = "video" if len(answer.videos) == 1 else f"video {number}"
        frames = f"{len(video.frames)} of {video.info.num_frames} frames"
        rows.append((name, f"{frames}, {video.info.duration:.1f} s"))
    stats = answer.stats
    tokens = f"{stats['num_input_tokens']} tokens, {stats['num_video_tokens']} of them visual"
    if stats["num_audio_tokens"]:
        tokens += f", {stats['num_audio_tokens']} audio"
    rows.append(("prompt", tokens))
    return rows


def _prefill(stats: dict[str, Any]) -> list[tuple[str, str]]:
    """Format what the prefill approximates."""
    rows = []
    if stats["anchor_len"] or stats["passing_len"]:
        rows.append(("anchor / passing", f"{stats['anchor_len']} / {stats['passing_len']} tokens"))
    if stats["warning"] is not None:
        rows.append(("warning", stats["warning"]))
    reduction = stats["reduction"]
    if reduction is not None:
        before = reduction["num_video_tokens_before"]
        after = reduction["num_video_tokens_after"]
        rows.append((f"kept by {reduction['method']}", f"{after} of {before} visual tokens"))
    if stats["attention_density"] is not None:
        density = f"{stats['attention_density']:.0%} of the causal scores computed"
        rows.append(("sparse attention", density))
    return rows


def _speculation(figures: dict[str, Any], on_draft_host: bool) -> list[tuple[str, str]]:
    """Format the metrics of speculative decoding."""
    place = "on the draft host" if on_draft_host else "on host 0"
    rows = [("drafting", f"{figures['strategy']}, {place}")]
    if figures.get("lost_draft"):
        rows.append(("", f"continued alone: {figures['lost_draft']}"))
    if figures["switched_off"]:
        tokens = figures["switched_off_after"]
        rows.append(("", f"switched off after {tokens} tokens: {figures['switched_off']}"))
    if figures["num_drafted"]:
        share = f"{figures['num_accepted']} of {figures['num_drafted']} drafted tokens"
        rows.append(("accepted", f"{figures['acceptance_rate']:.0%}, {share}"))
    if figures["tokens_per_target_forward"] is not None:
        rows.append(("tokens per pass", f"{figures['tokens_per_target_forward']:.2f}"))
    return rows
