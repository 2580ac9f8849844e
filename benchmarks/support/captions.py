"""Draws clips with captions, of words and what they are assigned, and asks about these.

A caption is one row of a frame's 4 x 4 cells, such as "river = 4 7" or "stone = river", with one
text in each cell and a dimmed scene behind. Each cell is a visual token of the model that
``make_reader.py`` makes, and reads as the text in it, or where there is none as a mark that stands
for the kind of scene.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import apbv  # noqa: F401  (before transformers: see apbv.compat.torchvision_guard)
from apbv.errors import InvalidRequestError

# isort: split
import numpy as np
from PIL import Image, ImageDraw, ImageFont
from transformers import PreTrainedTokenizerBase

from apbv.testing import clips

from .exams import Exam
from .ruler.words import NOUNS

GRID = 4  # cells per side of a frame, and visual tokens
SCENE_GRID = 6  # of the clips whose scenes these are
SIDE = clips.TOKEN_SIZE * SCENE_GRID  # pixels
CELL = SIDE // GRID
LONGEST_WORD = 6  # letters, legible in a cell
# What a cell without a text reads as, by scene; a pretrained decoder reads on over such marks.
MARKS = dict(zip(clips.SCENES, ("-", ".", ";", ",", ",", ",", ","), strict=True))
# The texts of cells without words.
SIGNS = (*MARKS.values(), "=", *"0123456789")
NUM_PAIRS = 2  # words with a number of their own
CHAIN = 3  # words that share a number

# Each task's question, and the beginning of its answer, which is given as in RULER.
QUESTIONS = {
    "retrieval": ("Which number does the video show for {word}? Answer with the number only.", ""),
    "tracking": (
        "Find all words that are assigned the value {number} in the text above.",
        "The words that are assigned the value {number} are:",
    ),
}


def token_of(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    """Return the token of a cell's text, None if it takes several; a word has a space before."""
    if text.isalpha() or text == "=":
        text = f" {text}"
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids[0] if len(ids) == 1 else None


