"""The benchmark of decoding steps: its form, and that what is wrong gets no speed."""

import importlib
import json

import pytest
import torch

from scripts import BENCHMARKS, figures_of


def test_every_way_beside_transformers(tmp_path):
    options = ["--tokens", 40, "--new-tokens", 1, 5, "--rounds", 2, "--warmup", 1]
    records, output = figures_of("decoding", tmp_path / "figures.jsonl", *options)
    assert [(r["num_new_tokens"], r["way"]) for r in records] == [
        (new, way) for new in (1, 5) for way in ("transformers", "apbv")
    ]
    for record in records:
        assert len(record["samples"]["ms"]) == 2 and record["error"] <= record["tolerance"]
        assert record["speedup"] > 0 and record["ms"] > 0
    assert len(output.strip().splitlines()) == 2 + len(records)


@pytest.mark.parametrize("off", [1.01, float("nan")])
def test_what_is_wrong_gets_an_error(monkeypatch, tmp_path, capsys, off):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    decoding = importlib.import_module("decoding")
    right = decoding.with_apbv

    def wrong(*arguments):
        step = right(*arguments)
        return lambda tokens: step(tokens) * torch.tensor(off)

    monkeypatch.setattr(decoding, "with_apbv", wrong)
    path = tmp_path / "figures.jsonl"
    arguments = ["--tokens", "40", "--new-tokens", "1", "--rounds", "1", "--json", str(path)]
    assert decoding.main(arguments) == 1
    transformers, ours = [json.loads(line) for line in path.read_text().splitlines()]
    assert transformers["ms"] > 0 and ours["ms"] is None and ours["speedup"] is None
    assert "error: apbv over 40 tokens is off by" in capsys.readouterr().err
