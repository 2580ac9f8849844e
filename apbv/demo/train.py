"""Trains the demo model from scratch on two CPU cores, in an hour.

    python -m apbv.demo.train --minutes 60 --out DIR
    python -m apbv.demo.train --minutes 90 --out DIR --resume    # longer, from where the first run stopped

The result in DIR/model is an ordinary Qwen2.5-VL checkpoint. Three things make so short a training work:

* Two linear heads, thrown away afterwards, predict border colour and letter from every visual token. Without
  them the vision tower gets no useful gradient before the language model has learned to look at it.
* The first word of an answer is also asked for at the last word of the question, which is one attention hop
  away from it, and not only after the tokens of the chat template that follow.
* All questions about a clip share one sequence: each sees the clip and itself, at the positions it would have
  alone. The clip is thus encoded once for eight questions or so.

Clips grow during training: 8-12 shots, 8-32, then 8-64. Short clips stay among the long ones: without
them the model forgets how to count the letters in a short clip.
"""

import argparse
import time
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from apbv.demo import clips
from apbv.demo.processor import build_processor
from apbv.torchvision_guard import ensure_torchvision_imports

ensure_torchvision_imports()

from transformers import (  # noqa: E402
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
)
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision  # noqa: E402
from transformers.utils.logging import disable_progress_bar  # noqa: E402

PATCH = 14
PATCHES_PER_SHOT = (clips.FRAME_SIZE // PATCH) ** 2
PATCH_VALUES = 3 * clips.FRAMES_PER_SHOT * PATCH**2
TOKENS_PER_SHOT = PATCHES_PER_SHOT // 4  # the merger joins 2 x 2 patches
COLOUR_IDS = {colour: index + 1 for index, colour in enumerate(clips.COLOURS)}  # 0 is "no border"
LETTER_IDS = {letter: index + 1 for index, letter in enumerate(clips.LETTERS)}

# Distance of two shots in M-RoPE time positions. At the clips' own frame rate it is 2, which is also the
# number of answer tokens per shot of a description; the other values teach the other tasks not to depend on
# the frame rate.
USUAL_STRIDE = 2.0
OTHER_STRIDES = (1 / 3, 1.0, 3.0, 4.0, 6.0)

TASKS = ("retrieval", "ordering", "counting", "describe")

# Weights of labels within a task; an answer's words otherwise count 1.
KEY_WEIGHT = 2.0  # of an answer's first token where it is asked for at the question's last word
TEMPLATE_WEIGHT = 0.3  # of the same at the chat template's tokens behind it
EASY_WEIGHT = 0.1  # of the end of an answer and of the words for noise, soon trivial
TASK_WEIGHTS = {"retrieval": 2.0, "ordering": 2.0, "counting": 1.0, "describe": 1.0}

# (share of the training time at which it begins, fewest shots, most shots)
CURRICULUM = ((0.0, 8, 12), (0.2, 8, 32), (0.4, 8, 64))
SHOTS_PER_STEP = 192
PEAK_LEARNING_RATE = 1e-3
WARMUP_STEPS = 100
RENEW_STEPS = 2  # between two renewals of a part of the shot pool
DECAY_BEGINS = 0.6  # share of the training time
CHECKPOINT_SECONDS = 120


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLForConditionalGeneration:
    """An untrained model of 2.6 M parameters."""
    token = tokenizer.convert_tokens_to_ids
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "mrope_section": [8, 4, 4]},
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_heads": 4,
            "patch_size": PATCH,
            "temporal_patch_size": clips.FRAMES_PER_SHOT,
            "spatial_merge_size": 2,
            "out_hidden_size": 192,
            "fullatt_block_indexes": [0, 1],
            "tokens_per_second": clips.FPS,
        },
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