def words_of(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the words that captions are made of: short ones that are one token.

    Raises:
        InvalidRequestError: the tokenizer has too few of them, or does not encode digits one by
            one.
    """
    words = []
    for word in NOUNS:
        if len(word) <= LONGEST_WORD and token_of(tokenizer, word) is not None:
            words.append(word)
    has_signs = all(token_of(tokenizer, sign) is not None for sign in SIGNS)
    joins_digits = token_of(tokenizer, "47") is not None
    if len(words) < NUM_PAIRS + CHAIN or not has_signs or joins_digits:
        raise InvalidRequestError(
            "captions need a tokenizer with short English words as one token, and one for each "
            "digit"
        )
    return tuple(words)


class Caption(NamedTuple):
    """A row of a frame's cells, and their texts, from the left."""

    row: int
    cells: tuple[str, ...]


class CaptionedClip(NamedTuple):
    """The specification of a clip with captions.

    Attributes:
        scenes: of one frame each.
        captions: by the number of the frame.
        pairs: captions of a word and its number, in the order of time.
        chain: captions of a word and its number, of a second word and the first one, and so on, in
            the order of time.
    """

    scenes: clips.ClipSpec
    captions: dict[int, Caption]
    pairs: list[Caption]
    chain: list[Caption]


def make_clip(seed: int, num_frames: int, split: str, words: tuple[str, ...]) -> CaptionedClip:
    """Make the clip with number `seed` of a split.

    Args:
        num_frames: at least ``NUM_PAIRS + CHAIN``.
        words: see :func:`words_of`.
    """
    rng = np.random.default_rng([clips.SPLITS.index(split), seed, num_frames])
    total = NUM_PAIRS + CHAIN
    scenes = clips.ClipSpec(tuple(clips.sample_scenes(rng, num_frames)), SCENE_GRID)

    # The captions: pairs first, then the chain, whose first word has a number as pairs have.
    names = rng.permutation(words)[:total].tolist()
    numbers = rng.permutation(np.arange(10, 100))[: NUM_PAIRS + 1].tolist()
    captions = []
    for place, name in enumerate(names):
        if place < len(numbers):
            value = tuple(str(numbers[place]))
        else:
            value = (names[place - 1],)
        row = int(rng.integers(GRID))
        captions.append(Caption(row, (name, "=", *value)))
    pairs = captions[:NUM_PAIRS]
    chain = captions[NUM_PAIRS:]

    # Their order, in which each kind stays in order, and their frames.
    places_of_chain = set(rng.choice(total, CHAIN, replace=False).tolist())
    frames = np.sort(rng.choice(num_frames, total, replace=False)).tolist()
    next_pairs = iter(pairs)
    next_of_chain = iter(chain)
    by_frame = {}
    for place, frame in enumerate(frames):
        by_frame[frame] = next(next_of_chain if place in places_of_chain else next_pairs)
    return CaptionedClip(scenes, by_frame, pairs, chain)


def draw(picture: np.ndarray, caption: Caption) -> np.ndarray:
    """Draw a caption over a frame, uint8 RGB [H, W, 3]."""
    dimmed = picture.copy()
    band = slice(caption.row * CELL, (caption.row + 1) * CELL)
    dimmed[band] = dimmed[band] * 0.35
    canvas = Image.fromarray(dimmed)
    for column, text in enumerate(caption.cells):
        middle = ((column + 0.5) * CELL, (caption.row + 0.5) * CELL)
        ImageDraw.Draw(canvas).text(
            middle, text, font=_font_for(text), anchor="mm", fill=(240, 240, 240)
        )
    return np.asarray(canvas)


@cache
def _font_for(text: str) -> ImageFont.FreeTypeFont:
    """Return Pillow's own font, as large as lets a text fit into a cell."""
    size = CELL - 10
    font = ImageFont.load_default(size)
    while font.getlength(text) >= CELL - 1:
        size -= 1
        font = ImageFont.load_default(size)
    return font


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
        number = "".join(clip.pairs[0].cells[2:])
        names = ", ".join(caption.cells[0] for caption in clip.chain)
        answers = {"retrieval": number, "tracking": f" {names}"}
        asked = []
        for task in self.tasks:
            question, _ = self._asked(seed, task)
            asked.append((task, question, answers[task]))
        return asked

    def start(self, seed: int, task: str) -> str:
        _, start = self._asked(seed, task)
        return start

    def score(self, task: str, said: str, answer: str) -> float:
        """Return the share of a right answer's words that an answer has."""
        words = answer.split(", ")
        num_right = 0
        for word in words:
            if word.strip() in said:
                num_right += 1
        return num_right / len(words)

    def needle_tokens(self, seed: int, task: str) -> np.ndarray:
        clip = self.clip(seed)
        asked = clip.pairs[:1] if task == "retrieval" else clip.chain
        relevant = {frame: caption for frame, caption in clip.captions.items() if caption in asked}
        return self._texts(relevant) != ""

    def texts(self, seed: int) -> np.ndarray:
        """Return the text at each of the clip's visual tokens, str [tokens]; "" without a text."""
        return self._texts(self.clip(seed).captions)

    def _asked(self, seed: int, task: str) -> tuple[str, str]:
        """Return a task's question, and the beginning of its answer."""
        clip = self.clip(seed)
        word = clip.pairs[0].cells[0]
        number = "".join(clip.chain[0].cells[2:])
        question, start = QUESTIONS[task]
        return question.format(word=word, number=number), start.format(word=word, number=number)

    def _texts(self, captions: dict[int, Caption]) -> np.ndarray:
        """Return the text of some captions at each visual token, str [tokens]; "" elsewhere."""
        cells = np.full((self.num_shots, GRID, GRID), "", dtype=f"U{LONGEST_WORD}")
        for frame, caption in captions.items():
            cells[frame, caption.row, : len(caption.cells)] = caption.cells
        # A newline ends the video.
        return np.append(cells.flatten(), "")


def exam_like(exam: Exam, tokenizer: PreTrainedTokenizerBase) -> CaptionExam:
    """Return an exam with captioned clips of the same split and length.

    Raises:
        InvalidRequestError: see :func:`words_of`.
    """
    return CaptionExam(
        GRID, exam.num_shots, exam.folder, tuple(QUESTIONS), exam.split, words_of(tokenizer)
    )
