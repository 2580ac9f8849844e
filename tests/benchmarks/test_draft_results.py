"""The table of drafts behind a long text in docs/results-speculation.md, drawn from its records."""

from documents import require_table
from scripts import ROOT
from support.records import markdown_table, read_records
from support.summaries import grouped

PAGE = ROOT / "docs" / "results-speculation.md"


def test_the_page_shows_its_records():
    records = read_records([ROOT / "docs" / "records" / "drafts.jsonl"])
    lines = []
    for (task,), (alone, *drafted) in grouped(records, "task").items():
        figures = [[f"{r['acceptance_rate']:.2f}", f"{r['tokens_per_target_forward']:.2f}"] for r in drafted]
        lines.append([task.partition(",")[0], f"{alone['num_input_tokens']:,}", *figures[0], *figures[1]])
    header = ["task", "tokens", "`vanilla`: accepted", "tokens per pass", "`ngram`: accepted", "tokens per pass"]
    require_table(PAGE, markdown_table(header, lines))
    speeds = [1e3 * record["new_tokens"] / record["decode_ms"][0] for record in records[:3]]
    said = "8,806 tokens are repeated at {1:.1f} tokens/s with `vanilla` and {2:.1f} with `ngram`, instead of {0:.1f}"
    said = said.format(*speeds)
    assert said in " ".join(PAGE.read_text(encoding="utf-8").split())
