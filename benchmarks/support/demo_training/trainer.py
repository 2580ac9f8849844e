"""Trains the demo's target from scratch, or distils its draft from the target.

What makes so short a training work:

* Linear heads, thrown away afterwards, predict border colour, letter and scene from every visual token. Without
  them the vision tower gets no useful gradient before the language model has learned to look at it.
* The first word of an answer is also predicted at the last word of the question, which is one attention hop
  away from it, and not only after the tokens of the chat template that follow.
* All questions about a clip share one sequence: each sees the clip and itself, at the positions it would have
  alone. The clip is thus encoded once for all of them.
* The vision tower first trains alone, on these labels, until the curriculum begins. Its embeddings are kept
  near unit root mean square: at three times that, what the language model's layers add to them is lost beside
  them, and retrieval is not learned at all. Later (`FREEZING_BEGINS`) the tower is frozen and every shot of the
  pool embedded once, which makes steps cheaper.
* Clips grow during training, and short ones stay among the long: without them the model forgets
  how to count the letters in a short clip.

Sizes, tokenizer and processor are those of the packaged checkpoints.

The draft learns the target's distribution over the next token. In half of its batches it sees a random part of
the visual tokens, as it will when it drafts on pruned KV; the target sees all of them.
"""

import json
import time
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoProcessor,
    GenerationConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
)

from apbv import demo

from .. import clips
from ..arguments import read_toml
from ..records import plot
from .data import COLOUR_IDS, KEY_WEIGHT, LETTER_IDS, Batch, BatchMaker
from .vision import ATTENTION, FrozenVision, answer_logits, encode_shots

RECIPE = read_toml(Path(__file__).with_name("recipe.toml"))
DENSE_WEIGHT = 0.5

FREEZING_BEGINS = 0.6  # share of the training time
FRESH_NEEDLES = 16  # per step: on large frames needles in clips are too rare to learn the letters from
VISION_TOKENS_PER_STEP = 1152  # while the vision tower is alone
FEWEST_SHOTS = 8
GRID_SHARES = {2: 0.6, 6: 0.4}
VISUAL_TOKENS_PER_STEP = 1536  # as many clips as fit, at least one
PEAK_LEARNING_RATE = 1e-3
WARMUP_STEPS = 100
DECAY_BEGINS = 0.3  # share of the training time
RENEW_STEPS = {2: 3, 6: 20}  # steps between two renewals of a part of a grid's shot pool
PRUNED_SHARE = 0.5  # of the draft's batches
FEWEST_KEPT = 0.05  # of the visual tokens in a pruned batch
LOG_SECONDS = 10


def build_model(size: str) -> Qwen2_5_VLForConditionalGeneration:
    """Build a model as the demo's "target" or "draft" is, untrained."""
    path = demo.model_path() if size == "target" else demo.draft_path()
    model = Qwen2_5_VLForConditionalGeneration(AutoConfig.from_pretrained(path))
    model.generation_config = GenerationConfig.from_pretrained(path)
    return model


def save_checkpoint(model: Qwen2_5_VLForConditionalGeneration, processor: Qwen2_5_VLProcessor, folder: Path) -> None:
    """Write model, tokenizer and processor as an ordinary Hugging Face checkpoint.

    The weights are stored in bfloat16, to be small; the configuration says float32, in which they are loaded.
    """
    low = Qwen2_5_VLForConditionalGeneration(model.config)
    low.load_state_dict(model.state_dict())
    low.generation_config = model.generation_config
    low.to(torch.bfloat16).save_pretrained(folder)
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), "dtype": "float32"}
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    processor.save_pretrained(folder)


