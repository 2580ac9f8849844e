"""Answer a question about a video, images or a long text.

    torchrun --nproc-per-node 2 launch/infer.py --model demo
    torchrun --nproc-per-node 8 launch/infer.py --model Qwen/Qwen2.5-VL-7B-Instruct \
        --video clip.mp4 --prompt "What happens in this video?"
    python launch/infer.py --model demo          (one host)
"""

import argparse
import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from tqdm import tqdm
from transformers import TextStreamer
from transformers.utils import logging as transformers_logging

from apbv import Engine, GenerateResult, HostGroup, PrefillConfig, SpeculativeConfig, demo
from apbv.allocator import keep_freed_memory
from apbv.config import HIPPO_TERMS, KEEP_POLICIES, KV_PLACEMENTS, PRUNINGS
from apbv.engine import DTYPES
from apbv.hosts import run_on_hosts
from apbv.kernels.backends import BACKENDS
from apbv.methods import METHODS
from apbv.methods.importance import IMPORTANCE
from apbv.speculate import STRATEGIES
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

    prefill = parser.add_argument_group("prefill")
    prefill.add_argument("--method", default="apbv", help=f"one of {', '.join(sorted(METHODS))}")
    prefill.add_argument("--frames", type=int, help="frames sampled from a video (default 64; demo 2048)")
    prefill.add_argument("--fps", type=float, help="sample at this rate, at most --frames")
    prefill.add_argument("--anchor-len", type=int, help="anchor tokens (default: from the prompt's length)")
    prefill.add_argument("--passing-len", type=int, help="KV pairs each block passes on (default: likewise)")
    prefill.add_argument(
        "--importance", default=PrefillConfig().importance, help=f"one of {', '.join(sorted(IMPORTANCE))}"
    )
    prefill.add_argument("--kv", choices=KV_PLACEMENTS, default="gathered", help="where decoding finds the KV")
    prefill.add_argument(
        "--backend",
        choices=BACKENDS,
        default="auto",
        help="what computes attention (default: by device)",
    )
    prefill.add_argument("--dtype", help=f"{', '.join(DTYPES)} (default auto; demo float32)")

    decode = parser.add_argument_group("decode")
    decode.add_argument("--max-new-tokens", type=int, help="default 128; demo 512")
    decode.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    decode.add_argument("--top-p", type=float, default=1.0)
    decode.add_argument("--seed", type=int, default=0)

    draft = parser.add_argument_group("speculative decoding")
    draft.add_argument("--speculate", default="off", help=f"off, or one of {', '.join(sorted(STRATEGIES))}")
    draft.add_argument("--draft-model", metavar="PATH", help="a directory or a hub id (demo: the packaged one)")
    draft.add_argument(
        "--draft-host", action="store_true", help="the last host (of one: a thread) drafts while the others verify"
    )
    draft.add_argument(
        "--num-draft-tokens", type=draft_tokens, default=5, metavar="N|auto", help="per round (default 5)"
    )
    draft.add_argument("--num-tree-nodes", type=int, help="draft a tree of so many, as deep at most (sd_tree: 25)")
    draft.add_argument("--keep", help=f"which visual tokens (default: the strategy's): {', '.join(KEEP_POLICIES)}")
    draft.add_argument("--hippo-terms", nargs="+", choices=HIPPO_TERMS, default=HIPPO_TERMS, help="of its scores")
    draft.add_argument(
        "--prune",
        choices=PRUNINGS,
        default=SpeculativeConfig().prune,
        help="what the draft reads or keeps",
    )
    draft.add_argument("--vision-first", action="store_true", help="a draft host begins before attention is known")
    draft.add_argument("--save-kept", metavar="PNG", help="a picture of the visual tokens that the draft saw")
    draft.add_argument("--keep-ratio", type=float, default=0.1, help="the share of them the draft sees (0.1)")

    draft.add_argument("--ensemble", default="MT*", help="what tabed drafts from: MT, MT*, MTCP, MTCP*, …")
    draft.add_argument("--captioner", metavar="MODULE:FUNCTION", help="gets the prompt, says what it shows")

    parser.add_argument("--json", metavar="FILE", help="append the figures as one JSON line")
    parser.add_argument("--timeline", metavar="FILE", help="what happened when, for ui.perfetto.dev")
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="T",
        help="processes (GPUs) that share a model (default 1)",
    )
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds to wait for another host")
    options = parser.parse_args(arguments)
    defaults = {"frames": 64, "dtype": "auto", "max_new_tokens": 128}
    if options.model == "demo":
        # Every frame of its clip, the precision its scores were measured in, and room for a description.
        defaults = {"frames": 2048, "dtype": "float32", "max_new_tokens": 512, "prompt": demo.DEMO_QUESTION}
        if not (options.image or options.context):
            defaults["video"] = "demo"
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.video == "demo":
        options.video = str(demo.video_path())
    if options.prompt is None:
        parser.error("--prompt is required")
    return options


def draft_tokens(text: str) -> int | str:
    """A number, or ``auto``."""
    return text if text == "auto" else int(text)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)

    def answer(hosts: HostGroup) -> None:
        if hosts.device.type == "cpu":
            keep_freed_memory()
        _quieten(hosts)
        run(options, hosts)

    return run_on_hosts(answer, options.timeout, options.tensor_parallel)


def run(options: argparse.Namespace, hosts: HostGroup) -> None:
    with hosts.local_stage("reading the options"):
        config = PrefillConfig(
            method=options.method,
            anchor_len=options.anchor_len,
            passing_len=options.passing_len,
            importance=options.importance,
            kv=options.kv,
            backend=options.backend,
        )
        speculate = None
        for name in (
            "draft_model",
            "draft_host",
            "num_tree_nodes",
            "keep",
            "vision_first",
            "captioner",
            "save_kept",
        ):
            if options.speculate == "off" and getattr(options, name):
                raise ValueError(f"--{name.replace('_', '-')} needs --speculate")
        if options.draft_host and options.save_kept:
            raise ValueError("--save-kept shows what host 0's draft saw: not together with --draft-host")
        if options.speculate != "off":
            speculate = SpeculativeConfig(
                strategy=options.speculate,
                draft_model=options.draft_model,
                num_draft_tokens=options.num_draft_tokens,
                num_tree_nodes=options.num_tree_nodes,
                keep=options.keep,
                keep_ratio=options.keep_ratio,
                hippo_terms=tuple(options.hippo_terms),
                prune=options.prune,
                vision_first=options.vision_first,
                ensemble=options.ensemble,
                draft_host=options.draft_host,
            )
        captioner = load_function(options.captioner) if options.captioner else None
        context = None
        if options.context:
            try:
                with open(options.context, encoding="utf-8") as file:
                    context = file.read()
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"cannot read the context {options.context}: {error}") from error
    engine = Engine.from_pretrained(
        options.model,
        prefill=config,
        speculate=speculate,
        hosts=hosts,
        dtype=options.dtype,
        captioner=captioner,
    )
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


def load_function(name: str) -> Callable:
    """A function by its name, ``package.module:function``, of an importable module.

    Raises:
        ValueError: there is none.
    """
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"cannot load {name}, which should be MODULE:FUNCTION: {error}") from error


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


def _quieten(hosts: HostGroup) -> None:
    """Warnings and progress bars once, not once per process."""
    if not hosts.is_leader:
        warnings.simplefilter("ignore")
        transformers_logging.set_verbosity_error()
        logging.disable(logging.WARNING)
    if not hosts.is_leader or not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()


if __name__ == "__main__":
    sys.exit(main())
