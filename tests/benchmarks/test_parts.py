"""What benchmarks are made of: their tables, plots and presets, and that what is wrong gets no
figures."""

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import accuracy
import decoding
import pytest
import roofline
import speculative
import throughput
import torch

import apbv
from apbv import HostGroup, PrefillConfig, ReduceConfig
from apbv.config import TabedConfig
from apbv.input.media.video import probe
from apbv.input.prompts.model_inputs import ModelInputs
from apbv.model.parts import inspect_model
from apbv.prefilling.methods import METHODS
from apbv.runner.decoder import Decoder
from apbv.speculate.strategies.table import require_consistent
from apbv.testing import clips
from apbv.testing.random_models import (
    CONFIGS,
    build_model,
    config_like,
    config_of,
    text_prompt,
    video_prompt,
)
from apbv.testing.simulated import simulate

from apbv_tests.documents import cells_in
from apbv_tests.patience import HANGING, wait_for
from apbv_tests.scripts import BENCHMARKS, assert_one_line_error
from support.exams import Candidate, Exam, load_demo, ranked_by, ways_of
from support.summaries import mean_cell, student_t

# ---- what is wrong ----


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("throughput", ["--resolutions", "big"], "'big' is not a resolution"),
        ("throughput", ["--hosts", "1"], "2 hosts at least"),
        (
            "throughput",
            ["--tokens", "100", "--model", "no-such-model"],
            "cannot load the model no-such-model",
        ),
        (
            "scaling",
            ["plan", "--model", "no-such-model"],
            "cannot load the configuration of no-such-model",
        ),
        (
            "speculative",
            ["--draft-model", "no-such", "--clips", 1],
            "cannot load the model no-such",
        ),
        (
            "speculative",
            ["--batch", 3, "--clips", 1],
            "--batch 3 needs as many questions, but there are 1",
        ),
    ],
)
def test_what_cannot_be_measured_is_one_line(name, options, message, capsys):
    assert_one_line_error(name, options, message, capsys)


@pytest.mark.parametrize("off", [1.01, float("nan")])
@pytest.mark.parametrize("of_batch", [False, True])
def test_wrong_decoding_steps_get_no_speed(monkeypatch, tmp_path, capsys, off, of_batch):
    step = decoding.with_apbv
    run = decoding.BatchRunner.run

    def wrong(*arguments):
        right = step(*arguments)
        return lambda: right() * torch.tensor(off)

    monkeypatch.setattr(decoding, "with_apbv", wrong)
    monkeypatch.setattr(
        decoding.BatchRunner, "run", lambda runner, ids, kvs: run(runner, ids, kvs) * off
    )
    path = tmp_path / "figures.jsonl"
    what = (
        ["--model", "demo", "--batch", "2", "--answer-tokens", "2"]
        if of_batch
        else ["--new-tokens", "1"]
    )
    assert decoding.main(["--tokens", "40", "--rounds", "1", "--json", str(path), *what]) == 1
    right, ours, *_ = [json.loads(line) for line in path.read_text().splitlines()]
    assert right["ms"] > 0 and ours["ms"] is None and ours["speedup"] is None
    named = "apbv, in a batch" if of_batch else "apbv"
    assert f"error: {named} over 40 tokens is off by" in capsys.readouterr().err


# ---- what is counted ----


@pytest.mark.parametrize(
    ("method", "most"),
    [
        # Of three partial results of a context token two are merged; and the question's scores are
        # among it.
        ("apbv", 10.5),
        # The anchor and the block are one triangle, copied to its place, and the question's has
        # another.
        ("star", 2.5),
        # In each step but the first, two results are read and one is written.
        ("zigzag_ring", 6.5),
    ],
)
def test_attention_writes_its_results_where_they_are_wanted(method, most):
    """A needless copy of the result would exceed the bounds."""

    def moved_per_output(hosts) -> float:
        config = PrefillConfig(method=method)
        kind = METHODS[method]
        attention = kind(kind.plan(hosts.size, 4096, 0, 4096 - 40, config), hosts, config, 1)
        rows = sum(map(len, attention.layout.local_spans(hosts.rank)))
        states = [torch.randn(1, rows, heads, 64).transpose(1, 2) for heads in (8, 2, 2)]
        with torch.no_grad(), roofline.Traffic() as traffic:
            out = attention(*states, 64**-0.5, 0).transpose(1, 2).contiguous()
        assert any("attention" in name for name in traffic.bytes)
        return (
            sum(size for name, size in traffic.bytes.items() if "attention" not in name)
            / out.nbytes
        )

    assert max(simulate(2, moved_per_output)) <= most


