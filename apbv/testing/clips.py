"""Draws synthetic clips from seeds: scenes with a few letters to find, and questions about them.

A clip is a sequence of shots of two video frames each. Scenes (noise, a gradient, printed text, a
disc or a square that moves or stands still) run over one to eight shots. Three to six shots hold a
needle, as VNBench calls it: one of 16 letters in a border of one of six colours, either *edited*
(laid over a part of the running scene) or *inserted* (a card that replaces the scene for one shot).
Colours and letters are unique within a clip, so a question that names a colour has one answer. Two
frames are one temporal patch of the video model, hence a patch never mixes two shots as long as
every frame of the clip is sampled.

It needs only numpy, Pillow and PyAV.
"""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ..demo import (
    BORDERS,
    COUNTING_QUESTION,
    DESCRIBE_QUESTION,
    GRIDS,  # noqa: F401  (a setting of clips like those below)
    ORDERING_QUESTION,
    RETRIEVAL_QUESTION,
    TOKEN_SIZE,
)

FRAMES_PER_SHOT = 2
FPS = 4  # video frames per second, so two shots per second
MIN_LETTERS = 3
MAX_LETTERS = 6
DEMO_CLIP = (10, 64, "test")  # arguments of make_clip that specify the bundled clip
LONGEST_SCENE = 8  # shots

LETTERS = tuple("ABCEFHJKLMPQRTXZ")
_PAINTS = (
    (215, 35, 35),
    (30, 165, 50),
    (40, 65, 225),
    (230, 215, 40),
    (170, 45, 190),
    (35, 205, 215),
)
COLOURS = dict(zip(BORDERS, _PAINTS, strict=True))
SCENES = (
    "grey noise",
    "smooth gradient",
    "printed text",
    "still disc",
    "moving disc",
    "still square",
    "moving square",
)
NEEDLES = ("edited", "inserted")
SPLITS = ("train", "validation", "test")
TASKS = ("retrieval", "ordering", "counting", "describe")
MOST_DESCRIBED = 128  # shots; a longer clip's further shots are not described


@dataclass(frozen=True)
class Needle:
    """A letter in a coloured border.

    Args:
        seed: seed of everything random in its pixels.
        kind: "edited" (over the scene) or "inserted" (instead of it).
        colour: border colour, a key of `COLOURS`.
        letter: one of `LETTERS`.
    """

    seed: int
    kind: str
    colour: str
    letter: str


@dataclass(frozen=True)
class Shot:
    """One shot of two frames.

    Args:
        seed: seed of the scene it belongs to.
        scene: what the scene shows, one of `SCENES`.
        age: number of shots that the scene has already run.
        needle: the letter in this shot, if any.
    """

    seed: int
    scene: str
    age: int = 0
    needle: Needle | None = None

    @property
    def description(self) -> str:
        """Describe the shot in two words: "red K" for a lettered shot, the scene for the others."""
        if self.needle is None:
            return self.scene
        return f"{self.needle.colour} {self.needle.letter}"


@dataclass(frozen=True)
class ClipSpec:
    """The specification of a clip, which `render` turns into pixels.

    Args:
        shots: the shots in the order of time.
        grid: visual tokens per side of a frame.
    """

    shots: tuple[Shot, ...]
    grid: int = 2

    @property
    def needles(self) -> tuple[Needle, ...]:
        """Return the letters shown, in the order of time."""
        return tuple(shot.needle for shot in self.shots if shot.needle)


# (shot, colour, letter) of each needle of a clip, in the order of time.
Placement = tuple[tuple[int, str, str], ...]


def split_of(placement: Placement, num_shots: int) -> str:
    """Return the only split that may have a placement.

    A tenth of all placements are for test, and a tenth for validation.
    """
    tenth = zlib.crc32(repr((num_shots, placement)).encode()) % 10
    if tenth == 0:
        return "test"
    if tenth == 1:
        return "validation"
    return "train"


