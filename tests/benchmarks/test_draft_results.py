"""The tables of drafts behind a long text and of TABED's ways, drawn from their records."""

from itertools import chain

from apbv_tests.documents import require_table
from apbv_tests.scripts import ROOT
from support.records import markdown_table, read_records
from support.summaries import grouped

PAGE = ROOT / "docs" / "results-speculation.md"
NOTES = ROOT / "docs" / "records" / "notes-speculation.md"


def tokens_per_second(record: dict) -> float:
    return 1e3 * record["new_tokens"] / record["decode_ms"][0]


def test_the_page_shows_its_records():
    """The table, and the range of each strategy's gains, with the rows in which drafting was
    slower."""
    records = read_records([ROOT / "docs" / "records" / "drafts.jsonl"])
    lines: list[list[str]] = []
    gains: dict[str, list[float]] = {}
    for (task,), (alone, *drafted) in grouped(records, "task").items():
        cells = [task.partition(",")[0], f"{alone['num_input_tokens']:,}"]
        for record in drafted:
            gain = tokens_per_second(record) / tokens_per_second(alone)
            gains.setdefault(record["label"].partition(",")[0], []).append(gain)
            cells += [
                f"{record['acceptance_rate']:.2f}",
                f"{record['tokens_per_target_forward']:.2f}",
                f"{gain:.2f}x",
            ]
        lines.append(cells)
    figures = ["accepted", "tokens per pass", "decoding"]
    header = [
        "task",
        "tokens",
        f"`vanilla`: {figures[0]}",
        *figures[1:],
        f"`ngram`: {figures[0]}",
        *figures[1:],
    ]
    require_table(PAGE, markdown_table(header, lines))

    ranges = {
        strategy: f"{min(found):.2f}x to {max(found):.2f}x" for strategy, found in gains.items()
    }
    said = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert (
        f"`vanilla` decodes {ranges['vanilla']} as fast in these rows, `ngram` {ranges['ngram']}."
        in said
    )
    assert all(
        ngram > vanilla for vanilla, ngram in zip(gains["vanilla"], gains["ngram"], strict=True)
    )
    assert "`ngram` is the faster one in every row" in said


def test_the_page_shows_the_records_of_a_hybrid():
    """With drafts and in batches the answers are the same."""
    records = read_records([ROOT / "docs" / "records" / "hybrid.jsonl"])
    lines = []
    for (answers,), (alone, vanilla, ngram) in grouped(records, "answers").items():
        assert all(record["identical"] for record in (alone, vanilla, ngram))
        accepted = vanilla["acceptance_rate"]
        lines.append(
            [
                str(answers),
                f"{alone['tokens_per_s']:.0f}",
                "" if accepted is None else f"{accepted:.2f}",
                f"{vanilla['drafted_per_token']:.2f}",
                f"{vanilla['speedup']:.2f}x",
                f"{ngram['drafted_per_token']:.2f}",
                f"{ngram['speedup']:.2f}x",
            ]
        )
    header = [
        "answers",
        "tokens/s without a draft",
        "`vanilla`: accepted",
        "drafted",
        "decoding",
        "`ngram`: drafted",
        "decoding",
    ]
    require_table(PAGE, markdown_table(header, lines))


def test_the_notes_show_tabeds_ways():
    """M and T are in both of the paper's tables; a greedy run repeats them exactly."""
    records = read_records([ROOT / "docs" / "records" / "tabed.jsonl"])
    tasks = list(dict.fromkeys(record["task"] for record in records))
    cells: dict[str, dict[str, list[str]]] = {}  # by way and task
    for record in records:
        assert record["identical"]
        figures = record["speculation"]
        if figures is None:
            continue
        shown = [
            f"{figures['acceptance_rate']:.2f}",
            f"{figures['tokens_per_target_forward']:.2f}",
        ]
        of_task = cells.setdefault(record["label"], {})
        assert of_task.setdefault(record["task"], shown) == shown
    header = ["way"]
    for task in tasks:
        header += [f"{task}: accepted", "tokens per pass"]
    lines = [
        [f"`{way}`", *chain.from_iterable(map(found.get, tasks))] for way, found in cells.items()
    ]
    require_table(NOTES, markdown_table(header, lines))
