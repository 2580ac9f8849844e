"""A small trained video-language model and a clip to ask it about, both part of the package.

The model is an ordinary Hugging Face checkpoint of `Qwen2_5_VLForConditionalGeneration` with 3.1 M parameters,
trained by `apbv.demo.train` on synthetic clips (`apbv.demo.clips`): it reads letters in coloured borders and names
scenes. Pass `model_path()` to any `from_pretrained`.
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


def video_path() -> Path:
    """The packaged clip: H.264, 56 x 56 pixels, 4 frames per second, 32 seconds."""
    return _FOLDER / "clip.mp4"
