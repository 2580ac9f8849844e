"""Draws clips of scenes with captions: words, and numbers or other words that they are assigned;
asks about these.

A caption is one row of a frame's 4 x 4 cells, such as "river = 4 7" or "stone = river", with one
text in each cell and a dimmed scene behind. Each cell is a visual token of the model that
``make_reader.py`` makes, and reads as the text in it, or where there is none as a mark that stands
for the kind of scene.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import numpy as np
from PIL import Image, ImageDraw, ImageFont
from transformers import PreTrainedTokenizerBase

from . import clips
from .exams import Exam
from .ruler.words import NOUNS

GRID = 4  # cells per side of a frame, and visual tokens
SCENE_GRID = 6  # of the clips whose scenes these are
SIDE = clips.TOKEN_SIZE * SCENE_GRID  # pixels
CELL = SIDE // GRID
LONGEST_WORD = 6  # letters, legible in a cell
# What a cell without a text reads as, by scene; a pretrained decoder reads on over such marks.
MARKS = dict(zip(clips.SCENES, ("-", ".", ";", ",", ",", ",", ","), strict=True))
SIGNS = (*MARKS.values(), "=", *"0123456789")
NUM_PAIRS, CHAIN = 2, 3  # words with a number of their own, and words that share one

# By task; an answer's beginning is given, as in RULER.
QUESTIONS = {
    "retrieval": ("Which number does the video show for {word}? Answer with the number only.", ""),
    "tracking": (
        "Find all words that are assigned the value {number} in the text above.",
        "The words that are assigned the value {number} are:",
    ),
}


def token_of(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    """Return the one token that a cell's text is read as, words with a space before; None if it
    takes several."""
    ids = tokenizer.encode(
        f" {text}" if text.isalpha() or text == "=" else text, add_special_tokens=False
    )
    return ids[0] if len(ids) == 1 else None


def words_of(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the words that captions are made of: short ones that are one token.

    Raises:
        ValueError: the tokenizer has too few of them, or does not encode digits one by one.
    """
    words = [
        word
        for word in NOUNS
        if len(word) <= LONGEST_WORD and token_of(tokenizer, word) is not None
    ]
    several = token_of(tokenizer, "47") is None and None not in (
        token_of(tokenizer, sign) for sign in SIGNS
    )
    if len(words) < NUM_PAIRS + CHAIN or not several:
        raise ValueError(
            "captions need a tokenizer with short English words as one token, and one for each "
            "digit"
        )
    return tuple(words)


class Caption(NamedTuple):
    """A row of a frame's cells, and their texts, from the left."""

    row: int
    cells: tuple[str, ...]


class CaptionedClip(NamedTuple):
    """Scenes of a frame each, and captions by frame.

    Attributes:
        pairs, chain: the captions of words with a number each, and of a word with a number, a word
            with that word's, and so on; both in the order of time.
    """

    scenes: clips.ClipSpec
    captions: dict[int, Caption]
    pairs: list[Caption]
    chain: list[Caption]


def make_clip(seed: int, num_frames: int, split: str, words: tuple[str, ...]) -> CaptionedClip:
    """Make the clip with number `seed` of a split, of at least ``NUM_PAIRS + CHAIN`` frames."""
    rng = np.random.default_rng([clips.SPLITS.index(split), seed, num_frames])
    total = NUM_PAIRS + CHAIN
    scenes = clips.ClipSpec(tuple(clips.sample_scenes(rng, num_frames)), SCENE_GRID)
    names = rng.permutation(words)[:total].tolist()
    numbers = [
        tuple(str(number)) for number in rng.permutation(np.arange(10, 100))[: NUM_PAIRS + 1]
    ]
    values = [*numbers, *((name,) for name in names[NUM_PAIRS:-1])]
    made = [
        Caption(int(rng.integers(GRID)), (name, "=", *value))
        for name, value in zip(names, values, strict=True)
    ]
    pairs = made[:NUM_PAIRS]
    chain = made[NUM_PAIRS:]
    in_chain = set(rng.choice(total, CHAIN, replace=False).tolist())
    rest = iter(pairs)
    linked = iter(chain)
    order = [next(linked if place in in_chain else rest) for place in range(total)]
    frames = np.sort(rng.choice(num_frames, total, replace=False)).tolist()
    return CaptionedClip(scenes, dict(zip(frames, order, strict=True)), pairs, chain)


