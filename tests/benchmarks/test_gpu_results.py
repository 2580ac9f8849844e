"""The tables of docs/results-gpu.md, drawn from the records of docs/records/."""

from typing import NamedTuple

import pytest
import roofline

from apbv.config import AblationConfig
from apbv.testing.random_models import CONFIGS, config_of
from tests.gpu.test_launches import launches_of_layer

from apbv_tests.documents import require_table, text_table
from apbv_tests.scripts import ROOT
from support.cost_model import Shape
from support.records import markdown_table, read_records, table
from support.summaries import grouped

RECORDS = ROOT / "docs" / "records" / "h200.jsonl"
PREFILLS = ("full", "zigzag_ring", "apbv")


def of(records: list[dict], benchmark: str) -> list[dict]:
    return [record for record in records if record.get("benchmark") == benchmark]


def name_of_gpu(records: list[dict]) -> str | None:
    """Return the GPU that the roofline knows and the records are of; None for others."""
    names = " ".join(record.get("device", "") for record in records)
    return next((gpu for gpu in roofline.PEAKS if gpu in names), None)


def ranged(values: list[float], form: str, unit: str) -> str:
    """Format the least and the most of some values; once if there is only one."""
    return " to ".join(f"{value:{form}}" for value in sorted({min(values), max(values)})) + unit


def prefill(records: list[dict]) -> str:
    """TTFT by method, its fastest and slowest run, and the ratios that these allow."""
    lines = []
    for (tokens,), rows in grouped(of(records, "throughput"), "num_input_tokens").items():
        runs = {row["label"]: row["samples"]["ttft_ms"] for row in rows}
        cells = [f"{tokens:,}"]
        for label in PREFILLS:
            cells.append(ranged(runs[label], ",.0f", " ms"))
        for label in PREFILLS[:2]:
            ratios = [other / ours for other in runs[label] for ours in runs["apbv"]]
            cells.append(ranged(ratios, ".2f", "x"))
        lines.append(cells)
    header = [
        "tokens",
        "`full`, 1 host",
        "`zigzag_ring`, 8",
        "`apbv`, 8",
        "over `full`",
        "over the ring",
    ]
    return markdown_table(header, lines)


def predicted_parts(record: dict, gpu: str | None) -> dict[str, float]:
    """Predict a prefill's parts in milliseconds; nothing where the roofline knows the GPU or the
    prompt not."""
    if (
        gpu is None
        or record.get("frames")
        or record["model"] not in CONFIGS
        or record["label"] not in PREFILLS
    ):
        return {}
    what = config_of(record["model"]), record["num_input_tokens"], record["label"], record["hosts"]
    # As it was measured: every host computed all of the anchor.
    return roofline.prefill_parts(*what, gpu, ablation=AblationConfig(split_anchor=False))


def kernels(records: list[dict]) -> str:
    """A prefill's kernels on one host by parts, beside what the roofline predicts."""
    header = ["kernels"]
    columns = []
    gpu = name_of_gpu(records)
    for record in of(records, "profile"):
        parts = predicted_parts(record, gpu)
        predicted = {
            "attention": parts["attention"],
            "matrix products": parts["projections"] + parts["MLP"],
            "the rest": parts["element-wise"] + parts["selection of passing KV"],
        }
        measured = {
            name: record["kernels_ms"].get(name, 0.0) for name in ("attention", "matrix products")
        }
        measured["the rest"] = sum(record["kernels_ms"].values()) - sum(measured.values())
        measured["all"] = sum(measured.values())
        predicted["all"] = sum(predicted.values())
        header += [f"`{record['label']}`, {record['hosts']}", "predicted"]
        columns += [measured, predicted]
    lines = []
    for name in ("attention", "matrix products", "the rest", "all"):
        lines.append([name, *[f"{column[name]:,.0f} ms" for column in columns]])
    return markdown_table(header, lines)


def operators(records: list[dict]) -> str:
    """Every operator by backend: its time, and the share of the ceiling that bounds it."""
    columns = {
        "operator": "`{op}`",
        "case": "{case}",
        "backend": "{backend}",
        "time": "{ms:.3g} ms",
    }
    right = [record for record in of(records, "operators") if record["ms"] is not None]
    return table(right, columns | {"of the ceiling": "{share_of_ceiling:.0%}"})


def steps(records: list[dict]) -> str:
    """A decoding step over a long context, one way beside the other."""
    columns = {"context": "{num_tokens:,}", "new tokens": "{num_new_tokens}", "way": "{way}"}
    columns |= {"time": "{ms:.2f} ms", "over transformers": "{speedup:.2f}x"}
    return table(of(records, "decoding"), columns)