class ShotPool:
    """Shots that went through a real H.264 round trip, to be joined to clips in any order.

    Args:
        seed: Seed of the pool; shots come from the train split only.
        size: Number of shots, at least 512; half of them are lettered.
    """

    _SHOTS_PER_FILE = 64

    def __init__(self, seed: int, size: int) -> None:
        self.rng = np.random.default_rng([seed, 1])
        self.next_clip = seed * 1_000_000
        self.deck: list[tuple[str, str]] = []
        num_files = size // self._SHOTS_PER_FILE
        num_shots = num_files * self._SHOTS_PER_FILE
        self.patches = torch.empty(num_shots, PATCHES_PER_SHOT, PATCH_VALUES, dtype=torch.uint8)
        self.contents: list[tuple[str, str] | None] = []
        self.places: dict[tuple[str, str] | None, list[int]] = {}
        for _ in tqdm(range(num_files), desc="shot pool", disable=None):
            self._encode_next(len(self.contents))
        self.oldest = 0

    def renew(self) -> None:
        """Replaces the oldest file's shots by fresh ones, so that the model cannot learn them by heart."""
        for place in range(self.oldest, self.oldest + self._SHOTS_PER_FILE):
            self.places[self.contents[place]].remove(place)
        self._encode_next(self.oldest)
        self.oldest = (self.oldest + self._SHOTS_PER_FILE) % len(self.contents)

    def _encode_next(self, first: int) -> None:
        """Writes and reads the next file; its shots go to the places from `first` on."""
        clip = self._dense_clip(self.next_clip)
        self.next_clip += 1
        buffer = BytesIO()
        clips.write_mp4(clips.render(clip), buffer)
        buffer.seek(0)
        self.patches[first : first + self._SHOTS_PER_FILE] = patchify(clips.read_mp4(buffer))
        contents = [(shot.colour, shot.letter) if shot.letter else None for shot in clip.shots]
        self.contents[first : first + self._SHOTS_PER_FILE] = contents
        for place, content in enumerate(contents, start=first):
            self.places.setdefault(content, []).append(place)

    def _dense_clip(self, seed: int) -> clips.ClipSpec:
        """The shots of a train clip, half of them overlaid with any colour and letter."""
        shots = []
        for shot in clips.make_clip(seed, self._SHOTS_PER_FILE, "train").shots:
            if self.rng.random() < 0.5:
                # Dealt from a deck rather than drawn, so that no combination is ever missing.
                if not self.deck:
                    self.deck = [(colour, letter) for colour in clips.COLOURS for letter in clips.LETTERS]
                    self.rng.shuffle(self.deck)
                shots.append(clips.Shot(shot.seed, *self.deck.pop()))
            else:
                shots.append(clips.Shot(shot.seed))
        return clips.ClipSpec(tuple(shots))

    def draw(self, layout: list[tuple[str, str] | None]) -> torch.Tensor:
        """uint8 [shots, 16, 1176]: random shots that show what a layout asks for."""
        choices = (self.places[key] for key in layout)
        return self.patches[[places[self.rng.integers(len(places))] for places in choices]]


def patchify(frames: np.ndarray) -> torch.Tensor:
    """Cuts frames into patches in the order of Qwen's video processor.

    Args:
        frames: uint8 RGB [2 * shots, 56, 56, 3].

    Returns:
        uint8 [shots, 16, 1176]; a patch holds (channel, frame, row, column).
    """
    grid = clips.FRAME_SIZE // (2 * PATCH)
    split = torch.from_numpy(frames).view(-1, clips.FRAMES_PER_SHOT, grid, 2, PATCH, grid, 2, PATCH, 3)
    return split.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, PATCHES_PER_SHOT, PATCH_VALUES)


