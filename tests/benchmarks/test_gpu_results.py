"""The tables of docs/results-gpu.md, drawn from the records of docs/records/."""

import pytest
import roofline

from gpu_tables import RECORDS, TABLES, name_of_gpu, of, predicted_parts
from scripts import ROOT
from support.records import read_records
from support.workloads import config_of

PAGE = ROOT / "docs" / "results-gpu.md"


def test_the_page_shows_its_records():
    page = PAGE.read_text(encoding="utf-8")
    records = read_records([RECORDS])
    for title, table in TABLES.items():
        assert table(records) in page, f"{PAGE.name} should show\n{title}\n{table(records)}"


def test_the_cost_model_is_near_what_was_measured():
    """Kernels of a prefill within 10 %, by parts; so is all of ``full``, which is not simulated."""
    records = read_records([RECORDS])
    gpu = name_of_gpu(records)
    for record in of(records, "profile"):
        parts, measured = predicted_parts(record, gpu), record["kernels_ms"]
        assert parts["attention"] == pytest.approx(measured["attention"], rel=0.1)
        assert parts["projections"] + parts["MLP"] == pytest.approx(measured["matrix products"], rel=0.1)
        assert sum(parts.values()) == pytest.approx(sum(measured.values()), rel=0.1)
    full = [record for record in of(records, "throughput") if record["label"] == "full"]
    assert len(full) == 5
    for record in full:
        launching = roofline.launching_ms(config_of(record["model"]), "full")
        stages = record.get("stages_ms") or {"prefill": min(record["samples"]["ttft_ms"])}
        predicted = max(sum(predicted_parts(record, gpu).values()), launching)
        assert predicted == pytest.approx(stages["prefill"], rel=0.1)


def test_what_the_page_says_of_them():
    page, records = PAGE.read_text(encoding="utf-8"), read_records([RECORDS])
    about, doctor, memcheck, tests = records[:4]
    assert doctor["healthy"] and memcheck["healthy"] and not tests["failed"]
    assert f"{tests['passed']} passed" in page and f"{doctor['worst_error']:.2f} of" in page
    for name, version in about["versions"].items():
        assert name == "apbv" or version in page, name


def test_the_readme_and_the_predictions_show_these_figures(capsys):
    records, readme = read_records([RECORDS]), (ROOT / "README.md").read_text(encoding="utf-8")
    ms = {
        r["label"]: min(r["samples"]["ttft_ms"])
        for r in of(records, "throughput")
        if r["num_input_tokens"] == 131_072
    }
    tokens = [r["tokens_per_s"] for r in of(records, "batch_decoding") if r["num_answers"] == 16][1:]
    token = {r["way"]: r["ms"] for r in of(records, "decoding")}
    for ours, theirs, unit in (
        (ms["apbv"], ms["full"], " ms"),
        (ms["apbv"], ms["zigzag_ring"], " ms"),
        (*tokens, ""),
        (token["apbv"], token["transformers"], " ms"),
    ):
        cells = [f"{each:.1f}" if each < 100 else f"{each:,.0f}" for each in (ours, theirs)]
        assert " | ".join(f"{cell}{unit}" for cell in cells) in readme
    assert f"TTFT {ms['apbv'] / 1e3:.2f} s, {ms['full'] / ms['apbv']:.1f}x" in readme
    for model, page in (("qwen2.5-vl-7b", "results-prefill.md"), ("qwen3.5-9b", "records/notes.md")):
        roofline.main(["--prefill", model, "--gpus", "H200"])
        table = capsys.readouterr().out.strip()
        assert table in (ROOT / "docs" / page).read_text(encoding="utf-8")
