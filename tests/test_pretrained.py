"""With real weights: a Qwen2 model, and a smaller one of its family, in folders that two variables
name."""

import random
from pathlib import Path

import pytest
import torch

from apbv import Engine, HostGroup, SamplingParams

from apbv_tests.configs import speculative_config
from apbv_tests.scripts import ROOT, figures_of, run_benchmark
from apbv_tests.weights import folder

pytestmark = pytest.mark.pretrained


def test_what_blocks_pass_on_makes_up_for_what_they_do_not_see(tmp_path):
    rows = ["full", "apbv", "apbv, no passing"]
    options = [
        "--model",
        folder("APBV_PRETRAINED_DRAFT"),
        "--tasks",
        "vt",
        "--tokens",
        1024,
        "--samples",
        1,
    ]
    records, _ = figures_of("ruler", tmp_path / "r.jsonl", *options, "--hosts", 4, "--rows", *rows)
    full, whole, alone = (record["kl"] for record in records)
    assert full == 0 and whole < 0.05 < alone


def test_a_decoder_reads_captions_that_a_tower_was_trained_for(tmp_path):
    made = run_benchmark(
        "make_reader", "--decoder", folder("APBV_PRETRAINED_DRAFT"), "--out", tmp_path / "reader"
    )
    assert made.returncode == 0, made.stderr
    assert float(made.stdout.partition("%")[0]) > 95
    rows = ["full", "star", "apbv", "dycoke, needles kept, 0.25", "dycoke, random, 0.25"]
    options = [
        "--preset",
        "captions",
        "--model",
        tmp_path / "reader",
        "--dtype",
        "bfloat16",
        "--shots",
        24,
    ]
    options += ["--hosts", 4, "--clips", 1, "--folder", tmp_path / "clips", "--labels", *rows]
    records, _ = figures_of("accuracy", tmp_path / "a.jsonl", *options)
    kl = {record["label"]: sum(record["kl"]) for record in records}
    assert kl["full"] == 0 and kl["apbv"] < kl["star"]
    assert kl["dycoke, needles kept, 0.25"] < kl["dycoke, random, 0.25"]


def test_a_draft_changes_no_token():
    engine = Engine.from_pretrained(
        folder("APBV_PRETRAINED"),
        hosts=HostGroup.single("cpu"),
        dtype="float32",
        speculate=speculative_config(
            strategy="vanilla", draft_model=folder("APBV_PRETRAINED_DRAFT"), keep_losing_draft=True
        ),
    )
    prompt = "Repeat the second sentence of the text, word for word."
    context = Path(ROOT, "LICENSE").read_text()[:1500]
    drafted = engine.generate(prompt, context=context, max_new_tokens=24)
    assert drafted.stats["speculation"]["num_accepted"] > 12
    assert (
        engine.decode(engine.prefill(prompt, context=context), max_new_tokens=24).token_ids
        == drafted.token_ids
    )


def test_sampled_drafts_keep_the_targets_distribution_over_the_real_vocabulary():
    """Each token's cumulative probability, spread evenly over its own, is uniform."""
    speculate = speculative_config(
        strategy="vanilla",
        draft_model=folder("APBV_PRETRAINED_DRAFT"),
        num_draft_tokens=3,
        keep_losing_draft=True,
    )
    hosts = HostGroup.single("cpu")
    engine = Engine.from_pretrained(
        folder("APBV_PRETRAINED"), hosts=hosts, dtype="bfloat16", speculate=speculate
    )
    prompt = "Write one sentence about the sea."
    count = 40
    bins = [0] * 10
    sampling = [
        SamplingParams(max_new_tokens=6, temperature=1.0, seed=i, ignore_eos=True)
        for i in range(count)
    ]
    asked = [{"prompt": prompt, "sampling": each} for each in sampling]
    found = dict(engine.generate_all(asked, max_together=16))
    ids = engine.prefill(prompt).inputs.input_ids
    spread = random.Random(0)
    for answer in found.values():
        whole = torch.cat([ids, torch.tensor([answer.token_ids])], dim=1)
        with torch.no_grad():
            p = engine.model(input_ids=whole).logits[0, ids.shape[1] :].double().softmax(dim=-1)
        for row, token in zip(p, answer.token_ids[1:], strict=False):
            below = float(row[:token].sum() + spread.random() * row[token])
            bins[min(9, int(10 * below))] += 1
    assert sum(answer.stats["speculation"]["num_accepted"] for answer in found.values()) > count / 2
    # One of 1,000, for 9 degrees.
    assert sum((number - count / 2) ** 2 / (count / 2) for number in bins) < 27.9
