"""The benchmark of further questions: its form, and that its ways are what they are called."""

from scripts import figures_of


def test_every_way_beside_none(tmp_path):
    options = ["--hosts", 1, 2, "--shots", 16, "--clips", 2, "--passing-len", 2, "--folder", tmp_path / "clips"]
    records, output = figures_of("reuse", tmp_path / "figures.jsonl", *options)
    assert [(r["hosts"], r["way"], r["simulated"]) for r in records] == [
        (hosts, way, hosts == 2) for hosts in (1, 2) for way in ("none", "exact", "kv")
    ]
    for record in records:
        assert record["reused"] == (0 if record["way"] == "none" else record["total"])
        assert sum(total for _, total in record["tasks"].values()) == record["total"]
        assert len(record["samples"]["ttft_ms"]) == record["total"]
        if record["way"] == "exact" or record["hosts"] == 1:
            assert record["same_answer"] == record["total"]  # nothing approximate about it
        if record["way"] == "kv":
            assert record["stages_ms"]["encode"] == record["stages_ms"]["decode_video"] == 0 or record["reused"]
    assert len(output.strip().splitlines()) == 2 + len(records)
