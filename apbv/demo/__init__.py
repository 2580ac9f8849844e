"""The bundled demo: a small trained video-language model, its draft, and a clip.

Both are ordinary Hugging Face checkpoints of `Qwen2_5_VLForConditionalGeneration`, with 3.1 M and
0.8 M parameters, trained on synthetic clips, which `benchmarks/render.py` draws: they read letters
in coloured borders and name scenes. Pass `model_path()` and `draft_path()` to any
`from_pretrained`.
"""

import re
from pathlib import Path

_FOLDER = Path(__file__).parent

TOKEN_SIZE = 28  # height and width in pixels of a visual token
GRIDS = (2, 6)  # tokens per side of a frame: frames of 56 x 56 and of 168 x 168 pixels
BORDERS = ("red", "green", "blue", "yellow", "purple", "cyan")
RETRIEVAL_QUESTION = "which letter has the border: {colour}"
ORDERING_QUESTION = "name the letters in order"
COUNTING_QUESTION = "how many letters are shown"
DESCRIBE_QUESTION = "describe the clip shot by shot"
DEMO_QUESTION = RETRIEVAL_QUESTION.format(colour=BORDERS[0])
EXAMPLE_QUESTIONS = (DEMO_QUESTION, ORDERING_QUESTION, COUNTING_QUESTION, DESCRIBE_QUESTION)
_QUESTIONS = re.compile(
    "|".join([*EXAMPLE_QUESTIONS, RETRIEVAL_QUESTION.format(colour=f"({'|'.join(BORDERS)})")])
)
_SIZES = {(side * TOKEN_SIZE, side * TOKEN_SIZE) for side in range(GRIDS[0], GRIDS[1] + 1)}
DEMO_LETTERS = "X J P H E L"  # of the bundled clip, in order


def model_path() -> Path:
    """Return the folder of the bundled checkpoint."""
    return _FOLDER / "model"


def draft_path() -> Path:
    """Return the folder of the draft's checkpoint, which has the same tokenizer and processor."""
    return _FOLDER / "draft"


def video_path() -> Path:
    """Return the path of the bundled clip.

    It is H.264, 56 x 56 pixels, 4 frames per second, 32 seconds.
    """
    return _FOLDER / "clip.mp4"


def understands(prompt: str, sizes: set[tuple[int, int]]) -> bool:
    """Return whether the demo model was trained on such a prompt, and frames of these sizes.

    Args:
        sizes: heights and widths.
    """
    return sizes <= _SIZES and _QUESTIONS.search(prompt) is not None
