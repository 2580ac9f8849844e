"""Prompts with sound against Qwen2.5-Omni's own processor and forward pass on the whole of them."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from apbv import Engine, HostGroup, PrefillConfig, ReuseConfig, load
from apbv.input.media.audio import AudioError
from apbv.model.parts import inspect_model
from apbv.request.request import Question

from apbv_tests import audio_files, families
from apbv_tests.audio_files import RATE
from apbv_tests.families import OMNI
from apbv_tests.fresh_hosts import described
from apbv_tests.omni_prompts import ASKED, FPS, FRAMES, omni_batch
from apbv_tests.oracle import as_double, oracle_of, run_oracle
from apbv_tests.prompts import check_prefill, prefill_job
from apbv_tests.read_prompts import read_question
from apbv_tests.video_files import encode

UNCOMPRESSED = 10**6
ALONE = HostGroup.single("cpu")


def read(question: Question, most_positions: int = 10**5):
    """What a model makes of a question, which has positions for so many tokens."""
    model = families.build_model(OMNI)
    model.config.text_config.max_position_embeddings = most_positions
    return read_question(inspect_model(model), families.build_processor(OMNI), question, ALONE)[0]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Videos with a track of the model's own rate, which nothing resamples; and a sound."""
    folder = tmp_path_factory.mktemp("sound")

    def video(name: str, seconds: float, sound: Sequence[tuple[float, float]]) -> str:
        path = folder / name
        return audio_files.write(
            path, sound, "flac", RATE, video=(0, seconds), size=(56, 84), fps=FPS
        )

    return {
        "as long": video("a.mkv", 4, [(0, 4)]),
        "shorter": video("b.mkv", 4, [(0, 2.7)]),
        "longer": video("c.mkv", 3, [(0, 4.5)]),
        "sound": audio_files.write(folder / "d.flac", [(0, 2.3)], "flac", RATE),
        "long sound": audio_files.write(folder / "e.flac", [(0, 9.1)], "flac", RATE),
        "silent": audio_files.write(
            folder / "f.mkv", [], "flac", RATE, video=(0, 3), size=(56, 84), fps=FPS
        ),
    }


PROMPTS = {
    "shorter": {"videos": ["shorter"]},
    "longer": {"videos": ["longer"]},
    "not heard": {"videos": ["as long"], "heard": False},
    "sounds": {"sounds": ["long sound", "sound"]},
    "both": {"videos": ["shorter"], "sounds": ["sound"]},
}


def asked_like(files: dict, videos=(), sounds=(), heard: bool = True) -> Question:
    return Question(
        ASKED,
        video=[files[name] for name in videos] or None,
        audio=[files[name] for name in sounds] or None,
        num_frames=FRAMES,
        audio_in_video=None if heard else False,
    )


def batch_like(files: dict, videos=(), sounds=(), heard: bool = True) -> dict:
    return omni_batch([files[name] for name in videos], [files[name] for name in sounds], heard)


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_is_the_one_of_the_models_own_processor(files, name):
    """Tokens, spectrograms, and the positions by which sound and frames lie at their times."""
    parts = inspect_model(families.build_model(OMNI))
    inputs = read(asked_like(files, **PROMPTS[name]))
    batch = batch_like(files, **PROMPTS[name])
    assert inputs.input_ids.tolist() == batch["input_ids"].tolist()
    masks = batch.get("feature_attention_mask", torch.zeros(0, 0))
    expected, _ = parts.model.model.get_rope_index(
        batch["input_ids"],
        video_grid_thw=batch.get("video_grid_thw"),
        attention_mask=batch["attention_mask"],
        use_audio_in_video="videos" in PROMPTS[name] and PROMPTS[name].get("heard", True),
        audio_seqlens=masks.sum(-1),
        second_per_grids=batch.get("video_second_per_grid"),
    )
    assert inputs.position_ids.tolist() == expected.tolist()
    assert inputs.num_audio_tokens == int((batch["input_ids"] == parts.audio_token_id).sum())
    heard = [] if inputs.audio is None else inputs.audio.spectrograms
    assert len(heard) == len(masks)
    for ours, theirs, mask in zip(heard, batch.get("input_features", ()), masks, strict=True):
        torch.testing.assert_close(ours, theirs[:, mask.bool()], rtol=0, atol=1e-5)


def test_sound_is_context_where_prefill_is_approximate(pool, files):
    """Audio tokens are passed on and left out as visual ones are: against the dense mask."""
    settings = {"anchor_len": 24, "passing_len": 6}
    batch = as_double(batch_like(files, videos=["as long"]))
    results = pool.run(3, prefill_job, OMNI, batch, None, settings)
    start = results[0].start
    stop = results[0].query_start
    (sounds,) = torch.where(batch["input_ids"][0] == families.build_config(OMNI).audio_token_id)
    assert start < sounds[0] and sounds[-1] + 2 == stop, "what ends the sound is context, too"
    oracle = oracle_of(settings, 3, stop, start)
    model = families.build_model(OMNI, dtype=torch.float64)
    expected = run_oracle(model, batch | {"use_audio_in_video": True}, oracle)
    check_prefill(results, expected, zip(oracle.keys, oracle.values, strict=True), 1e-9)


