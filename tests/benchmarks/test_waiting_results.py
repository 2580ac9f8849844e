"""The table of short requests' waits in docs/results-serving.md, drawn from its records."""

from apbv_tests.documents import require_table
from apbv_tests.scripts import ROOT
from support.records import markdown_table, read_records

HEAVY = {
    "text": "a text of 55,017 tokens",
    "tiff": "a TIFF of 12,000 x 12,000 pixels",
    "webp": "such a WebP",
    "png": "such a PNG",
    "jpg": "such a JPEG",
    "300 pictures": "300 pictures of 112 x 112 pixels, 5,417 tokens",
    "2000 pictures": "2,000 of them, 36,017 tokens",
    "frames": "a clip of 40 frames of 8,000 x 3,000 pixels",
    "gif": "a GIF of 160 frames of 1,000 x 750 pixels",
}


def test_the_page_shows_its_records():
    records = read_records([ROOT / "docs" / "records" / "waiting.jsonl"])
    lines = [
        [
            HEAVY[record["heavy"]],
            f"{record['heavy_alone_ms']['p50'] / 1e3:.1f} s",
            f"{record['before_s']:.1f} s",
            f"**{record['worst_wait_ms'] / 1e3:.1f} s**",
            f"{record['growth']:.2f}x",
        ]
        for record in records
    ]
    header = [
        "heavy request",
        "its TTFT, alone",
        "longest wait before",
        "longest wait",
        "its TTFT beside these",
    ]
    require_table(ROOT / "docs" / "results-serving.md", markdown_table(header, lines))
    assert not any(record["num_unhealthy"] for record in records)  # as the page says
