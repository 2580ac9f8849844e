"""Seeded synthetic clips: noise shots with a few bordered letters between them, and questions about them.

A clip is a sequence of shots of two video frames each. Most shots are grey noise; three to six of them show
one of 16 letters inside a border of one of six colours. Colours and letters are unique within a clip, so a
question that names a colour has one answer. Two frames are one temporal patch of the video model, hence a
patch never mixes two shots as long as every frame of the clip is sampled.

Needs only numpy, Pillow and PyAV.
"""

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import av
import numpy as np
from PIL import Image, ImageDraw, ImageFont

FRAME_SIZE = 56  # pixels, height and width
FRAMES_PER_SHOT = 2
FPS = 4  # video frames per second, so two shots per second
MIN_LETTERS, MAX_LETTERS = 3, 6

LETTERS = tuple("ABCEFHJKLMPQRTXZ")
COLOURS = {
    "red": (215, 35, 35),
    "green": (30, 165, 50),
    "blue": (40, 65, 225),
    "yellow": (230, 215, 40),
    "purple": (170, 45, 190),
    "cyan": (35, 205, 215),
}
SPLITS = ("train", "validation", "test")

RETRIEVAL_QUESTION = "which letter has the border: {colour}"
ORDERING_QUESTION = "name the letters in order"
COUNTING_QUESTION = "how many letters are shown"
DESCRIBE_QUESTION = "describe the clip shot by shot"


@dataclass(frozen=True)
class Shot:
    """One shot of two frames.

    Args:
        seed: Seed of everything random in its pixels.
        colour: Border colour, a key of `COLOURS`; None for a noise shot.
        letter: Letter shown, one of `LETTERS`; None for a noise shot.
    """

    seed: int
    colour: str | None = None
    letter: str | None = None

    @property
    def description(self) -> str:
        """Two words: "red K" for a lettered shot, "grey noise" for the others."""
        return f"{self.colour} {self.letter}" if self.letter else "grey noise"


@dataclass(frozen=True)
class ClipSpec:
    """What a clip shows; `render` turns it into pixels.

    Args:
        shots: The shots in the order of time.
    """

    shots: tuple[Shot, ...]

    @property
    def lettered(self) -> tuple[Shot, ...]:
        """The shots that show a letter, in the order of time."""
        return tuple(shot for shot in self.shots if shot.letter)


def sample_layout(rng: np.random.Generator, num_shots: int) -> list[tuple[str, str] | None]:
    """Draws what each shot of a clip shows.

    Args:
        rng: Source of randomness.
        num_shots: Number of shots, at least `MIN_LETTERS`.

    Returns:
        One entry per shot: (colour, letter), or None for noise.
    """
    count = int(rng.integers(MIN_LETTERS, min(MAX_LETTERS, num_shots) + 1))
    places = np.sort(rng.choice(num_shots, size=count, replace=False))
    colours = rng.permutation(list(COLOURS))[:count]
    letters = rng.permutation(LETTERS)[:count]
    layout: list[tuple[str, str] | None] = [None] * num_shots
    for place, colour, letter in zip(places, colours, letters, strict=True):
        layout[place] = (str(colour), str(letter))
    return layout


def make_clip(seed: int, num_shots: int, split: str) -> ClipSpec:
    """The clip with number `seed` of a split.

    The split is part of the seed of every random draw, so two splits never share a clip or a shot.

    Args:
        seed: Number of the clip within its split, from 0.
        num_shots: Length in shots.
        split: One of `SPLITS`.
    """
    rng = np.random.default_rng([SPLITS.index(split), seed, num_shots])
    layout = sample_layout(rng, num_shots)
    seeds = rng.integers(0, 2**62, size=num_shots)
    shots = [
        Shot(int(shot_seed), *(content or (None, None))) for shot_seed, content in zip(seeds, layout, strict=True)
    ]
    return ClipSpec(tuple(shots))