class Trainer:
    """A training run: model, heads and optimiser.

    Args:
        size: `"target"` or `"draft"`.
        out: folder for the history, its plot and the checkpoint (model/).
        minutes: length of the training.
        seed: seed of the weights and of the data.
        teacher: checkpoint to distil from; None to learn from the correct answers.
    """

    def __init__(self, size: str, out: Path, minutes: float, seed: int, teacher: Path | None = None) -> None:
        torch.manual_seed(seed)
        self.out = out
        self.curriculum = RECIPE["curriculum"][size]
        self.seconds = minutes * 60
        self.processor = AutoProcessor.from_pretrained(demo.model_path())
        self.model = build_model(size)
        self.model.set_attn_implementation(ATTENTION)
        self.teacher = None
        if teacher:
            self.teacher = Qwen2_5_VLForConditionalGeneration.from_pretrained(teacher, dtype=torch.float32).eval()
            self.teacher.set_attn_implementation(ATTENTION)
        hidden = self.model.config.vision_config.out_hidden_size
        classes = len(COLOUR_IDS) + 1, len(LETTER_IDS) + 1, len(clips.SCENES)
        self.heads = nn.ModuleList(nn.Linear(hidden, number) for number in classes)
        self.parameters = [*self.model.parameters(), *self.heads.parameters()]
        self.optimiser = torch.optim.AdamW(self.parameters, lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)
        self.frozen: FrozenVision | None = None
        self.teacher_frozen: FrozenVision | None = None
        self.step = 0
        self.elapsed = 0.0
        self.history: list[dict[str, float]] = []

    def progress(self) -> float:
        """Return the share of the training time that has passed."""
        return min(self.elapsed / self.seconds, 1.0)

    def learning_rate(self) -> float:
        """Return the learning rate: linear warm-up, a plateau, and a quadratic fall to a hundredth at the end."""
        fall = max(0.0, self.progress() - DECAY_BEGINS) / (1 - DECAY_BEGINS)
        return PEAK_LEARNING_RATE * min(1.0, (self.step + 1) / WARMUP_STEPS) * max(0.01, (1 - fall) ** 2)

    def next_loss(self, batches: BatchMaker, generator: torch.Generator) -> tuple[torch.Tensor, dict[str, float]]:
        """Compute the loss of a new batch of the curriculum's present lengths, and figures to log."""
        grid = int(batches.rng.choice(list(GRID_SHARES), p=list(GRID_SHARES.values())))
        reached = [stage for stage in self.curriculum if stage["from"] <= self.progress()]
        if not reached:
            dense = self.dense_loss(*batches.draw_shots(VISION_TOKENS_PER_STEP // grid**2, grid))
            return dense, {"dense": dense.item()}
        if self.teacher and not self.teacher_frozen:
            self.teacher_frozen = FrozenVision(self.teacher.model.visual, batches)
        if self.progress() >= FREEZING_BEGINS and not self.frozen:
            self.frozen = FrozenVision(self.model.model.visual, batches)
        most = reached[-1][str(grid)]
        num_shots = int(FEWEST_SHOTS * (most / FEWEST_SHOTS) ** batches.rng.random() + 0.5)
        batch = batches.draw(max(1, VISUAL_TOKENS_PER_STEP // (num_shots * grid**2)), num_shots, grid)
        loss, report = self.loss(batches, batch, generator)
        if self.frozen:
            return loss, report
        fresh = self.dense_loss(*batches.fresh_needles(FRESH_NEEDLES, max(GRID_SHARES)))
        return loss + DENSE_WEIGHT * fresh, {**report, "dense, fresh needles": fresh.item()}

    def dense_loss(self, pixels: torch.Tensor, token_labels: torch.Tensor) -> torch.Tensor:
        """Compute the heads' loss on shots whose pixels and labels `BatchMaker` drew."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.heads_loss(encode_shots(self.model.model.visual, pixels), token_labels)

    def heads_loss(self, visual: torch.Tensor, token_labels: torch.Tensor) -> torch.Tensor:
        """Compute the heads' loss on embeddings [shots, grid^2, hidden]; needles weigh as much as the rest."""
        size = visual.float().square().mean(-1).sqrt().flatten()
        flat = visual.flatten(0, 1) / size[:, None]
        colours, letters, scenes = token_labels.flatten(0, 1).unbind(-1)
        colour_scores, letter_scores, scene_scores = (head(flat).float() for head in self.heads)
        covered = colours > 0
        loss = (size - 1).square().mean()
        shows_scene = scenes != -100
        if shows_scene.any():
            loss = loss + F.cross_entropy(scene_scores[shows_scene], scenes[shows_scene])
        for group in (covered, ~covered):
            if group.any():
                loss = loss + F.cross_entropy(colour_scores[group], colours[group]) / 2
        if covered.any():
            loss = loss + F.cross_entropy(letter_scores[covered], letters[covered])
        return loss

    def loss(
        self, batches: BatchMaker, batch: Batch, generator: torch.Generator
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Compute the loss of one batch, and figures to log."""
        report: dict[str, float] = {}
        loss = torch.zeros(())
        chosen = (batch.labels != -100).flatten().nonzero()[:, 0]
        kept = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if self.frozen:
                visual = self.frozen.embeddings[batch.grid][batch.places]
            else:
                visual = encode_shots(self.model.model.visual, batches.pixels(batch.grid, batch.places))
                dense = self.heads_loss(visual, batch.token_labels)
                report["dense"] = dense.item()
                loss = DENSE_WEIGHT * dense
            if self.teacher:
                with torch.no_grad():
                    seen = self.teacher_frozen.embeddings[batch.grid][batch.places]
                    wanted = answer_logits(self.teacher, batch, seen, chosen)
                kept = self.draw_kept(visual.shape[0] * visual.shape[1] // len(batch.labels), generator)
            logits = answer_logits(self.model, batch, visual, chosen, kept)
        labels, weights = batch.labels.flatten()[chosen], batch.weights.flatten()[chosen]
        if self.teacher:
            said, meant = logits.log_softmax(-1), wanted.log_softmax(-1)
            each = F.kl_div(said, meant, reduction="none", log_target=True).sum(-1)
            labels = wanted.argmax(-1)
        else:
            each = F.cross_entropy(logits, labels, reduction="none")
        right, tasks = logits.argmax(-1) == labels, batch.tasks.flatten()[chosen]
        task_weights = [stage for stage in RECIPE["task_weights"] if stage["from"] <= self.progress()][-1]
        for index, task in enumerate(clips.TASKS):
            mine = (tasks == index) & (weights > 0)
            if mine.any():
                loss = loss + task_weights[task] * (each * weights)[mine].sum() / weights[mine].sum()
                telling = right[mine & ((weights == 1.0) | (weights == KEY_WEIGHT))].float()
                if kept is None and len(telling):
                    report[task] = telling.mean().item()
                elif task == "describe" and len(telling):
                    report["describe, pruned"] = telling.mean().item()
        return loss, report

    def draw_kept(self, num_visual: int, generator: torch.Generator) -> torch.Tensor | None:
        """Draw ascending indices of a part of `num_visual` tokens, or None for all of them."""
        share, size = torch.rand(2, generator=generator).tolist()
        if share >= PRUNED_SHARE:
            return None
        count = max(1, round(num_visual * FEWEST_KEPT**size))
        return torch.randperm(num_visual, generator=generator)[:count].sort().values

    def save(self) -> None:
        """Write the checkpoint, the history and its plot."""
        save_checkpoint(self.model, self.processor, self.out / "model")
        (self.out / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in self.history))
        curves: dict[str, list] = {}
        for row in self.history:
            for name in row.keys() & {*clips.TASKS, "describe, pruned"}:
                curves.setdefault(name, []).append((row["minutes"], row[name]))
        plot(self.out / "curves.png", {"minutes": curves}, "right answer tokens, running mean")

    def run(self, batches: BatchMaker) -> None:
        """Train until the time is over, and save the model."""
        bar = tqdm(total=round(self.seconds), unit="s", disable=None)
        generator = torch.Generator().manual_seed(0)
        self.model.train()
        last_logged = 0.0
        averages: dict[str, float] = {}
        while self.progress() < 1.0:
            began = time.monotonic()
            for group in self.optimiser.param_groups:
                group["lr"] = self.learning_rate()
            loss, report = self.next_loss(batches, generator)
            self.optimiser.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimiser.step()
            self.step += 1
            for grid, pool in batches.pools.items():
                if self.step % RENEW_STEPS[grid] == 0:
                    places = pool.renew()
                    for frozen in (self.frozen, self.teacher_frozen):
                        if frozen:
                            frozen.embed(grid, places)
            self.elapsed += time.monotonic() - began
            for name, value in report.items():
                averages[name] = 0.97 * averages.get(name, value) + 0.03 * value
            bar.update(round(self.elapsed) - bar.n)
            if self.elapsed - last_logged > LOG_SECONDS:
                last_logged = self.elapsed
                row = {"step": self.step, "minutes": self.elapsed / 60, "learning rate": self.learning_rate()}
                self.history.append({**row, **averages})
                tqdm.write(" ".join(f"{name} {value:.4g}" for name, value in self.history[-1].items()))
        self.save()
