"""Draw docs/road.svg, the way from a video to an answer on two hosts.

    python docs/draw_road.py

The picture is made with the standard library only.
"""

from collections.abc import Iterable
from pathlib import Path
from xml.sax.saxutils import escape

PICTURE = Path(__file__).with_name("road.svg")

WIDTH = 960
HEIGHT = 526
INK, GREY, PAPER = "#1f2933", "#52606d", "#ffffff"
# A host's frames and its share of the prompt have the same hue in every row.
ANCHOR, QUESTION = "#d9c8f0", "#f9d98c"
HOST = ("#9fc8ee", "#f2b2a0")
PALE = ("#eef5fc", "#fdf1ee")
FONT = "font-family='Helvetica, Arial, sans-serif'"


def box(
    x: float, y: float, width: float, height: float, fill: str, label: str = "", radius: int = 3
) -> str:
    """A rectangle with a label in its middle."""
    shape = (
        f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='{radius}' "
        f"fill='{fill}' stroke='{INK}' stroke-width='1'/>"
    )
    return shape + (
        text(x + width / 2, y + height / 2 + 5, label, anchor="middle") if label else ""
    )


def text(
    x: float, y: float, words: str, *, size: int = 14, anchor: str = "start", colour: str = INK
) -> str:
    """One line of text, whose baseline is at ``y``."""
    return (
        f"<text x='{x:g}' y='{y:g}' {FONT} font-size='{size}' text-anchor='{anchor}' "
        f"fill='{colour}'>{escape(words)}</text>"
    )


def arrow(x1: float, y1: float, x2: float, y2: float, *, both_ways: bool = False) -> str:
    """A straight arrow."""
    start = " marker-start='url(#head)'" if both_ways else ""
    return (
        f"<line x1='{x1:g}' y1='{y1:g}' x2='{x2:g}' y2='{y2:g}' stroke='{INK}' stroke-width='1.5' "
        f"marker-end='url(#head)'{start}/>"
    )


def step(number: int, y: float, *lines: str) -> Iterable[str]:
    """What happens in a row, at its left."""
    yield text(20, y, f"{number}. {lines[0]}", size=15)
    for offset, line in enumerate(lines[1:], start=1):
        yield text(38, y + 18 * offset, line, size=13, colour=GREY)


def draw() -> str:
    """The picture as SVG."""
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' "
        f"height='{HEIGHT}' role='img'>",
        "<title>From a video to an answer on two hosts</title>",
        "<defs><marker id='head' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='7' "
        "markerHeight='7' orient='auto-start-reverse'><path d='M0 0 L10 5 L0 10 z' "
        f"fill='{INK}'/></marker></defs>",
        f"<rect width='{WIDTH}' height='{HEIGHT}' rx='8' fill='{PAPER}'/>",
    ]

    parts += step(1, 44, "Read", "Each host decodes and encodes", "its own frames of the video.")
    for frame in range(12):
        parts.append(box(310 + 38 * frame, 28, 34, 44, HOST[frame // 6]))
    parts.append(text(785, 46, "frames of host 0", size=13))
    parts.append(text(785, 64, "frames of host 1", size=13))
    parts += [box(768, 35, 12, 12, HOST[0]), box(768, 53, 12, 12, HOST[1])]

    parts.append(arrow(536, 76, 536, 108))
    parts += step(
        2, 132, "Cut the prompt", "The context becomes 2H blocks;", "H is the number of hosts."
    )
    widths = (72, 110, 110, 110, 110, 88)
    labels = ("anchor", "block 0", "block 1", "block 2", "block 3", "question")
    fills = (ANCHOR, HOST[0], HOST[1], HOST[1], HOST[0], QUESTION)
    x = 310
    for width, label, fill in zip(widths, labels, fills, strict=True):
        parts.append(box(x, 114, width, 36, fill, label))
        x += width

    parts += [arrow(450, 154, 450, 190), arrow(768, 154, 768, 190)]
    parts += step(
        3,
        222,
        "Prefill, one forward pass",
        "The unmodified language model runs",
        "on every host's share. In each layer,",
        "blocks pass their most important KV",
        "pairs on to later blocks, and the",
        "question attends to everything.",
    )
    for host, (first, second) in enumerate(((0, 3), (1, 2))):
        left = 300 + 324 * host
        parts.append(box(left, 194, 300, 136, PALE[host], radius=6))
        parts.append(text(left + 12, 216, f"host {host}"))
        x = left + 10
        for width, label, fill in (
            (60, "anchor", ANCHOR),
            (72, f"block {first}", HOST[host]),
            (72, f"block {second}", HOST[host]),
            (76, "question", QUESTION),
        ):
            parts.append(box(x, 228, width, 36, fill, label))
            x += width
        parts.append(text(left + 12, 290, "attention of anchor, blocks and", size=13, colour=GREY))
        parts.append(
            text(left + 12, 308, "question; keeps its own tokens' KV", size=13, colour=GREY)
        )
    parts.append(arrow(590, 246, 634, 246, both_ways=True))
    parts.append(arrow(590, 300, 634, 300, both_ways=True))

    parts += [arrow(450, 334, 450, 370), arrow(768, 334, 768, 370)]
    parts += step(
        4,
        396,
        "First token",
        "Every host has it. The KV of every",
        "token lies on exactly one host.",
    )
    parts.append(
        box(
            300, 374, 624, 44, "#f5f7fa", "logits of the last token, and the KV of the whole prompt"
        )
    )

    parts.append(arrow(612, 422, 612, 452))
    parts += step(5, 474, "Answer", "Decode, with a draft if you like;", "or hand the KV on.")
    ways = ("on host 0", "on all hosts", "with a draft", "transformers", "vLLM, or disk")
    for number, way in enumerate(ways):
        parts.append(box(300 + 126 * number, 456, 120, 40, "#dff0df", way))

    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
