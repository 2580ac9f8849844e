"""The packaged model answers about held-out clips, from H.264 file to text, prefilled by two hosts with APB-V."""

import itertools
import json
import re
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import train_demo
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from transformers.video_utils import VideoMetadata, load_video

from apbv import Engine, HostGroup, PrefillConfig, demo

from support import clips
from support.demo_training import data, vision
from support.demo_training import trainer as training
from support.drafting import scale_model
from support.exams import Candidate, Exam, Way, sit


def load(path):
    return AutoModelForImageTextToText.from_pretrained(path, dtype="float32").eval()


@pytest.fixture(scope="module")
def target():
    return load(demo.model_path())


def clip_job(hosts: HostGroup, asked: list[str]) -> list[str]:
    config = PrefillConfig(passing_len=16, anchor_len=32)
    engine = Engine.from_pretrained("demo", hosts=hosts, prefill=config, dtype="float32")
    request = {"video": demo.video_path(), "num_frames": 128, "max_new_tokens": 8}
    return [engine.generate(question, **request).text.strip() for question in asked]


def test_the_packaged_clip_is_answered_right_with_real_compression(pool):
    """Blocks of about 50 tokens that pass on 16 each, per layer and KV head."""
    clip = clips.make_clip(*clips.DEMO_CLIP)
    answers = {question: answer for task, question, answer in clips.questions(clip) if task == "retrieval"}
    asked = [demo.DEMO_QUESTION, *list(answers)[-2:]]
    assert pool.run(2, clip_job, asked)[0] == [answers[question] for question in asked]


@pytest.fixture(scope="module")
def processor():
    return AutoProcessor.from_pretrained(demo.model_path())


def score_job(hosts: HostGroup, exam: Exam, num_clips: int) -> list[dict]:
    processor = AutoProcessor.from_pretrained(demo.model_path())
    candidate = Candidate(load(demo.model_path()), processor, hosts)
    return [sit(candidate, exam, seed, {"apbv": Way(PrefillConfig())})[0]["right"] for seed in range(num_clips)]


@pytest.mark.thorough
def test_held_out_clips_are_answered_right(pool, tmp_path):
    exam = Exam(grid=6, num_shots=16, folder=tmp_path, tasks=clips.TASKS, split="validation")
    found, others = pool.run(2, score_job, exam, 6)
    assert found == others
    for task in clips.TASKS:
        right, total = (sum(numbers) for numbers in zip(*(counts[task] for counts in found), strict=True))
        assert right >= 0.85 * total, (task, right, total)