def test_a_layer_moves_what_its_calls_read_and_write():
    shape = config_of("llama-small")
    rotated = (shape.num_attention_heads + shape.num_key_value_heads) * shape.head_dim
    # In bf16 two residuals, two norms, a product of gate and up, and heads and their angles.
    fused = 2 * (
        10 * shape.hidden_size + 3 * shape.intermediate_size + 2 * rotated + 4 * shape.head_dim
    )
    one, two, three = (roofline.element_wise_bytes(shape, rows) for rows in (64, 128, 192))
    assert three - two == two - one == 64 * fused
    assert roofline.element_wise_bytes(shape, 64, is_fused=False) > 2 * one


def test_a_prefill_is_predicted_by_its_parts(capsys):
    tokens = 32_768
    shape = config_of("llama-small")
    sizes = ["--prefill", "llama-small", "--tokens", str(tokens), "--hosts", "2"]
    roofline.main([*sizes, "--gpus", "H200"])
    rows = [cells_in(line) for line in capsys.readouterr().out.splitlines()]
    full = {row[0]: float(row[1]) for row in rows[2:-5]}
    pairs = shape.num_hidden_layers * shape.num_attention_heads * tokens * (tokens + 1) / 2
    assert full["attention"] == pytest.approx(1e3 * 4 * 64 * pairs / (0.68 * 989e12), abs=0.06)
    (_, gpu, *_), _, (_, cpu, *_), (_, larger, *_), (*_, relative, _) = rows[-5:]
    assert float(gpu) == pytest.approx(sum(full.values()), abs=1) and full["element-wise"] > 0.1
    assert float(larger) == max(float(gpu), float(cpu)) and relative == "1.00x"
    # A short prompt's kernels end before the CPU has launched them.
    assert roofline.launching_ms(shape, "apbv", 8) > sum(
        roofline.prefill_parts(shape, 2048, "apbv", 8, "H200").values()
    )


def test_drafts_are_predicted_by_what_they_read(capsys):
    """A target that drafts for itself from all of its KV gains nothing; one that reads little of it
    does."""
    roofline.main(
        ["--draft", "llama-small", "--target", "llama-small", "--acceptance", "1", "--gpus", "H200"]
    )
    rows = [cells_in(line) for line in capsys.readouterr().out.splitlines()]
    for num_tokens, _, _, same, tenth, std, lookup in rows[2:]:
        assert same.startswith("1.00 ×") and lookup == "17.00 × (γ = 16)"
        assert 1 < float(tenth.split()[0]) < 10
        assert (
            float(std.split()[0]) == 1 if int(num_tokens) == 1024 else float(std.split()[0]) > 1.2
        )


def test_intervals_of_few_samples_are_those_of_student():
    """Quantiles from a table."""
    for freedom, quantile in (
        (1, 12.706),
        (2, 4.303),
        (3, 3.182),
        (4, 2.776),
        (11, 2.201),
        (49, 2.010),
    ):
        assert student_t(freedom) == pytest.approx(quantile, rel=0.01)
    assert mean_cell([1.0, 2.0, 3.0, 4.0], "+.2f") == "+2.50 ± 2.04"


# ---- presets, and the models that they name ----


@pytest.mark.parametrize("name", CONFIGS)
def test_a_presets_random_tokens_stand_for_nothing_but_text(name):
    """Of all its vocabulary, in more tokens than that has; and its prompts are prefilled, by a
    small model."""
    config, hosts = CONFIGS[name], HostGroup.single("cpu")
    vocab = config.get_text_config().vocab_size
    is_video_model = hasattr(config, "vision_config")
    special = (
        {1000, 1001, 1002, 1003} if is_video_model else {config.bos_token_id, config.eos_token_id}
    )
    drawn = text_prompt(config, 2 * vocab, 9).batch["input_ids"]
    assert not special & set(drawn.unique().tolist()) and 0.9 * vocab < drawn.max() < vocab
    prompts = [text_prompt(config, 60, 9)]
    if is_video_model:
        prompts.append(video_prompt(config, 4, 56, 56, 9))
    like = "qwen2.5-vl-narrow" if is_video_model else "llama-small"
    small = {"vocab_size": vocab}
    small |= {"num_hidden_layers": 1, "hidden_size": 128}
    model = build_model(config_like(like, small, {"depth": 1}), torch.float32, "cpu")
    parts = inspect_model(model)
    for prompt in prompts:
        inputs = ModelInputs.from_processor(
            parts, prompt.batch, hosts, query_start=prompt.query_start
        )
        state = apbv.prefill(parts, inputs, hosts=hosts, config=PrefillConfig(method="full"))
        assert (
            state.logits.isfinite().all()
            and len(Decoder(parts, state.kv, state.next_position).advance([5])) == 1
        )


