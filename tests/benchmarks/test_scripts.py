"""Every benchmark once as a user runs it, at toy size: records keep to their schema, and say what
they should."""

import json
import statistics

import pytest
import speculative
from throughput import PRESETS, SWITCHES

from apbv.prefilling.methods import METHODS

from apbv_tests.scripts import figures_of, run_benchmark
from support.cost_model import METHODS as COSTED

SPLIT_METHODS = [name for name, method in METHODS.items() if method.facts.splits]


@pytest.fixture
def run(tmp_path):
    """Runs a benchmark, which has to print a table: the records, and what it printed."""

    def run(name: str, *options, hosts: int = 1, plot: bool = False) -> tuple[list[dict], str]:
        path = tmp_path / "figures.png"
        options = [*options, *(["--plot", path] if plot else [])]
        records, output = figures_of(name, tmp_path / "figures.jsonl", *options, hosts=hosts)
        assert sum(line.startswith("|") for line in output.splitlines()) > 2
        assert not plot or path.read_bytes().startswith(b"\x89PNG")
        return records, output

    return run


# ---- prefills ----


def test_throughput_of_real_hosts(run):
    options = ["--tokens", 300, "--query-len", 9, "--passing-len", 5, "--rounds", 1, "--warmup", 0]
    rows, _ = run("throughput", *options, hosts=2)
    assert [row["label"] for row in rows] == ["full", *SPLIT_METHODS]
    by_label = {row["label"]: row for row in rows}
    for row in rows:
        assert row["label"] == row["method"] and not row["simulated"]
        assert row["hosts"] == len(row["comm_bytes"]) == len(row["peak_memory_bytes"])
        assert row["threads_per_host"] == (2 if row["method"] == "full" else 1)
        assert sum(row["comm_bytes"]) > 0 or row["method"] == "full"
        for baseline in ("full", "zigzag_ring"):
            if row["method"] not in ("full", baseline):
                speedup = by_label[baseline]["ttft_ms"]["p50"] / row["ttft_ms"]["p50"]
                assert row[f"speedup_vs_{baseline}"] == pytest.approx(speedup)
    # Rings carry every key and value to every host; APB-V five per block and layer.
    assert sum(by_label["apbv"]["comm_bytes"]) < sum(by_label["zigzag_ring"]["comm_bytes"]) / 2


def test_throughput_without_the_parts_of_the_method(run):
    """APB-V's Table 4: without V each host encodes all frames, and receives no embeddings."""
    options = ["--preset", "table4", "--model", "demo", "--frames", 16, "--resolutions", "84x84"]
    rows, _ = run("throughput", *options, "--rounds", 1, "--warmup", 0, hosts=2)
    received = {row["label"]: sum(row["comm_bytes"]) for row in rows}
    assert {row["label"] for row in rows} == PRESETS["table4"]["rows"].keys()
    assert received["-V"] < received["APB-V"] and received["-O-F-Z-V"] < received["-O-F-Z"]
    for row in rows:
        off = [name for name in SWITCHES if not row[name]]
        settings = PRESETS["table4"]["rows"][row["label"]]
        switches = settings.get("ablation", {})
        assert off == [name for name, is_on in switches.items() if is_on is False]


def test_a_profile_shows_what_every_stage_and_host_computes(run, tmp_path):
    options = ["--tokens", 300, "--query-len", 9, "--rounds", 1, "--warmup", 0, "--hosts", 2]
    _, output = run("throughput", *options, "--methods", "full", "apbv", "--profile", tmp_path)
    tables = [
        [line.split(" | ") for line in part.splitlines() if "`aten::mm`" in line]
        for part in output.split("json:")
    ]
    # Each layer multiplies seven times, and the last token's logits are one more.
    calls = [
        [(stage.strip("| "), int(count)) for stage, _, count, *_ in table] for table in tables[1:]
    ]
    assert calls == [[("prefill", 4 * 7 + 1)], [("prefill", 2 * (4 * 7 + 1))]]
    traces = [
        json.loads((tmp_path / f"{name}-300.json").read_text())["traceEvents"]
        for name in ("full-1", "apbv-2")
    ]
    stages = [
        [event["tid"] for event in trace if event["name"] == "apbv.prefill" and "dur" in event]
        for trace in traces
    ]
    assert [len(set(threads)) for threads in stages] == [1, 2]


