"""Measures the demo model on held-out clips: exact match per task.

    python -m apbv.demo.evaluate --clips 40 --shots 32

Every clip is rendered, written as an H.264 file, decoded from it, and answered by plain `generate`.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from apbv.demo import clips, model_path
from apbv.torchvision_guard import ensure_torchvision_imports

ensure_torchvision_imports()

from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel, ProcessorMixin  # noqa: E402
from transformers.utils.logging import disable_progress_bar  # noqa: E402
from transformers.video_utils import load_video  # noqa: E402


def ask(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    videos: Sequence[Path],
    questions: Sequence[str],
    max_new_tokens: int = 512,
) -> list[str]:
    """Answers one question about each video file.

    Args:
        model: A Qwen2.5-VL model.
        processor: Its processor.
        videos: Video files, one per question; all frames of each are used.
        questions: The questions.
        max_new_tokens: Longest answer, in tokens.

    Returns:
        The answers, without special tokens.
    """
    texts = [
        processor.apply_chat_template(
            [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": question}]}],
            add_generation_prompt=True,
            tokenize=False,
        )
        for question in questions
    ]
    # The metadata carries the frame rate, from which the model derives the distance of frames in time.
    frames, metadata = zip(*(load_video(str(path), backend="pyav") for path in videos), strict=True)
    inputs = processor(
        text=texts,
        videos=list(frames),
        video_metadata=list(metadata),
        padding=True,
        padding_side="left",
        return_tensors="pt",
    ).to(model.device)
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=max_new_tokens)
    return processor.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def evaluate(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    num_clips: int,
    num_shots: int,
    split: str = "test",
    batch: int = 8,
) -> dict[str, tuple[int, int]]:
    """Counts exactly right answers to every question about the first clips of a split.

    Returns:
        Per task: (right answers, questions). "describe, shots" counts single shots of the descriptions.
    """
    right: dict[str, int] = defaultdict(int)
    total: dict[str, int] = defaultdict(int)
    asked: dict[str, list[tuple[Path, str, str]]] = defaultdict(list)
    with TemporaryDirectory() as folder:
        for seed in range(num_clips):
            clip = clips.make_clip(seed, num_shots, split)
            path = Path(folder) / f"{seed}.mp4"
            clips.write_mp4(clips.render(clip), path)
            for task, question, answer in clips.questions(clip):
                asked[task].append((path, question, answer))
        for task, items in asked.items():
            for first in range(0, len(items), batch):
                paths, questions, answers = zip(*items[first : first + batch], strict=True)
                for said, answer in zip(ask(model, processor, paths, questions), answers, strict=True):
                    right[task] += said == answer
                    total[task] += 1
                    if task == "describe":
                        said_shots, shots = said.split(", "), answer.split(", ")[:-1]
                        right["describe, shots"] += sum(a == b for a, b in zip(said_shots, shots, strict=False))
                        total["describe, shots"] += len(shots)
    return {task: (right[task], total[task]) for task in total}


def main() -> None:
    parser = argparse.ArgumentParser(description="Exact match of the demo model on held-out clips.")
    parser.add_argument("--model", type=Path, default=model_path(), help="checkpoint folder")
    parser.add_argument("--clips", type=int, default=40)
    parser.add_argument("--shots", type=int, nargs="+", default=[32], help="lengths of the clips")
    parser.add_argument("--split", choices=clips.SPLITS, default="test")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    disable_progress_bar()
    processor = AutoProcessor.from_pretrained(arguments.model)
    model = AutoModelForImageTextToText.from_pretrained(
        arguments.model, dtype=getattr(torch, arguments.dtype)
    ).eval()
    for num_shots in arguments.shots:
        began = time.monotonic()
        results = evaluate(model, processor, arguments.clips, num_shots, arguments.split)
        seconds = time.monotonic() - began
        print(f"{arguments.clips} {arguments.split} clips of {num_shots} shots, {seconds:.0f} s")
        for task, (right, total) in results.items():
            print(f"  {task:16} {right / total:.3f}  ({right} of {total})", flush=True)


if __name__ == "__main__":
    main()
