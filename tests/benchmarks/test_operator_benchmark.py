"""The benchmark of the operators at toy size: its counts, its form, and that what is wrong gets no
speed."""

import json
import statistics
from functools import partial

import operators
import pytest
import torch

from apbv.kernels import reference

from apbv_tests.scripts import figures_of, validator_of


@pytest.fixture
def benchmark(tmp_path):
    """Runs the benchmark in this process: its exit status and records."""
    validator = validator_of("operators")

    def run(*options):
        path = tmp_path / "figures.jsonl"
        arguments = ["--preset", "quick", "--rounds", 1, "--warmup", 1, "--json", path, *options]
        status = operators.main([str(argument) for argument in arguments])
        records = (
            [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        )
        for record in records:
            validator.validate(record)
        return status, records

    return run


def test_every_operator_beside_the_ceilings(tmp_path):
    options = ["--preset", "quick", "--rounds", 1, "--warmup", 1]
    records, output = figures_of("operators", tmp_path / "figures.jsonl", *options)
    assert len(output.strip().splitlines()) == 1 + 2 + len(records) and output.startswith(
        "ceilings: "
    )
    assert len({record["op"] for record in records}) == 8
    for record in records:
        assert (
            record["wrong"] is None
            and record["backend"] == "torch"
            and len(record["samples"]["ms"]) == 1
        )
        assert record["is_default"]
        assert record["ms"] == statistics.median(record["samples"]["ms"])
        assert 0 <= record["error"] <= 1
        ceiling = record["ceiling"]
        seconds = record["ms"] / 1e3
        floors = (
            record["flops"] / ceiling["tflops"] / 1e12,
            record["bytes"] / ceiling["gigabytes_per_s"] / 1e9,
        )
        assert record["share_of_ceiling"] == pytest.approx(max(floors) / seconds)
        assert record["tflops"] == pytest.approx(record["flops"] / seconds / 1e12)
    by_case = {record["case"]: record for record in records}
    assert by_case["causal"]["flops"] == 4 * 32 * 4 * sum(range(1, 601))
    # 128 anchor keys, three whole blocks of 150, and one causally.
    block = by_case["anchor, passing blocks, block"]
    assert block["flops"] == 4 * 32 * 4 * (150 * (128 + 3 * 150) + sum(range(1, 151)))
    # The anchor's own 128 queries see 1, 2, ... keys of the last segment.
    both = by_case["passing blocks, anchor and block"]
    assert both["flops"] == 4 * 32 * 4 * (150 * 3 * 150 + sum(range(1, 279)))
    # 600 tokens are blocks of 128, and one of 88; of half of 0, 1, 2, 3 and 4 blocks the rounded
    # number is listed.
    listed = by_case["50% of the blocks"]
    assert listed["flops"] == 4 * 32 * 4 * (
        128 * 128 * (0 + 0 + 1 + 2) + 88 * 2 * 128 + 4 * 128 * 129 // 2 + 88 * 89 // 2
    )
    few = by_case["16 tokens"]
    assert few["flops"] == 4 * 32 * 4 * (16 * 584 + 16 * 17 // 2)
    assert few["bytes"] == 4 * 32 * (2 * 16 * 4 + 2 * 600 * 2)


def lse_too_high(q, segments, scale, causal_last, *, num_anchor_queries=0, backend):
    out, lse = reference.segmented_attention(
        q, segments, scale, causal_last, num_anchor_queries=num_anchor_queries
    )
    return out, lse + 0.01


def one_key_missing(q, segments, scale, causal_last, *, num_anchor_queries=0, backend):
    *before, (k, v) = segments
    out, lse = reference.segmented_attention(
        q, segments, scale, causal_last, num_anchor_queries=num_anchor_queries
    )
    off, _ = reference.segmented_attention(
        q, [*before, (k, v.index_fill(2, torch.tensor([7]), 0.0))], scale, True
    )
    return (off if q.shape[2] > 1 else out), lse


def crashing(*operands, **settings):
    raise RuntimeError("out of registers\nand more")


@pytest.mark.parametrize("function", [lse_too_high, one_key_missing, crashing])
def test_what_is_wrong_gets_no_speed(benchmark, monkeypatch, capsys, function):
    monkeypatch.setattr("apbv.kernels.segmented_attention", function)
    status, records = benchmark("--ops", "segmented_attention")
    printed = capsys.readouterr()
    assert status == 1 and "error: segmented_attention (causal) with torch" in printed.err
    for record in records:
        assert record["wrong"] and record["ms"] is None
    assert ("out of registers" in printed.err) == (
        function is crashing
    ) and "and more" not in printed.err


def test_backends_agree_at_the_measured_size(monkeypatch):
    """A kernel that is right at the doctor's sizes, but not at this one, gets no speed."""
    monkeypatch.setattr(operators.kernels, "error_of", lambda *_: 0.5)
    case = operators.cases(operators.sizes_of("quick"), [600])[0]
    operands = case.make(operators.Draw(0, torch.device("cpu"), torch.float32))

    def off(operands):
        out, lse = case.run(operands, "torch")
        return out * 1.001, lse

    right = [operators.Contender("torch", partial(case.run, backend="torch")) for _ in range(2)]
    wrong = operators.Contender("triton", off)
    operators.check(case, operands, torch.float32, [*right, wrong])
    assert [entry.wrong for entry in right] == [None, None] and wrong.wrong.startswith(
        "differs by 1.0e-03"
    )
