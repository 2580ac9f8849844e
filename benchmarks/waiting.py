"""Measure how long short requests wait beside a heavy one, and how much they delay it.

    torchrun --nproc-per-node 2 benchmarks/waiting.py --json waiting.jsonl
    torchrun --nproc-per-node 2 benchmarks/waiting.py --heavy pictures --pictures 2000 --rounds 3

Every heavy request is answered alone, and then beside a client that asks the server to answer "hi", again as soon
as it has the answer. The wait counts from a request to its whole answer. Meanwhile another client asks for
/health: a host that only works must not count as one that has failed.
"""

import argparse
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import av
import numpy as np
from PIL import Image

from apbv import Engine, HostGroup
from apbv.serve.settings import ServerSettings

from support.arguments import COUNT, add_shared
from support.clients import Answer, is_healthy, measure_on_hosts, serve_while, stream_answer
from support.summaries import percentiles

_TILE = 112  # pixels per side of a small picture
_HEALTH_SECONDS = 0.2
Content = list[dict]


def _file(kind: str, path: Path) -> dict:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": path.name}}


def _drawn(height: int, width: int, number: int = 0) -> Image.Image:
    """Draw a picture with gradients and edges, different for each number."""
    rows, columns = np.arange(height, dtype=np.uint16)[:, None], np.arange(width, dtype=np.uint16)[None]
    channels = (columns // 47 + rows * 0 + number, rows // 47 + columns * 0, (columns // 64) ^ (rows // 64))
    return Image.fromarray(np.stack([channel.astype(np.uint8) for channel in channels], axis=-1))


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
    path, (height, width) = folder / "long.gif", (options.side // 16, options.side // 12)
    first, *others = (_drawn(height, width, number) for number in range(options.frames * 4))
    first.save(path, save_all=True, append_images=others, duration=40)
    return [_file("video", path)]


def _frames(options: argparse.Namespace, folder: Path) -> Content:
    path, (height, width) = folder / "wide.mp4", (options.side // 4 // 2 * 2, options.side * 2 // 3 // 2 * 2)
    with av.open(path, "w") as file:
        stream = file.add_stream("libx264", 25, {"preset": "ultrafast", "g": "5"})
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        for number in range(options.frames):
            file.mux(stream.encode(av.VideoFrame.from_image(_drawn(height, width, number))))
        file.mux(stream.encode())
    return [_file("video", path)]


def _text(options: argparse.Namespace, folder: Path) -> Content:
    return [{"type": "text", "text": "one two three " * options.words}]


_ENCODED = {"tiff": {"compression": "tiff_adobe_deflate"}, "webp": {"method": 0, "quality": 60}}
_ENCODED |= {"png": {"compress_level": 1}}
# What makes each heavy request's content, and its files.
HEAVY: dict[str, Callable[[argparse.Namespace, Path], Content]] = {
    "text": _text,
    **{suffix: partial(_picture, suffix) for suffix in ("tiff", "webp", "png", "jpg")},
    "pictures": _pictures,
    "frames": _frames,
    "gif": _gif,
}


class _Stream:
    """A client's short requests, one after the other, until the end of the ``with`` block, and looks at /health.

    Attributes:
        answers: to the short requests.
        num_ill: how often the server said that it cannot answer.
    """

    def __init__(self, ask: Callable[[], Answer], port: int):
        self.answers: list[Answer] = []
        self.num_ill = 0
        self._ask, self._port, self._is_over = ask, port, threading.Event()
        self._failures: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(each,)) for each in (self._say_hi, self._look)]

    def __enter__(self) -> "_Stream":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        if self._failures:
            raise self._failures[0]

    def _run(self, once: Callable[[], None]) -> None:
        try:
            while not self._is_over.is_set():
                once()
        except BaseException as error:
            self._failures.append(error)

    def _say_hi(self) -> None:
        self.answers.append(self._ask())

    def _look(self) -> None:
        self.num_ill += is_healthy(self._port) is False
        self._is_over.wait(_HEALTH_SECONDS)


def measure(options: argparse.Namespace, hosts: HostGroup) -> Iterator[dict]:
    """Measure every heavy request; yield the records, on host 0."""
    engine = Engine.from_pretrained(options.model, hosts=hosts, dtype=options.dtype)
    records: list[dict] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(hosts.broadcast_bytes(name.encode()).decode())
        settings = ServerSettings(model="benchmark", media_dir=folder, num_frames=options.frames)

        def ask(port: int) -> None:
            def answer(content: str | Content, num_tokens: int) -> Answer:
                messages = [{"role": "user", "content": content}]
                body = {"messages": messages, "max_tokens": num_tokens, "ignore_eos": True}
                return stream_answer(port, body, options.timeout)

            def say_hi() -> Answer:
                return answer("hi", options.max_new_tokens)

            undisturbed = [say_hi() for _ in range(20)][4:]
            for heavy in options.heavy:
                content = [*HEAVY[heavy](options, folder), {"type": "text", "text": "what is this?"}]
                alone, beside, waits, num_ill = [], [], [], 0
                answer(content, 1)  # a warm-up
                for _ in range(options.rounds):
                    alone.append(answer(content, 1))
                    with _Stream(say_hi, port) as stream:
                        beside.append(answer(content, 1))
                    waits += stream.answers
                    num_ill += stream.num_ill
                if len({each.text for each in (*undisturbed, *waits)} | {""}) > 2:
                    raise ValueError(f"beside {heavy} the answers to short requests differ")
                if len({each.text for each in (*alone, *beside)}) > 1:
                    raise ValueError(f"the answers to {heavy} differ")
                records.append(record(options, hosts, heavy, undisturbed, waits, alone, beside, num_ill))

        serve_while(engine, hosts, settings, ask)
    yield from records


def record(
    options: argparse.Namespace,
    hosts: HostGroup,
    heavy: str,
    undisturbed: list[Answer],
    waits: list[Answer],
    alone: list[Answer],
    beside: list[Answer],
    num_ill: int,
) -> dict:
    """Return a JSON-ready record."""
    samples = {
        "undisturbed_ms": [each.end * 1e3 for each in undisturbed],
        "wait_ms": [each.end * 1e3 for each in waits],
        "heavy_alone_ms": [each.first_token * 1e3 for each in alone],
        "heavy_beside_ms": [each.first_token * 1e3 for each in beside],
    }
    return {
        "benchmark": "waiting",
        "model": options.model,
        "hosts": hosts.size,
        "heavy": f"{options.pictures} pictures" if heavy == "pictures" else heavy,
        "num_unhealthy": num_ill,
        "worst_wait_ms": max(samples["wait_ms"]),
        "growth": min(samples["heavy_beside_ms"]) / min(samples["heavy_alone_ms"]),
        **{name: percentiles(values) for name, values in samples.items()},
        "samples": samples,
    }


COLUMNS = {
    "beside": "{heavy}",
    "short requests": lambda row: len(row["samples"]["wait_ms"]),
    "alone, p50 ms": "{undisturbed_ms[p50]:.0f}",
    "p50 ms": "{wait_ms[p50]:.0f}",
    "worst ms": "{worst_wait_ms:.0f}",
    "heavy TTFT alone ms": "{heavy_alone_ms[p50]:.0f}",
    "beside them ms": "{heavy_beside_ms[p50]:.0f}",
    "growth, minima": "{growth:.2f}",
    "503": "{num_unhealthy}",
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="demo, a directory or a hub id")
    parser.add_argument("--heavy", nargs="+", choices=HEAVY, default=[*HEAVY], help="default: all of them")
    parser.add_argument("--side", type=COUNT, default=12000, help="pixels per side of a large picture")
    parser.add_argument("--pictures", type=COUNT, default=300, help="number of small pictures (default 300)")
    parser.add_argument("--frames", type=COUNT, default=40, help="frames of a video (default 40)")
    parser.add_argument("--words", type=COUNT, default=5000, help="a text of three times as many (default 5000)")
    add_shared(parser, "pinned", "json", dtype="float32", rounds=1, max_new_tokens=4, timeout=300.0)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    return measure_on_hosts(parse_arguments(arguments), measure, COLUMNS)


if __name__ == "__main__":
    sys.exit(main())