def sample_placement(rng: np.random.Generator, num_shots: int, split: str) -> Placement:
    """Draw where a clip shows which letter in which border.

    Args:
        rng: source of randomness.
        num_shots: number of shots, at least `MIN_LETTERS`.
        split: the split whose placements are drawn from.
    """
    while True:
        count = int(rng.integers(MIN_LETTERS, min(MAX_LETTERS, num_shots) + 1))
        places = np.sort(rng.choice(num_shots, size=count, replace=False)).tolist()
        colours = rng.permutation(list(COLOURS))[:count].tolist()
        letters = rng.permutation(LETTERS)[:count].tolist()
        placement = tuple(zip(places, colours, letters, strict=True))
        if split_of(placement, num_shots) == split:
            return placement


def sample_scenes(rng: np.random.Generator, num_shots: int) -> list[Shot]:
    """Draw scenes until they fill a number of shots.

    Two in five last one shot, the others two to eight.
    """
    shots: list[Shot] = []
    while len(shots) < num_shots:
        length = 1 if rng.random() < 0.4 else int(rng.integers(2, LONGEST_SCENE + 1))
        seed = int(rng.integers(0, 2**62))
        scene = str(rng.choice(SCENES))
        shots += [Shot(seed, scene, age) for age in range(length)]
    return shots[:num_shots]


def make_clip(
    seed: int, num_shots: int, split: str, grid: int = 2, needles: Sequence[str] = NEEDLES
) -> ClipSpec:
    """Make the clip with number `seed` of a split.

    The split is part of the seed of every random draw, so two splits never share a scene or a
    needle, and it limits how letters are placed (`split_of`), so they never share a placement.

    Args:
        seed: number of the clip within its split, from 0.
        num_shots: length in shots.
        split: one of `SPLITS`.
        grid: visual tokens per side of a frame, one of `GRIDS`.
        needles: kinds of needle to draw from.
    """
    kinds = sum(1 << NEEDLES.index(kind) for kind in needles)
    rng = np.random.default_rng([SPLITS.index(split), seed, num_shots, grid, kinds])
    shots = sample_scenes(rng, num_shots)
    for place, colour, letter in sample_placement(rng, num_shots, split):
        needle_seed = int(rng.integers(0, 2**62))
        kind = str(rng.choice(list(needles)))
        needle = Needle(needle_seed, kind, colour, letter)
        shots[place] = replace(shots[place], needle=needle)
    return ClipSpec(tuple(shots), grid)


def questions(clip: ClipSpec) -> list[tuple[str, str, str]]:
    """List every question that can be asked about a clip.

    The colour comes last in a retrieval question, so that the token that names it can look up the
    answer itself.

    Returns:
        (task, question, answer) triples; tasks are retrieval (one per needle), ordering, counting
        and describe.
    """
    asked = []
    for needle in clip.needles:
        question = RETRIEVAL_QUESTION.format(colour=needle.colour)
        asked.append(("retrieval", question, needle.letter))
    letters = [needle.letter for needle in clip.needles]
    asked.append(("ordering", ORDERING_QUESTION, " ".join(letters)))
    asked.append(("counting", COUNTING_QUESTION, str(len(clip.needles))))
    descriptions = [shot.description for shot in clip.shots]
    asked.append(("describe", DESCRIBE_QUESTION, ", ".join([*descriptions, "end"])))
    return asked


def asked_apart(clip: ClipSpec) -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]:
    """Return the retrievals among a clip's questions, and the others."""
    asked = questions(clip)
    number = len(clip.needles)
    return asked[:number], asked[number:]


def render(clip: ClipSpec) -> np.ndarray:
    """Render the pixels of a clip.

    Returns:
        uint8 RGB [T, H, W, 3] with T = 2 * number of shots and H = W = 28 * grid.
    """
    size = TOKEN_SIZE * clip.grid
    scene = None
    frames = []
    for shot in clip.shots:
        if scene is None or (scene.seed, scene.kind) != (shot.seed, shot.scene):
            scene = _Scene(shot.seed, shot.scene, size)
        for index in range(FRAMES_PER_SHOT):
            frames.append(_render_frame(shot, scene, index))
    return np.stack(frames)


def needle_box(needle: Needle, size: int) -> tuple[int, int, int]:
    """Return top, left and side, in pixels, of a needle's border in a frame of size x size pixels.

    It is as large as the smallest frame, and begins at any patch of a larger one.
    """
    side = 2 * TOKEN_SIZE
    patch = TOKEN_SIZE // 2
    num_places = (size - side) // patch + 1
    top, left = np.random.default_rng([needle.seed, 0]).integers(0, num_places, size=2) * patch
    return int(top), int(left), side


