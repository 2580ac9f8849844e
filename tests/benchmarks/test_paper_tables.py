"""The papers' tables that were measured here, drawn from their records: APB-V's Tables 3, 4 and 9,
HIPPO's Table 3 and Figure 6, ParallelVLM's Tables 1 and 2, STD's Table 1 and TABED's Table 3."""

from collections.abc import Sequence

import accuracy
import pytest
import speculative
import throughput

from apbv_tests.documents import require_table
from apbv_tests.scripts import ROOT
from support.records import markdown_table, read_records
from support.summaries import grouped

RECORDS = ROOT / "docs" / "records"
PREFILL = ROOT / "docs" / "results-prefill.md"
ACCURACY = RECORDS / "notes-accuracy.md"
SPECULATION = RECORDS / "notes-speculation.md"


def drafting(records: Sequence[dict], preset: str) -> dict[str, dict]:
    """The records of a preset's ways by label, of one run; every answer is the one without a
    draft."""
    alone, *ways = records
    assert alone["label"] == "autoregressive" and alone["decode_speedup"] == 1
    assert all(record["preset"] == preset and record["identical"] for record in records)
    found = {record["label"]: record for record in ways}
    assert [*found] == [*speculative.PRESETS[preset]]
    return found


# ---- APB-V's Table 4 ----


def test_table_4_of_apbv():
    """Medians of interleaved rounds; requests per second as in the paper."""
    records = read_records([RECORDS / "table4.jsonl"])
    columns = ["without"]
    by_row = {label: [label] for label in throughput.PRESETS["table4"]["rows"]}
    for (tokens,), found in grouped(records, "num_input_tokens").items():
        columns += [f"{tokens:,} tokens: req/s", "over `full`", "MiB received"]
        assert {record["label"] for record in found} == by_row.keys()
        for record in found:
            assert record["preset"] == "table4" and not record["simulated"]
            by_row[record["label"]] += [
                f"{record['request_throughput']:.3f}",
                f"{record['speedup_vs_full']:.2f}x",
                f"{sum(record['comm_bytes']) / 2**20:.1f}",
            ]
    require_table(PREFILL, markdown_table(columns, by_row.values()))
    received = {(r["num_input_tokens"], r["label"]): sum(r["comm_bytes"]) for r in records}
    for tokens in {tokens for tokens, _ in received}:  # without V no embeddings come
        assert received[tokens, "-V"] < received[tokens, "APB-V"]
        assert received[tokens, "-O-F-Z-V"] < received[tokens, "-O-F-Z"]


# ---- HIPPO's Table 3 and Figure 6 ----


def test_table_3_of_hippo():
    records = read_records([RECORDS / "hippo3.jsonl"])
    rows = [
        [
            label,
            f"{record['speculation']['acceptance_rate']:.2f}",
            f"{record['speculation']['mean_accepted_tokens']:.2f}",
            f"{record['decode_speedup']:.2f}x",
            f"{record['end_to_end_speedup']:.2f}x",
        ]
        for label, record in drafting(records, "hippo3").items()
    ]
    header = ["parallel drafting", "accepted", "MAT", "decoding", "end-to-end"]
    require_table(SPECULATION, markdown_table(header, rows))


def test_figure_6_of_hippo():
    preset = "hippo6"
    records = read_records([RECORDS / "hippo6.jsonl"])
    header = ["HIPPO"]
    rows = {label: [label] for label in speculative.PRESETS[preset]}
    size = 1 + len(rows)
    for start in range(0, len(records), size):
        found = drafting(records[start : start + size], preset)
        (ratio,) = {record["speculation"]["config"]["keep_ratio"] for record in found.values()}
        header += [f"MAT, {ratio:.0%} kept", f"decoding, {ratio:.0%} kept"]
        for label, record in found.items():
            rows[label] += [
                f"{record['speculation']['mean_accepted_tokens']:.2f}",
                f"{record['decode_speedup']:.2f}x",
            ]
    require_table(SPECULATION, markdown_table(header, rows.values()))


# ---- STD's Table 1 ----


def test_table_1_of_std():
    records = read_records([RECORDS / "std1.jsonl"])
    rows = [
        [
            label,
            f"{record['speculation']['acceptance_rate']:.0%}",
            f"{record['speculation']['tokens_per_target_forward']:.2f}",
            f"{record['decode_speedup']:.2f}x",
            f"{record['end_to_end_speedup']:.2f}x",
        ]
        for label, record in drafting(records, "std1").items()
    ]
    header = ["self-drafting", "accepted", "tokens per pass", "decoding", "end-to-end"]
    require_table(SPECULATION, markdown_table(header, rows))


# ---- Accuracy: APB-V's Tables 3 and 9, ParallelVLM's Table 2 ----

TASKS = ("retrieval", "ordering", "counting")


@pytest.mark.parametrize("preset", ["table3", "table9", "parallelvlm2"])
def test_a_table_of_accuracy(preset):
    """Every way of the preset answered the same questions about the same clips."""
    records = read_records([RECORDS / f"{preset}.jsonl"])
    rows = accuracy.summarise(records)
    assert [row["label"] for row in rows] == [*accuracy.PRESETS[preset]]
    assert len({(row["clip"], row["clips"]) for row in rows}) == 1
    has_full = "full" in accuracy.PRESETS[preset]

    header = [preset]
    if has_full:
        header += ["KL", "same first choice", "TTFT over `full`"]
    header += ["visual tokens read", *TASKS]
    cells = []
    for row in rows:
        label = f"`{row['label']}`"
        if row["hosts"] > 1:
            label += f", {row['hosts']} hosts"
        cells.append([label])
        if has_full:
            cells[-1] += [row["kl"], row["agrees"], f"{row['speedup']:.2f}x"]
        shares = [100 * right / total for right, total in (row["right"][task] for task in TASKS)]
        cells[-1] += [f"{row['kept']:.0%}", *(f"{share:.0f}" for share in shares)]
    require_table(ACCURACY, markdown_table(header, cells))


# ---- ParallelVLM's Table 1 ----


@pytest.mark.parametrize("draft", ["a draft of its own", "the target as its draft"])
def test_table_1_of_parallelvlm(draft):
    name = "parallelvlm1" if draft == "a draft of its own" else "parallelvlm1-own"
    found = drafting(read_records([RECORDS / f"{name}.jsonl"]), "parallelvlm1")
    rows = [
        [
            label,
            f"{record['speculation']['acceptance_rate']:.0%}",
            f"{record['speculation']['mean_accepted_tokens']:.2f}",
            f"{record['decode_speedup']:.2f}x",
            f"{record['end_to_end_speedup']:.2f}x",
        ]
        for label, record in found.items()
    ]
    header = [f"ParallelVLM's Table 1, {draft}", "accepted", "MAT", "decoding", "end-to-end"]
    require_table(SPECULATION, markdown_table(header, rows))


# ---- TABED's Table 3 ----


def test_table_3_of_tabed():
    """The tokens that weights are learned from."""
    records = read_records([RECORDS / "tabed3.jsonl"])
    by_task = {}
    for (task,), found in grouped(records, "task").items():
        by_task[task] = drafting(found, "tabed3")
    header = ["weights learned from"]
    for task in by_task:
        header += [f"{task}: accepted", "tokens per pass"]
    rows = []
    for label in speculative.PRESETS["tabed3"]:
        rows.append([f"`{label}`"])
        for found in by_task.values():
            figures = found[label]["speculation"]
            rows[-1] += [
                f"{figures['acceptance_rate']:.3f}",
                f"{figures['tokens_per_target_forward']:.3f}",
            ]
    require_table(SPECULATION, markdown_table(header, rows))