def encode_shots(visual: nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    """The vision tower's output, computed for all shots at once.

    The tower attends within one temporal patch only, and its own forward does so in a loop over them; as all
    have the same size, they can be a batch instead, which is several times faster here.

    Args:
        visual: The model's vision tower.
        pixels: Normalised patches, float [shots, 16, 1176].

    Returns:
        float [shots, 4, hidden].
    """
    shots = pixels.shape[0]
    grid = torch.arange(PATCHES_PER_SHOT).view(2, 2, 2, 2)  # block row, block column, row, column
    rows = (grid // 8 * 2 + grid // 2 % 2).flatten()
    columns = (grid // 4 % 2 * 2 + grid % 2).flatten()
    hidden = visual.patch_embed(pixels.view(-1, PATCH_VALUES)).view(shots, PATCHES_PER_SHOT, -1)
    cos, sin = visual.rotary_pos_emb(hidden, torch.stack([rows, columns], dim=-1))
    for block in visual.blocks:
        attention = block.attn
        qkv = attention.qkv(block.norm1(hidden)).view(shots, PATCHES_PER_SHOT, 3, attention.num_heads, -1)
        query, key, value = qkv.unbind(2)
        query, key = apply_rotary_pos_emb_vision(query, key, cos, sin)
        heads = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query, key, value)))
        hidden = hidden + attention.proj(heads.transpose(1, 2).reshape(hidden.shape))
        hidden = hidden + block.mlp(block.norm2(hidden))
    return visual.merger(hidden.view(-1, hidden.shape[-1])).view(shots, TOKENS_PER_SHOT, -1)


@dataclass
class Row:
    """One clip with all its questions, as one sequence of L tokens.

    Args:
        segments: 0 for the clip, then the number of the question, int64 [L].
        ids: Token ids, int64 [L].
        positions: M-RoPE positions, int64 [3, L].
        labels: Next token to predict, int64 [L], -100 where there is none.
        weights: Weight of each label, float [L].
        tasks: Index into TASKS of the answer a label belongs to, int64 [L], -1 elsewhere.
    """

    segments: torch.Tensor
    ids: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    tasks: torch.Tensor


@dataclass
class Batch:
    """Clips of equal length with all their questions; B clips of S shots, L tokens.

    Args:
        pixels: Normalised patches, float [B * S, 16, 1176].
        shot_labels: Colour and letter of each shot, int64 [B * S, 2].
        input_ids: int64 [B, L].
        positions: M-RoPE positions, int64 [3, B, L].
        mask: True where a token (row) may see another (column), bool [B, 1, L, L].
        labels: Next token to predict, int64 [B, L], -100 where there is none.
        weights: Weight of each label, float [B, L].
        tasks: Index into TASKS of the answer a label belongs to, int64 [B, L], -1 elsewhere.
    """

    pixels: torch.Tensor
    shot_labels: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    tasks: torch.Tensor


