"""Make a video model of a text model, whose visual tokens are words: LLaVA-OneVision with a pretrained decoder.

    python benchmarks/make_reader.py --decoder Qwen/Qwen2.5-Coder-0.5B-Instruct --out DIR

The decoder's weights stay as they are. A small vision tower and the projector are trained, without the decoder, to
turn each cell of a captioned frame (support/captions.py) into the decoder's own input embedding of the cell's
text. Of held-out H.264 files, prints the share of visual tokens whose nearest embedding of the whole vocabulary is
the right one. Questions about such clips:

    python benchmarks/accuracy.py --preset captions --model DIR --dtype bfloat16 --shots 24 --hosts 4
"""

import argparse
import sys
import tempfile
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import numpy as np
import torch
from torch.nn.functional import cross_entropy
from tqdm import trange
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from apbv import HostGroup

from support import captions, clips
from support.arguments import COUNT
from support.demo_training.processor import CHAT_TEMPLATE
from support.exams import Candidate, Exam

PATCH = captions.CELL // 2  # LLaVA-OneVision halves the sides of a video's frames
PLACEHOLDERS = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
NUM_SCENES = 512
BATCH = 24  # frames
PEAK_LEARNING_RATE = 1e-3


def build_model(
    decoder: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> LlavaOnevisionForConditionalGeneration:
    """Build the model, with the decoder's own modules and an untrained vision tower.

    Raises:
        ValueError: the decoder has no embeddings for the placeholders of images and videos.
    """
    ids = {kind: tokenizer.convert_tokens_to_ids(token) for kind, token in PLACEHOLDERS.items()}
    if None in ids.values() or max(ids.values()) >= decoder.config.vocab_size:
        raise ValueError(f"the decoder's tokenizer needs {' and '.join(PLACEHOLDERS.values())}, as Qwen2.5's has")
    config = LlavaOnevisionConfig(
        # Of one layer, as it is replaced.
        text_config={**decoder.config.to_dict(), "num_hidden_layers": 1, "layer_types": None},
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": captions.SIDE,
            "patch_size": PATCH,
            "vision_use_head": False,
        },
        image_token_id=ids["image"],
        video_token_id=ids["video"],
        image_grid_pinpoints=[[captions.SIDE, captions.SIDE]],
        tie_word_embeddings=decoder.config.tie_word_embeddings,
    )
    torch.manual_seed(0)
    model = LlavaOnevisionForConditionalGeneration(config).float().eval()
    model.model.language_model, model.lm_head = decoder.model, decoder.lm_head
    config.text_config = decoder.config
    newline = tokenizer.encode("\n", add_special_tokens=False)[0]
    model.model.image_newline.data = decoder.get_input_embeddings().weight[newline].detach().float().clone()
    model.generation_config = decoder.generation_config
    return model


def build_processor(tokenizer: PreTrainedTokenizerBase) -> LlavaOnevisionProcessor:
    """Build LLaVA-OneVision's processor for frames of 8 x 8 patches, with a ChatML template."""
    size = {"height": captions.SIDE, "width": captions.SIDE}
    template = CHAT_TEMPLATE.replace("<|vision_start|>", "").replace("<|vision_end|>", "{{ '\\n' }}")
    return LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(
            size=size, image_grid_pinpoints=[[captions.SIDE, captions.SIDE]]
        ),
        video_processor=LlavaOnevisionVideoProcessor(size=size),
        tokenizer=tokenizer,
        num_image_tokens=(captions.SIDE // PATCH) ** 2,
        vision_feature_select_strategy="full",
        image_token=PLACEHOLDERS["image"],
        video_token=PLACEHOLDERS["video"],
        chat_template=template,
    )


