"""The benchmark of decoding steps: its form, and that what is wrong gets no speed."""

import json
import shlex

import decoding
import pytest
import torch

from scripts import figures_of
from support.decoding import batches


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


def test_batches_beside_answers_one_after_the_other(tmp_path):
    options = "--model demo --tokens 40 --batch 1 3 --answer-tokens 3 --rounds 2 --warmup 1"
    records, output = figures_of("decoding", tmp_path / "figures.jsonl", *shlex.split(options))
    assert [(r["num_answers"], r["way"]) for r in records] == [
        (size, way) for size in (1, 3) for way in ("apbv, one after the other", "apbv, in a batch")
    ]
    for record in records:
        assert len(record["samples"]["ms"]) == 2 and record["error"] <= record["tolerance"]
        assert record["tokens_per_s"] == pytest.approx(record["num_answers"] / record["ms"] * 1e3)
    assert records[3]["speedup"] == pytest.approx(records[2]["ms"] / records[3]["ms"])
    assert len(output.strip().splitlines()) == 2 + len(records)


def test_a_batch_that_is_wrong_gets_an_error(monkeypatch, tmp_path, capsys):
    run = batches.BatchRunner.run
    monkeypatch.setattr(batches.BatchRunner, "run", lambda runner, ids, kvs: run(runner, ids, kvs) * 1.01)
    path = tmp_path / "figures.jsonl"
    arguments = ["--model", "demo", "--tokens", "40", "--batch", "2", "--answer-tokens", "2", "--rounds", "1"]
    assert decoding.main([*arguments, "--json", str(path)]) == 1
    alone, together = [json.loads(line) for line in path.read_text().splitlines()]
    assert alone["tokens_per_s"] > 0 and together["ms"] is None and together["speedup"] is None
    assert "error: apbv, in a batch over 40 tokens is off by" in capsys.readouterr().err


@pytest.mark.parametrize("off", [1.01, float("nan")])
def test_what_is_wrong_gets_an_error(monkeypatch, tmp_path, capsys, off):
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