def questions(clip: ClipSpec) -> list[tuple[str, str, str]]:
    """Every question that can be asked about a clip.

    The colour comes last in a retrieval question: the token that names it can then look the answer up itself.

    Returns:
        (task, question, answer) triples; tasks are retrieval (one per lettered shot), ordering, counting and
        describe.
    """
    lettered = clip.lettered
    asked = [("retrieval", RETRIEVAL_QUESTION.format(colour=shot.colour), shot.letter) for shot in lettered]
    return [
        *asked,
        ("ordering", ORDERING_QUESTION, " ".join(shot.letter for shot in lettered)),
        ("counting", COUNTING_QUESTION, str(len(lettered))),
        ("describe", DESCRIBE_QUESTION, ", ".join(shot.description for shot in clip.shots) + ", end"),
    ]


def render(clip: ClipSpec) -> np.ndarray:
    """Pixels of a clip.

    Returns:
        uint8 RGB [T, H, W, 3] with T = 2 * number of shots and H = W = 56.
    """
    return np.concatenate([_render_shot(shot) for shot in clip.shots])


def write_mp4(frames: np.ndarray, path: str | Path | BytesIO, fps: int = FPS) -> None:
    """Writes frames as an H.264 file (yuv420p, constant rate factor 18).

    Args:
        frames: uint8 RGB [T, H, W, 3].
        path: File to write, or a buffer.
        fps: Frames per second.
    """
    target = path if isinstance(path, BytesIO) else str(path)
    with av.open(target, "w", format="mp4") as container:
        # One thread makes the encoder's decisions, hence the file, the same everywhere.
        stream = container.add_stream("libx264", rate=fps, options={"crf": "18", "threads": "1"})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def read_mp4(path: str | Path | BytesIO) -> np.ndarray:
    """All frames of a video file as uint8 RGB [T, H, W, 3]."""
    with av.open(path if isinstance(path, BytesIO) else str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def _render_shot(shot: Shot) -> np.ndarray:
    """uint8 RGB [2, H, W, 3]: two frames that differ by a little fresh noise."""
    rng = np.random.default_rng(shot.seed)
    still = _noise_texture(rng)
    if shot.letter:
        still = _draw_letter(rng, still, shot.colour, shot.letter)
    flicker = rng.normal(0.0, 4.0, size=(FRAMES_PER_SHOT, FRAME_SIZE, FRAME_SIZE, 1))
    return np.clip(still[None] + flicker, 0, 255).astype(np.uint8)


def _noise_texture(rng: np.random.Generator) -> np.ndarray:
    """float [H, W, 3]: near-grey blocks of random size, brightness and contrast."""
    cells = int(rng.choice([4, 7, 14, 28]))
    texture = rng.normal(rng.uniform(70, 140), rng.uniform(10, 35), size=(cells, cells, 1))
    texture = texture + rng.normal(0, 4, size=3)
    return np.kron(texture, np.ones((FRAME_SIZE // cells, FRAME_SIZE // cells, 1)))


def _draw_letter(rng: np.random.Generator, background: np.ndarray, colour: str, letter: str) -> np.ndarray:
    """float [H, W, 3]: the letter, light on the dimmed background, inside its border."""
    canvas = Image.fromarray(np.clip(background * 0.6, 0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(canvas)
    # Pillow's built-in font, so that clips look the same wherever they are rendered.
    font = ImageFont.load_default(size=int(rng.integers(29, 40)))
    centre = FRAME_SIZE / 2 + rng.uniform(-4, 4, size=2)
    brightness = int(rng.integers(215, 256))
    draw.text(tuple(centre), letter, font=font, anchor="mm", fill=(brightness,) * 3, stroke_width=1)
    border = np.clip(np.array(COLOURS[colour]) + rng.uniform(-20, 20, size=3), 0, 255).astype(int)
    width = int(rng.integers(5, 8))
    draw.rectangle((0, 0, FRAME_SIZE - 1, FRAME_SIZE - 1), outline=tuple(map(int, border)), width=width)
    return np.asarray(canvas, dtype=np.float64)
