"""The packaged model answers about held-out clips, from H.264 file to text, prefilled by two hosts
with APB-V."""

import re

import pytest
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from transformers.video_utils import load_video

from apbv import Engine, HostGroup, PrefillConfig, demo
from apbv.testing import clips


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
    answers = {
        question: answer for task, question, answer in clips.questions(clip) if task == "retrieval"
    }
    asked = [demo.DEMO_QUESTION, *list(answers)[-2:]]
    assert pool.run(2, clip_job, asked)[0] == [answers[question] for question in asked]


@pytest.fixture(scope="module")
def processor():
    return AutoProcessor.from_pretrained(demo.model_path())


def inputs_of(processor, question: str, answer: str, frames, metadata):
    content = [{"type": "video"}, {"type": "text", "text": question}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    return processor(
        text=[text + answer], videos=[frames], video_metadata=[metadata], return_tensors="pt"
    )


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
    for name in (
        "tokenizer.json",
        "processor_config.json",
        "chat_template.jinja",
        "generation_config.json",
    ):
        assert (demo.draft_path() / name).read_bytes() == (demo.model_path() / name).read_bytes()
