"""The tables of docs/results-gpu.md, drawn from the records of docs/records/."""

import statistics
from itertools import product

from scripts import ROOT
from support.records import markdown_table, read_records
from support.summaries import grouped, mean_cell

PAGE, RECORDS = ROOT / "docs" / "results-gpu.md", ROOT / "docs" / "records" / "h200.jsonl"
METHODS = ("zigzag_ring", "apb", "apbv", "star", "apbv, no passing")


def prefill(records: list[dict]) -> str:
    """The faster of two runs, by method."""
    lines, rows = [], [record for record in records if record["benchmark"] == "throughput"]
    for (tokens,), of_length in grouped(rows, "num_input_tokens").items():
        ms = {record["label"]: min(record["samples"]["ttft_ms"]) for record in of_length}
        lines.append(
            [f"{tokens:,}", *(f"{each:,.0f} ms" for each in ms.values()), f"{ms['full'] / ms['apbv']:.2f}x"]
        )
    return markdown_table(["tokens", "`full`, 1 host", "`zigzag_ring`, 8", "`apbv`, 8", "speedup"], lines)


def batch(records: list[dict]) -> str:
    """Tokens per second of all answers."""
    lines, rows = [], [record for record in records if record["benchmark"] == "batch_decoding"]
    for (answers,), ways in grouped(rows, "num_answers").items():
        alone, together, theirs = (way["tokens_per_s"] for way in ways)
        ms = {way["way"]: way["ms"] for way in ways}["apbv, in a batch"]
        speeds = [f"{each:,.0f}" for each in (theirs, alone, together)]
        lines.append([answers, *speeds, f"{ms:.2f} ms", f"{together / theirs:.1f}x"])
    header = [
        "answers",
        "transformers, a batch",
        "apbv, sequential",
        "apbv, a batch",
        "its step",
        "over transformers",
    ]
    return markdown_table(header, lines)


def server(records: list[dict]) -> str:
    lines = []
    for record in records:
        if record["benchmark"] == "serving":
            load = "engine alone" if record["way"] == "engine" else f"{record['concurrency']} clients"
            cells = [f"{record['request_throughput']:.1f}", f"{record['ttft_ms']['p50']:.0f} ms"]
            lines.append([load, *cells, f"{record['tpot_ms']['p50']:.1f} ms"])
    return markdown_table(["load", "requests/s", "TTFT, p50", "TPOT, p50"], lines)


def accuracy(records: list[dict]) -> str:
    """Divergence from full attention, over samples that every row answered."""
    rows = [record for record in records if record["benchmark"] == "ruler"]
    samples = grouped(rows, "num_tokens", "task", "index")
    complete = {sample for sample, found in samples.items() if len(found) == 1 + 2 * len(METHODS)}
    columns, cells = list(product((8192, 16384, 32000), (4, 8))), []
    for method in METHODS:
        line = []
        for tokens, hosts in columns:
            of_row = [each for each in rows if (each["label"], each["hosts"]) == (method, hosts)]
            kl = [
                r["kl"]
                for r in of_row
                if (tokens, r["task"], r["index"]) in complete and r["num_tokens"] == tokens
            ]
            line.append(mean_cell(kl, ".4f"))
        name, _, rest = method.partition(", ")
        cells.append([f"`{name}`" + (f", {rest}" if rest else ""), *line])
    sizes = [sum(sample[0] == tokens for sample in complete) for tokens, _ in columns]
    header = [f"{tokens:,}, {hosts}, {size}" for (tokens, hosts), size in zip(columns, sizes, strict=True)]
    return markdown_table(["row", *header], cells)


def tables() -> list[str]:
    records = read_records([RECORDS])
    return [prefill(records), batch(records), server(records), accuracy(records)]


def test_the_page_shows_its_records():
    page = PAGE.read_text(encoding="utf-8")
    for table in tables():
        assert table in page, f"{PAGE.name} should show\n{table}"


def test_what_the_page_says_of_them():
    page, records = PAGE.read_text(encoding="utf-8"), read_records([RECORDS])
    about, doctor, memcheck, tests = records[:4]
    assert doctor["healthy"] and memcheck["healthy"] and not tests["failed"]
    assert f"{tests['passed']} passed" in page and f"{doctor['worst_error']:.2f} of" in page
    for name, version in about["versions"].items():
        assert name == "apbv" or version in page, name
    exact = [record["right"] for record in records if record.get("label") == "full" and "right" in record]
    assert f"{100 * statistics.fmean(exact):.0f}% right" in page
    for other, told in (("star", "{} more, `apbv`"), ("apbv, no passing", "{} more, `apb`"), ("apb", "{}.")):
        assert told.format(mean_cell(further(records, other), ".3f")) in page


def further(records: list[dict], label: str) -> list[float]:
    """How much more a row diverges than ``apbv``, for each sample the mean of its numbers of hosts."""
    kl = {
        (r["label"], (r["task"], r["num_tokens"], r["index"]), r["hosts"]): r["kl"]
        for r in records
        if r["benchmark"] == "ruler"
    }
    found: dict[tuple, list[float]] = {}
    for (row, sample, hosts), value in kl.items():
        if row == label and ("apbv", sample, hosts) in kl:
            found.setdefault(sample, []).append(value - kl["apbv", sample, hosts])
    return [statistics.fmean(each) for each in found.values()]
