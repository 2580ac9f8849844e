"""A small trained video-language model, its draft, and a clip to ask them about.

Both are ordinary Hugging Face checkpoints of `Qwen2_5_VLForConditionalGeneration`, with 3.1 M and 0.8 M
parameters, trained on synthetic clips (`apbv.demo.clips`): they read letters in coloured borders and name scenes.
Pass `model_path()` and `draft_path()` to any `from_pretrained`.
"""

from pathlib import Path

_FOLDER = Path(__file__).parent

EXAMPLE_QUESTIONS = (
    "which letter has the border: red",
    "name the letters in order",
    "how many letters are shown",
    "describe the clip shot by shot",
)
DEMO_QUESTION = EXAMPLE_QUESTIONS[0]
DEMO_CLIP = (10, 64, "test")  # arguments of apbv.demo.clips.make_clip that specify the packaged clip


def model_path() -> Path:
    """Return the folder of the packaged checkpoint."""
    return _FOLDER / "model"


def draft_path() -> Path:
    """Return the folder of the draft's checkpoint, which has the same tokenizer and processor."""
    return _FOLDER / "draft"


def video_path() -> Path:
    """Return the path of the packaged clip: H.264, 56 x 56 pixels, 4 frames per second, 32 seconds."""
    return _FOLDER / "clip.mp4"
