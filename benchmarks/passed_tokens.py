"""Draw how often each place of a video is passed on between hosts, after the APB-V paper's Figure 8.

    python benchmarks/passed_tokens.py --clips 20 --json passed.jsonl --picture passed.png
    python benchmarks/passed_tokens.py --hosts 8 --shots 256 --passing-len 8 --importance dot

APB-V's blocks pass their l_p most important KV pairs on, in every layer and KV head. The intensity of a visual
token is the share of layers and KV heads in which it is passed on. In the picture it is yellow: on each frame that
shows a letter, and on some between; the question asks for one of the letters. The table tells intensities apart:
of the letter that is asked for, of other letters, and of all else. The anchor, which every host has, is left out.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from tqdm import tqdm

from apbv import PrefillConfig, prefill
from apbv.config import IMPORTANCE_NAMES
from apbv.speculate.watchers import PassedOn

from support import clips
from support.arguments import add_exam_options, add_json_option
from support.exams.candidate import Candidate, load_demo
from support.exams.exam import Exam, clips_folder
from support.exams.settings import paper_lengths
from support.on_hosts import run_on
from support.records import keep_records, show
from support.tables import markdown_table

_WIDTH, _GAP, _CAPTION = 112, 6, 16  # pixels
_MOST_FRAMES = 24  # of a picture


def intensities(candidate: Candidate, file: Path, question: str, config: PrefillConfig) -> Tensor:
    """Return in what share of layers and KV heads each visual token is passed on; collective.

    Returns:
        ``[visual tokens]`` on every host; NaN for those that the anchor holds.
    """
    inputs = candidate.read(file, question)
    watcher = PassedOn()
    options = {"hosts": candidate.hosts, "config": config, "watcher": watcher, "encoded": candidate.encoded}
    state = prefill(candidate.parts, inputs, **options)
    shares = torch.stack(watcher.result()).float().mean(dim=(0, 1))
    in_anchor = max(0, state.layout.anchor.stop - inputs.context_start)
    shares[:in_anchor] = torch.nan
    return shares


def measure(options: argparse.Namespace) -> Iterator[dict]:
    """Yield a record for every clip, of which the first is drawn."""
    engine = load_demo()
    exam = Exam(options.grid, options.shots, options.clips, ("retrieval",), options.split)
    folder = clips_folder(options.folder)
    anchor, passing = paper_lengths(options.shots * options.grid**2)
    config = PrefillConfig(
        anchor_len=anchor, passing_len=options.passing_len or passing, importance=options.importance
    )
    for seed in tqdm(range(options.clips), unit="clip", disable=None):
        file, clip = exam.file(seed, folder), exam.clip(seed)
        _, question, answer = exam.questions(seed)[0]

        def look(hosts, model, file=file, question=question) -> Tensor:
            return intensities(Candidate(model, engine.processor, hosts), file, question, config)

        shares = run_on(options.hosts, engine.hosts, engine.model, look).view(-1, options.grid, options.grid)
        letters = {number: shot.needle.letter for number, shot in enumerate(clip.shots) if shot.needle}
        asked = [number for number, letter in letters.items() if letter == answer]
        others = [number for number in letters if number not in asked]
        rest = [number for number in range(len(shares)) if number not in letters]
        record = {
            "benchmark": "passed_tokens",
            "hosts": options.hosts,
            "grid": options.grid,
            "shots": options.shots,
            "split": options.split,
            "seed": seed,
            "question": question,
            "importance": options.importance,
            "anchor_len": config.anchor_len,
            "passing_len": config.passing_len,
            "letters": letters,
            "of_asked": _mean(shares[asked]),
            "of_other_letters": _mean(shares[others]),
            "of_rest": _mean(shares[rest]),
        }
        if options.picture and not seed:
            draw(clips.render(clip)[:: clips.FRAMES_PER_SHOT], shares, record).save(options.picture)
        yield record


def _mean(shares: Tensor) -> float | None:
    mean = float(shares.nanmean())
    return None if mean != mean else mean


def draw(frames: np.ndarray, shares: Tensor, record: dict) -> Image.Image:
    """Draw frames in the order of time, yellow where they are passed on; names under letters.

    Args:
        frames: uint8 ``[shots, H, W, 3]``.
        shares: ``[shots, h, w]``, NaN in the anchor.
        record: what :func:`measure` says of the clip.
    """
    letters = record["letters"]
    spread = {round(x) for x in np.linspace(0, len(frames) - 1, max(2, _MOST_FRAMES - len(letters)))}
    chosen = sorted({*letters, *spread})
    columns = int(np.ceil(len(chosen) ** 0.5))
    rows = -(-len(chosen) // columns)
    canvas = Image.new("RGB", (columns * (_WIDTH + _GAP) - _GAP, (rows + 1) * (_WIDTH + _CAPTION + _GAP)), "white")
    brush, font = ImageDraw.Draw(canvas), ImageFont.load_default(12)
    for place, number in enumerate(chosen):
        left, top = place % columns * (_WIDTH + _GAP), place // columns * (_WIDTH + _CAPTION + _GAP)
        picture = np.asarray(Image.fromarray(frames[number]).resize((_WIDTH, _WIDTH), Image.Resampling.NEAREST))
        canvas.paste(Image.fromarray(_tinted(picture, shares[number])), (left, top + _CAPTION))
        brush.text(
            (left, top), f"{number}: {letters[number]}" if number in letters else str(number), "black", font
        )
    legend = f"{record['question']}\nYellow: passed on in this share of layers and KV heads; the anchor is dark."
    brush.multiline_text((0, rows * (_WIDTH + _CAPTION + _GAP)), legend, "black", font)
    return canvas.crop((0, 0, canvas.width, rows * (_WIDTH + _CAPTION + _GAP) + 3 * _CAPTION))


def _tinted(picture: np.ndarray, shares: Tensor) -> np.ndarray:
    """Mix a frame ``[H, W, 3]`` with yellow by its tokens' shares ``[h, w]``."""
    size = picture.shape[0] // shares.shape[0]
    alpha = np.kron(shares.nan_to_num(0.0).numpy(), np.ones((size, size)))[..., None] * 0.8
    light = np.kron(np.where(shares.isnan().numpy(), 0.3, 1.0), np.ones((size, size)))[..., None]
    side = size * shares.shape[0]
    mixed = picture.astype(float)
    mixed[:side, :side] = light * picture[:side, :side] * (1 - alpha) + alpha * np.array([255.0, 225.0, 0.0])
    return mixed.astype(np.uint8)


def table(records: list[dict]) -> str:
    """Format the mean intensities over all clips as a Markdown table."""
    first = records[0]
    cells = [first["hosts"], first["passing_len"], first["importance"], len(records)]
    for name in ("of_asked", "of_other_letters", "of_rest"):
        known = [record[name] for record in records if record[name] is not None]
        cells.append(f"{sum(known) / len(known):.3f}" if known else "–")
    header = ["hosts", "l_p", "importance", "clips", "the letter asked for", "other letters", "all else"]
    return markdown_table(header, [cells])


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=8, help="simulated (8)")
    parser.add_argument("--passing-len", type=int, help="l_p (default: a 128th of the visual tokens)")
    parser.add_argument("--importance", choices=IMPORTANCE_NAMES, default=PrefillConfig().importance)
    add_exam_options(parser, num_clips=20, num_shots=256)
    add_json_option(parser)
    parser.add_argument("--picture", type=Path, metavar="PNG", help="draw the first clip")
    options = parser.parse_args(arguments)
    if options.clips < 1 or options.hosts < 2 or options.passing_len == 0:
        parser.error("--clips and --passing-len must be at least 1, and --hosts at least 2")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    show(options, keep_records(measure(options), "passed_tokens.py", options.json), table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
