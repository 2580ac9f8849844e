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

import apbv  # noqa: F401  (before transformers: see apbv.compat.torchvision_guard)

# isort: split
import torch
from torch import Tensor
from tqdm import tqdm

from apbv import ModelInputs, PrefillConfig, SamplingParams, SpeculativeConfig, prefill
from apbv.config import KEEP_POLICIES
from apbv.demo import draft_path
from apbv.model.attention import apbv_attention
from apbv.model.parts import ModelParts
from apbv.speculate.drafters.draft import Draft, DraftTask
from apbv.speculate.drafters.tree import Tree
from apbv.speculate.strategies.builders import draft_by_model
from apbv.speculate.strategies.table import make_observer
from apbv.testing import clips

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
        scores=None if observer is None else observer.result,
        hosts=hosts,
        config=config,
        keep=config.keep_policy,
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
    predicted = []
    with apbv_attention(model.language_model):
        for end in range(1, len(sequence)):
            proposal = draft.drafter.propose(sequence[:end], Tree.chain(1))
            predicted.append(proposal.tokens[0])
    return predicted


def measure(options: argparse.Namespace) -> Iterator[dict]:
    """Yield a record for every clip, choice and share of tokens."""
    engine = load_demo(dtype=options.dtype)
    exam = Exam.of(options)
    draft_model = load_demo(draft_path()).model
    candidate = Candidate(engine.model, engine.processor, engine.hosts, draft_model)
    configs = []
    for policy in options.keep:
        ratios = [1.0] if policy == "full" else options.keep_ratio
        for ratio in ratios:
            configs.append(SpeculativeConfig(strategy="specvlm", keep=policy, keep_ratio=ratio))
    for seed in tqdm(range(options.clips), unit="clip", disable=None):
        file = exam.file(seed)
        inputs = candidate.read(file, clips.DESCRIBE_QUESTION)
        described, _ = candidate.answer(inputs, FULL, 2 * clips.MOST_DESCRIBED)
        for config in configs:
            # How much of the target's description the draft predicts.
            inputs = candidate.read(file, clips.DESCRIBE_QUESTION)
            draft = draft_of(candidate, inputs, config, seed)
            said = predict_along(draft, candidate.draft, inputs, described)
            num_predicted = 0
            for token, described_token in zip(said, described, strict=True):
                if token == described_token:
                    num_predicted += 1

            # Which tokens the draft gets for each question.
            views = []
            for task, question, _ in exam.questions(seed):
                inputs = candidate.read(file, question)
                draft = draft_of(candidate, inputs, config, seed)
                needles = torch.from_numpy(exam.needle_tokens(seed, task))
                views.append(seen(draft.kept, needles))
            means = {}
            for name in views[0]:
                means[name] = statistics.fmean(view[name] for view in views)
            yield {
                "benchmark": "draft_views",
                **fields_of(config, "keep", "keep_ratio"),
                **fields_of(options, "grid", "shots", "split"),
                "seed": seed,
                "predicted": num_predicted,
                "described": len(described),
                **means,
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
    by_choice = grouped(records, "keep", "keep_ratio")
    for (policy, ratio), records_of_choice in by_choice.items():
        predicted = sum(record["predicted"] for record in records_of_choice)
        described = sum(record["described"] for record in records_of_choice)
        yield {
            "label": policy if policy == "full" else f"{policy}, {ratio:g}",
            "clips": len(records_of_choice),
            "at_ends": statistics.fmean(record["at_ends"] for record in records_of_choice),
            "of_needles": statistics.fmean(record["of_needles"] for record in records_of_choice),
            "share": predicted / described,
        }


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    return parser_of("draft_views", __doc__, {"keep": KEEP_POLICIES}).parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    records = keep(measure(options), options.json)
    print(table(summarise(records), columns_of("draft_views")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
