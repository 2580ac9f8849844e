"""Compare video readers on files of many kinds with FFmpeg's decoding of the whole file.

    python benchmarks/video_kinds.py --readers apbv torchcodec decord2

The files are those of `tests/helpers/apbv_tests/odd_files.py`. A reader is right if all frames, and
single ones in random order, are those of the whole file, and its times are the file's to 50 ms.
Readers that are not installed are left out. Readers may make RGB in another way: a frame may differ
by two levels of 255 on average. Every reader has a process of its own for each file.
"""

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import av
import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))
from apbv_tests.odd_files import KINDS
from support.arguments import parser_of
from support.records import markdown_table

# All frames by number, and their times.
Opened = tuple[Callable[[int], np.ndarray], np.ndarray]
_SINGLES = 12
_LEVELS = 2
_LATE = 0.05


def open_apbv(path: str) -> Opened:
    from apbv.input.media.video import probe, read_frames

    info = probe(path)

    def read(index: int) -> np.ndarray:
        return read_frames(info, [index], threads=1)[0]

    return read, info.timestamps


def open_torchcodec(path: str) -> Opened:
    from torchcodec.decoders import VideoDecoder

    decoder = VideoDecoder(path, dimension_order="NHWC", seek_mode="exact")
    times = [decoder.get_frame_at(index).pts_seconds for index in range(len(decoder))]

    def read(index: int) -> np.ndarray:
        return decoder.get_frame_at(index).data.numpy()

    return read, np.array(times)


def open_decord(path: str) -> Opened:
    import decord

    reader = decord.VideoReader(path, num_threads=1)
    starts_and_ends = reader.get_frame_timestamp(range(len(reader)))

    def read(index: int) -> np.ndarray:
        return reader[index].asnumpy()

    return read, starts_and_ends[:, 0]


def open_opencv(path: str) -> Opened:
    import cv2

    video = cv2.VideoCapture(path)
    times = []
    while video.grab():
        times.append(video.get(cv2.CAP_PROP_POS_MSEC) / 1000)

    def read(index: int) -> np.ndarray:
        video.set(cv2.CAP_PROP_POS_FRAMES, index)
        _, picture = video.read()
        # BGR becomes RGB.
        return picture[..., ::-1]

    return read, np.array(times)


# The module that a reader needs, where it is not part of apbv.
MODULES = {"torchcodec": "torchcodec", "decord2": "decord", "opencv": "cv2"}
READERS = {
    "apbv": open_apbv,
    "torchcodec": open_torchcodec,
    "decord2": open_decord,
    "opencv": open_opencv,
}


def verdict(reader: str, path: str, wanted: np.ndarray | None) -> str:
    """Return "right", "refuses", or what is wrong.

    Args:
        wanted: the frames' times in seconds, from 0; None: they are not compared.
    """
    warnings.simplefilter("ignore")
    # Decode the whole file, to the size of its first frame.
    whole = []
    with av.open(f"file:{path}") as container:
        frames = list(container.decode(container.streams.best("video")))
        width = frames[0].width
        height = frames[0].height
        for frame in frames:
            frame = frame.reformat(width, height, "rgb24", interpolation="BICUBIC")
            whole.append(frame.to_ndarray())
    # Read all frames, and then some in random order.
    singles = np.random.default_rng(0).permutation(len(whole))[:_SINGLES]
    try:
        read, times = READERS[reader](path)
        if len(times) != len(whole):
            return f"{len(times)} of {len(whole)} frames"
        for index in [*range(len(whole)), *singles.tolist()]:
            got = read(index)
            if got.shape != whole[index].shape:
                return "frame size"
            if np.abs(got.astype(int) - whole[index]).mean() > _LEVELS:
                return "other frames"
    except ImportError:
        raise
    except Exception:
        # Of any kind: every library has its own.
        return "refuses"
    if wanted is not None and np.abs(times - times[0] - wanted).max() > _LATE:
        return "times"
    return "right"


def rows(kinds: list[str], readers: list[str]) -> Iterator[list[str]]:
    """Yield each kind's name and the readers' verdicts, each from a process of its own."""
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1)
    with TemporaryDirectory() as temporary, pool:
        for number, kind in enumerate(tqdm(kinds, unit="file", disable=None)):
            folder = Path(temporary) / str(number)
            folder.mkdir()
            make, times = KINDS[kind]
            path = make(folder)
            futures = [pool.submit(verdict, reader, path, times) for reader in readers]
            yield [kind, *[future.result() for future in futures]]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of("video_kinds", __doc__, {"readers": READERS, "kinds": KINDS})
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    readers = []
    missing = []
    for reader in options.readers:
        if reader in MODULES and find_spec(MODULES[reader]) is None:
            missing.append(reader)
        else:
            readers.append(reader)
    if missing:
        tqdm.write(f"note: not installed and skipped: {', '.join(missing)}", file=sys.stderr)
    if not readers:
        print("error: no reader is installed", file=sys.stderr)
        return 1
    verdicts = list(rows(options.kinds, readers))
    print(markdown_table(["file", *readers], verdicts, align="---"))
    # Only apbv has to read all files right.
    if "apbv" in readers:
        column = 1 + readers.index("apbv")
        if any(row[column] != "right" for row in verdicts):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