def batch(records: list[dict]) -> str:
    """Tokens per second of all answers of a batch."""
    lines = []
    for (tokens, answers), ways in grouped(
        of(records, "batch_decoding"), "num_tokens", "num_answers"
    ).items():
        alone, together, theirs = (way["tokens_per_s"] for way in ways)
        ms = {way["way"]: way["ms"] for way in ways}["apbv, in a batch"]
        speeds = [f"{each:,.0f}" for each in (theirs, alone, together)]
        lines.append([f"{tokens:,}", answers, *speeds, f"{ms:.2f} ms", f"{together / theirs:.1f}x"])
    header = [
        "context",
        "answers",
        "transformers, a batch",
        "apbv, sequential",
        "apbv, a batch",
        "its step",
    ]
    return markdown_table([*header, "over transformers"], lines)


def server(records: list[dict]) -> str:
    """The server under load, and the engine without it."""
    columns = {
        "load": lambda row: (
            "engine alone" if row["way"] == "engine" else f"{row['concurrency']} clients"
        ),
        "requests/s": "{request_throughput:.1f}",
        "TTFT, p50": "{ttft_ms[p50]:.0f} ms",
        "TPOT, p50": "{tpot_ms[p50]:.1f} ms",
    }
    return table(of(records, "serving"), columns)


PAGE = ROOT / "docs" / "results-gpu.md"


def test_the_page_shows_its_records():
    records = read_records([RECORDS])
    for table_of in (prefill, kernels, operators, steps, batch, server):
        require_table(PAGE, table_of(records))


def test_the_cost_model_is_near_what_was_measured():
    """Kernels of a prefill within 10 %, by parts; so is all of ``full``, which is not simulated."""
    records = read_records([RECORDS])
    gpu = name_of_gpu(records)
    for record in of(records, "profile"):
        parts = predicted_parts(record, gpu)
        measured = record["kernels_ms"]
        assert parts["attention"] == pytest.approx(measured["attention"], rel=0.1)
        assert parts["projections"] + parts["MLP"] == pytest.approx(
            measured["matrix products"], rel=0.1
        )
        assert sum(parts.values()) == pytest.approx(sum(measured.values()), rel=0.1)
    full = [record for record in of(records, "throughput") if record["label"] == "full"]
    assert len(full) == 5
    for record in full:
        launching = roofline.launching_ms(config_of(record["model"]), "full", 1)
        stages = record.get("stages_ms") or {"prefill": min(record["samples"]["ttft_ms"])}
        predicted = max(sum(predicted_parts(record, gpu).values()), launching)
        assert predicted == pytest.approx(stages["prefill"], rel=0.1)


def test_what_the_page_says_of_them():
    page = PAGE.read_text(encoding="utf-8")
    records = read_records([RECORDS])
    about, doctor, memcheck, tests = records[:4]
    assert doctor["healthy"] and memcheck["healthy"] and not tests["failed"]
    assert f"{tests['passed']} passed, {tests['skipped']} skipped" in page
    assert f"{doctor['worst_error']:.2f} of" in page
    (longest,) = {
        r["git_sha"] for r in of(records, "throughput") if len(r["samples"]["ttft_ms"]) == 1
    }
    (steps_of,) = {r["git_sha"] for r in of(records, "decoding")}
    said = " ".join(page.split())
    assert f"131,072 tokens are one run each, of revision {longest}." in said
    assert (
        f"Qwen2.5-VL-7B's language model, of revision {steps_of}. *transformers* is its uncompiled "
        "loop" in said
    )
    for name, version in about["versions"].items():
        assert name == "apbv" or version in page, name


def test_the_readme_and_the_predictions_show_these_figures(capsys):
    records = read_records([RECORDS])
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    ms = {
        r["label"]: min(r["samples"]["ttft_ms"])
        for r in of(records, "throughput")
        if r["num_input_tokens"] == 131_072
    }
    tokens = [r["tokens_per_s"] for r in of(records, "batch_decoding") if r["num_answers"] == 16][
        1:
    ]
    token = {r["way"]: r["ms"] for r in of(records, "decoding")}
    for ours, theirs, unit in (
        (ms["apbv"], ms["full"], " ms"),
        (ms["apbv"], ms["zigzag_ring"], " ms"),
        (*tokens, ""),
        (token["apbv"], token["transformers"], " ms"),
    ):
        cells = [f"{each:.1f}" if each < 100 else f"{each:,.0f}" for each in (ours, theirs)]
        assert " | ".join(f"{cell}{unit}" for cell in cells) in readme
    single = [r for r in of(records, "throughput") if r["num_input_tokens"] == 131_072]
    assert {len(record["samples"]["ttft_ms"]) for record in single} == {1}
    (revision,) = {record["git_sha"] for record in [*single, *of(records, "decoding")]}
    assert (
        f"simulated, one run of revision {revision}" in readme
        and f"measured, revision {revision}" in readme
    )
    without_graphs = token["transformers"] / token["apbv, no graphs"]
    gain = (
        f"{token['transformers'] / token['apbv']:.1f}x; {without_graphs:.2f}x without CUDA graphs"
    )
    assert f"transformers, uncompiled | {gain} |" in readme
    assert f"TTFT {ms['apbv'] / 1e3:.2f} s, {ms['full'] / ms['apbv']:.1f}x" in readme
    for model, page in (
        ("qwen2.5-vl-7b", "results-prefill.md"),
        ("qwen3.5-9b", "records/notes.md"),
    ):
        roofline.main(["--prefill", model, "--gpus", "H200"])
        table = capsys.readouterr().out.strip()
        assert table in (ROOT / "docs" / page).read_text(encoding="utf-8")


