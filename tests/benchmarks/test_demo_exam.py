"""The packaged model in the benchmarks' hands: it takes their exam, and is scaled by them."""

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from apbv import HostGroup, PrefillConfig, demo
from apbv.testing import clips

from support.drafting import scale_model
from support.exams import Candidate, Exam, Way, sit


def load_target():
    path = demo.model_path()
    return AutoModelForImageTextToText.from_pretrained(path, dtype="float32").eval()


def score_job(hosts: HostGroup, exam: Exam, num_clips: int) -> list[dict]:
    processor = AutoProcessor.from_pretrained(demo.model_path())
    candidate = Candidate(load_target(), processor, hosts)
    counts = []
    for seed in range(num_clips):
        records = sit(candidate, exam, seed, {"apbv": Way(PrefillConfig())})
        counts.append(records[0]["right"])
    return counts


@pytest.mark.thorough
def test_held_out_clips_are_answered_right(pool, tmp_path):
    exam = Exam(grid=6, num_shots=16, folder=tmp_path, tasks=clips.TASKS, split="validation")
    found, others = pool.run(2, score_job, exam, 6)
    assert found == others
    for task in clips.TASKS:
        right = sum(counts[task][0] for counts in found)
        total = sum(counts[task][1] for counts in found)
        assert right >= 0.85 * total, (task, right, total)


def test_a_scaled_model_computes_the_same_with_more_layers():
    target = load_target()
    scaled = scale_model(target, 3)
    num_layers = target.config.text_config.num_hidden_layers
    assert scaled.config.text_config.num_hidden_layers == 3 * num_layers
    tokenizer = AutoProcessor.from_pretrained(demo.model_path()).tokenizer
    ids = tokenizer("name the letters in order", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(scaled(ids).logits, target(ids).logits)