def test_presets_cover_the_papers_sweeps():
    options = throughput.parse_arguments(["--preset", "table5"])
    workloads, cases = throughput.plan(options, HostGroup.single("cpu"))
    assert len(workloads) == 6 and [case.hosts for case in cases] == [
        1,
        *[n for n in (2, 4, 6, 8) for _ in range(5)],
    ]
    workloads, cases = throughput.plan(
        throughput.parse_arguments(["--preset", "table4"]), HostGroup.single("cpu")
    )
    assert len(workloads) == 6 and [case.hosts for case in cases] == [1, *[8] * 8]
    off = {
        case.label: "".join(
            letter
            for letter, switch in zip("OFZV", throughput.SWITCHES, strict=True)
            if not getattr(case.config, switch)
        )
        for case in cases
    }
    assert off.pop("APB-V") == off.pop("full") == ""
    assert all(label.replace("-", "") == letters for label, letters in off.items())
    assert {"O", "F", "Z", "V", "OF", "OFZ", "OFZV"} == set(off.values())
    for name in accuracy.PRESETS:
        assert len(ways_of(accuracy.PRESETS[name], 1024)) > 1, name
    for name in speculative.PRESETS:
        configs = speculative.configs_of(name, 0.3)
        assert len(configs) > 1, name
        hosts = SimpleNamespace(size=2, tensor_parallel_size=1)
        for config in configs.values():
            require_consistent(config, PrefillConfig(), hosts, has_captioner=True)
    assert speculative.configs_of("hippo1", 0.3)["HIPPO"].keep_ratio == 0.3
    config = speculative.configs_of("std1", 0.3)["STD"]
    assert (config.keep_tokens, config.num_draft_tokens) == (1024, 9)  # Section 4 of the paper
    # TABED's text-only context has line breaks (I.2); ParallelVLM's OnSD leaves the visual tokens
    # out instead.
    for name in ("tabed1", "tabed2"):
        config = speculative.configs_of(name, 0.3)["T"]
        assert (config.strategy, config.tabed) == ("tabed", TabedConfig(ensemble="T"))
    assert speculative.configs_of("parallelvlm1", 0.3)["OnSD"].strategy == "text_only"


def test_prompts_of_ones_own_are_read_beside_their_file(tmp_path):
    path = BENCHMARKS / "support" / "prompts.jsonl"
    texts = [
        given["context"]
        for _, given in speculative.questions(
            speculative.parse_arguments(["--prompts", str(path)]), None
        )
    ]
    assert {len(text) for text in texts} == {2000, 8000}
    path = tmp_path / "mine.jsonl"
    path.write_text('{"task": "watch", "prompt": "why", "video": "clips/a.mp4"}\n')
    with path.open("a") as file:
        file.write('{"task": "look", "prompt": "what", "image": "a.png"}\n')
        file.write('{"task": "look", "prompt": "which", "image": ["a.png", "images/b.png"]}\n')
    first = tmp_path / "a.png"
    second = tmp_path / "images" / "b.png"
    options = speculative.parse_arguments(["--prompts", str(path)])
    assert list(speculative.questions(options, None)) == [
        ("watch", {"prompt": "why", "video": tmp_path / "clips" / "a.mp4"}),
        ("look", {"prompt": "what", "images": [first]}),
        ("look", {"prompt": "which", "images": [first, second]}),
    ]


