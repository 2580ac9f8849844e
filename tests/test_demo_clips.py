"""The demo's clip generator, its questions, and the packaged checkpoint."""

import json
import re

import numpy as np
import pytest

from apbv import demo
from apbv.demo import clips


def test_clip_is_determined_by_seed_length_and_split():
    first, second = (clips.make_clip(3, 16, "test") for _ in range(2))
    assert first == second
    np.testing.assert_array_equal(clips.render(first), clips.render(second))
    assert first != clips.make_clip(4, 16, "test")


def test_splits_share_no_shot():
    seeds = {
        split: {shot.seed for number in range(50) for shot in clips.make_clip(number, 24, split).shots}
        for split in clips.SPLITS
    }
    assert all(len(shots) == 50 * 24 for shots in seeds.values())
    assert not seeds["train"] & seeds["validation"]
    assert not seeds["train"] & seeds["test"]
    assert not seeds["validation"] & seeds["test"]


@pytest.mark.parametrize("num_shots", [8, 32, 64])
def test_clip_keeps_its_rules(num_shots):
    for seed in range(20):
        clip = clips.make_clip(seed, num_shots, "validation")
        assert len(clip.shots) == num_shots
        lettered = clip.lettered
        assert clips.MIN_LETTERS <= len(lettered) <= clips.MAX_LETTERS
        assert len({shot.colour for shot in lettered}) == len(lettered)
        assert len({shot.letter for shot in lettered}) == len(lettered)


def test_rendered_border_has_the_named_colour():
    for seed in range(10):
        clip = clips.make_clip(seed, 12, "test")
        frames = clips.render(clip)
        assert frames.shape == (24, clips.FRAME_SIZE, clips.FRAME_SIZE, 3) and frames.dtype == np.uint8
        for index, shot in enumerate(clip.shots):
            edge = frames[2 * index : 2 * index + 2, :, :4].reshape(-1, 3).mean(0)
            nearest = min(clips.COLOURS, key=lambda name: np.abs(edge - clips.COLOURS[name]).sum())
            if shot.letter:
                assert nearest == shot.colour
            else:
                assert np.ptp(edge) < 30  # noise is nearly grey


def test_mp4_round_trip_keeps_frames(tmp_path):
    frames = clips.render(clips.make_clip(0, 16, "test"))
    clips.write_mp4(frames, tmp_path / "clip.mp4")
    decoded = clips.read_mp4(tmp_path / "clip.mp4")
    assert decoded.shape == frames.shape
    assert np.abs(decoded.astype(int) - frames).mean() < 8


def test_answers_follow_from_the_clip():
    for seed in range(20):
        clip = clips.make_clip(seed, 20, "test")
        by_task: dict[str, list[tuple[str, str]]] = {}
        for task, question, answer in clips.questions(clip):
            by_task.setdefault(task, []).append((question, answer))
        assert set(by_task) == {"retrieval", "ordering", "counting", "describe"}
        letters = {shot.colour: shot.letter for shot in clip.lettered}
        assert {question.split()[-1]: answer for question, answer in by_task["retrieval"]} == letters
        assert by_task["ordering"][0][1].split() == list(letters.values())
        assert by_task["counting"][0][1] == str(len(letters))
        *parts, end = by_task["describe"][0][1].split(", ")
        assert end == "end" and len(parts) == 20
        said = [tuple(part.split()) for part in parts if part != "grey noise"]
        assert said == list(letters.items())


def test_checkpoint_is_small_and_lists_no_foreign_path():
    folder = demo.model_path()
    assert sum(file.stat().st_size for file in folder.iterdir()) < 8_000_000
    assert demo.video_path().stat().st_size < 300_000
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen2_5_VLForConditionalGeneration"]
    for file in folder.glob("*.json"):
        assert not re.search(r'"(/|[A-Z]:\\\\)\w+/', file.read_text()), file


@pytest.fixture(scope="module")
def model_and_processor():
    from apbv.torchvision_guard import ensure_torchvision_imports

    ensure_torchvision_imports()
    transformers = pytest.importorskip("transformers")
    processor = transformers.AutoProcessor.from_pretrained(demo.model_path())
    model = transformers.AutoModelForImageTextToText.from_pretrained(demo.model_path(), dtype="float32").eval()
    return model, processor


def test_checkpoint_is_the_genuine_class(model_and_processor):
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLForConditionalGeneration

    model, _ = model_and_processor
    assert type(model) is Qwen2_5_VLForConditionalGeneration
    assert 2_000_000 < model.num_parameters() < 3_000_000


def test_any_text_survives_the_tokenizer(model_and_processor):
    tokenizer = model_and_processor[1].tokenizer
    for text in ("which letter has the border: red", "Où est 漢字?\n\tline two  ", "end, 42 😀"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_model_answers_about_the_packaged_clip(model_and_processor):
    from apbv.demo.evaluate import ask

    clip = clips.make_clip(*demo.DEMO_CLIP)
    assert clips.read_mp4(demo.video_path()).shape[0] == 2 * len(clip.shots)
    asked = clips.questions(clip)
    assert demo.DEMO_QUESTION in [question for _, question, _ in asked]
    for _, question, answer in asked:
        assert ask(*model_and_processor, [demo.video_path()], [question]) == [answer]


def test_held_out_files_are_answered(model_and_processor):
    from apbv.demo.evaluate import evaluate

    results = evaluate(*model_and_processor, num_clips=6, num_shots=24, split="validation")
    for task in ("retrieval", "ordering", "counting"):
        right, total = results[task]
        assert right >= 0.75 * total, (task, right, total)
    right, total = results["describe, shots"]
    assert right >= 0.95 * total


def test_training_sequences_equal_what_the_processor_makes(model_and_processor):
    """A packed training row holds, per question, the tokens and positions that inference would see."""
    import torch
    from transformers.video_utils import VideoMetadata

    from apbv.demo import train

    model, processor = model_and_processor
    pool = train.ShotPool(seed=7, size=512)
    maker = train.BatchMaker(pool, seed=7)
    clip = clips.make_clip(0, 10, "train")
    frames = clips.render(clip)
    pixels = processor.video_processor(videos=[frames], return_tensors="pt")
    patches = maker.normalise(train.patchify(frames))
    torch.testing.assert_close(patches.flatten(0, 1), pixels["pixel_values_videos"])
    with torch.no_grad():
        ours = train.encode_shots(model.model.visual, patches).flatten(0, 1)
        genuine = model.model.visual(pixels["pixel_values_videos"], grid_thw=pixels["video_grid_thw"])
    torch.testing.assert_close(ours, genuine.pooler_output)

    maker.pool.renew()
    assert maker.draw(num_clips=4, num_shots=16).mask.any()
    layout = [(shot.colour, shot.letter) if shot.letter else None for shot in clip.shots]
    row = maker.row(layout, train.USUAL_STRIDE, None, True)
    metadata = VideoMetadata(total_num_frames=20, fps=float(clips.FPS), frames_indices=list(range(20)))
    for number, (_, question, answer) in enumerate(clips.questions(clip), start=1):
        content = [{"type": "video"}, {"type": "text", "text": question}]
        text = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        inputs = processor(text=[text + answer], videos=[frames], video_metadata=[metadata], return_tensors="pt")
        inputs.pop("pixel_values_videos")
        chosen = (row.segments == 0) | (row.segments == number)
        torch.testing.assert_close(row.ids[chosen], inputs["input_ids"][0])
        positions, _ = model.model.get_rope_index(**inputs)
        torch.testing.assert_close(row.positions[:, chosen], positions[:, 0])