def inputs_of(processor, question: str, answer: str, frames, metadata):
    content = [{"type": "video"}, {"type": "text", "text": question}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    return processor(text=[text + answer], videos=[frames], video_metadata=[metadata], return_tensors="pt")


def test_the_packaged_clip_is_answered_right_with_plain_transformers(target, processor):
    clip = clips.make_clip(*clips.DEMO_CLIP)
    frames, metadata = load_video(str(demo.video_path()), backend="pyav")
    answers = {question: answer for _, question, answer in clips.questions(clip)}
    for question in demo.EXAMPLE_QUESTIONS[:2]:
        inputs = inputs_of(processor, question, "", frames, metadata)
        output = target.generate(**inputs, max_new_tokens=40)[:, inputs["input_ids"].shape[1] :]
        assert processor.batch_decode(output, skip_special_tokens=True) == [answers[question]]


def test_the_checkpoints_are_genuine_and_small_and_list_no_foreign_path(target):
    draft = load(demo.draft_path())
    assert type(target) is type(draft) is Qwen2_5_VLForConditionalGeneration
    assert 3_000_000 <= target.num_parameters() <= 8_000_000 and draft.num_parameters() <= 1_000_000
    files = [*demo.model_path().iterdir(), *demo.draft_path().iterdir(), demo.video_path()]
    assert sum(file.stat().st_size for file in files) < 20_000_000
    for file in demo.model_path().glob("*.json"):
        assert not re.search(r'"(/|[A-Z]:\\\\)\w+/', file.read_text()), file
    # The draft reads and writes as the target does.
    for name in ("tokenizer.json", "processor_config.json", "chat_template.jinja", "generation_config.json"):
        assert (demo.draft_path() / name).read_bytes() == (demo.model_path() / name).read_bytes()


def test_a_scaled_model_computes_the_same_with_more_layers(target, processor):
    scaled = scale_model(target, 3)
    assert scaled.config.text_config.num_hidden_layers == 3 * target.config.text_config.num_hidden_layers
    ids = processor.tokenizer("name the letters in order", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(scaled(ids).logits, target(ids).logits)


@pytest.fixture(scope="module")
def shot_pool():
    """As few shots as a pool may hold, which are not encoded: that takes longest."""
    with mock.patch.multiple(clips, write_mp4=lambda frames, file: np.save(file, frames), read_mp4=np.load):
        return data.ShotPool(seed=9, size=1024, grid=2)


def test_training_sequences_equal_what_the_processor_makes(target, processor):
    """A packed training row holds, per question, the tokens and positions that inference would see."""
    maker, grid = data.BatchMaker({}, seed=7), 6
    clip = clips.make_clip(0, 10, "train", grid)
    frames = clips.render(clip)
    pixels = processor.video_processor(videos=[frames], return_tensors="pt")
    patches = maker.normalise(data.patchify(frames, grid))
    torch.testing.assert_close(patches.flatten(0, 1), pixels["pixel_values_videos"])
    with torch.no_grad():
        ours = vision.encode_shots(target.model.visual, patches).flatten(0, 1)
        genuine = target.model.visual(pixels["pixel_values_videos"], grid_thw=pixels["video_grid_thw"])
    torch.testing.assert_close(ours, genuine.pooler_output)

    asked = clips.questions(clip)
    row = maker.row(clip, torch.arange(10) * data.STRIDE, None, asked)
    metadata = VideoMetadata(total_num_frames=20, fps=float(clips.FPS), frames_indices=list(range(20)))
    before = len(row["ids"]) - len(row["labels"])
    for number, (_, question, answer) in enumerate(asked, start=1):
        inputs = inputs_of(processor, question, answer, frames, metadata)
        inputs.pop("pixel_values_videos")
        chosen = torch.cat([torch.ones(before, dtype=torch.bool), row["segments"] == number])
        torch.testing.assert_close(row["ids"][chosen], inputs["input_ids"][0])
        positions, _ = target.model.get_rope_index(**inputs)
        torch.testing.assert_close(row["positions"][:, chosen], positions[:, 0])


def test_questions_of_a_drawn_batch_do_not_see_each_other(shot_pool):
    """Other words in the first question change its own logits, and no other question's."""
    maker = data.BatchMaker({2: shot_pool}, seed=9)
    model = load(demo.model_path())
    model.set_attn_implementation(vision.ATTENTION)
    batch = maker.draw(num_clips=2, num_shots=12, grid=2)
    chosen = (batch.labels != -100).flatten().nonzero()[:, 0]
    tasks = batch.tasks.flatten()[chosen]
    counting, retrieval = (clips.TASKS.index(task) for task in ("counting", "retrieval"))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        visual = vision.encode_shots(model.model.visual, maker.pixels(2, batch.places))
        before = vision.answer_logits(model, batch, visual, chosen)
        first = batch.input_ids.shape[1] - batch.labels.shape[1]
        batch.input_ids[:, first + 1 : first + 6] = maker.tokenizer(" end").input_ids[0]
        after = vision.answer_logits(model, batch, visual, chosen)
    assert torch.equal(before[tasks == counting], after[tasks == counting])
    assert not torch.equal(before[tasks == retrieval], after[tasks == retrieval])


@pytest.mark.thorough
def test_a_short_training_learns_and_saves(tmp_path, monkeypatch, shot_pool):
    """A few steps of the real thing: the loss falls."""
    monkeypatch.setattr(train_demo, "ShotPool", lambda *_: shot_pool)
    monkeypatch.setattr(train_demo, "POOL_SIZES", {2: 1024})
    # Every step takes half a second by this clock: as many steps on every machine.
    clock = SimpleNamespace(monotonic=itertools.count(step=0.5).__next__)
    small = {"GRID_SHARES": {2: 1.0}, "WARMUP_STEPS": 5, "LOG_SECONDS": 1, "time": clock}
    small |= dict.fromkeys(("VISION_TOKENS_PER_STEP", "VISUAL_TOKENS_PER_STEP"), 384)
    for name, value in small.items():
        monkeypatch.setattr(training, name, value)
    command = ["target", "--out", str(tmp_path), "--threads", "1"]
    assert train_demo.main([*command, "--minutes", "0.2"]) == 0
    history = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert history[-1]["step"] > 20 and history[-1]["dense"] < history[0]["dense"]
    assert (tmp_path / "curves.png").exists()
    assert load(tmp_path / "model").num_parameters() > 3_000_000