def needle_tokens(shot: Shot, grid: int) -> np.ndarray:
    """Return which tokens of a shot its needle covers by a quarter or more, bool [grid, grid]."""
    if shot.needle is None:
        return np.zeros((grid, grid), dtype=bool)
    top, left, side = needle_box(shot.needle, TOKEN_SIZE * grid)
    rows = _covered(top, top + side, grid)
    columns = _covered(left, left + side, grid)
    return rows[:, None] * columns >= TOKEN_SIZE**2 / 4


def _covered(start: int, stop: int, grid: int) -> np.ndarray:
    """Return how many pixels of each token a range covers along one side, int [grid]."""
    edges = np.arange(grid) * TOKEN_SIZE
    first = np.maximum(edges, start)
    last = np.minimum(edges + TOKEN_SIZE, stop)
    return (last - first).clip(min=0)


def write_mp4(
    frames: Iterable[np.ndarray | av.VideoFrame], path: str | Path, fps: int = FPS, **options: str
) -> None:
    """Write frames as an H.264 file (yuv420p).

    Args:
        frames: uint8 RGB [H, W, 3] each, or frames of PyAV.
        path: file to write.
        fps: frames per second.
        options: of the encoder (default: constant rate factor 18).
    """
    if not options:
        # With one thread the encoder makes the same decisions, and hence the same file, everywhere.
        options = {"crf": "18", "threads": "1"}
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=fps, options=options)
        stream.pix_fmt = "yuv420p"
        for number, frame in enumerate(frames):
            if not isinstance(frame, av.VideoFrame):
                frame = av.VideoFrame.from_ndarray(frame, format="rgb24")
            if number == 0:
                stream.height = frame.height
                stream.width = frame.width
            frame.pts = number
            frame.time_base = Fraction(1, fps)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


class _Scene:
    """A running scene: its still background, and the path of what moves.

    Args:
        seed: seed of the scene.
        kind: one of `SCENES`.
        size: height and width in pixels.
    """

    def __init__(self, seed: int, kind: str, size: int) -> None:
        rng = np.random.default_rng([seed, SCENES.index(kind)])
        self.seed = seed
        self.kind = kind
        self.size = size
        # The background.
        if kind == "grey noise":
            self.still = _noise(rng, size)
        elif kind == "smooth gradient":
            self.still = _gradient(rng, size, contrast=rng.uniform(50, 110))
        else:
            self.still = _gradient(rng, size, contrast=rng.uniform(0, 25))
        if kind == "printed text":
            self.still = _print_text(rng, self.still)
        # The shape, if there is one, and its path in pixels and pixels per frame.
        self.shape = kind.split()[1]
        self.fill = _muted_colour(rng, brightness=rng.choice([30, 210]))
        self.radius = rng.uniform(9, 14) * (size / 56) ** rng.uniform(0.3, 1)
        self.start = rng.uniform(0, 2 * (size - 2 * self.radius), size=2)
        angle = rng.uniform(0, 2 * np.pi)
        speed = 0.0
        if kind.startswith("moving"):
            speed = rng.uniform(4, 7) * (size / 56) ** 0.5
        self.velocity = speed * np.array([np.cos(angle), np.sin(angle)])

    def frame(self, number: int) -> np.ndarray:
        """Draw the scene's frame `number`, float [H, W, 3]."""
        if self.shape not in ("disc", "square"):
            return self.still
        # The path is reflected at the edges: a distance along a line of twice the free length is
        # folded back.
        free = self.size - 2 * self.radius
        folded = np.mod(self.start + self.velocity * number, 2 * free)
        x, y = np.minimum(folded, 2 * free - folded) + self.radius
        canvas = Image.fromarray(np.clip(self.still, 0, 255).astype(np.uint8))
        draw = ImageDraw.Draw(canvas)
        corners = (x - self.radius, y - self.radius, x + self.radius, y + self.radius)
        if self.shape == "disc":
            draw.ellipse(corners, fill=self.fill)
        else:
            draw.rectangle(corners, fill=self.fill)
        return np.asarray(canvas, dtype=np.float64)