def draw(picture: np.ndarray, caption: Caption) -> np.ndarray:
    """Draw a caption over a frame, uint8 RGB [H, W, 3], with Pillow's own font as large as fits
    into a cell."""
    dimmed = picture.copy()
    band = slice(caption.row * CELL, (caption.row + 1) * CELL)
    dimmed[band] = dimmed[band] * 0.35
    canvas = Image.fromarray(dimmed)
    for column, text in enumerate(caption.cells):
        middle = (column + 0.5) * CELL, (caption.row + 0.5) * CELL
        ImageDraw.Draw(canvas).text(
            middle, text, font=_font_for(text), anchor="mm", fill=(240, 240, 240)
        )
    return np.asarray(canvas)


@cache
def _font_for(text: str) -> ImageFont.FreeTypeFont:
    fonts = map(ImageFont.load_default, range(CELL - 10, 0, -1))
    return next(font for font in fonts if font.getlength(text) < CELL - 1)


def render_scenes(scenes: clips.ClipSpec) -> np.ndarray:
    """Render one frame per shot, uint8 RGB [T, H, W, 3]."""
    return clips.render(scenes)[:: clips.FRAMES_PER_SHOT]


@dataclass(frozen=True)
class CaptionExam(Exam):
    """Clips with captions, and what is asked about each of them.

    Attributes:
        words: that captions may have, see :func:`words_of`.
    """

    words: tuple[str, ...] = ()
    kind = "captions"

    def needles(self, seed: int) -> str:
        return self.kind

    def clip(self, seed: int) -> CaptionedClip:
        return make_clip(seed, self.num_shots, self.split, self.words)

    def render(self, seed: int) -> np.ndarray:
        clip = self.clip(seed)
        frames = render_scenes(clip.scenes)
        for number, caption in clip.captions.items():
            frames[number] = draw(frames[number], caption)
        return frames

    def questions(self, seed: int) -> list[tuple[str, str, str]]:
        clip = self.clip(seed)
        names = ", ".join(caption.cells[0] for caption in self.clip(seed).chain)
        answers = {"retrieval": "".join(clip.pairs[0].cells[2:]), "tracking": f" {names}"}
        return [(task, self._asked(seed, task)[0], answers[task]) for task in self.tasks]

    def start(self, seed: int, task: str) -> str:
        return self._asked(seed, task)[1]

    def score(self, task: str, said: str, answer: str) -> float:
        """Return the share of a right answer's words that an answer has."""
        wanted = answer.split(", ")
        return sum(word.strip() in said for word in wanted) / len(wanted)

    def needle_tokens(self, seed: int, task: str) -> np.ndarray:
        clip = self.clip(seed)
        asked = clip.pairs[:1] if task == "retrieval" else clip.chain
        shown = {number: caption for number, caption in clip.captions.items() if caption in asked}
        return self._texts(shown) != ""

    def texts(self, seed: int) -> np.ndarray:
        """Return the text at each of the clip's visual tokens, str [tokens]; "" where there is
        none."""
        return self._texts(self.clip(seed).captions)

    def _asked(self, seed: int, task: str) -> list[str]:
        """Return a task's question, and the beginning of its answer."""
        clip = self.clip(seed)
        about = {"word": clip.pairs[0].cells[0], "number": "".join(clip.chain[0].cells[2:])}
        return [text.format(**about) for text in QUESTIONS[task]]

    def _texts(self, captions: dict[int, Caption]) -> np.ndarray:
        cells = np.full((self.num_shots, GRID, GRID), "", dtype=f"U{LONGEST_WORD}")
        for number, caption in captions.items():
            cells[number, caption.row, : len(caption.cells)] = caption.cells
        return np.append(cells.flatten(), "")  # a newline ends the video


def exam_like(exam: Exam, tokenizer: PreTrainedTokenizerBase) -> CaptionExam:
    """Return an exam with as many captioned clips of the same length; see :func:`words_of` for
    errors."""
    return CaptionExam(
        GRID, exam.num_shots, exam.folder, tuple(QUESTIONS), exam.split, words_of(tokenizer)
    )
