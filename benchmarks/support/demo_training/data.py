"""Draws training data: shots from real H.264 files, joined to clips and packed with questions."""

from dataclasses import dataclass
from functools import cache
from io import BytesIO

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import AutoProcessor

from apbv import demo

from .. import clips

PATCH_SIZE = clips.TOKEN_SIZE // 2  # pixels; the merger joins 2 x 2 patches to one token
PATCH_VALUES = 3 * clips.FRAMES_PER_SHOT * PATCH_SIZE**2
COLOUR_IDS = {colour: index + 1 for index, colour in enumerate(clips.COLOURS)}  # 0 is "no border"
LETTER_IDS = {letter: index + 1 for index, letter in enumerate(clips.LETTERS)}
SCENE_IDS = {scene: index for index, scene in enumerate(clips.SCENES)}

# Distance of two shots in M-RoPE time positions at the clips' own frame rate, which is also the number of answer
# tokens per shot of a description. Other clips get gaps between their shots instead, up to LONGEST_TIME in all:
# the model thus knows the positions of long clips from short ones, and does not depend on the frame rate.
STRIDE = 2
LONGEST_TIME = 2200
USUAL_STRIDE_SHARE = 0.6

# Weights of labels within a task; all other words of an answer count 1.
KEY_WEIGHT = 2.0  # of an answer's first token, predicted at the question's last word
TEMPLATE_WEIGHT = 0.3  # of the same token, predicted at the chat template's tokens after that word
_FILLS = {"segments": -1, "labels": -100, "weights": 0, "tasks": -1}  # of rows that are shorter than others
EASY_WEIGHT = 0.1  # of the end of an answer and of the words for scenes, which are soon trivial


class ShotPool:
    """A pool of shots that were encoded to H.264 and decoded, to be joined to clips in any order.

    Two in five shots hold a needle.

    Args:
        seed: seed of the pool; shots come from the train split only.
        size: number of shots, rounded down to whole files; 1,024 at least, or some needle might be missing.
        grid: visual tokens per side of a frame.
    """

    SHOTS_PER_FILE = 64
    _NEEDLE_SHARE = 0.4

    def __init__(self, seed: int, size: int, grid: int) -> None:
        self.grid = grid
        self.rng = np.random.default_rng([seed, grid, 1])
        self.next_file = seed * 1_000_000
        self.deck: list[tuple[str, str, str]] = []
        num_files = size // self.SHOTS_PER_FILE
        num_shots = num_files * self.SHOTS_PER_FILE
        self.patches = torch.empty(num_shots, 4 * grid**2, PATCH_VALUES, dtype=torch.uint8)
        self.token_labels = torch.empty(num_shots, grid**2, 3, dtype=torch.long)
        self.shots: list[clips.Shot] = []
        self.by_needle: dict[tuple[str, str, str], list[int]] = {}
        for _ in tqdm(range(num_files), desc=f"{grid} x {grid} shots", disable=None):
            self._encode_next(len(self.shots))
        self.oldest = 0

    def renew(self) -> list[int]:
        """Replace the oldest file's shots by fresh ones, so that the model cannot learn them by heart.

        Returns:
            The places of the replaced shots.
        """
        places = list(range(self.oldest, self.oldest + self.SHOTS_PER_FILE))
        for place in places:
            if needle := self.shots[place].needle:
                self.by_needle[needle.kind, needle.colour, needle.letter].remove(place)
        self._encode_next(self.oldest)
        self.oldest = (self.oldest + self.SHOTS_PER_FILE) % len(self.shots)
        return places

    def _encode_next(self, first: int) -> None:
        """Write and read the next file; its shots go to the places from `first` on."""
        clip = self._dense_clip(self.next_file)
        self.next_file += 1
        buffer = BytesIO()
        clips.write_mp4(clips.render(clip), buffer)
        buffer.seek(0)
        places = slice(first, first + self.SHOTS_PER_FILE)
        self.patches[places] = patchify(clips.read_mp4(buffer), self.grid)
        self.token_labels[places] = torch.stack([label_tokens(shot, self.grid) for shot in clip.shots])
        self.shots[places] = clip.shots
        for place, shot in enumerate(clip.shots, start=first):
            if needle := shot.needle:
                self.by_needle.setdefault((needle.kind, needle.colour, needle.letter), []).append(place)

    def _dense_clip(self, seed: int) -> clips.ClipSpec:
        """Make a clip of train scenes with any needle in two of five shots."""
        shots = []
        for shot in clips.make_clip(seed, self.SHOTS_PER_FILE, "train", self.grid).shots:
            needle = None
            if self.rng.random() < self._NEEDLE_SHARE:
                # Dealt from a deck rather than drawn, so that no combination is ever missing.
                if not self.deck:
                    self.deck = [(k, c, x) for k in clips.NEEDLES for c in clips.COLOURS for x in clips.LETTERS]
                    self.rng.shuffle(self.deck)
                needle = clips.Needle(int(self.rng.integers(0, 2**62)), *map(str, self.deck.pop()))
            shots.append(clips.Shot(shot.seed, shot.scene, shot.age, needle))
        return clips.ClipSpec(tuple(shots), self.grid)

    def draw_clip(self, num_shots: int, rng: np.random.Generator) -> list[int]:
        """Choose the pool's shots for a new clip of running scenes with needles, and return their places."""
        places: list[int] = []
        while len(places) < num_shots:
            start = int(rng.integers(len(self.shots)))
            length = int(rng.integers(4, 33))
            window = range(start, min(start + length, len(self.shots)))
            places += [place for place in window if self.shots[place].needle is None]
        places = places[:num_shots]
        for place, colour, letter in clips.sample_placement(rng, num_shots, "train"):
            choices = self.by_needle[str(rng.choice(clips.NEEDLES)), colour, letter]
            places[place] = choices[rng.integers(len(choices))]
        return places