def _render_frame(shot: Shot, scene: _Scene, index: int) -> np.ndarray:
    """Draw one frame, uint8 RGB [H, W, 3], with a little fresh noise over scene and needle."""
    number = shot.age * FRAMES_PER_SHOT + index
    picture = scene.frame(number)
    if shot.needle:
        picture = _draw_needle(shot.needle, picture)
    height, width, _ = picture.shape
    rng = np.random.default_rng([shot.seed, number, 1])
    flicker = rng.standard_normal((height, width, 1), np.float32)
    return np.clip(picture + 3 * flicker, 0, 255).astype(np.uint8)


def _noise(rng: np.random.Generator, size: int) -> np.ndarray:
    """Draw near-grey blocks of random size, brightness and contrast, float [H, W, 3]."""
    block = int(rng.choice([2, 4, 7, 14]))
    brightness = rng.uniform(70, 140)
    contrast = rng.uniform(15, 35)
    texture = rng.normal(brightness, contrast, size=(size // block, size // block, 1))
    tint = rng.normal(0, 4, size=3)
    return np.kron(texture + tint, np.ones((block, block, 1)))


def _gradient(rng: np.random.Generator, size: int, contrast: float) -> np.ndarray:
    """Draw a gradient from a muted colour to a brighter one at any angle, float [H, W, 3]."""
    angle = rng.uniform(0, 2 * np.pi)
    steps = np.linspace(-0.7, 0.7, size)
    slope = np.cos(angle) * steps[:, None] + np.sin(angle) * steps[None, :]
    colour = _muted_colour(rng, brightness=rng.uniform(85, 145))
    return np.array(colour) + contrast * slope[..., None]


def _print_text(rng: np.random.Generator, background: np.ndarray) -> np.ndarray:
    """Draw lines of small lower-case letters and digits, float [H, W, 3]."""
    canvas = Image.fromarray(np.clip(background, 0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(canvas)
    size = canvas.width
    height = int(rng.integers(9, 13) * (size / 56) ** rng.uniform(0, 0.6))
    font = ImageFont.load_default(size=height)
    ink = int(rng.choice([15, 235]))
    characters = list("abcdefghijklmnopqrstuvwxyz0123456789  ")
    line_length = 1 + 2 * size // height
    for top in range(int(rng.integers(0, 5)), size - height, height + 2):
        line = "".join(rng.choice(characters, size=line_length))
        left = int(rng.integers(0, 5))
        draw.text((left, top), line, font=font, fill=(ink, ink, ink))
    return np.asarray(canvas, dtype=np.float64)


def _muted_colour(rng: np.random.Generator, brightness: float) -> tuple[int, int, int]:
    """Draw a colour that is far less saturated than any border's."""
    red, green, blue = np.clip(brightness + rng.uniform(-25, 25, size=3), 0, 255)
    return int(red), int(green), int(blue)


def _draw_needle(needle: Needle, picture: np.ndarray) -> np.ndarray:
    """Draw a light letter in its border on the dimmed scene or on a card, float [H, W, 3]."""
    size = picture.shape[0]
    top, left, side = needle_box(needle, size)
    rng = np.random.default_rng([needle.seed, 1])

    # The background. A card is drawn in any case, so that what follows does not depend on the kind.
    card = _gradient(rng, size, contrast=rng.uniform(0, 30)) * 0.6
    if needle.kind == "inserted":
        background = card
    else:
        background = picture.copy()
        background[top : top + side, left : left + side] *= 0.6
    canvas = Image.fromarray(np.clip(background, 0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(canvas)

    # The letter. Pillow's built-in font makes clips look the same wherever they are rendered.
    font = ImageFont.load_default(size=int(rng.integers(29, 40)))
    centre = np.array([left, top]) + side / 2 + rng.uniform(-4, 4, size=2)
    brightness = int(rng.integers(215, 256))
    draw.text(
        tuple(centre),
        needle.letter,
        font=font,
        anchor="mm",
        fill=(brightness, brightness, brightness),
        stroke_width=1,
    )

    # The border.
    shade = np.array(COLOURS[needle.colour]) + rng.uniform(-20, 20, size=3)
    colour = tuple(int(value) for value in np.clip(shade, 0, 255))
    width = int(rng.integers(5, 8))
    corners = (left, top, left + side - 1, top + side - 1)
    draw.rectangle(corners, outline=colour, width=width)
    return np.asarray(canvas, dtype=np.float64)
