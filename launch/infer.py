"""Answer a question about videos, images, audio or a long text.

    torchrun --nproc-per-node 2 launch/infer.py --model demo
    torchrun --nproc-per-node 8 launch/infer.py --model Qwen/Qwen2.5-VL-7B-Instruct \
        --video clip.mp4 --prompt "What happens in this video?"
    python launch/infer.py --model demo          (one host)
"""

import argparse
from functools import partial

from apbv import demo
from apbv.config.refusals import refuse
from apbv.launch.options import (
    ANSWER_LENGTH,
    SAMPLING,
    OptionParser,
    YesOrNoOnce,
    add_draft_options,
    add_host_options,
    add_prefill_options,
    add_settings,
    check,
    exit_with,
)


def parse_arguments(
    arguments: list[str] | None = None, prog: str | None = None
) -> argparse.Namespace:
    """Parse and check the options; exits if one is wrong."""
    parser = OptionParser(
        prog, "%(prog)s --model MODEL [options]", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model", required=True, help='"demo", a directory, or a hub id')
    parser.add_argument(
        "--video",
        metavar="demo|FILE",
        action="append",
        help="a video file, or the bundled clip; can be repeated",
    )
    parser.add_argument(
        "--image",
        metavar="FILE",
        action="append",
        help="an image file, placed after the videos; can be repeated",
    )
    parser.add_argument(
        "--audio",
        metavar="FILE",
        action="append",
        help="an audio file, placed after the images; can be repeated",
    )
    parser.add_argument(
        "--audio-in-video",
        action=YesOrNoOnce,
        help="use the videos' audio tracks (default: if the model takes audio and they have one)",
    )
    parser.add_argument("--context", metavar="FILE", help="text file that the question is about")
    parser.add_argument("--prompt", help="the question")

    add_prefill_options(parser)
    decode = parser.add_argument_group("decode")
    add_settings(decode, ANSWER_LENGTH)
    add_settings(decode, SAMPLING)
    add_draft_options(parser)

    parser.add_argument("--json", metavar="FILE", help="append the metrics as one JSON line")
    add_host_options(parser)
    options = parser.parse_args(arguments)
    if options.model == "demo":
        if options.prompt is None:
            options.prompt = demo.DEMO_QUESTION
        if not (options.video or options.image or options.audio or options.context):
            options.video = ["demo"]
    if options.video:
        options.video = [
            str(demo.video_path()) if path == "demo" else path for path in options.video
        ]
    if options.prompt is None:
        parser.error("--prompt is required: give the question")
    for name in ("frames", "fps", "video_chunk_mib", "audio_in_video"):
        if getattr(options, name) is not None and options.video is None:
            parser.error(f"--{name.replace('_', '-')} needs a --video")
    source = None
    for name in ("audio", "image", "video"):
        if getattr(options, name):
            source = f"--{name}"
    with parser.rejecting():
        refuse(context="--context" if options.context else None, source=source)
    check(parser, options)
    return options


def main(arguments: list[str] | None = None, prog: str | None = None) -> int:
    """Answer a question on this host; return the exit status."""
    options = parse_arguments(arguments, prog)
    # Imported here because this takes seconds.
    from apbv.hosts import run_on_hosts
    from apbv.launch.answer import run

    return run_on_hosts(
        partial(run, options), options.timeout, options.tensor_parallel, options.device
    )


if __name__ == "__main__":
    exit_with(main)