def train(
    model: LlavaOnevisionForConditionalGeneration, processor: LlavaOnevisionProcessor, words: list[str], steps: int
) -> None:
    """Train the vision tower and the projector on frames whose cells have random texts."""
    marks = [*dict.fromkeys(captions.MARKS.values())]
    texts = [*marks, "=", *captions.DIGITS, *words]
    ids = torch.tensor([captions.token_of(processor.tokenizer, text) for text in texts])
    wanted = model.get_input_embeddings().weight[ids].detach().float()  # [texts, d]
    unit = wanted.square().mean().sqrt()
    rng = np.random.default_rng(0)
    shots = clips.sample_scenes(rng, NUM_SCENES)
    scenes = captions.render_scenes(clips.ClipSpec(tuple(shots), captions.SCENE_GRID))
    model.requires_grad_(False)
    learned = [*model.model.vision_tower.parameters(), *model.model.multi_modal_projector.parameters()]
    for parameter in learned:
        parameter.requires_grad_(True)
    optimiser = torch.optim.AdamW(learned, lr=PEAK_LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, PEAK_LEARNING_RATE, total_steps=steps)
    shown = trange(steps, unit="step", disable=None)
    for _ in shown:
        batch, numbers, frames = rng.choice(NUM_SCENES, BATCH), _draw_texts(rng, range(len(marks), len(texts))), []
        for number, of_frame in zip(batch, numbers, strict=True):
            frame = scenes[number]
            for row, of_row in enumerate(of_frame):
                if of_row.any():
                    cells = tuple(texts[number] if number else "" for number in of_row)
                    frame = captions.draw(frame, captions.Caption(row, cells))
            frames.append(frame)
            of_frame[of_frame == 0] = marks.index(captions.MARKS[shots[number].scene])
        pixels = processor.video_processor([np.stack(frames)], return_tensors="pt").pixel_values_videos
        rows = model.model.get_video_features(pixels, return_dict=True).pooler_output[0, :-1]
        # A guess, softly, of the nearest embedding, which learns faster than the distance alone.
        apart = torch.cdist(rows / unit, wanted / unit).square() / wanted.shape[1]
        number = torch.from_numpy(numbers).flatten()
        loss = cross_entropy(-10 * apart, number) + apart.gather(1, number[:, None]).mean()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimiser.step()
        schedule.step()
        shown.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    model.requires_grad_(False)


def _draw_texts(rng: np.random.Generator, texts: range) -> np.ndarray:
    """Draw texts of a batch's cells by number, int64 [BATCH, rows, columns]; 0 for none, as half the rows have."""
    numbers = rng.integers(texts.start, texts.stop, size=(BATCH, captions.GRID, captions.GRID))
    numbers *= rng.random((BATCH, captions.GRID, 1)) < 0.5
    return numbers * (rng.random(numbers.shape) < 0.8)


@torch.no_grad()
def shares_read(
    model: LlavaOnevisionForConditionalGeneration, processor: LlavaOnevisionProcessor, num_clips: int
) -> tuple[float, float]:
    """Return the share of held-out files' visual tokens whose nearest embedding of all is the right one.

    Returns:
        of the captions' texts, and of all tokens.
    """
    candidate, found, is_text = Candidate(model, processor, HostGroup.single("cpu")), [], []
    table = model.get_input_embeddings().weight.float()
    with tempfile.TemporaryDirectory() as folder:
        exam = captions.exam_like(Exam(captions.GRID, 16, Path(folder)), processor.tokenizer)
        for seed in range(num_clips):
            visual = candidate.read(exam.file(seed), "?").visual
            rows = torch.cat([*candidate.encoded(visual.chunks(visual.host, 2**30))]).float()
            texts = exam.texts(seed)
            ids = torch.tensor([captions.token_of(processor.tokenizer, text) for text in texts])
            found.append(torch.cdist(rows, table).argmin(dim=1) == ids)
            is_text.append(torch.from_numpy(~np.isin(texts, [*captions.MARKS.values(), "\n"])))
    right = torch.cat(found).float()
    return right[torch.cat(is_text)].mean().item(), right.mean().item()


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--decoder", required=True, help="a text model such as Qwen2's: a directory, or a hub id")
    parser.add_argument("--out", type=Path, required=True, help="output directory")
    parser.add_argument("--steps", type=COUNT, default=800, help="training steps (default 800)")
    parser.add_argument("--clips", type=COUNT, default=4, help="held-out clips to check (default 4)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    tokenizer = AutoTokenizer.from_pretrained(options.decoder)
    words = captions.words_of(tokenizer)
    model = build_model(AutoModelForCausalLM.from_pretrained(options.decoder, dtype="auto"), tokenizer)
    processor = build_processor(tokenizer)
    train(model, processor, words, options.steps)
    model.save_pretrained(options.out)
    processor.save_pretrained(options.out)
    texts, tokens = shares_read(model, processor, options.clips)
    print(f"read right: {texts:.1%} of the captions' texts, {tokens:.1%} of all visual tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
