"""At any rate, what the model is told of the frames' times are their times."""

import re

import numpy as np
import pytest

from apbv import HostGroup
from apbv.input.media.video import probe, sample_uniform
from apbv.model.parts import inspect_model
from apbv.request.request import Question

from apbv_tests import audio_files, families
from apbv_tests.odd_files import streams
from apbv_tests.read_prompts import read_question
from apbv_tests.video_files import encode

# A screen that is busy for a second, and then changes at times.
TIMES = [*range(0, 1000, 40), 1700, 3900, 4000, 9050, 9100, 19100, 24340]


@pytest.fixture(scope="module")
def recording(tmp_path_factory) -> str:
    """With sound, from the first frame on."""
    folder = tmp_path_factory.mktemp("idle")
    video = encode(folder / "v.mkv", n=len(TIMES), pts=TIMES, size=(56, 84), bframes=0)
    sound = audio_files.write(folder / "s.mkv", [(0, 24.4)], "flac", 16000)
    return streams(folder / "a.mkv", lambda *_: True, video, sound)


def read(family: str, path: str, **options):
    model = families.build_model(family)
    processor = families.build_processor(family)
    model.config.get_text_config().max_position_embeddings = 10**5
    question = Question("What happens?", video=path, num_frames=11, **options)
    return (
        model,
        processor,
        read_question(inspect_model(model), processor, question, HostGroup.single("cpu"))[0],
    )


def test_qwen3_vl_reads_the_times(recording):
    info = probe(recording)
    assert not info.has_constant_rate
    picked = sample_uniform(info, 11)
    _, processor, inputs = read("qwen3_vl", recording)
    text = processor.tokenizer.decode(inputs.input_ids[0])
    told = [float(number) for number in re.findall(r"<([\d.]+) seconds>", text)]
    of_frames = np.array([TIMES[index] / 1000 for index in [*picked, picked[-1]]])
    assert told == pytest.approx((of_frames[::2] + of_frames[1::2]) / 2, abs=0.0501)


@pytest.mark.parametrize(
    ("family", "is_heard"), [("qwen2_5_vl", False), (families.OMNI, False), (families.OMNI, True)]
)
def test_other_models_space_frames_evenly(recording, family, is_heard):
    """As transformers does; audio is a 25th of a second each, from the same start."""
    options = {"audio_in_video": is_heard} if family == families.OMNI else {}
    model, _, inputs = read(family, recording, **options)
    parts = inspect_model(model)
    ids = inputs.input_ids[0]
    positions = inputs.position_ids[0, 0]
    found = positions[ids == parts.video_token_id]
    steps = found.unique().diff()
    assert len(steps) == 5 and steps.max() - steps.min() <= 1
    if is_heard:
        sounds = positions[parts.is_audio(ids)]
        assert sounds.tolist() == list(range(int(found[0]), int(found[0]) + len(sounds)))
        assert len(sounds) == pytest.approx(24.4 * 25, abs=3)


def test_a_constant_rate_is_told_as_transformers_tells_it(tmp_path):
    """Dropping a frame or rounding to milliseconds does not make a rate variable."""
    for name in ("a.mkv", "a.mp4", "a.ts"):
        info = probe(encode(tmp_path / name, n=50))
        assert info.has_constant_rate and info.fps == pytest.approx(25)
    times = [33 * i + i // 3 for i in range(90)]
    times[71:] = [time + 33 for time in times[71:]]
    assert probe(encode(tmp_path / "b.mkv", n=90, pts=times)).has_constant_rate
    late = [40 * i for i in range(50)]
    late[26:] = [time + 400 for time in late[26:]]
    assert not probe(encode(tmp_path / "c.mkv", n=50, pts=late)).has_constant_rate