def test_a_plan_of_a_long_video_on_eight_gpus(run):
    options = ["--frames", 64, "--resolution", "1440p", "--hosts", 4, 8, "--explain"]
    records, output = run("scaling", "plan", *options)
    split = [method for method in COSTED if method != "full"]
    assert [(r["hosts"], r["method"]) for r in records] == [
        (1, "full"),
        *((h, m) for h in (4, 8) for m in split),
    ]
    ratio = {(r["method"], r["hosts"]): r["flop_ratio"] for r in records}
    # Exact methods divide the work (the zigzag evenly), the approximate ones also save some of it.
    assert ratio["full", 1] == 1 and ratio["zigzag_ring", 8] == pytest.approx(8, rel=1e-3)
    assert ratio["ulysses", 8] <= 8 < ratio["apb", 8] < ratio["apbv", 8] > ratio["apbv", 4]
    assert output.count("FLOPs of full over this: busiest host") == len(records)


@pytest.mark.thorough
def test_simulated_hosts_beside_the_cost_model(run):
    options = ["--tokens", 256, "--hosts", 2, "--rounds", 2, "--full-rounds", 2]
    (record,), _ = run("scaling", "simulate", *options)
    assert (
        record["simulated"]
        and len(record["full_ms"]) == 2
        and len(record["noisy_critical_path_ms"]) == 2
    )
    full = statistics.mean(record["full_ms"])
    assert record["speedup_vs_full"] == pytest.approx(full / record["critical_path_ms"])
    # At its mean pace no host is slower than where the slowest one sets the pace of every run.
    assert record["critical_path_ms"] <= 1.01 * statistics.mean(record["noisy_critical_path_ms"])
    assert record["share_of_flop_ratio"] == record["speedup_vs_full"] / record["flop_ratio"]


@pytest.mark.thorough
def test_reuse_beside_none(run, tmp_path):
    options = [
        "--hosts",
        1,
        2,
        "--shots",
        16,
        "--clips",
        1,
        "--passing-len",
        2,
        "--folder",
        tmp_path / "clips",
    ]
    records, _ = run("reuse", *options)
    assert [(r["hosts"], r["way"], r["simulated"]) for r in records] == [
        (hosts, way, hosts == 2) for hosts in (1, 2) for way in ("none", "exact", "kv")
    ]
    for record in records:
        assert record["reused"] == (0 if record["way"] == "none" else record["total"])
        assert (
            len(record["samples"]["ttft_ms"])
            == record["total"]
            == sum(t for _, t in record["tasks"].values())
        )
        if record["way"] == "exact" or record["hosts"] == 1:
            assert record["same_answer"] == record["total"]  # nothing approximate about it


# ---- answers ----


@pytest.mark.thorough
def test_methods_differ_where_they_should(run, tmp_path):
    options = ["--preset", "methods", "--clips", 2, "--shots", 64, "--split", "validation"]
    records, _ = run("accuracy", *options, "--folder", tmp_path / "clips")
    assert {r["label"] for r in records} == {
        *METHODS,
        "apbv, default lengths",
        "apbv, dot",
        "apbv, as its authors",
    }
    assert all(
        (r["hosts"] == 8) == r["simulated"] == METHODS[r["method"]].facts.splits for r in records
    )

    def right(label: str) -> int:
        counts = [
            r["right"][task]
            for r in records
            if r["label"] == label
            for task in ("ordering", "counting")
        ]
        assert sum(total for _, total in counts) == 4
        return sum(number for number, _ in counts)

    full = right("full")
    assert full >= 3
    # Exact methods answer as full attention does; without passing blocks these tasks cannot be
    # solved.
    assert right("zigzag_ring") == right("ulysses") == full
    assert right("apbv") >= full - 1 > right("star")


