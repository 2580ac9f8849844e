"""Trains the demo's target from scratch and distils its draft, on two CPU cores.

    python -m apbv.demo.train target --minutes 75 --out DIR
    python -m apbv.demo.train draft --teacher DIR/model --minutes 20 --out DRAFT_DIR
    (either with --resume: go on from the state in --out)

The result in DIR/model is an ordinary Qwen2.5-VL checkpoint, DIR/curves.png shows how the training went. What
makes so short a training work:

* Linear heads, thrown away afterwards, predict border colour, letter and scene from every visual token. Without
  them the vision tower gets no useful gradient before the language model has learned to look at it.
* The first word of an answer is also asked for at the last word of the question, which is one attention hop
  away from it, and not only after the tokens of the chat template that follow.
* All questions about a clip share one sequence: each sees the clip and itself, at the positions it would have
  alone. The clip is thus encoded once for all of them.
* The vision tower first trains alone, on these labels, until `CURRICULUM` begins. Its embeddings are kept
  near unit root mean square: at three times that, what the language model's layers add to them is lost beside
  them, and retrieval is not learned at all. Later (`FREEZING_BEGINS`) the tower is frozen and every shot of the
  pool embedded once, which makes steps cheaper.
* Clips grow during training (`CURRICULUM`), and short ones stay among the long: without them the model forgets
  how to count the letters in a short clip.

The draft learns the target's distribution over the next token. In half of its batches it sees a random part of
the visual tokens, as it will when it drafts on pruned KV; the target sees all of them.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from apbv.demo import clips
from apbv.demo.architecture import SIZES, build_model, save_checkpoint
from apbv.demo.curves import plot_curves
from apbv.demo.data import COLOUR_IDS, KEY_WEIGHT, LETTER_IDS, PATCH_VALUES, Batch, BatchMaker, ShotPool
from apbv.demo.processor import build_processor  # makes transformers importable beside any torchvision

from transformers import AttentionInterface, Qwen2_5_VLForConditionalGeneration  # isort: skip
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision  # isort: skip
from transformers.utils.logging import disable_progress_bar  # isort: skip

# (share of the training time at which they begin, weights of the tasks' losses)
TASK_WEIGHTS = (
    (0.0, {"retrieval": 0.6, "ordering": 0.5, "counting": 0.2, "describe": 0.2}),
    (0.25, {"retrieval": 0.6, "ordering": 0.7, "counting": 0.6, "describe": 2.0}),
    (0.57, {"retrieval": 0.6, "ordering": 1.5, "counting": 0.6, "describe": 1.5}),
)
DENSE_WEIGHT = 0.5

# (share of the training time at which it begins, most shots by grid); lengths are drawn log-uniformly.
# The vision tower is alone before the first.
CURRICULUM = {
    "target": (
        (0.08, {2: 12, 6: 12}),
        (0.16, {2: 32, 6: 24}),
        (0.25, {2: 128, 6: 48}),
        (0.4, {2: 512, 6: 128}),
        (0.85, {2: 1024, 6: 256}),
    ),
    "draft": (
        (0.25, {2: 24, 6: 12}),
        (0.5, {2: 128, 6: 32}),
        (0.75, {2: 512, 6: 128}),
    ),
}
FREEZING_BEGINS = 0.6  # share of the training time
FRESH_NEEDLES = 16  # per step: in clips needles are rare, on large frames too rare to learn the letters from
VISION_TOKENS_PER_STEP = 1152  # while the vision tower is alone
FEWEST_SHOTS = 8
GRID_SHARES = {2: 0.6, 6: 0.4}
VISUAL_TOKENS_PER_STEP = 1536  # as many clips as fit, at least one
PEAK_LEARNING_RATE = 1e-3
WARMUP_STEPS = 100
DECAY_BEGINS = 0.3  # share of the training time
RENEW_STEPS = {2: 3, 6: 20}  # between two renewals of a part of a grid's shot pool
POOL_SIZES = {2: 8192, 6: 3072}
PRUNED_SHARE, FEWEST_KEPT = 0.5, 0.05  # of the draft's batches, and of their visual tokens
CHECKPOINT_SECONDS = 120
LOG_SECONDS = 10


def packed_attention(module, query, key, value, attention_mask, scaling, **_):
    """Attention of packed rows: causal up to the first masked row, by the mask from there on.

    Twice as fast on long clips as one mask for all rows. Shapes as in transformers' attention interface; the mask
    holds the last rows only, additive [B, 1, Q, L].
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    before = query.shape[2] - attention_mask.shape[2]
    parts = [
        F.scaled_dot_product_attention(
            query[:, :, :before], key[:, :, :before], value[:, :, :before], is_causal=True, scale=scaling
        ),
        F.scaled_dot_product_attention(query[:, :, before:], key, value, attn_mask=attention_mask, scale=scaling),
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register("demo_packed", packed_attention)
ATTENTION = {"text_config": "demo_packed", "vision_config": "sdpa"}


def encode_shots(visual: nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    """The vision tower's output, computed for all shots at once.

    The tower attends within one temporal patch only, and its own forward does so in a loop over them; as all
    have the same size, they can be a batch instead, which is several times faster here.

    Args:
        visual: The model's vision tower.
        pixels: Normalised patches, float [shots, 4 * grid^2, 1176].

    Returns:
        float [shots, grid^2, hidden].
    """
    shots, patches, _ = pixels.shape
    grid = round((patches // 4) ** 0.5)
    numbers = torch.arange(patches)
    block, inner = numbers // 4, numbers % 4
    rows, columns = block // grid * 2 + inner // 2, block % grid * 2 + inner % 2
    hidden = visual.patch_embed(pixels.view(-1, PATCH_VALUES)).view(shots, patches, -1)
    cos, sin = visual.rotary_pos_emb(hidden, torch.stack([rows, columns], dim=-1))
    for layer in visual.blocks:
        attention = layer.attn
        qkv = attention.qkv(layer.norm1(hidden)).view(shots, patches, 3, attention.num_heads, -1)
        query, key, value = qkv.unbind(2)
        query, key = apply_rotary_pos_emb_vision(query, key, cos, sin)
        heads = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query, key, value)))
        hidden = hidden + attention.proj(heads.transpose(1, 2).reshape(hidden.shape))
        hidden = hidden + layer.mlp(layer.norm2(hidden))
    return visual.merger(hidden.view(-1, hidden.shape[-1])).view(shots, grid**2, -1)


class FrozenVision:
    """What a vision tower that no longer learns makes of every shot of the pools.

    Args:
        visual: The tower.
        batches: Whose pools.
    """

    _SHOTS_AT_ONCE = 64

    def __init__(self, visual: nn.Module, batches: BatchMaker) -> None:
        self.visual, self.batches = visual, batches
        self.embeddings: dict[int, torch.Tensor] = {}
        for grid, pool in batches.pools.items():
            num_shots = len(pool.shots)
            self.embeddings[grid] = torch.empty(num_shots, grid**2, visual.config.out_hidden_size)
            for first in range(0, num_shots, self._SHOTS_AT_ONCE):
                self.embed(grid, list(range(first, min(first + self._SHOTS_AT_ONCE, num_shots))))

    @torch.no_grad()
    def embed(self, grid: int, places: list[int]) -> None:
        """Computes the embeddings of shots anew."""
        self.embeddings[grid][places] = encode_shots(self.visual, self.batches.pixels(grid, places))

    def look_up(self, grid: int, places: list[int]) -> torch.Tensor:
        """float [shots, grid^2, hidden]."""
        return self.embeddings[grid][places]


def answer_logits(
    model: Qwen2_5_VLForConditionalGeneration,
    batch: Batch,
    visual: torch.Tensor,
    chosen: torch.Tensor,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits of a batch's labelled tokens.

    Args:
        model: Target or draft, with the attention implementation "demo_packed".
        batch: The batch.
        visual: Visual embeddings, [shots, grid^2, hidden].
        chosen: Indices of the labelled tokens in the flattened labels, int64 [N].
        kept: Which visual tokens of each clip the model sees, growing, int64; None for all.

    Returns:
        float [N, vocabulary].
    """
    embeds = model.get_input_embeddings()(batch.input_ids)
    is_video = batch.input_ids == model.config.video_token_id
    embeds = embeds.masked_scatter(is_video[..., None], visual.float().flatten(0, 1))
    positions, mask = batch.positions, batch.mask
    length, behind = embeds.shape[1], mask.shape[2]
    if kept is not None:
        seen = torch.cat(
            [
                torch.arange(batch.first_visual),
                kept + batch.first_visual,
                torch.arange(length - behind, length),
            ]
        )
        embeds, positions, mask = embeds[:, seen], positions[..., seen], mask[..., seen]
    hidden = model.model.language_model(
        inputs_embeds=embeds,
        position_ids=positions,
        attention_mask={"full_attention": mask.to(torch.bfloat16)},
        use_cache=False,
    ).last_hidden_state[:, -behind:]
    # A multiple of 256, as the CPU's matrix kernels are compiled per shape.
    padded = F.pad(chosen, (0, -len(chosen) % 256))
    return model.lm_head(hidden.flatten(0, 1)[padded])[: len(chosen)].float()


class Trainer:
    """Model, heads and optimiser, with everything needed to go on after a stop.

    Args:
        size: "target" or "draft".
        out: Folder for the state (state.pt), the history, its plot and the checkpoint (model/).
        minutes: Length of the whole training, earlier runs included.
        seed: Seed of the weights and of the data.
        teacher: Checkpoint to distil from; None to learn from the right answers.
    """

    def __init__(self, size: str, out: Path, minutes: float, seed: int, teacher: Path | None = None) -> None:
        torch.manual_seed(seed)
        self.out = out
        self.curriculum = CURRICULUM[size]
        self.seconds = minutes * 60
        self.processor = build_processor()
        self.model = build_model(size, self.processor.tokenizer)
        self.model.set_attn_implementation(ATTENTION)
        self.teacher = None
        if teacher:
            self.teacher = Qwen2_5_VLForConditionalGeneration.from_pretrained(teacher, dtype=torch.float32).eval()
            self.teacher.set_attn_implementation(ATTENTION)
        hidden = self.model.config.vision_config.out_hidden_size
        self.heads = nn.ModuleList(
            nn.Linear(hidden, classes) for classes in (len(COLOUR_IDS) + 1, len(LETTER_IDS) + 1, len(clips.SCENES))
        )
        self.parameters = [*self.model.parameters(), *self.heads.parameters()]
        self.optimiser = torch.optim.AdamW(self.parameters, lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)
        self.frozen: FrozenVision | None = None
        self.teacher_frozen: FrozenVision | None = None
        self.step = 0
        self.elapsed = 0.0
        self.history: list[dict[str, float]] = []

    def progress(self) -> float:
        """Share of the training time that has passed."""
        return min(self.elapsed / self.seconds, 1.0)

    def learning_rate(self) -> float:
        """Linear warm-up, a plateau, and a quadratic fall to a hundredth at the end."""
        fall = max(0.0, self.progress() - DECAY_BEGINS) / (1 - DECAY_BEGINS)
        return PEAK_LEARNING_RATE * min(1.0, (self.step + 1) / WARMUP_STEPS) * max(0.01, (1 - fall) ** 2)

    def next_loss(self, batches: BatchMaker, generator: torch.Generator) -> tuple[torch.Tensor, dict[str, float]]:
        """Loss of the next batch, of the lengths that the curriculum allows by now, and what to print about it."""
        grid = int(batches.rng.choice(list(GRID_SHARES), p=list(GRID_SHARES.values())))
        reached = [most for begin, most in self.curriculum if begin <= self.progress()]
        if not reached:
            dense = self.dense_loss(*batches.draw_shots(VISION_TOKENS_PER_STEP // grid**2, grid))
            return dense, {"dense": dense.item()}
        if self.teacher and not self.teacher_frozen:
            self.teacher_frozen = FrozenVision(self.teacher.model.visual, batches)
        if self.progress() >= FREEZING_BEGINS and not self.frozen:
            self.frozen = FrozenVision(self.model.model.visual, batches)
        most = reached[-1]
        num_shots = int(FEWEST_SHOTS * (most[grid] / FEWEST_SHOTS) ** batches.rng.random() + 0.5)
        batch = batches.draw(max(1, VISUAL_TOKENS_PER_STEP // (num_shots * grid**2)), num_shots, grid)
        loss, report = self.loss(batches, batch, generator)
        if self.frozen:
            return loss, report
        fresh = self.dense_loss(*batches.fresh_needles(FRESH_NEEDLES, max(GRID_SHARES)))
        return loss + DENSE_WEIGHT * fresh, {**report, "dense, fresh needles": fresh.item()}

    def dense_loss(self, pixels: torch.Tensor, token_labels: torch.Tensor) -> torch.Tensor:
        """Loss of the heads on shots, with pixels and labels as `BatchMaker` draws them."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.heads_loss(encode_shots(self.model.model.visual, pixels), token_labels)

    def heads_loss(self, visual: torch.Tensor, token_labels: torch.Tensor) -> torch.Tensor:
        """Loss of the heads on visual embeddings [shots, grid^2, hidden]; needles weigh as much as the rest."""
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
        """Loss of one batch, and what to print about it."""
        report: dict[str, float] = {}
        loss = torch.zeros(())
        chosen = (batch.labels != -100).flatten().nonzero()[:, 0]
        kept = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if self.frozen:
                visual = self.frozen.look_up(batch.grid, batch.places)
            else:
                visual = encode_shots(self.model.model.visual, batches.pixels(batch.grid, batch.places))
                dense = self.heads_loss(visual, batch.token_labels)
                report["dense"] = dense.item()
                loss = DENSE_WEIGHT * dense
            if self.teacher:
                with torch.no_grad():
                    seen = self.teacher_frozen.look_up(batch.grid, batch.places)
                    wanted = answer_logits(self.teacher, batch, seen, chosen)
                kept = self.draw_kept(visual.shape[0] * visual.shape[1] // len(batch.labels), generator)
            logits = answer_logits(self.model, batch, visual, chosen, kept)
        labels, weights = batch.labels.flatten()[chosen], batch.weights.flatten()[chosen]
        if self.teacher:
            each = F.kl_div(logits.log_softmax(-1), wanted.log_softmax(-1), reduction="none", log_target=True).sum(
                -1
            )
            labels = wanted.argmax(-1)
        else:
            each = F.cross_entropy(logits, labels, reduction="none")
        right, tasks = logits.argmax(-1) == labels, batch.tasks.flatten()[chosen]
        task_weights = [stage for begin, stage in TASK_WEIGHTS if begin <= self.progress()][-1]
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
        """A random part of `num_visual` tokens, growing, or None for all of them."""
        share, size = torch.rand(2, generator=generator).tolist()
        if share >= PRUNED_SHARE:
            return None
        count = max(1, round(num_visual * FEWEST_KEPT**size))
        return torch.randperm(num_visual, generator=generator)[:count].sort().values

    def save(self) -> None:
        """Writes the state, the checkpoint, the history and its plot."""
        self.out.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "heads": self.heads.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "step": self.step,
            "elapsed": self.elapsed,
            "history": self.history,
        }
        unfinished = self.out / "state.pt.part"
        torch.save(state, unfinished)
        unfinished.replace(self.out / "state.pt")
        save_checkpoint(self.model, self.processor, self.out / "model")
        (self.out / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in self.history))
        plot_curves(self.history, self.out / "curves.png")

    def resume(self) -> None:
        """Goes on from the state in the output folder."""
        state = torch.load(self.out / "state.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.heads.load_state_dict(state["heads"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.elapsed, self.history = state["step"], state["elapsed"], state["history"]

    def run(self, batches: BatchMaker) -> None:
        """Trains until the time is over, saving every two minutes."""
        bar = tqdm(total=round(self.seconds), initial=round(self.elapsed), unit="s", disable=None)
        generator = torch.Generator().manual_seed(self.step)
        self.model.train()
        last_saved = last_logged = self.elapsed
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
            if self.elapsed - last_saved > CHECKPOINT_SECONDS:
                last_saved = self.elapsed
                self.save()
        self.save()


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the demo's target, or distils its draft.")
    parser.add_argument("size", choices=list(SIZES))
    parser.add_argument("--minutes", type=float, default=75, help="length of the whole training")
    parser.add_argument("--out", type=Path, required=True, help="folder for state and checkpoint")
    parser.add_argument("--teacher", type=Path, help="checkpoint that the draft is distilled from")
    parser.add_argument("--resume", action="store_true", help="go on from the state in --out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    if (arguments.size == "draft") != (arguments.teacher is not None):
        parser.error("the draft, and only the draft, needs --teacher")
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)
    disable_progress_bar()  # of writing checkpoints; the training has its own
    trainer = Trainer(arguments.size, arguments.out, arguments.minutes, arguments.seed, arguments.teacher)
    if arguments.resume:
        trainer.resume()
    # A resumed run must not see the first run's data again.
    seed = arguments.seed + trainer.step
    trainer.run(BatchMaker({grid: ShotPool(seed, size, grid) for grid, size in POOL_SIZES.items()}, seed))


if __name__ == "__main__":
    main()
