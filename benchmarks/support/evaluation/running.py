"""Has an engine answer samples, on all hosts together."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from apbv import Engine, GenerateResult, HostGroup
from apbv.hosts import HostError

from .answers import option_in, same_answer
from .samples import LETTERS, Parse, Sample, file_sizes

Keep = Callable[[dict], None]
# What is kept of an answer's figures.
_FIGURES = ("method", "hosts", "num_input_tokens", "num_video_tokens", "ttft_ms", "total_ms", "reused")


def answer_all(
    engine: Engine,
    hosts: HostGroup,
    samples: Sequence[Sample],
    ask: Callable[[Sample], Mapping[str, Any]],
    read: Callable[[Sample, GenerateResult], dict],
    keep: Keep,
    num_done: int,
    **options: Any,
) -> None:
    """Answer samples, and give a record of each to the leader as soon as it is there; collective.

    A question that fails leaves a record with its error, and the next one follows.

    Args:
        hosts: all hosts, a draft host included.
        ask: returns a sample's arguments of :meth:`apbv.Engine.generate`; called on every host.
        read: returns an answer's record.
        keep: called on the leader with each record.
        num_done: how many were answered before, for the progress bar.
        options: of :meth:`apbv.Engine.generate_all`.

    Raises:
        HostError: the hosts can no longer work together.
    """
    bar = tqdm(
        total=num_done + len(samples), initial=num_done, unit="question", disable=not hosts.is_leader or None
    )
    counts: Counter[str] = Counter()
    asked: list[Sample] = []

    def add(sample: Sample, answer: GenerateResult | Exception) -> None:
        record = {
            "key": sample.key,
            "unit": sample.unit or sample.key,
            "unit_size": sample.unit_size,
            "groups": dict(sample.groups),
            "is_choice": bool(sample.options),
            "expected": sample.expected,
            "file_sizes": file_sizes(sample),
        }
        if isinstance(answer, Exception):
            if hosts.is_broken or engine.hosts.is_broken:
                raise answer
            record["error"] = str(answer)
            counts["failed"] += 1
        else:
            record |= read(sample, answer)
            counts["right"] += bool(record["right"])
        bar.update()
        bar.set_postfix(counts)
        if hosts.is_leader:
            keep(record)

    def questions() -> Iterator[Mapping[str, Any]]:
        for sample in samples:
            try:
                given = ask(sample)
            except (ValueError, HostError) as error:
                add(sample, error)
                continue
            asked.append(sample)
            yield given

    with bar:
        for number, answer in engine.generate_all(questions(), **options):
            add(asked[number], answer)


def judged(
    sample: Sample, text: str, parse: Parse | None, guess: Callable[[Sample], int] | None = None
) -> dict[str, Any]:
    """Return an answer with the letter of the option that it names, and whether it is right.

    Both are None if there is nothing to say: an open question has no letters, a right answer may be unknown.

    Args:
        parse: reads which option an answer names; None: the prompt does not show the options, so that an answer
            names one by its text.
        guess: chooses an option where an answer names none; None: such an answer is wrong.
    """
    if not sample.options:
        right = None if sample.answer is None else same_answer(text, sample.answer)
        return {"text": text, "choice": None, "right": right}
    choice = (parse or option_in)(text, sample.options)
    found = {"text": text, "choice": None if choice is None else LETTERS[choice]}
    if choice is None and guess is not None:
        choice = guess(sample)
        found["guess"] = LETTERS[choice]
    return found | {"right": None if sample.answer is None else choice == sample.answer}


def figures_of(answer: GenerateResult) -> dict:
    """Return the recorded metrics of an answer."""
    stats = answer.stats
    found = {name: stats[name] for name in _FIGURES if name in stats}
    found["num_tokens"] = len(answer.token_ids)
    found |= {name: stats[name] for name in ("reduction", "attention_density") if stats.get(name) is not None}
    if stats.get("speculation"):
        found["tokens_per_target_forward"] = stats["speculation"].get("tokens_per_target_forward")
    return found
