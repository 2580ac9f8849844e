"""The benchmark of KV's way to another process: its form, and that what it times arrives unchanged."""

from scripts import figures_of


def test_both_ways_beside_one_another(tmp_path):
    """It compares what arrives with what was sent, and fails where they differ."""
    options = ["--tokens", 600, "--rounds", 2, "--shapes", "qwen2.5-vl-3b", "--directory", tmp_path / "shared"]
    records, output = figures_of("kv_transfer", tmp_path / "figures.jsonl", *options, hosts=2)
    assert [record["way"] for record in records] == ["tcp", "directory"]
    for record in records:
        assert record["num_bytes"] == 2 * 36 * 2 * 600 * 128 * 2 and record["hosts"] == 2
        assert len(record["samples"]["total_ms"]) == 2
        assert 0 < record["first_layer_ms"] <= record["fetch_ms"] <= record["total_ms"]
    assert sum(line.startswith("|") for line in output.splitlines()) == 2 + len(records)
    assert not list((tmp_path / "shared").iterdir())