class BatchMaker:
    """Draws training batches.

    Args:
        pool: Where shots come from.
        seed: Seed of what clips show and of what is asked.
    """

    def __init__(self, pool: ShotPool, seed: int) -> None:
        self.pool = pool
        self.rng = np.random.default_rng([seed, 2])
        self.processor = build_processor()
        self.tokenizer = self.processor.tokenizer
        self.video_token = self.tokenizer.convert_tokens_to_ids("<|video_pad|>")
        self.easy_ids = {*self.tokenizer("grey noise, grey noise,").input_ids, self.tokenizer.eos_token_id}
        self._prompts: dict[tuple[str, str | None], tuple[list[int], list[int]]] = {}
        video = self.processor.video_processor
        per_channel = torch.tensor([video.image_mean, video.image_std]).repeat_interleave(PATCH_VALUES // 3, dim=1)
        self.mean, self.std = per_channel * 255

    def normalise(self, patches: torch.Tensor) -> torch.Tensor:
        """uint8 [..., 1176] to what the video processor makes of the same pixels."""
        return (patches.float() - self.mean) / self.std

    def prompt(self, question: str, system: str | None) -> tuple[list[int], list[int]]:
        """Token ids before the video's placeholder and from <|vision_end|> to the answer's beginning."""
        if (question, system) not in self._prompts:
            self._prompts[question, system] = self._tokenize_prompt(question, system)
        return self._prompts[question, system]

    def _tokenize_prompt(self, question: str, system: str | None) -> tuple[list[int], list[int]]:
        content = [{"type": "video"}, {"type": "text", "text": question}]
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": content})
        text = self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        before, after = text.split("<|video_pad|>")
        return self.tokenizer(before).input_ids, self.tokenizer(after).input_ids

    def draw(self, num_clips: int, num_shots: int) -> Batch:
        """A batch of `num_clips` clips of `num_shots` shots each."""
        usual = self.rng.random() < 0.7
        stride = USUAL_STRIDE if usual else float(self.rng.choice(OTHER_STRIDES))
        system = "answer in few words" if self.rng.random() < 0.15 else None
        layouts = [clips.sample_layout(self.rng, num_shots) for _ in range(num_clips)]
        rows = [self.row(layout, stride, system, describe=usual) for layout in layouts]
        length = _round_up(max(len(row.ids) for row in rows), 32)
        segments = _stack([row.segments for row in rows], length, -1)
        earlier = torch.arange(length)[:, None] >= torch.arange(length)[None, :]
        visible = (segments[:, None, :] == segments[:, :, None]) | (segments[:, None, :] == 0)
        shown = [content or (None, None) for layout in layouts for content in layout]
        return Batch(
            pixels=self.normalise(torch.cat([self.pool.draw(layout) for layout in layouts])),
            shot_labels=torch.tensor([(COLOUR_IDS.get(c, 0), LETTER_IDS.get(x, 0)) for c, x in shown]),
            input_ids=_stack([row.ids for row in rows], length, self.tokenizer.pad_token_id),
            positions=_stack([row.positions for row in rows], length, 0).transpose(0, 1),
            mask=(earlier & visible)[:, None],
            labels=_stack([row.labels for row in rows], length, -100),
            weights=_stack([row.weights for row in rows], length, 0),
            tasks=_stack([row.tasks for row in rows], length, -1),
        )

    def row(self, layout: list[tuple[str, str] | None], stride: float, system: str | None, describe: bool) -> Row:
        """One clip's sequence: the clip, then each question with its answer.

        Args:
            layout: What each shot shows.
            stride: Distance of two shots in M-RoPE time positions.
            system: System message, if any.
            describe: Whether to ask for a description too.
        """
        clip = clips.ClipSpec(tuple(clips.Shot(0, *(content or (None, None))) for content in layout))
        asked = [item for item in clips.questions(clip) if describe or item[0] != "describe"]
        before, _ = self.prompt("", system)
        num_visual = len(layout) * TOKENS_PER_SHOT
        times = (torch.arange(len(layout)) * stride).long().repeat_interleave(TOKENS_PER_SHOT)
        rows, columns = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])
        grid = torch.stack([times, rows.repeat(len(layout)), columns.repeat(len(layout))])
        positions = [torch.arange(len(before)).expand(3, -1), grid + len(before)]
        # Text goes on where the video's rows and columns end, as in the model's get_rope_index.
        text_begins = len(before) + 2
        ids = [*before, *[self.video_token] * num_visual]
        segments, labels, weights, tasks = ([value] * len(ids) for value in (0, -100, 0.0, -1))
        for number, (task, question, answer) in enumerate(asked, start=1):
            prompt = self.prompt(question, system)[1]
            answer_ids = [*self.tokenizer(answer).input_ids, self.tokenizer.eos_token_id]
            # The answer's first token is the target from the question's last word to the prompt's last token.
            question_end = len(self.tokenizer(question).input_ids)  # <|vision_end|> comes before it
            early = len(prompt) - 1 - question_end
            segment = prompt + answer_ids[:-1]
            ids += segment
            segments += [number] * len(segment)
            labels += [-100] * question_end + [answer_ids[0]] * early + answer_ids
            weights += [0.0] * question_end + [KEY_WEIGHT] + [TEMPLATE_WEIGHT] * (early - 1)
            weights += [EASY_WEIGHT if token in self.easy_ids else 1.0 for token in answer_ids]
            tasks += [-1] * question_end + [TASKS.index(task)] * (early + len(answer_ids))
            positions.append((torch.arange(len(segment)) + text_begins).expand(3, -1))
        return Row(
            segments=torch.tensor(segments),
            ids=torch.tensor(ids),
            positions=torch.cat(positions, dim=1),
            labels=torch.tensor(labels),
            weights=torch.tensor(weights),
            tasks=torch.tensor(tasks),
        )