def test_accuracy_goes_on_where_its_file_ends(tmp_path):
    labels = ["full", "star", "apbv", "slowfast, 0.5", "full, draft by hippo, 0.1"]
    labels[4:4] = dropped = ["dycoke, 0.25", "dycoke, random, 0.25", "dycoke, needles kept, 0.25"]
    path = tmp_path / "figures.jsonl"
    plot = tmp_path / "figures.png"
    options = ["--preset", "systems", "--shots", 16, "--hosts", 2, "--folder", tmp_path / "clips"]
    options += ["--labels", *labels]
    records, _ = figures_of("accuracy", path, "--clips", 1, *options)
    assert sorted(record["label"] for record in records) == sorted(labels)
    for record in records:
        assert (
            (record["hosts"] == 2) == record["simulated"] == (record["label"] in ("star", "apbv"))
        )
        assert len(record["ttft_ms"]) == len(record["num_visual_kept"]) == 4  # questions
        is_whole = record["label"] not in ("slowfast, 0.5", *dropped)
        assert (set(record["num_visual_kept"]) == {64}) == is_whole and record[
            "num_visual_tokens"
        ] == 64
        assert min(record["ttft_ms"]) > record["reading_ms"]
    by_label = {record["label"]: record for record in records}
    # As many are kept, however they are chosen.
    assert {tuple(by_label[label]["num_visual_kept"]) for label in dropped} == {(16,) * 4}
    assert len({str(by_label[label]["settings"]) for label in dropped}) == 3
    # Speculation is lossless, whatever its draft sees.
    assert by_label["full"]["right"] == by_label[labels[-1]]["right"]
    before = path.read_text()
    result = run_benchmark("accuracy", "--clips", 2, *options, "--json", path, "--plot", plot)
    assert result.returncode == 0, result.stderr
    assert path.read_text().startswith(before) and plot.read_bytes().startswith(b"\x89PNG")
    added = [json.loads(line) for line in path.read_text()[len(before) :].splitlines()]
    assert sorted((record["label"], record["seed"]) for record in added) == sorted(
        (label, 1) for label in labels
    )
    assert len(result.stdout.strip().splitlines()) == 2 + len(labels)
    assert run_benchmark("accuracy", "--table", path).stdout == result.stdout


# ---- decoding and speculation ----


def test_decoding_steps_and_batches(run):
    records, _ = run("decoding", "--tokens", 40, "--new-tokens", 1, 5, "--rounds", 2, "--warmup", 1)
    ways = [(new, way) for new in (1, 5) for way in ("transformers", "apbv")]
    assert [(r["num_new_tokens"], r["way"]) for r in records] == ways
    assert all(r["speedup"] > 0 and r["ms"] > 0 for r in records)
    options = [
        "--model",
        "demo",
        "--tokens",
        40,
        "--batch",
        3,
        "--answer-tokens",
        3,
        "--rounds",
        2,
        "--warmup",
        1,
    ]
    in_batch, _ = run("decoding", *options)
    alone, together, _ = in_batch
    ways = ["apbv, one after the other", "apbv, in a batch", "transformers, in a batch"]
    assert [r["way"] for r in in_batch] == ways
    assert together["tokens_per_s"] == pytest.approx(3 / together["ms"] * 1e3)
    assert together["speedup"] == pytest.approx(alone["ms"] / together["ms"])
    for record in records + in_batch:
        assert len(record["samples"]["ms"]) == 2 and record["error"] <= record["tolerance"]


def of_clip(tmp_path, *options, clips: int = 1) -> list:
    return [
        "--clips",
        clips,
        "--shots",
        16,
        "--max-new-tokens",
        12,
        "--folder",
        tmp_path / "clips",
        *options,
    ]