def patchify(frames: np.ndarray, grid: int) -> torch.Tensor:
    """Cut frames into patches in the order of Qwen's video processor.

    Args:
        frames: uint8 RGB [2 * shots, 28 * grid, 28 * grid, 3].
        grid: visual tokens per side.

    Returns:
        uint8 [shots, 4 * grid^2, 1176]; a patch holds (channel, frame, row, column).
    """
    size = PATCH_SIZE
    split = torch.from_numpy(frames).view(-1, clips.FRAMES_PER_SHOT, grid, 2, size, grid, 2, size, 3)
    return split.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, 4 * grid**2, PATCH_VALUES)


def label_tokens(shot: clips.Shot, grid: int) -> torch.Tensor:
    """Label what each visual token of a shot shows.

    Returns:
        int64 [grid^2, 3]: colour and letter of the needle that covers a quarter or more of the token, 0 and 0
        elsewhere; and the scene, -100 where a needle or its card hides it.
    """
    labels = torch.zeros(grid, grid, 3, dtype=torch.long)
    labels[..., 2] = SCENE_IDS[shot.scene]
    if shot.needle:
        covered = torch.from_numpy(clips.needle_tokens(shot, grid))
        labels[covered] = torch.tensor([COLOUR_IDS[shot.needle.colour], LETTER_IDS[shot.needle.letter], -100])
        if shot.needle.kind == "inserted":
            labels[..., 2] = -100
    return labels.flatten(0, 1)


@dataclass
class Batch:
    """B clips of S shots and their questions: P tokens up to the clip's last, then Q tokens of questions.

    Attributes:
        grid: visual tokens per side of a frame.
        places: places of the B * S shots in the grid's pool.
        token_labels: what each visual token shows (`label_tokens`), int64 [B * S, grid^2, 3].
        input_ids: int64 [B, P + Q].
        positions: M-RoPE positions, int64 [3, B, P + Q].
        mask: additive attention mask of the questions' tokens, float [B, 1, Q, P + Q]. The tokens before them
            are causal.
        labels: next token to predict, int64 [B, Q], -100 where there is none.
        weights: weight of each label, float [B, Q].
        tasks: index into clips.TASKS of the answer a label belongs to, int64 [B, Q], -1 elsewhere.
        first_visual: index of the first visual token.
    """

    grid: int
    places: list[int]
    token_labels: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    tasks: torch.Tensor
    first_visual: int