@pytest.mark.thorough
def test_sigterm_ends_the_processes_that_a_benchmark_has_started(tmp_path):
    """Else they would go on for minutes. Each says which it is as soon as it runs."""
    code = f"""
import os, pathlib, sys, time
from support.videos import worker

def wait(rank):
    pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch()
    time.sleep({HANGING})

if __name__ == "__main__":
    worker.in_processes_of_their_own(2, wait)
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS)}
    with subprocess.Popen([sys.executable, script], env=environment) as process:
        wait_for(lambda: len([path for path in tmp_path.iterdir() if path.name.isdigit()]) == 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANGING) == 128 + signal.SIGTERM
    children = [path.name for path in tmp_path.iterdir() if path.name.isdigit()]
    wait_for(lambda: not any(Path("/proc", child).exists() for child in children))


# ---- clips ----


def test_two_benchmarks_may_write_the_same_clip_at_the_same_time(tmp_path, monkeypatch):
    both_have_written = threading.Barrier(2, timeout=HANGING)
    write_mp4 = clips.write_mp4

    def write_with_the_other(frames, path):
        write_mp4(frames, path)
        both_have_written.wait()

    monkeypatch.setattr(clips, "write_mp4", write_with_the_other)
    exam = Exam(2, 16, tmp_path)
    with ThreadPoolExecutor(2) as benchmarks:
        first, second = benchmarks.map(exam.file, [0, 0])
    assert first == second and probe(first).num_frames == 16 * clips.FRAMES_PER_SHOT
    assert [*tmp_path.iterdir()] == [first]


# ---- what is kept in place of a reducer's choice ----


def test_as_many_other_tokens_are_kept(tmp_path):
    exam = Exam(2, 16, tmp_path)
    engine = load_demo()
    hosts = HostGroup.single("cpu")
    candidate, reduce = (
        Candidate(engine.model, engine.processor, hosts),
        ReduceConfig(method="dycoke", ratio=0.3),
    )
    shots = exam.clip(0).shots
    config = PrefillConfig(method="full", reduce=reduce)
    shown = torch.stack([torch.from_numpy(clips.needle_tokens(shot, 2)) for shot in shots])
    assert [bool(of_shot.all()) for of_shot in shown] == [shot.needle is not None for shot in shots]
    scores = torch.rand(64, generator=torch.Generator().manual_seed(0)) + shown.flatten()
    inputs = candidate.read(exam.file(0), clips.DESCRIBE_QUESTION)

    def reduction():
        return candidate.answer(inputs, config, 1)[1].reduction

    own = reduction()
    with ranked_by(scores, reduce):
        drawn = reduction()
    assert (
        drawn.kept.tolist()
        == scores.topk(own.num_after).indices.sort().values.tolist()
        != own.kept.tolist()
    )
    assert torch.equal(reduction().kept, own.kept)


# ---- profiles ----


def event(
    kind: str, name: str, begin: float, length: float, thread: int = 1, number: int | None = None
) -> dict:
    """One of a trace by torch's profiler, whose launches and kernels have a number in common."""
    found = {
        "ph": "X",
        "cat": kind,
        "name": name,
        "pid": 1,
        "tid": thread,
        "ts": begin,
        "dur": length,
    }
    return found | {"args": {} if number is None else {"correlation": number}}


def test_a_kernel_belongs_to_the_stage_that_launched_it():
    """However late it ran, and whether an operator of torch or Triton launched it."""
    trace = [
        event("user_annotation", "apbv.encode", 0, 10),
        event("cpu_op", "aten::mm", 1, 5),
        event("cuda_runtime", "cudaLaunchKernel", 2, 1, number=1),
        event("user_annotation", "apbv.prefill", 10, 10),
        event("cuda_driver", "cuLaunchKernelEx", 11, 1, number=2),
        event("user_annotation", "apbv.prefill", 5, 10, thread=2),
        event("user_annotation", "the user's own", 6, 3, thread=2),
        event("cuda_runtime", "cudaLaunchKernel", 7, 1, thread=2, number=3),
        event("cuda_runtime", "cudaMemcpyAsync", 20, 1, number=4),
        event("kernel", "gemm", 3000, 4000, thread=7, number=1),
        event("kernel", "attention", 7000, 1000, thread=7, number=2),
        event("kernel", "attention", 8000, 2000, thread=7, number=3),
        event("gpu_memcpy", "Memcpy HtoD", 10000, 1000, thread=7, number=4),
        event("kernel", "small", 11000, 5, thread=7, number=2),
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
    ]
    rows = [line.strip("| ").split(" | ") for line in throughput.kernel_table(trace).splitlines()]
    assert rows[0] == ["stage", "kernel", "calls", "ms", "share"]
    assert rows[2:] == [
        ["encode", "`gemm`", "1", "4.00", "50.0%"],
        ["prefill", "`attention`", "2", "3.00", "37.5%"],
        ["prefill", "others", "1", "0.01", "0.1%"],
        ["outside", "`Memcpy HtoD`", "1", "1.00", "12.5%"],
    ]


def test_without_a_gpu_an_operator_has_the_time_that_is_its_own():
    trace = [
        event("user_annotation", "apbv.prefill", 0, 10_000),
        event("cpu_op", "aten::linear", 1000, 5000),
        event("cpu_op", "aten::mm", 2000, 3000),
        event("cpu_op", "aten::mm", 7000, 1000),
    ]
    rows = [
        line.strip("| ").split(" | ") for line in throughput.kernel_table(trace).splitlines()[2:]
    ]
    assert rows == [
        ["prefill", "`aten::mm`", "2", "4.00", "66.7%"],
        ["prefill", "`aten::linear`", "1", "2.00", "33.3%"],
    ]
