"""Measure how long short requests wait beside a heavy one, and how much they delay it.

    torchrun --nproc-per-node 2 benchmarks/waiting.py --json waiting.jsonl
    torchrun --nproc-per-node 2 benchmarks/waiting.py --heavy pictures --pictures 2000 --rounds 3

Every heavy request is answered alone, and then beside a client that asks the server to answer "hi",
again as soon as it has the answer. The wait counts from a request to its whole answer. Meanwhile
another client asks for /health: a host that only works must not count as one that has failed.
"""

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import apbv  # noqa: F401  (before transformers: see apbv.compat.torchvision_guard)

# isort: split
import numpy as np
from PIL import Image

from apbv import Engine, HostGroup
from apbv.serve.settings import ServerSettings
from apbv.testing.clips import write_mp4

from support.arguments import parser_of
from support.clients import Answer, is_healthy, serve_while, stream_answer
from support.records import columns_of, measure_on_hosts
from support.summaries import percentiles

_TILE = 112  # pixels per side of a small picture
_HEALTH_SECONDS = 0.2
Content = list[dict]
T = TypeVar("T")


def _file(kind: str, path: Path) -> dict:
    """Return the part of a message that is a file; its kind is "image" or "video"."""
    return {"type": f"{kind}_url", f"{kind}_url": {"url": path.name}}


def _drawn(height: int, width: int, number: int = 0) -> Image.Image:
    """Draw a picture with gradients and edges, different for each number."""
    rows = np.arange(height, dtype=np.uint16)[:, None]
    columns = np.arange(width, dtype=np.uint16)[None]
    channels = (
        columns // 47 + rows * 0 + number,
        rows // 47 + columns * 0,
        (columns // 64) ^ (rows // 64),
    )
    return Image.fromarray(np.stack([channel.astype(np.uint8) for channel in channels], axis=-1))


# How Pillow encodes files of these kinds: as fast as it can.
_ENCODED = {
    "tiff": {"compression": "tiff_adobe_deflate"},
    "webp": {"method": 0, "quality": 60},
    "png": {"compress_level": 1},
}


def _picture(suffix: str, options: argparse.Namespace, folder: Path) -> Content:
    path = folder / f"large.{suffix}"
    _drawn(options.side, options.side).save(path, **_ENCODED.get(suffix, {}))
    return [_file("image", path)]


def _pictures(options: argparse.Namespace, folder: Path) -> Content:
    paths = [folder / f"small{number}.png" for number in range(options.pictures)]
    for number, path in enumerate(paths):
        _drawn(_TILE, _TILE, number).save(path)
    return [_file("image", path) for path in paths]


def _gif(options: argparse.Namespace, folder: Path) -> Content:
    path = folder / "long.gif"
    height = options.side // 16
    width = options.side // 12
    pictures = [_drawn(height, width, number) for number in range(options.frames * 4)]
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=40)
    return [_file("video", path)]


def _frames(options: argparse.Namespace, folder: Path) -> Content:
    path = folder / "wide.mp4"
    # A quarter and two thirds of the side, made even.
    height = options.side // 4 // 2 * 2
    width = options.side * 2 // 3 // 2 * 2
    frames = (np.asarray(_drawn(height, width, number)) for number in range(options.frames))
    write_mp4(frames, path, 25, preset="ultrafast", g="5")
    return [_file("video", path)]


def _text(options: argparse.Namespace, folder: Path) -> Content:
    return [{"type": "text", "text": "one two three " * options.words}]


# What makes each heavy request's content, and its files.
HEAVY: dict[str, Callable[[argparse.Namespace, Path], Content]] = {
    "text": _text,
    "tiff": partial(_picture, "tiff"),
    "webp": partial(_picture, "webp"),
    "png": partial(_picture, "png"),
    "jpg": partial(_picture, "jpg"),
    "pictures": _pictures,
    "frames": _frames,
    "gif": _gif,
}


def until(is_over: threading.Event, once: Callable[[], T]) -> list[T]:
    """Call a function again and again; return the results."""
    results = []
    while not is_over.is_set():
        results.append(once())
    return results


def measure(options: argparse.Namespace, hosts: HostGroup) -> Iterator[dict]:
    """Measure every heavy request; yield the records, on host 0."""
    engine = Engine.from_pretrained(options.model, hosts=hosts, dtype=options.dtype)
    records: list[dict] = []
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(2) as pool:
        # Host 0's, on all hosts.
        folder = Path(hosts.broadcast_bytes(temporary.encode()).decode())
        settings = ServerSettings(model="benchmark", media_dir=folder, num_frames=options.frames)

        def ask(port: int) -> None:
            def answer(content: str | Content, num_tokens: int) -> Answer:
                messages = [{"role": "user", "content": content}]
                body = {"messages": messages, "max_tokens": num_tokens, "ignore_eos": True}
                return stream_answer(port, body, options.timeout)

            def say_hi() -> Answer:
                return answer("hi", options.max_new_tokens)

            def is_ill() -> bool:
                time.sleep(_HEALTH_SECONDS)
                return is_healthy(port) is False

            # The first four warm up.
            undisturbed = [say_hi() for _ in range(20)][4:]
            for heavy in options.heavy:
                files = HEAVY[heavy](options, folder)
                content = [*files, {"type": "text", "text": "what is this?"}]
                alone = []
                beside = []
                waits = []
                num_ill = 0

                # Warm up.
                answer(content, 1)

                # Ask the heavy request alone, and then beside short ones.
                for _ in range(options.rounds):
                    alone.append(answer(content, 1))
                    is_over = threading.Event()
                    asking = pool.submit(until, is_over, say_hi)
                    watching = pool.submit(until, is_over, is_ill)
                    try:
                        beside.append(answer(content, 1))
                    finally:
                        is_over.set()
                    waits += asking.result()
                    num_ill += sum(watching.result())

                # Check the answers. A short one may also be empty.
                short_texts = {short.text for short in (*undisturbed, *waits)}
                if len(short_texts - {""}) > 1:
                    raise ValueError(f"beside {heavy} the answers to short requests differ")
                if len({long.text for long in (*alone, *beside)}) > 1:
                    raise ValueError(f"the answers to {heavy} differ")

                # Make the record.
                samples = {
                    "undisturbed_ms": [1e3 * short.end for short in undisturbed],
                    "wait_ms": [1e3 * short.end for short in waits],
                    "heavy_alone_ms": [1e3 * long.first_token for long in alone],
                    "heavy_beside_ms": [1e3 * long.first_token for long in beside],
                }
                name = f"{options.pictures} pictures" if heavy == "pictures" else heavy
                growth = min(samples["heavy_beside_ms"]) / min(samples["heavy_alone_ms"])
                record = {
                    "benchmark": "waiting",
                    "model": options.model,
                    "hosts": hosts.size,
                    "heavy": name,
                    "num_unhealthy": num_ill,
                    "worst_wait_ms": max(samples["wait_ms"]),
                    "growth": growth,
                }
                for figure, values in samples.items():
                    record[figure] = percentiles(values)
                record["samples"] = samples
                records.append(record)

        serve_while(engine, hosts, settings, ask)
    yield from records


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    return parser_of("waiting", __doc__, {"heavy": HEAVY}).parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    return measure_on_hosts(parse_arguments(arguments), measure, columns_of("waiting"))


if __name__ == "__main__":
    sys.exit(main())
