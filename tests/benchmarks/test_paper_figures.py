"""The scripts behind the papers' figures, at toy size, and what they compute from what was seen."""

import pytest
import torch
from draft_views import seen
from ensemble_weights import hits
from passed_tokens import intensities
from speculation_memory import without_draft

from apbv import Engine, HostGroup, PrefillConfig

from scripts import figures_of, run_benchmark, valid_records
from support.exams.candidate import Candidate
from support.exams.exam import Exam
from support.on_hosts import run_on


def run(name: str, path, *options) -> tuple[list[dict], str]:
    return figures_of(name, path, "--clips", 1, "--folder", path.parent / "clips", *options)


def test_views_of_a_draft(tmp_path):
    path, plot = tmp_path / "views.jsonl", tmp_path / "views.png"
    options = ["--shots", 16, "--keep", "full", "attention", "uniform_frames", "--keep-ratio", 0.25]
    records, output = run("draft_views", path, *options, "--plot", plot)
    assert [record["keep"] for record in records] == ["full", "attention", "uniform_frames"]
    full, attended, frames = records
    assert (full["kept"], attended["kept"], frames["kept"]) == (64, 16, 16)
    for record in records:
        assert sum(record["histogram"]) == pytest.approx(1)
        assert record["right"]["retrieval"][1] == 2 and record["right"]["description"][1] > 16
    assert full["of_needles"] == 1 and attended["of_needles"] < 1
    # The whole clip tells the draft more about what the target says of it than four of its frames do.
    assert full["right"]["description"][0] > frames["right"]["description"][0]
    assert len(output.strip().splitlines()) == 2 + 3 and plot.read_bytes().startswith(b"\x89PNG")
    again = run_benchmark("draft_views", "--table", path)
    assert again.stdout == output


def test_where_kept_tokens_lie():
    views = torch.zeros(50, 6, 6)
    views[0, 0, 0] = views[1, 5, 5] = views[49, 2, 2] = views[20, 3, 3] = 1
    found = seen(views, needle_shots=[20, 21])
    assert found["kept"] == 4 and found["at_ends"] == pytest.approx(3 / 4)
    assert found["histogram"][0] == pytest.approx(0.5) and found["histogram"][10] == pytest.approx(0.25)
    # Of six rows the centres of the first and the last lie within a tenth of an edge.
    assert found["at_border"] == pytest.approx(0.5) and found["border_share"] == pytest.approx(1 / 3)
    assert found["of_needles"] == pytest.approx(1 / 72)
    assert seen(torch.ones(50, 2, 2), [0])["at_border"] is None


def test_passed_tokens_are_drawn(tmp_path):
    path, picture = tmp_path / "passed.jsonl", tmp_path / "passed.png"
    options = ["--shots", 48, "--hosts", 2, "--passing-len", 3, "--picture", picture]
    (record,), output = run("passed_tokens", path, *options)
    assert record["hosts"] == 2 and record["passing_len"] == 3
    # The question's attention finds letters among noise.
    assert record["of_asked"] > 2 * record["of_rest"]
    assert len(output.strip().splitlines()) == 3 and picture.read_bytes().startswith(b"\x89PNG")


def test_intensity_is_the_share_of_layers_and_heads(tmp_path):
    """Blocks that pass all of themselves on do so in every layer and head; what the anchor holds is not passed."""
    engine = Engine.from_pretrained("demo", hosts=HostGroup.single(), dtype="float32")
    clips = Exam(2, 16, 1)

    def look(length: int):
        def job(hosts, model):
            candidate = Candidate(model, engine.processor, hosts)
            config = PrefillConfig(anchor_len=12, passing_len=length)
            return intensities(candidate, clips.file(0, tmp_path), "how many letters are shown", config)

        return run_on(2, engine.hosts, engine.model, job)

    everything, few = look(1000), look(2)
    in_anchor = everything.isnan()
    assert torch.equal(in_anchor, few.isnan()) and 0 < in_anchor.sum() < 12  # with the tokens before the video
    assert (everything[~in_anchor] == 1).all()
    assert few[~in_anchor].sum() == pytest.approx(
        4 * 2
    )  # two pairs of each of four blocks, in every layer and head


def test_weights_are_traced(tmp_path):
    path, plot = tmp_path / "weights.jsonl", tmp_path / "weights.png"
    options = ["--shots", 12, "--max-new-tokens", 20, "--plot", plot]
    (record,), output = run("ensemble_weights", path, *options)
    # The first token is the prefill's; of the others all are learnt but those of the last round.
    assert 20 - 1 - 6 <= len(record["weights"]) == len(record["accepted"]) < 20
    assert record["weights"][0] == 0.5 and all(len(row) == 11 for row in record["accepted"])
    assert len(output.strip().splitlines()) == 3 and plot.read_bytes().startswith(b"\x89PNG")


def test_hits_leave_out_what_no_weight_decides():
    only_m = [True] * 3 + [False] * 8  # w(T) of 0, 0.1 or 0.2
    record = {"weights": [0.5, 0.9, 0.2, 1.0], "accepted": [only_m, only_m, [True] * 11, [False] * 11]}
    assert hits(record) == {"MT*": [1, 2], "M": [2, 2], "T": [0, 2], "MT": [0, 2]}


def test_memory_of_every_way(tmp_path):
    path = tmp_path / "memory.jsonl"
    asked = ["--model", "demo", "--prompt", "describe the clip shot by shot", "--max-new-tokens", 8]
    result = run_benchmark("speculation_memory", "--json", path, "--", *asked, "--draft-model=demo")
    assert result.returncode == 0, result.stderr
    records = valid_records("speculation_memory", path)
    assert [record["label"] for record in records] == ["Autoregressive", "SD", "ParallelVLM"]
    alone, in_turn, beside = records
    assert all(record["token_ids"] == alone["token_ids"] and record["num_new_tokens"] == 8 for record in records)
    assert all(record["peak_memory_bytes"] > 2**27 for record in records)
    assert alone["draft_prefill_ms"] is None and in_turn["draft_prefill_ms"] > 0 and beside["overlaps"]
    assert beside["draft_decode_ms"] > 0 and "All answers are the same: True" in result.stdout


def test_options_of_drafts_are_left_out():
    given = ["--model", "a", "--draft-model", "b", "--frames", "8", "--draft-timeout=3"]
    assert without_draft(given) == ["--model", "a", "--frames", "8"]