def test_a_papers_table_of_drafts(run, tmp_path):
    options = of_clip(tmp_path, "--preset", "hippo3", "--tasks", "describe")
    records, _ = run("speculative", *options, hosts=2)
    alone, *drafted = records
    assert [record["label"] for record in drafted] == [*speculative.PRESETS["hippo3"]]
    assert {record["task"] for record in records} == {"describe"}
    assert all(record["identical"] and record["preset"] == "hippo3" for record in records)
    for record in drafted:
        figures = record["speculation"]
        assert record["decode_speedup"] == pytest.approx(
            alone["decode_ms"][0] / record["decode_ms"][0]
        )
        assert record["end_to_end_speedup"] == pytest.approx(
            alone["total_ms"][0] / record["total_ms"][0]
        )
        assert (
            figures["config"]["ablation"]["keep_losing_draft"] is True
            and figures["accepted_in_a_row"] >= 0
        )


def test_drafts_behind_one_prefill_of_the_target(run, tmp_path):
    """The ways' totals are not comparable, as all but the first find the video's KV in the
    cache."""
    options = of_clip(
        tmp_path, "--strategies", "ngram", "--tasks", "describe", "ordering", "--reuse", "kv"
    )
    records, _ = run("speculative", *options)
    assert [record["task"] for record in records] == ["describe"] * 2 + ["ordering"] * 2
    assert all(record["identical"] and record["end_to_end_speedup"] is None for record in records)


def test_tabeds_tables_of_a_pair_that_is_made(run, tmp_path):
    """Each is one command; a target drafted by its own first layers is neither always right nor
    always wrong."""
    made = run_benchmark("make_llava", "--out", tmp_path, "--prompts", 1)
    assert made.returncode == 0, made.stderr
    models = ["--model", tmp_path / "target", "--draft-model", tmp_path / "draft"]
    options = [*models, "--prompts", tmp_path / "prompts.jsonl", "--max-new-tokens", 12]
    records, _ = run("speculative", *options, "--preset", "tabed2")
    labels = ["autoregressive", "M", "T", "P", "C", "MTCP", "MTCP*"]
    tasks = ["one image", "two images", "five images"]
    assert [(r["task"], r["label"]) for r in records] == [
        (t, each) for t in tasks for each in labels
    ]
    assert all(record["identical"] for record in records)
    rates = [r["speculation"]["acceptance_rate"] for r in records if r["label"] == "M"]
    assert all(0 < rate < 1 for rate in rates)


def test_a_hybrid_that_is_made_drafts_in_batches(run, tmp_path):
    """Its first layers are neither always right nor always wrong."""
    made = run_benchmark("make_hybrid", "--out", tmp_path, "--size", "tiny", "--layers", 4)
    assert made.returncode == 0, made.stderr
    models = ["--model", tmp_path / "target", "--draft-model", tmp_path / "draft"]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"task": "repeat", "prompt": "Repeat the words: some words of a text."}\n' * 2
    )
    options = [*models, "--prompts", prompts, "--max-new-tokens", 24, "--dtype", "float32"]
    records, _ = run("speculative", *options, "--strategies", "vanilla")
    (rate,) = {r["speculation"]["acceptance_rate"] for r in records if r["speculation"]}
    assert 0 < rate < 1
    records, _ = run("speculative", *options, "--strategies", "vanilla", "--batch", 1, 2)
    assert [record["answers"] for record in records] == [1, 1, 2, 2]
    assert all(record["identical"] for record in records)


def test_drafts_in_batches(run, tmp_path):
    options = of_clip(tmp_path, "--batch", 1, 2, "--strategies", "std", "--scale", 2, clips=2)
    records, _ = run("speculative", *options, hosts=2)
    labels = ["autoregressive", "std, 0.1, γ = 5"]
    assert [(r["answers"], r["label"]) for r in records] == [
        (size, each) for size in (1, 2) for each in labels
    ]
    for alone, drafted in zip(records[::2], records[1::2], strict=True):
        assert (
            alone["speedup"] == 1
            and alone["drafted_per_token"] == 0
            and alone["acceptance_rate"] is None
        )
        assert drafted["identical"] and drafted["num_input_tokens"] > 64
        # A draft that seemed not to pay in the warm-up, by the clock, is not asked again.
        assert (drafted["acceptance_rate"] is not None) == (drafted["drafted_per_token"] > 0)
        speeds = drafted["tokens_per_s"] / alone["tokens_per_s"]
        assert drafted["new_tokens"] == alone["new_tokens"] and drafted["speedup"] == pytest.approx(
            speeds
        )


