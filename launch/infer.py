"""Answer a question about a video, images or a long text.

    torchrun --nproc-per-node 2 launch/infer.py --model demo
    torchrun --nproc-per-node 8 launch/infer.py --model Qwen/Qwen2.5-VL-7B-Instruct \
        --video clip.mp4 --prompt "What happens in this video?"
    python launch/infer.py --model demo          (one host)
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from tqdm import tqdm
from transformers import TextStreamer

from apbv import Engine, GenerateResult, HostGroup, demo
from apbv.allocator import keep_freed_memory
from apbv.hosts import run_on_hosts
from apbv.launch.options import (
    add_draft_options,
    add_host_options,
    add_prefill_options,
    fill_in,
    load_engine,
    quieten,
    require_draft,
)
from apbv.speculate.picture import draw_kept
from apbv.stats import append_json_lines
from apbv.timeline import write_timeline
from apbv.video import probe, read_frames, sample_fps, sample_uniform

MOST_FRAMES_DRAWN = 36


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help='"demo", a directory, or a hub id')
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--video", metavar="demo|FILE", help="a video file, or the packaged clip")
    source.add_argument("--image", metavar="FILE", action="append", help="an image file; may be repeated")
    source.add_argument("--context", metavar="FILE", help="a text file that the question is about")
    parser.add_argument("--prompt", help="the question")

    add_prefill_options(parser)
    decode = parser.add_argument_group("decode")
    decode.add_argument("--max-new-tokens", type=int, help="default 128; demo 512")
    decode.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    decode.add_argument("--top-p", type=float, default=1.0)
    decode.add_argument("--seed", type=int, default=0)

    draft = add_draft_options(parser)
    draft.add_argument("--save-kept", metavar="PNG", help="a picture of the visual tokens that the draft saw")

    parser.add_argument("--json", metavar="FILE", help="append the figures as one JSON line")
    parser.add_argument("--timeline", metavar="FILE", help="what happened when, for ui.perfetto.dev")
    add_host_options(parser)
    options = parser.parse_args(arguments)
    fill_in(options)
    if options.model == "demo":
        options.prompt = demo.DEMO_QUESTION if options.prompt is None else options.prompt
        if options.video is None and not (options.image or options.context):
            options.video = "demo"
    if options.video == "demo":
        options.video = str(demo.video_path())
    if options.prompt is None:
        parser.error("--prompt is required")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)

    def answer(hosts: HostGroup) -> None:
        if hosts.device.type == "cpu":
            keep_freed_memory()
        quieten(hosts)
        run(options, hosts)

    return run_on_hosts(answer, options.timeout, options.tensor_parallel)


def run(options: argparse.Namespace, hosts: HostGroup) -> None:
    with hosts.local_stage("reading the options"):
        require_draft(options, "save_kept")
        if options.draft_host and options.save_kept:
            raise ValueError("--save-kept shows what host 0's draft saw: not together with --draft-host")
        context = None
        if options.context:
            try:
                with open(options.context, encoding="utf-8") as file:
                    context = file.read()
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"cannot read the context {options.context}: {error}") from error
    engine = load_engine(options, hosts)
    streamer = TextStreamer(engine.tokenizer, skip_special_tokens=True) if hosts.is_leader else None

    def show(token: int) -> None:
        if streamer is not None:
            streamer.put(torch.tensor([token]))

    with _progress(engine, enabled=hosts.is_leader and sys.stderr.isatty()):
        answer = engine.generate(
            options.prompt,
            video=options.video,
            images=options.image,
            context=context,
            num_frames=options.frames,
            fps=options.fps,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=options.seed,
            on_token=show,
            timeline=options.timeline is not None,
        )
    # Of the hosts that answered: a draft host is by itself.
    with engine.hosts.local_stage("writing the figures"):
        if hosts.is_leader:
            streamer.end()
            sys.stdout.flush()
            print(_table(answer.stats), file=sys.stderr, flush=True)
            if options.json:
                append_json_lines(options.json, [answer.stats])
            if options.save_kept:
                save_kept(answer, options)
            if options.timeline:
                write_timeline(options.timeline, answer.timeline)


def save_kept(answer: GenerateResult, options: argparse.Namespace) -> None:
    """Draw at most so many frames, evenly chosen, with the visual tokens that the draft saw.

    Raises:
        ValueError: there is nothing to draw, or the file cannot be written.
    """
    if answer.kept is None:
        raise ValueError(
            "--save-kept needs a video, and a draft that sees some of its tokens (--speculate specvlm)"
        )
    info = probe(options.video)
    if options.fps is None:
        sampled = sample_uniform(info, options.frames)
    else:
        sampled = sample_fps(info, options.fps, max_frames=options.frames)
    shown = sample_uniform(len(answer.kept), MOST_FRAMES_DRAWN)
    per_row = -(-len(sampled) // len(answer.kept))  # frames that the model merges
    picture = draw_kept(read_frames(info, [sampled[row * per_row] for row in shown]), answer.kept[shown].numpy())
    try:
        picture.save(options.save_kept)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot write the picture {options.save_kept}: {error}") from error


@contextmanager
def _progress(engine: Engine, enabled: bool) -> Iterator[None]:
    """A bar over the decoder layers of the first forward pass, which is the prefill."""
    if not enabled:
        yield
        return
    layers = engine.model.get_decoder().layers
    with tqdm(total=len(layers), desc="prefill", unit="layer", leave=False) as bar:
        hooks = [layer.register_forward_hook(lambda *_: bar.update() and None) for layer in layers]
        hooks.append(layers[-1].register_forward_hook(lambda *_: bar.close()))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _table(stats: dict) -> str:
    """The figures that a person wants to see at a glance."""
    mebibyte = 2**20
    rows = [
        ("method", f"{stats['method']} on {_hosts(stats)}, {stats['device']}, {stats['dtype']}"),
        ("prompt", f"{stats['num_input_tokens']} tokens, {stats['num_video_tokens']} of them visual"),
        ("anchor / passing", f"{stats['anchor_len']} / {stats['passing_len']} tokens"),
        *((name, f"{milliseconds:.1f} ms") for name, milliseconds in stats["stages_ms"].items()),
        ("time to first token", f"{stats['ttft_ms']:.1f} ms"),
        ("decoding", f"{stats['output_throughput'] or 0:.1f} tokens/s"),
        ("communication", f"{stats['comm_bytes_total'] / mebibyte:.2f} MiB"),
        ("peak memory", f"{max(stats['peak_memory_bytes']) / mebibyte:.0f} MiB on the fullest process"),
    ]
    return "\n".join(f"  {name:<20} {value}" for name, value in rows)


def _hosts(stats: dict) -> str:
    size = stats["tensor_parallel_size"]
    return f"{stats['hosts']} host(s)" + (f" of {size} processes" if size > 1 else "")


if __name__ == "__main__":
    sys.exit(main())