def _stack(values: list[torch.Tensor], length: int, fill: int) -> torch.Tensor:
    """Pads tensors at the end of their last dimension and stacks them."""
    return torch.stack([F.pad(value, (0, length - value.shape[-1]), value=fill) for value in values])


def _round_up(length: int, multiple: int) -> int:
    """Few different shapes let the CPU's matrix kernels, compiled per shape, be reused."""
    return -(-length // multiple) * multiple


class Trainer:
    """Model, heads and optimiser, with everything needed to go on after a stop.

    Args:
        out: Folder for the state (state.pt) and the checkpoint (model/).
        minutes: Length of the whole training, earlier runs included.
        seed: Seed of the weights and of the data.
    """

    def __init__(self, out: Path, minutes: float, seed: int) -> None:
        torch.manual_seed(seed)
        self.out = out
        self.seconds = minutes * 60
        self.processor = build_processor()
        self.model = build_model(self.processor.tokenizer)
        hidden = self.model.config.vision_config.out_hidden_size
        self.colour_head = nn.Linear(hidden, len(COLOUR_IDS) + 1)
        self.letter_head = nn.Linear(hidden, len(LETTER_IDS) + 1)
        self.parameters = [
            *self.model.parameters(),
            *self.colour_head.parameters(),
            *self.letter_head.parameters(),
        ]
        self.optimiser = torch.optim.AdamW(self.parameters, lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)
        self.step = 0
        self.elapsed = 0.0

    def progress(self) -> float:
        """Share of the training time that has passed."""
        return min(self.elapsed / self.seconds, 1.0)

    def learning_rate(self) -> float:
        """Linear warm-up, a plateau, and a linear fall to a hundredth at the end."""
        fall = max(0.0, self.progress() - DECAY_BEGINS) / (1 - DECAY_BEGINS)
        return PEAK_LEARNING_RATE * min(1.0, (self.step + 1) / WARMUP_STEPS) * max(0.01, 1 - fall)

    def loss(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """Loss of one batch, and what to print about it."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            visual = encode_shots(self.model.model.visual, batch.pixels)
            colours, letters = self.colour_head(visual), self.letter_head(visual)
            embeds = self.model.get_input_embeddings()(batch.input_ids)
            is_video = batch.input_ids == self.model.config.video_token_id
            embeds = embeds.masked_scatter(is_video[..., None], visual.float().flatten(0, 1))
            mask = torch.zeros(batch.mask.shape).masked_fill(~batch.mask, torch.finfo(torch.float32).min)
            hidden = self.model.model.language_model(
                inputs_embeds=embeds,
                position_ids=batch.positions,
                attention_mask={"full_attention": mask.to(torch.bfloat16)},
                use_cache=False,
            ).last_hidden_state
            chosen = (batch.labels != -100).flatten().nonzero()[:, 0]
            padded = F.pad(chosen, (0, _round_up(len(chosen), 256) - len(chosen)))
            logits = self.model.lm_head(hidden.flatten(0, 1)[padded])[: len(chosen)]
        labels, weights = batch.labels.flatten()[chosen], batch.weights.flatten()[chosen]
        each = F.cross_entropy(logits.float(), labels, reduction="none")
        dense = 0.0
        for scores, target in ((colours, batch.shot_labels[:, 0]), (letters, batch.shot_labels[:, 1])):
            target = target[:, None].expand(-1, TOKENS_PER_SHOT)
            dense = dense + F.cross_entropy(scores.float().flatten(0, 1), target.flatten())
        report = {"dense": dense.item()}
        loss = 0.5 * dense
        right, tasks = logits.argmax(-1) == labels, batch.tasks.flatten()[chosen]
        for index, task in enumerate(TASKS):
            mine = (tasks == index) & (weights > 0)
            if mine.any():
                loss = loss + TASK_WEIGHTS[task] / 4 * (each * weights)[mine].sum() / weights[mine].sum()
                if task == "retrieval":
                    key = right[mine & (weights == KEY_WEIGHT)]
                    report["key"] = key.float().mean().item()
                report[task] = right[mine & (weights == 1.0)].float().mean().item()
        return loss, report

    def save(self) -> None:
        """Writes the state and the checkpoint."""
        self.out.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "colour_head": self.colour_head.state_dict(),
            "letter_head": self.letter_head.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "step": self.step,
            "elapsed": self.elapsed,
        }
        unfinished = self.out / "state.pt.part"
        torch.save(state, unfinished)
        unfinished.replace(self.out / "state.pt")
        save_checkpoint(self.model, self.processor, self.out / "model")

    def resume(self) -> None:
        """Goes on from the state in the output folder."""
        state = torch.load(self.out / "state.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.colour_head.load_state_dict(state["colour_head"])
        self.letter_head.load_state_dict(state["letter_head"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.elapsed = state["step"], state["elapsed"]

    def run(self, batches: BatchMaker) -> None:
        """Trains until the time is over, saving every two minutes."""
        bar = tqdm(total=round(self.seconds), initial=round(self.elapsed), unit="s", disable=None)
        self.model.train()
        last_saved = last_printed = self.elapsed
        averages: dict[str, float] = {}
        while self.progress() < 1.0:
            began = time.monotonic()
            _, fewest, most = [stage for stage in CURRICULUM if stage[0] <= self.progress()][-1]
            num_shots = int(batches.rng.integers(fewest, most + 1))
            batch = batches.draw(max(1, SHOTS_PER_STEP // num_shots), num_shots)
            for group in self.optimiser.param_groups:
                group["lr"] = self.learning_rate()
            loss, report = self.loss(batch)
            self.optimiser.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimiser.step()
            self.step += 1
            if self.step % RENEW_STEPS == 0:
                batches.pool.renew()
            self.elapsed += time.monotonic() - began
            for name, value in report.items():
                averages[name] = 0.97 * averages.get(name, value) + 0.03 * value
            bar.update(round(self.elapsed) - bar.n)
            if self.elapsed - last_printed > 10:
                last_printed = self.elapsed
                figures = " ".join(f"{name} {value:.3f}" for name, value in averages.items())
                tqdm.write(
                    f"step {self.step} {self.elapsed / 60:.1f} min, shots {fewest}-{most}, "
                    f"lr {self.learning_rate():.1e}, {figures}"
                )
            if self.elapsed - last_saved > CHECKPOINT_SECONDS:
                last_saved = self.elapsed
                self.save()
        self.save()


def save_checkpoint(
    model: Qwen2_5_VLForConditionalGeneration, processor: Qwen2_5_VLProcessor, folder: Path
) -> None:
    """Writes model (bfloat16), tokenizer and processor as an ordinary Hugging Face checkpoint."""
    low = Qwen2_5_VLForConditionalGeneration(model.config)
    low.load_state_dict(model.state_dict())
    low.generation_config = model.generation_config
    low.to(torch.bfloat16).save_pretrained(folder)
    processor.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the demo model.")
    parser.add_argument("--minutes", type=float, default=60, help="length of the whole training")
    parser.add_argument("--out", type=Path, required=True, help="folder for state and checkpoint")
    parser.add_argument("--resume", action="store_true", help="go on from the state in --out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pool", type=int, default=16384, help="number of encoded shots to draw clips from")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)
    disable_progress_bar()  # of writing checkpoints; the training has its own
    trainer = Trainer(arguments.out, arguments.minutes, arguments.seed)
    if arguments.resume:
        trainer.resume()
    # A resumed run must not see the first run's data again.
    seed = arguments.seed + trainer.step
    trainer.run(BatchMaker(ShotPool(seed, arguments.pool), seed))


if __name__ == "__main__":
    main()