class Predicted(NamedTuple):
    """A prefill of 131,072 tokens with Qwen2.5-VL-7B on H200s.

    Attributes:
        gpu: milliseconds of its kernels and exchanges.
        cpu: milliseconds of the launches.
        hidden: milliseconds of exchanges that attention can hide.
    """

    gpu: float
    cpu: float
    hidden: float

    @property
    def larger(self) -> float:
        return max(self.gpu, self.cpu)

    @property
    def text(self) -> str:
        return f"{self.gpu:.0f} ms, {self.cpu:.0f} ms"


def predicted(method: str, hosts: int, machine_hosts=None, kv="gathered", **settings) -> Predicted:
    model = config_of("qwen2.5-vl-7b")
    tokens = 131_072
    parts = roofline.prefill_parts(
        model, tokens, method, hosts, "H200", machine_hosts, kv, **settings
    )
    layout, _ = roofline.cost_of_text(Shape.from_config(model), tokens, method, hosts, **settings)
    launching = roofline.launching_ms(model, method, hosts, layout.splits_anchor)
    return Predicted(sum(parts.values()), launching, min(parts["attention"], parts["collectives"]))


def test_the_page_predicts_more_hosts_as_the_roofline_does():
    full = predicted("full", 1)
    rows = []
    for hosts in (8, 16, 32, 64):
        ring = predicted("zigzag_ring", hosts)
        ours = predicted("apbv", hosts)
        whole = predicted("apbv", hosts, ablation=AblationConfig(split_anchor=False))
        shorter = predicted("apbv", hosts, passing_budget=1 / 8)
        rows.append(
            [
                str(hosts),
                ring.text,
                ours.text,
                f"{full.larger / ours.larger:.1f}x",
                f"{ring.larger / ours.larger:.2f}x",
                f"{ring.gpu / ours.gpu:.2f}x",
                f"{ring.larger / whole.larger:.2f}x",
                f"{ring.larger / shorter.larger:.2f}x",
            ]
        )
    header = [
        "hosts",
        "`zigzag_ring`: GPU, CPU",
        "`apbv`: GPU, CPU",
        "over `full`",
        "over the ring",
        "of the GPU alone",
        "whole anchor: over the ring",
        "l_p = n / 16H: over the ring",
    ]
    require_table(ROOT / "docs" / "results-prefill.md", text_table(header, rows))


def test_the_page_predicts_hosts_on_several_machines():
    """Of eight GPUs, with the KV where it was computed, and on host 0."""
    full = predicted("full", 1)
    rows = []
    for hosts in (16, 32, 64):
        ring = predicted("zigzag_ring", hosts, 8, "sharded")
        ours = predicted("apbv", hosts, 8, "sharded")
        gathered_ring = predicted("zigzag_ring", hosts, 8)
        gathered = predicted("apbv", hosts, 8)
        rows.append(
            [
                str(hosts),
                ring.text,
                ours.text,
                f"{full.larger / ours.larger:.1f}x",
                f"{ring.larger / ours.larger:.2f}x",
                f"{(ring.gpu - ring.hidden) / (ours.gpu - ours.hidden):.2f}x",
                f"{gathered_ring.larger / gathered.larger:.2f}x",
            ]
        )
    header = [
        "hosts on machines of 8",
        "`zigzag_ring`: GPU, CPU",
        "`apbv`: GPU, CPU",
        "over `full`",
        "over the ring",
        "of the GPU alone, with exchanges hidden",
        "KV gathered on host 0: over the ring",
    ]
    require_table(ROOT / "docs" / "results-prefill.md", text_table(header, rows))


@pytest.mark.parametrize(
    ("method", "hosts"), [("full", 1), ("zigzag_ring", 2), ("zigzag_ring", 16), ("apbv", 8)]
)
def test_launches_are_predicted_as_the_emulated_gpu_counts_them(method, hosts):
    splits_anchor = method == "apbv"
    expected = roofline.launches_of_layer(method, hosts, splits_anchor)
    assert launches_of_layer(method, hosts) == expected


def test_a_layer_has_no_more_launches_on_more_hosts():
    """Not one for every earlier block, of which 64 hosts have up to 127."""
    assert launches_of_layer("apbv", 64) <= launches_of_layer("apbv", 8)