class BatchMaker:
    """A source of training batches.

    Args:
        pools: the shots, by grid.
        seed: seed of what clips show and of what is asked.
    """

    def __init__(self, pools: dict[int, ShotPool], seed: int) -> None:
        self.pools = pools
        self.rng = np.random.default_rng([seed, 2])
        self.processor = AutoProcessor.from_pretrained(demo.model_path())
        self.tokenizer = self.processor.tokenizer
        self.video_token = self.tokenizer.convert_tokens_to_ids("<|video_pad|>")
        words = {word for scene in clips.SCENES for word in scene.split()}
        forms = [form.format(word) for word in words for form in ("{}", " {}", "{},", " {},")]
        self.easy_ids = {token for form in forms for token in self.tokenizer(form).input_ids}
        self.prompt = cache(self.prompt)
        video = self.processor.video_processor
        per_channel = torch.tensor([video.image_mean, video.image_std]).repeat_interleave(PATCH_VALUES // 3, dim=1)
        self.mean, self.std = per_channel * 255

    def normalise(self, patches: torch.Tensor) -> torch.Tensor:
        """Turn uint8 patches [..., 1176] into what the video processor makes of the same pixels."""
        return (patches.float() - self.mean) / self.std

    def pixels(self, grid: int, places: list[int]) -> torch.Tensor:
        """Return the normalised patches of a pool's shots, float [S, 4 * grid^2, 1176]."""
        return self.normalise(self.pools[grid].patches[places])

    def prompt(self, question: str, system: str | None) -> tuple[list[int], list[int]]:
        """Return the token ids before the video's placeholder, and those from <|vision_end|> to the answer."""
        content = [{"type": "video"}, {"type": "text", "text": question}]
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": content})
        text = self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        before, after = text.split("<|video_pad|>")
        return self.tokenizer(before).input_ids, self.tokenizer(after).input_ids

    def draw(self, num_clips: int, num_shots: int, grid: int) -> Batch:
        """Draw a batch of `num_clips` clips of `num_shots` shots each."""
        pool = self.pools[grid]
        usual = self.rng.random() < USUAL_STRIDE_SHARE
        system = "answer in few words" if self.rng.random() < 0.15 else None
        drawn = [pool.draw_clip(num_shots, self.rng) for _ in range(num_clips)]
        rows = []
        for places in drawn:
            clip = clips.ClipSpec(tuple(pool.shots[place] for place in places), grid)
            times = torch.arange(num_shots) * STRIDE if usual else self._times_with_gaps(num_shots)
            rows.append(self.row(clip, times, system, self._choose(clip, describe=usual)))
        # Rounded up, because with few different shapes the CPU's kernels, compiled per shape, are reused.
        behind = -(-max(len(row["labels"]) for row in rows) // 32) * 32
        before = len(rows[0]["ids"]) - len(rows[0]["labels"])
        packed = {name: _stack([row[name] for row in rows], behind, fill) for name, fill in _FILLS.items()}
        segments = packed.pop("segments")
        same = segments[:, None, :] == segments[:, :, None]
        own = same & torch.ones(behind, behind, dtype=torch.bool).tril()
        visible = torch.cat([torch.ones(num_clips, behind, before, dtype=torch.bool), own], dim=-1)
        flat = [place for places in drawn for place in places]
        return Batch(
            grid=grid,
            places=flat,
            token_labels=pool.token_labels[flat],
            input_ids=_stack([row["ids"] for row in rows], before + behind, self.tokenizer.pad_token_id),
            positions=_stack([row["positions"] for row in rows], before + behind, 0).transpose(0, 1),
            mask=torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[:, None],
            **packed,
            first_visual=before - num_shots * grid**2,
        )

    def draw_shots(self, num_shots: int, grid: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw random shots of the pool; return their pixels and token labels (`label_tokens`)."""
        places = self.rng.integers(len(self.pools[grid].shots), size=num_shots).tolist()
        return self.pixels(grid, places), self.pools[grid].token_labels[places]

    def fresh_needles(self, num_shots: int, grid: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw new shots that all hold a needle, without encoding them; return their pixels and token labels."""
        shots = []
        for _ in range(num_shots):
            scene, needle = self.rng.integers(0, 2**62, size=2).tolist()
            chosen = (str(self.rng.choice(names)) for names in (clips.NEEDLES, list(clips.COLOURS), clips.LETTERS))
            shots.append(clips.Shot(scene, str(self.rng.choice(clips.SCENES)), 0, clips.Needle(needle, *chosen)))
        frames = clips.render(clips.ClipSpec(tuple(shots), grid))
        return self.normalise(patchify(frames, grid)), torch.stack([label_tokens(shot, grid) for shot in shots])

    def _times_with_gaps(self, num_shots: int) -> torch.Tensor:
        """Draw ascending time positions of shots, int64, evenly or unevenly spaced, from 0 to LONGEST_TIME."""
        longest = np.exp(self.rng.uniform(np.log(num_shots / 2), np.log(LONGEST_TIME)))
        steps = np.ones(num_shots) if self.rng.random() < 0.5 else self.rng.exponential(size=num_shots)
        times = np.cumsum(steps) - steps[0]
        return torch.from_numpy(np.floor(times * longest / max(times[-1], 1))).long()

    def _choose(self, clip: clips.ClipSpec, describe: bool) -> list[tuple[str, str, str]]:
        """Choose a few retrievals and every other question once; descriptions end after MOST_DESCRIBED shots."""
        retrievals, (*others, description) = clips.asked_apart(clip)
        count = len(retrievals) if len(clip.shots) <= 16 else 2
        chosen = [retrievals[index] for index in self.rng.choice(len(retrievals), size=count, replace=False)]
        if not describe:
            return chosen + others
        task, question, answer = description
        if len(clip.shots) > clips.MOST_DESCRIBED:
            answer = "".join(f"{shot}, " for shot in answer.split(", ")[: clips.MOST_DESCRIBED]).rstrip()
        return [*chosen, *others, (task, question, answer)]

    def row(
        self, clip: clips.ClipSpec, times: torch.Tensor, system: str | None, asked: list[tuple[str, str, str]]
    ) -> dict[str, torch.Tensor]:
        """Build one clip's sequence of L tokens: P up to the clip's last, then each question with its answer.

        Every question sees the clip and itself, at the positions it would have alone.

        Args:
            clip: the clip.
            times: M-RoPE time position of each shot, from 0, int64 [S].
            system: system message, if any.
            asked: (task, question, answer) triples; an answer that ends in "," is cut off there.

        Returns:
            ``ids`` [L] and M-RoPE ``positions`` [3, L]; and of the tokens after the clip, [L - P], ``segments``:
            the number, from 1, of the question; ``labels``: the next token, -100 where there is none; their
            ``weights``; and ``tasks``: the index into clips.TASKS, -1 outside answers.
        """
        before, _ = self.prompt("", system)
        rows, columns = torch.meshgrid(torch.arange(clip.grid), torch.arange(clip.grid), indexing="ij")
        num_shots, per_shot = len(clip.shots), clip.grid**2
        places = [times.repeat_interleave(per_shot), *(x.flatten().repeat(num_shots) for x in (rows, columns))]
        positions = [torch.arange(len(before)).expand(3, -1), torch.stack(places) + len(before)]
        # Text goes on where the video's rows and columns end, as in the model's get_rope_index.
        text_begins = len(before) + clip.grid
        ids = [*before, *[self.video_token] * (num_shots * per_shot)]
        packed: dict[str, list] = {name: [] for name in _FILLS}
        for number, (task, question, answer) in enumerate(asked, start=1):
            prompt = self.prompt(question, system)[1]
            answer_ids = self.tokenizer(answer).input_ids
            answer_weights = [EASY_WEIGHT if token in self.easy_ids else 1.0 for token in answer_ids]
            if not answer.endswith(","):
                answer_ids.append(self.tokenizer.eos_token_id)
                answer_weights.append(EASY_WEIGHT)
            # The answer's first token is the target from the question's last word to the prompt's last token.
            question_end = len(self.tokenizer(question).input_ids)  # <|vision_end|> comes before it
            early = len(prompt) - 1 - question_end
            segment = prompt + answer_ids[:-1]
            ids += segment
            packed["segments"] += [number] * len(segment)
            packed["labels"] += [-100] * question_end + [answer_ids[0]] * early + answer_ids
            early_weights = [KEY_WEIGHT] + [TEMPLATE_WEIGHT] * (early - 1)
            packed["weights"] += [0.0] * question_end + early_weights + answer_weights
            packed["tasks"] += [-1] * question_end + [clips.TASKS.index(task)] * (early + len(answer_ids))
            positions.append((torch.arange(len(segment)) + text_begins).expand(3, -1))
        row = {name: torch.tensor(values) for name, values in packed.items()}
        return {"ids": torch.tensor(ids), "positions": torch.cat(positions, dim=1), **row}


def _stack(values: list[torch.Tensor], length: int, fill: int) -> torch.Tensor:
    """Pad tensors at the end of their last dimension and stack them."""
    return torch.stack([F.pad(value, (0, length - value.shape[-1]), value=fill) for value in values])
