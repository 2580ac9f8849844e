"""A video model that is made of a text model, and what is asked about its clips."""

import make_reader
import numpy as np
import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from apbv import Engine

from apbv_tests.families import build_model, build_tokenizer
from apbv_tests.scripts import figures_of, run_benchmark
from support import captions
from support.exams import Exam
from support.ruler.words import NOUNS


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """A small Qwen2 whose tokenizer has the words of captions."""
    folder = tmp_path_factory.mktemp("decoder")
    tokenizer = build_tokenizer("qwen2")
    texts = [" =", *(f" {word}" for word in NOUNS if len(word) <= captions.LONGEST_WORD)]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in texts])
    model = build_model("qwen2")
    model.resize_token_embeddings(len(tokenizer))
    for saved in (model, tokenizer):
        saved.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def reader(decoder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reader")
    result = run_benchmark(
        "make_reader", "--decoder", decoder, "--out", folder, "--steps", 2, "--clips", 1
    )
    assert result.returncode == 0, result.stderr
    assert "of held-out texts are read right" in result.stdout
    return folder


def test_the_decoder_stays_as_it_is_and_the_tower_learns(decoder, reader):
    given = AutoModelForCausalLM.from_pretrained(decoder).state_dict()
    model = AutoModelForImageTextToText.from_pretrained(reader)
    made = {
        name.removeprefix("model.language_model."): tensor
        for name, tensor in model.state_dict().items()
    }
    assert all(
        torch.equal(made[name.removeprefix("model.")], tensor) for name, tensor in given.items()
    )
    before = make_reader.build_model(
        AutoModelForCausalLM.from_pretrained(decoder), Engine.from_pretrained(reader).tokenizer
    )
    for part in ("vision_tower", "multi_modal_projector"):
        learned = dict(getattr(model.model, part).named_parameters())
        assert any(
            not torch.equal(learned[n], p)
            for n, p in getattr(before.model, part).named_parameters()
        )


@torch.no_grad()
def test_a_cell_is_the_visual_token_that_its_text_is_expected_at(reader, tmp_path):
    engine = Engine.from_pretrained(reader)
    exam = captions.exam_like(Exam(captions.GRID, 12, tmp_path), engine.tokenizer)
    frames = exam.render(3)
    clip = exam.clip(3)
    texts = exam.texts(3)
    plain = captions.render_scenes(clip.scenes)
    pixels = [
        engine.processor.video_processor([each], return_tensors="pt") for each in (frames, plain)
    ]
    model = engine.model.model
    # Patch embeddings are not mixed yet, so that only the tokens of changed cells differ.
    rows = [
        model.vision_tower.embeddings.patch_embedding(each.pixel_values_videos[0])
        .flatten(2)
        .transpose(1, 2)
        for each in pixels
    ]
    apart = (model.apply_pooling(rows[0]) - model.apply_pooling(rows[1])).norm(dim=-1).flatten()
    row = [clip.captions[number].row if number in clip.captions else -1 for number in range(12)]
    in_band = np.repeat(row, captions.GRID**2) == np.tile(
        np.repeat(range(captions.GRID), captions.GRID), 12
    )
    assert (apart.numpy() > 1e-3).tolist() == in_band.tolist()
    assert not (texts[:-1][~in_band] != "").any() and texts[-1] == ""
    assert [text for text in texts if text] == [
        t for n in sorted(clip.captions) for t in clip.captions[n].cells
    ]
    for task, _, answer in exam.questions(3):
        asked = texts[exam.needle_tokens(3, task)]
        assert set(answer.replace(",", "").split() if task == "tracking" else answer) <= set(asked)


@pytest.mark.thorough
def test_captions_by_every_way_to_choose(reader, tmp_path):
    options = ["--preset", "captions", "--model", reader, "--clips", 1, "--shots", 12, "--hosts", 2]
    labels = ["full", "dycoke, 0.25", "dycoke, needles kept, 0.5", "apbv", "w/o P"]
    path = tmp_path / "a.jsonl"
    options = [*options, "--folder", tmp_path / "clips"]
    records, _ = figures_of("accuracy", path, *options, "--labels", *labels)
    by_label = {record["label"]: record for record in records}
    assert sorted(by_label) == sorted(labels)
    full, drawn, kept, whole, alone = (by_label[label] for label in labels)
    assert full["kl"] == [0, 0] and full["agrees"] == [1, 1] and full["needles_kept"] == [1, 1]
    assert kept["needles_kept"] == [1, 1] != drawn["needles_kept"] and min(drawn["kl"]) > 0
    assert 0 < sum(whole["kl"]) != sum(alone["kl"]) > 0 and whole["hosts"] == alone["hosts"] == 2
    # A run that goes on compares with the same distributions.
    again = tmp_path / "b.jsonl"
    more, _ = figures_of("accuracy", again, *options, "--labels", "apbv")
    assert [record["label"] for record in more] == ["apbv"] and more[0]["kl"] == pytest.approx(
        whole["kl"]
    )


def test_a_tokenizer_without_the_words_is_refused():
    with pytest.raises(ValueError, match="short English words as one token"):
        captions.words_of(build_tokenizer("qwen2"))