# ---- answers ----


def answer_job(hosts: HostGroup, path: str, folder: str):
    """An answer, one from the saved KV, and one to a further question about what is known."""
    config = PrefillConfig(passing_len=UNCOMPRESSED, kv="sharded")
    model = families.build_model(OMNI, dtype=torch.float64)
    engine = Engine(
        model, families.build_processor(OMNI), hosts, config, reuse=ReuseConfig(mode="kv")
    )
    about = {"video": path, "num_frames": FRAMES}
    tokens = engine.generate(ASKED, max_new_tokens=STEPS, **about).token_ids
    state = engine.prefill("And before?", **about)
    assert state.reused == "kv"
    state.save(folder)
    loaded = load(folder, engine.model, hosts=hosts, kv=config.kv)
    return tokens, engine.decode(loaded, max_new_tokens=STEPS).token_ids


STEPS = 4


def test_answers_are_those_of_transformers(pool, files, tmp_path):
    """Also a further one about the same video, from KV that was stored, and saved."""
    batch = as_double(omni_batch([files["longer"]]))
    expected = []
    for question in (ASKED, "And before?"):
        model = families.build_model(OMNI, dtype=torch.float64)
        inputs = read(replace(asked_like(files, videos=["longer"]), prompt=question))
        assert inputs.next_position == int(inputs.position_ids.max()) + 1, (
            "where generate() goes on"
        )
        batch |= {
            "input_ids": inputs.input_ids,
            "attention_mask": torch.ones_like(inputs.input_ids),
        }
        generated = model.generate(
            **batch, use_audio_in_video=True, max_new_tokens=STEPS, do_sample=False
        )
        expected.append(generated[0, inputs.num_tokens :].tolist())
    for found in pool.run(2, answer_job, files["longer"], str(tmp_path / "kv")):
        assert list(found) == expected


def test_other_sound_of_the_same_length_is_heard_anew(files, tmp_path):
    """Stored KV belongs to its files, not to the tokens that stand for them."""
    other = audio_files.write(tmp_path / "other.flac", [(1, 3.3)], "flac", RATE)
    parts = families.build_model(OMNI), families.build_processor(OMNI)
    engine = Engine(*parts, ALONE, reuse=ReuseConfig(mode="kv"))
    states = [engine.prefill(ASKED, audio=path) for path in (files["sound"], other, files["sound"])]
    assert len({state.num_tokens for state in states}) == 1
    assert [state.reused for state in states] == [None, None, "kv"]
    assert torch.equal(states[0].logits.argmax(), states[2].logits.argmax())


# ---- what cannot be heard ----


def refused_job(hosts: HostGroup, questions: list[Question]) -> list[str]:
    engine = Engine(families.build_model(OMNI), families.build_processor(OMNI), hosts)
    refusals = []
    for question in questions:
        about = {name: getattr(question, name) for name in ("video", "audio", "audio_in_video")}
        refusals.append(described(partial(engine.generate, ASKED, num_frames=4, **about)))
    engine.generate("still there?", max_new_tokens=1)
    return refusals


def test_what_cannot_be_heard_is_one_error_on_every_host(pool, files, tmp_path):
    """And the hosts answer the next request."""
    broken = tmp_path / "broken.wav"
    mute = encode(tmp_path / "mute.mp4", n=10, size=(56, 84))
    broken.write_bytes(b"RIFF")
    reasons = {
        "AudioError: .*mute.mp4: has no audio track": Question(
            ASKED, video=mute, audio_in_video=True
        ),
        "AudioError: .*f.mkv: its audio track is empty": Question(
            ASKED, video=files["silent"], audio_in_video=True
        ),
        "AudioError: .*broken.wav: the audio cannot be decoded": Question(ASKED, audio=str(broken)),
        "PromptError: .*mute.mp4: .*audio_in_video": Question(
            ASKED, video=[files["as long"], mute]
        ),
    }
    for refusals in pool.run(2, refused_job, list(reasons.values())):
        for reason, refusal in zip(reasons, refusals, strict=True):
            assert re.search(reason, refusal), refusal
    for video in (mute, files["silent"]):
        heard = read(Question(ASKED, video=video))
        seen = read(Question(ASKED, video=video, audio_in_video=False))
        assert heard.audio is None and torch.equal(heard.input_ids, seen.input_ids)


def test_no_more_is_heard_than_the_model_has_positions_for(files):
    """What is too much together is not decoded: a small file can hold hours, and a prompt many of
    them."""
    sound = files["sound"]
    video = files["shorter"]
    long = [{"audio": [sound, sound]}, {"video": video, "audio": sound}, {"video": [video, video]}]
    for asked, most in (({"audio": sound}, 50), *((each, 110) for each in long)):  # of 0.04 s
        with pytest.raises(AudioError, match="more audio than the 2 seconds"):
            read(Question(ASKED, **asked), most_positions=most)
