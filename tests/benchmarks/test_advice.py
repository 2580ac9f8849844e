"""The advice of docs/choosing.md, with the figures of the tables that it rests on."""

import re
from pathlib import Path

import pytest

from apbv_tests.documents import cells_in
from apbv_tests.scripts import ROOT

DOCS = ROOT / "docs"
CHOOSING = " ".join((DOCS / "choosing.md").read_text(encoding="utf-8").split())


def rows_under(page: Path, header: str) -> dict[str, list[str]]:
    """The rows of a page's table whose first line begins so: the other cells, by the first one."""
    text = page.read_text(encoding="utf-8")
    lines = re.match(r"(?:\|.*\n)*", text[text.index(header) :])[0].splitlines()
    rows = [cells_in(line) for line in lines[2:]]
    return {first: cells for first, *cells in rows}


def answers_of_the_reader() -> dict[str, str]:
    """The reader's accuracy in percent by row: reductions stand in the right half of the table."""
    rows = rows_under(DOCS / "accuracy.md", "| row | KL | accuracy, % | | row, ratio |")
    left = {label: cells[1] for label, cells in rows.items()}
    right = {cells[3]: cells[6] for cells in rows.values()}
    return left | right


READER = answers_of_the_reader()
# TTFT, prefill, and the three tasks' percentages of right answers.
DEMO = rows_under(
    DOCS / "records" / "notes-accuracy.md", "| row | TTFT, ms | prefill, ms | retrieval |"
)
# Acceptance, decoding and end-to-end with 2x2 tokens per shot, and the same with 6x6.
DRAFTS = rows_under(DOCS / "results-speculation.md", "| strategy | acceptance, 2x2 |")
LONG = rows_under(
    DOCS / "records" / "notes-speculation.md",
    "| strategy, kept | acceptance rate | draft prefill |",
)
HOSTS = rows_under(DOCS / "results-prefill.md", "| method, hosts | TTFT | over `full` |")


def number(cell: str) -> float:
    """A cell's number without its interval."""
    return float(cell.partition(" ")[0])


def percent(cell: str) -> str:
    """A cell's percentage, without its interval: ``97.3 (91-99)`` is ``97%``."""
    return f"{number(cell):.0f}%"


def over_full(row: str) -> str:
    return f"{float(DEMO['`full`'][0]) / float(DEMO[row][0]):.2f}x"


best_ordered = max(DEMO["`star`, 8 hosts"][3], DEMO["`xattention`"][3], key=number)


@pytest.mark.parametrize(
    "claim",
    [
        # One GPU, too slow.
        f"with the demo `full` had a TTFT of {DEMO['`full`'][0]} ms, `fastvid` at half "
        f"{DEMO['`fastvid`, 0.5'][0]}, `flexprefill` {DEMO['`flexprefill`'][0]}; `dycoke` at half "
        f"{DEMO['`dycoke`, 0.5'][0]}, but the reader then read {READER['`dycoke`, 0.5']}% of "
        f"captions right instead of {READER['`full`']}%",
        # One visible object.
        f"the reader read {READER['`slowfast`, 0.5']}% of its captions right with `slowfast`, "
        f"{READER['`dycoke`, 0.5']}% with `dycoke` and {READER['`fastvid`, 0.5']}% with `fastvid`; "
        f"{READER['`full`']}% with `full`",
        f"ordered at most {percent(best_ordered)} correctly",
        # Which reduction.
        f"at half the reader read {READER['`fastvid`, 0.5']}% of its captions right, with `full` "
        f"{READER['`full`']}%, at a quarter {READER['`fastvid`, 0.25']}%",
        f"`full` {percent(DEMO['`full`'][3])}, and its TTFT was that of `full` "
        f"({over_full('`fastvid`, 0.5')})",
        f"at half the reader read {READER['`dycoke`, 0.5']}% right, at a quarter "
        f"{READER['`dycoke`, 0.25']}%",
        f"the demo's TTFT at half was {over_full('`dycoke`, 0.5')} as fast as that of `full`",
        f"| not `slowfast` | | at half the reader read {READER['`slowfast`, 0.5']}% right",
        f"does not show it ({percent(DEMO['`slowfast`, 0.5'][3])} ordered correctly)",
        # Which draft.
        f"{DRAFTS['`vanilla`'][2]} with 144 tokens of prompt, {DRAFTS['`vanilla`'][5]} with 1,168",
        *(
            f"{DRAFTS[f'`{name}`'][2]} and {DRAFTS[f'`{name}`'][5]}"
            for name in ("hippo", "specvlm", "ngram")
        ),
        f"({LONG['`hippo`, 10%'][4]} and {LONG['`specvlm`, 10%'][4]})",
        # Several GPUs.
        f"a host received {HOSTS['`apbv`, 2'][3].removesuffix(' MiB')} MiB, with `zigzag_ring` "
        f"{HOSTS['`zigzag_ring`, 2'][3].removesuffix(' MiB')}",
    ],
)
def test_advice_has_the_figures_of_the_tables(claim):
    assert claim in CHOOSING


def test_no_reduction_is_recommended_that_the_reader_cannot_read_with():
    """A reduction of the table is advised against if the reader's answers at half are mostly
    wrong."""
    advice = rows_under(DOCS / "choosing.md", "| choose | when | reason |")
    reductions = {row: int(right) for row, right in READER.items() if row.endswith("`, 0.5")}
    assert len(reductions) == 3
    for row, right in reductions.items():
        name = row.partition(",")[0]
        assert (name in advice) == (2 * right > int(READER["`full`"])), row
        assert (f"not {name}" in advice) == (name not in advice), row


def test_single_letters_are_found_with_every_reduction_at_half():
    found = [DEMO[f"`{name}`, 0.5"][2] for name in ("slowfast", "fastvid", "dycoke")]
    assert {percent(cell) for cell in found} == {"100%"}
    assert "found its single letters with every reduction at half (100%)" in CHOOSING
