"""Make a video model of a text model, whose visual tokens are words: LLaVA-OneVision with a
pretrained decoder.

    python benchmarks/make_reader.py --decoder Qwen/Qwen2.5-Coder-0.5B-Instruct --out DIR

The decoder's weights stay as they are. A small vision tower and the projector are trained, without
the decoder, to turn each cell of a captioned frame (support/captions.py) into the decoder's own
input embedding of the cell's text. Of the texts in held-out H.264 files, prints the share whose
visual tokens' nearest embedding of the whole vocabulary is the right one. Questions about such
clips:

    python benchmarks/accuracy.py --preset captions --model DIR --dtype bfloat16 --shots 24 \
        --hosts 4
"""

import argparse
import sys
import tempfile
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.compat.torchvision_guard)
from apbv.errors import InvalidRequestError

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

from apbv import HostGroup, demo
from apbv.model.loading.checkpoints import load_weights
from apbv.testing import clips

from support import captions
from support.arguments import parser_of, presets_of
from support.exams import Candidate, Exam

SIZE = {"height": captions.SIDE, "width": captions.SIDE}
PINPOINTS = [[captions.SIDE, captions.SIDE]]
TOWER = presets_of("make_reader")["vision_tower"]
PATCH = captions.CELL // 2  # LLaVA-OneVision halves the sides of a video's frames
PLACEHOLDERS = ("<|image_pad|>", "<|video_pad|>")
NUM_SCENES = 512  # frames without captions
BATCH = 24  # frames
NUM_MARKS = len(set(captions.MARKS.values()))
PEAK_LEARNING_RATE = 1e-3


