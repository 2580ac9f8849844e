"""Trace the weights that TABED gives to its prompts while an answer grows, after its paper's Figures 3 and 4.

    python benchmarks/ensemble_weights.py --clips 4 --json weights.jsonl --plot weights.png
    python benchmarks/ensemble_weights.py --tasks ordering describe

The y-axis is w(M) / (w(M) + w(T)), M the prompt as it is and T its text alone. Shaded are the weights, in steps of
a tenth, whose mixture has the target's token on top: there a drafted token is accepted. MT* (the blue line) takes
the weights that did best so far; M, T and MT are the constants 1, 0 and 0.5. The table says for how many of the
tokens each lies in the shaded part, leaving out those where all weights, or none, do.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from torch import Tensor
from tqdm import tqdm

from apbv import SamplingParams, SpeculativeConfig
from apbv.input.request import Question, Request
from apbv.model.attention import apbv_attention
from apbv.prefilling.encode import encode_visual
from apbv.speculate.ensemble import GRID_STEPS, EnsembleDrafter, GridWeights, read_contexts
from apbv.speculate.pace import Pace
from apbv.speculate.serial import generate_speculatively

from support import clips
from support.arguments import add_exam_options, add_json_option, add_plot_option
from support.exams.exam import Exam, clips_folder
from support.exams.pair import DemoPair
from support.plots import import_pyplot, save
from support.records import keep_records, show
from support.summaries import sum_counts
from support.tables import markdown_table

CONSTANTS = {"M": 1.0, "T": 0.0, "MT": 0.5}


class TracedWeights(GridWeights):
    """A TracedWeights records MT*'s weights, and which weights would have drafted each token.

    Attributes:
        chosen: w(M) for every verified token.
        accepted: for every verified token, whether its target's choice is on top of the mixture, by w(T) in steps
            of a tenth.
    """

    def __init__(self) -> None:
        super().__init__()
        self.chosen: list[float] = []
        self.accepted: list[list[bool]] = []
        self._now = 0.5  # in the first block

    def learn(self, token: int, p: Tensor, q: Tensor) -> None:
        super().learn(token, p, q)
        second = torch.arange(GRID_STEPS + 1, dtype=q.dtype) / GRID_STEPS
        mixed = torch.stack([1 - second, second], dim=1) @ q.cpu()
        self.accepted.append((mixed.argmax(dim=-1) == token).tolist())
        self.chosen.append(self._now)

    def choose(self) -> Tensor:
        weights = super().choose()
        self._now = float(weights[0])
        return weights


def measure(options: argparse.Namespace) -> Iterator[dict]:
    """Yield a record for every answer."""
    pair, folder = DemoPair.load(), clips_folder(options.folder)
    exam = Exam(options.grid, options.shots, options.clips, tuple(options.tasks), options.split)
    for seed in tqdm(range(options.clips), unit="clip", disable=None):
        for task, question, _ in exam.questions(seed):
            weights, accepted, tokens = trace(pair, exam.file(seed, folder), question, options)
            yield {
                "benchmark": "ensemble_weights",
                "task": task,
                "question": question,
                "grid": options.grid,
                "shots": options.shots,
                "split": options.split,
                "seed": seed,
                "num_draft_tokens": options.num_draft_tokens,
                "num_new_tokens": tokens,
                "weights": weights,
                "accepted": accepted,
            }


def trace(
    pair: DemoPair, file: Path, question: str, options: argparse.Namespace
) -> tuple[list[float], list[list[bool]], int]:
    """Answer a question with MT*; return its weights and the accepting ones by token, and the number of tokens."""
    inputs = pair.read(file, question)
    state, task = pair.prefill(inputs, SpeculativeConfig(strategy="tabed", ensemble="MT*"))
    tokenizer = pair.target.processor.tokenizer
    contexts = read_contexts(
        "MT",
        pair.draft_parts,
        inputs,
        torch.arange(inputs.num_visual_tokens),
        encode_visual(pair.draft_parts, inputs.visual),
        pair.hosts,
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        None,
    )
    traced = TracedWeights()
    drafter = EnsembleDrafter(
        pair.draft_parts, contexts, traced, inputs.num_tokens, task.sampling, task.vocab_size
    )
    sampling = SamplingParams(max_new_tokens=options.max_new_tokens)
    answer = state.begin_answer(pair.target.parts, Request(Question(question), state.timer, sampling=sampling))
    with apbv_attention(pair.target.parts.language_model), apbv_attention(pair.draft_parts.language_model):
        tokens, _ = generate_speculatively(answer, drafter, Pace(options.num_draft_tokens, True))
    return traced.chosen, traced.accepted, len(tokens)


def hits(record: dict) -> dict[str, list[int]]:
    """Count for MT* and the constants the tokens in the shaded part, of those that weights decide about."""
    counts = {name: [0, 0] for name in ("MT*", *CONSTANTS)}
    for weight, accepted in zip(record["weights"], record["accepted"], strict=True):
        if len(set(accepted)) == 1:
            continue
        for name in counts:
            second = 1 - CONSTANTS.get(name, weight)
            counts[name][0] += accepted[round(GRID_STEPS * second)]
            counts[name][1] += 1
    return counts


def table(records: list[dict]) -> str:
    """Format by task how many tokens each choice of weights would have had accepted."""
    lines = []
    for task in dict.fromkeys(record["task"] for record in records):
        of_task = sum_counts(hits(record) for record in records if record["task"] == task)
        total = of_task["MT*"][1]
        shares = [f"{100 * right / total:.1f} %" if total else "–" for right, _ in of_task.values()]
        lines.append([task, total, *shares])
    return markdown_table(["task", "tokens", "MT*", *CONSTANTS], lines)


def plot(records: list[dict], path: Path) -> None:
    """Plot the weights of the first answers over the tokens, with the accepting weights shaded."""
    shown = [record for record in records if record["weights"]][:6]
    figure, panels = import_pyplot().subplots(len(shown), 1, figsize=(10, 1.8 * len(shown)), squeeze=False)
    for axes, record in zip(panels[:, 0], shown, strict=True):
        # Columns are tokens; rows go from w(M) = 0 up to 1.
        cells = torch.tensor(record["accepted"]).flip(1).T
        edge = 0.5 / GRID_STEPS
        extent = (-0.5, cells.shape[1] - 0.5, -edge, 1 + edge)
        axes.imshow(cells, aspect="auto", origin="lower", cmap="Greys", vmin=0, vmax=3, extent=extent)
        axes.step(range(len(record["weights"])), record["weights"], where="mid", color="C0", label="MT*")
        axes.axhline(CONSTANTS["MT"], color="C1", linestyle=":", label="MT")
        axes.set(ylim=(-edge, 1 + edge), ylabel="w(M)")
        axes.set_title(f"{record['question']}, clip {record['seed']}", fontsize=9, loc="left")
    panels[0, 0].legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=8)
    panels[-1, 0].set_xlabel("decoding step")
    figure.tight_layout()
    save(figure, path)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=clips.TASKS, default=["describe"])
    parser.add_argument("--num-draft-tokens", type=int, default=5, help="γ (5)")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    add_exam_options(parser, num_clips=4, num_shots=32)
    add_json_option(parser)
    add_plot_option(parser)
    options = parser.parse_args(arguments)
    if min(options.clips, options.num_draft_tokens, options.max_new_tokens) < 1:
        parser.error("--clips, --num-draft-tokens and --max-new-tokens must be at least 1")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    show(options, keep_records(measure(options), "ensemble_weights.py", options.json), table, plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
