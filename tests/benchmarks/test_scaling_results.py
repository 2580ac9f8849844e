"""The table and the plot of many simulated hosts, from the records."""

import json
import statistics

import scaling
from PIL import Image

from apbv_tests.documents import require_table, text_table
from apbv_tests.scripts import ROOT
from support.records import read_records

RECORDS = ROOT / "docs" / "records" / "scaling.jsonl"
COLUMNS = {
    "`zigzag_ring`": "zigzag_ring",
    "`apbv`": "apbv",
    "`apbv`, before": "apbv, before",
    "`apbv`, n/8 in all": "apbv, n/8 in all",
}


def test_the_page_has_the_medians_of_the_records():
    records = read_records([RECORDS])
    rows = []
    for hosts in sorted({record["hosts"] for record in records}):
        row = [str(hosts)]
        for label in COLUMNS.values():
            speedups = [
                record["speedup_vs_full"]
                for record in records
                if record["hosts"] == hosts and record["label"] == label
            ]
            cell = ""
            if speedups:
                cell = f"{statistics.median(speedups):.1f}x ({len(speedups)})"
            row.append(cell)
        rows.append(row)
    table = text_table(["hosts", *COLUMNS], rows)
    require_table(ROOT / "docs" / "results-prefill.md", table)


def test_the_plot_is_of_the_records():
    drawn = json.loads(Image.open(ROOT / "docs" / "hosts.png").text["Description"])
    curves = scaling.speedup_curves(read_records([RECORDS]))
    assert drawn == json.loads(json.dumps(curves)), "draw docs/hosts.png again"