def build_model(
    decoder: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> LlavaOnevisionForConditionalGeneration:
    """Build the model, with the decoder's own modules and an untrained vision tower.

    Raises:
        InvalidRequestError: the decoder has no embeddings for the placeholders of images and
            videos.
    """
    tokens = []
    for text in (*PLACEHOLDERS, "\n"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise InvalidRequestError(
                f"the decoder's tokenizer needs {' and '.join(PLACEHOLDERS)}, as Qwen2.5's has"
            )
        tokens.append(ids[0])
    image_token, video_token, newline_token = tokens
    config = LlavaOnevisionConfig(
        # Of one layer, as it is replaced.
        text_config={**decoder.config.to_dict(), "num_hidden_layers": 1, "layer_types": None},
        vision_config={**TOWER, "image_size": captions.SIDE, "patch_size": PATCH},
        image_token_id=image_token,
        video_token_id=video_token,
        image_grid_pinpoints=PINPOINTS,
        tie_word_embeddings=decoder.config.tie_word_embeddings,
    )
    torch.manual_seed(0)
    model = LlavaOnevisionForConditionalGeneration(config).float().eval()
    model.model.language_model = decoder.model
    model.lm_head = decoder.lm_head
    config.text_config = decoder.config
    newline = decoder.get_input_embeddings().weight[newline_token]
    model.model.image_newline.data = newline.detach().float().clone()
    model.generation_config = decoder.generation_config
    return model


def build_processor(tokenizer: PreTrainedTokenizerBase) -> LlavaOnevisionProcessor:
    """Build LLaVA-OneVision's processor for frames of 8 x 8 patches, with a ChatML template."""
    template = (demo.model_path() / "chat_template.jinja").read_text()
    template = template.replace("<|vision_start|>", "").replace("<|vision_end|>", "{{ '\\n' }}")
    return LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(size=SIZE, image_grid_pinpoints=PINPOINTS),
        video_processor=LlavaOnevisionVideoProcessor(size=SIZE),
        tokenizer=tokenizer,
        num_image_tokens=(captions.SIDE // PATCH) ** 2,
        vision_feature_select_strategy="full",
        image_token=PLACEHOLDERS[0],
        video_token=PLACEHOLDERS[1],
        chat_template=template,
    )


def train(
    model: LlavaOnevisionForConditionalGeneration, processor: LlavaOnevisionProcessor, steps: int
) -> None:
    """Train the vision tower and the projector on frames whose cells have random texts.

    Raises:
        InvalidRequestError: see :func:`support.captions.words_of`.
    """
    # The texts, marks first, and the decoder's embeddings of them, [texts, d].
    all_texts = [*captions.SIGNS, *captions.words_of(processor.tokenizer)]
    texts = list(dict.fromkeys(all_texts))
    ids = torch.tensor([captions.token_of(processor.tokenizer, text) for text in texts])
    embeddings = model.get_input_embeddings().weight[ids].detach().float()
    unit = embeddings.square().mean().sqrt()

    # The scenes behind the texts.
    rng = np.random.default_rng(0)
    shots = clips.sample_scenes(rng, NUM_SCENES)
    scenes = captions.render_scenes(clips.ClipSpec(tuple(shots), captions.SCENE_GRID))

    # What is trained.
    model.requires_grad_(False)
    parameters = []
    for part in (model.model.vision_tower, model.model.multi_modal_projector):
        part.requires_grad_(True)
        parameters += part.parameters()
    optimiser = torch.optim.AdamW(parameters, lr=PEAK_LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, PEAK_LEARNING_RATE, total_steps=steps)

    progress = trange(steps, unit="step", disable=None)
    for _ in progress:
        # Draw frames. Half of the rows have a caption, with a text in four of five cells.
        numbers = rng.integers(NUM_MARKS, len(texts), size=(BATCH, captions.GRID, captions.GRID))
        has_caption = rng.random((BATCH, captions.GRID, 1)) < 0.5
        has_text = has_caption & (rng.random(numbers.shape) < 0.8)
        places = rng.choice(NUM_SCENES, BATCH)
        frames = []
        for place, frame_numbers, frame_has_text in zip(places, numbers, has_text, strict=True):
            frame = scenes[place]
            for row in frame_has_text.any(axis=1).nonzero()[0]:
                cells = np.where(frame_has_text[row], np.array(texts)[frame_numbers[row]], "")
                frame = captions.draw(frame, captions.Caption(row, tuple(cells.tolist())))
            frames.append(frame)
            # Other cells read as the mark of the scene.
            mark = captions.MARKS[shots[place].scene]
            frame_numbers[~frame_has_text] = texts.index(mark)

        # Compare what the model makes of every cell with the embedding of its text.
        batch = processor.video_processor([np.stack(frames)], return_tensors="pt")
        features = model.model.get_video_features(batch.pixel_values_videos, return_dict=True)
        # A newline ends the video.
        rows = features.pooler_output[0, :-1]
        distances = torch.cdist(rows / unit, embeddings / unit).square() / embeddings.shape[1]
        expected = torch.from_numpy(numbers).flatten()
        # That the nearest embedding is the right one is learned faster than the distance alone.
        choice_loss = cross_entropy(-10 * distances, expected)
        distance_loss = distances.gather(1, expected[:, None]).mean()
        loss = choice_loss + distance_loss

        # Learn.
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        schedule.step()
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    model.requires_grad_(False)


@torch.no_grad()
def share_read(
    model: LlavaOnevisionForConditionalGeneration,
    processor: LlavaOnevisionProcessor,
    num_clips: int,
) -> float:
    """Return the share of texts in held-out files that are read right.

    The nearest of all embeddings must be that of the text's token.
    """
    candidate = Candidate(model, processor, HostGroup.single("cpu"))
    num_right = 0
    num_texts = 0
    table = model.get_input_embeddings().weight.float()
    with tempfile.TemporaryDirectory() as folder:
        exam = captions.exam_like(Exam(captions.GRID, 16, Path(folder)), processor.tokenizer)
        for seed in range(num_clips):
            visual = candidate.read(exam.file(seed), "?").visual
            texts = exam.texts(seed)
            is_text = texts != ""
            chunks = visual.chunks(visual.host, 2**30)
            rows = torch.cat(list(candidate.encoded(chunks)))[is_text]
            nearest = torch.cdist(rows.float(), table).argmin(dim=1).tolist()
            for token, text in zip(nearest, texts[is_text], strict=True):
                num_texts += 1
                if token == captions.token_of(processor.tokenizer, text):
                    num_right += 1
    return num_right / num_texts


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    return parser_of("make_reader", __doc__).parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    tokenizer = AutoTokenizer.from_pretrained(options.decoder, trust_remote_code=False)
    decoder = load_weights(AutoModelForCausalLM, options.decoder, dtype="auto")
    model = build_model(decoder, tokenizer)
    processor = build_processor(tokenizer)
    train(model, processor, options.steps)
    model.save_pretrained(options.out)
    processor.save_pretrained(options.out)
    share = share_read(model, processor, options.clips)
    print(f"{share:.1%} of held-out texts are read right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