@pytest.mark.thorough
def test_views_of_a_draft(run, tmp_path):
    options = ["--clips", 1, "--folder", tmp_path / "clips", "--shots", 16, "--keep-ratio", 0.25]
    records, _ = run("draft_views", *options, "--keep", "full", "attention", "random")
    full, attended, drawn = records
    assert (full["kept"], attended["kept"], drawn["kept"]) == (64, 16, 16)
    for record in records:
        assert record["described"] > 16
    assert full["of_needles"] == 1 and attended["of_needles"] < 1
    # The whole clip tells the draft more about what the target says than a random quarter of its
    # tokens does.
    assert full["predicted"] > drawn["predicted"]


# ---- the server, and KV on its way to another process ----


def test_the_server_beside_the_engine(run):
    options = [
        "--requests",
        3,
        "--concurrency",
        1,
        3,
        "--frames",
        16,
        "--max-new-tokens",
        6,
        "--ignore-eos",
    ]
    records, _ = run("serving", *options, "--max-running", 1, "all", "--batch", hosts=2)
    assert [(r["way"], r["concurrency"], r["max_running"]) for r in records] == [
        ("engine", 1, None),
        *[("server", concurrency, most) for most in (1, None) for concurrency in (1, 3)],
        ("batch", None, None),
    ]
    for record in records:
        num_requests = 1 if record["way"] == "engine" else 3
        assert (
            len(record["samples"]["ttft_ms"]) == record["num_requests"] == num_requests
            and record["hosts"] == 2
        )
        assert record["ttft_ms"]["p50"] <= record["latency_ms"]["p50"]
        assert record["output_throughput"] == pytest.approx(6 * record["request_throughput"])


@pytest.mark.thorough
def test_servers_at_a_rate_of_requests(run):
    """Of one host or both that decode, with and without a draft; who gets the tokens in time counts
    as goodput."""
    options = ["--requests", 3, "--rate", 50, "--frames", 16, "--max-new-tokens", 6, "--ignore-eos"]
    options += ["--decode-hosts", 1, "all", "--speculate", "off", "vanilla", "--limits", 1e6, 1e6]
    records, _ = run("serving", *options, hosts=2)
    assert [(r["rate"], r["decode_hosts"], r["speculate"]) for r in records] == [
        (None, None, None),
        *[
            (50, decode_hosts, speculate)
            for speculate in ("off", "vanilla")
            for decode_hosts in (1, None)
        ],
    ]
    for record in records:
        assert record["goodput"] == record["request_throughput"] and record["concurrency"] in (
            1,
            None,
        )


def test_short_requests_beside_heavy_ones(run):
    """It fails where answers differ."""
    options = ["--side", 96, "--frames", 8, "--pictures", 3, "--words", 300]
    records, _ = run("waiting", *options, hosts=2)
    assert [r["heavy"] for r in records] == [
        "text",
        "tiff",
        "webp",
        "png",
        "jpg",
        "3 pictures",
        "frames",
        "gif",
    ]
    for record in records:
        assert (
            record["worst_wait_ms"] == max(record["samples"]["wait_ms"])
            and record["num_unhealthy"] == 0
        )
        assert (
            len(record["samples"]["heavy_alone_ms"])
            == len(record["samples"]["heavy_beside_ms"])
            == 1
        )


def test_kv_to_another_process(run):
    """It compares what arrives with what was sent, and fails where they differ."""
    options = ["--tokens", 200, "--rounds", 1, "--shapes", "qwen2.5-vl-3b"]
    (record,), _ = run("kv_transfer", *options, hosts=2)
    assert record["num_bytes"] == 2 * 36 * 2 * 200 * 128 * 2 and record["hosts"] == 2
    assert 0 < record["first_layer_ms"] <= record["fetch_ms"] <= record["total_ms"]
