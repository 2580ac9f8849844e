"""Show which visual tokens each keep policy gives the draft, and the draft's accuracy on them.

    python benchmarks/draft_views.py --clips 40 --json views.jsonl
    python benchmarks/draft_views.py --keep full attention random --keep-ratio 0.1 0.5

After HIPPO's Figure 3 (the draft's accuracy on all tokens, the most attended and random ones) and
ParallelVLM's Figure 4 (how many of the kept tokens are in the first and last 4 % of the video). The
demo model's needles also show how much of the question's subject is retained. The demo's draft was
trained to describe clips as the target does; its accuracy is therefore the share of the target's
description that it predicts, token by token.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from torch import Tensor
from tqdm import tqdm

from apbv import ModelInputs, PrefillConfig, SamplingParams, SpeculativeConfig, prefill
from apbv.config import KEEP_POLICIES
from apbv.demo import draft_path
from apbv.model.attention import apbv_attention
from apbv.model.parts import ModelParts
from apbv.speculate.builders import draft_by_model
from apbv.speculate.draft import Draft, DraftTask
from apbv.speculate.strategies import keep_policy, make_observer
from apbv.speculate.tree import Tree

from support import clips
from support.arguments import parser_of
from support.exams import Candidate, Exam, load_demo
from support.records import columns_of, fields_of, keep, table
from support.summaries import grouped

FULL = PrefillConfig(method="full")
BINS = 25  # of 4 % of the video each, as in ParallelVLM's Figure 4


def draft_of(
    candidate: Candidate, inputs: ModelInputs, config: SpeculativeConfig, seed: int
) -> Draft:
    """Prefill a prompt as a drafting strategy does, and return its draft.

    Args:
        seed: of random choices.
    """
    target = candidate.parts
    draft = candidate.draft
    hosts = candidate.hosts
    observer = make_observer(config, target)
    state = prefill(
        target, inputs, hosts=hosts, config=FULL, observer=observer, encoded=candidate.encoded
    )
    task = DraftTask(
        target=target,
        draft=draft,
        inputs=inputs,
        state=state,
        scores=observer and observer.result,
        hosts=hosts,
        config=config,
        keep=keep_policy(config),
        sampling=SamplingParams(seed=seed),
        vocab_size=min(target.vocab_size, draft.vocab_size),
        leave_last=True,  # so that the draft gives the answer's first token, too
    )
    return draft_by_model(task)


@torch.no_grad()
def predict_along(
    draft: Draft, model: ModelParts, inputs: ModelInputs, tokens: list[int]
) -> list[int]:
    """Let a draft predict each of the tokens that follow a prompt from those before it."""
    sequence = [int(inputs.input_ids[0, -1]), *tokens]
    with apbv_attention(model.language_model):
        proposals = [
            draft.drafter.propose(sequence[:end], Tree.chain(1)) for end in range(1, len(sequence))
        ]
    return [proposal.tokens[0] for proposal in proposals]


def measure(options: argparse.Namespace) -> Iterator[dict]:
    """Yield a record for every clip, choice and share of tokens."""
    engine = load_demo(dtype=options.dtype)
    exam = Exam.of(options)
    candidate = Candidate(
        engine.model, engine.processor, engine.hosts, load_demo(draft_path()).model
    )
    ways = [
        SpeculativeConfig(strategy="specvlm", keep=name, keep_ratio=ratio)
        for name in options.keep
        for ratio in (options.keep_ratio if name != "full" else [1.0])
    ]
    for seed in tqdm(range(options.clips), unit="clip", disable=None):
        file = exam.file(seed)
        inputs = candidate.read(file, clips.DESCRIBE_QUESTION)
        described, _ = candidate.answer(inputs, FULL, 2 * clips.MOST_DESCRIBED)
        for config in ways:
            inputs = candidate.read(file, clips.DESCRIBE_QUESTION)
            found = []
            draft = draft_of(candidate, inputs, config, seed)
            said = predict_along(draft, candidate.draft, inputs, described)
            for task, question, _ in exam.questions(seed):
                kept = draft_of(candidate, candidate.read(file, question), config, seed).kept
                found.append(seen(kept, torch.from_numpy(exam.needle_tokens(seed, task))))
            yield {
                "benchmark": "draft_views",
                **fields_of(config, "keep", "keep_ratio"),
                **fields_of(options, "grid", "shots", "split"),
                "seed": seed,
                "predicted": sum(a == b for a, b in zip(said, described, strict=True)),
                "described": len(described),
                **{name: statistics.fmean(each[name] for each in found) for name in found[0]},
            }


def seen(kept: Tensor, needles: Tensor) -> dict:
    """Say where kept tokens lie.

    Args:
        kept: their numbers, int64.
        needles: bool ``[visual tokens]``, which show what the question is about.
    """
    bins = kept * BINS // len(needles)
    return {
        "kept": float(len(kept)),
        "at_ends": float(((bins == 0) | (bins == BINS - 1)).float().mean()),
        "of_needles": float(needles[kept].sum() / needles.sum()),
    }


def summarise(records: list[dict]) -> Iterator[dict]:
    """Sum the records of every choice and share."""
    for (name, ratio), of_way in grouped(records, "keep", "keep_ratio").items():
        row = {"label": name if name == "full" else f"{name}, {ratio:g}", "clips": len(of_way)}
        row |= {
            name: statistics.fmean(record[name] for record in of_way)
            for name in ("at_ends", "of_needles")
        }
        predicted, described = (
            sum(record[name] for record in of_way) for name in ("predicted", "described")
        )
        yield {**row, "share": predicted / described}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    return parser_of("draft_views", __doc__, {"keep": KEEP_POLICIES}).parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    print(table(summarise(keep(measure(options), options.json)), columns_of("draft_views")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
