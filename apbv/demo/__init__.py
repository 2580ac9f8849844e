"""A small trained video-language model, its draft, and a clip to ask them about, all part of the package.

Both are ordinary Hugging Face checkpoints of `Qwen2_5_VLForConditionalGeneration`, with 3.1 M and 0.8 M
parameters, trained by `apbv.demo.train` on synthetic clips (`apbv.demo.clips`): they read letters in coloured
borders and name scenes. Pass `model_path()` and `draft_path()` to any `from_pretrained`.
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
    """Folder of the packaged checkpoint."""
    return _FOLDER / "model"


def draft_path() -> Path:
    """Folder of the draft's checkpoint, with the same tokenizer and processor."""
    return _FOLDER / "draft"


def video_path() -> Path:
    """The packaged clip: H.264, 56 x 56 pixels, 4 frames per second, 32 seconds."""
    return _FOLDER / "clip.mp4"
