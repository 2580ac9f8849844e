"""A part of a video, from one second to another, as its part of a message gives it."""

import math
import re

import numpy as np
import pytest
import torch
from transformers.video_utils import VideoMetadata

from apbv import Engine, HostGroup, ModelInputs, PrefillConfig, ReuseConfig
from apbv.errors import PromptError
from apbv.input.media.video import VideoError, VideoInfo, probe, sample_uniform
from apbv.input.prompts.prompt_reader import PromptReader
from apbv.model.parts import inspect_model
from apbv.request.request import Question
from apbv.stats import StageTimer

from apbv_tests import audio_files, families
from apbv_tests.omni_prompts import ASKED, plain_samples
from apbv_tests.prompts import by_processor
from apbv_tests.video_files import decode_all, encode

HOSTS = HostGroup.single("cpu")
QUESTION = "What happens?"
FAMILIES = [family for family in families.VIDEO_FAMILIES if not family.endswith("_moe")]
TIMES = [*range(0, 1000, 40), 1700, 3900, 4000, 9050, 9100, 19100, 24340]  # in ms


@pytest.fixture(scope="module")
def film(tmp_path_factory) -> str:
    """Four seconds, at 25 frames per second."""
    return str(encode(tmp_path_factory.mktemp("film") / "film.mp4", n=100, size=(56, 84)))


def chat(*videos: tuple[str, dict], question: str = QUESTION) -> list[dict]:
    content = [{"type": "video", "video": path, **options} for path, options in videos]
    return [{"role": "user", "content": [*content, {"type": "text", "text": question}]}]


def reader_of(family: str) -> PromptReader:
    model = families.build_model(family)
    model.config.get_text_config().max_position_embeddings = 10**5
    return PromptReader(inspect_model(model), families.build_processor(family), 8)


def sample(reader: PromptReader, messages: list[dict], **options):
    question = Question(messages=messages, **options)
    prompt = reader.render(question)
    return prompt, reader.sample([probe(path) for path in prompt.videos], question, prompt.sampling)


def frames_of(path: str, options: dict, **asked) -> list[int]:
    (video,) = sample(reader_of("qwen2_5_vl"), chat((path, options)), **asked)[1]
    return list(video.frames)


def range_by_qwen(info: VideoInfo, start: float | None, end: float | None) -> tuple[int, int]:
    """The first and the last frame, by qwen-vl-utils' calculate_video_frame_range."""
    first = 0
    last = info.num_frames - 1
    if start is not None:
        first = math.ceil(start * info.fps - 1e-6)
    if end is not None:
        last = min(math.floor(end * info.fps + 1e-6), last)
    return first, last


def told_by_qwen(path: str, options: dict, num_frames: int) -> tuple[torch.Tensor, VideoMetadata]:
    """Frames and their metadata as qwen-vl-utils returns them: the length is the part's, indices
    are the file's."""
    info = probe(path)
    first, last = range_by_qwen(info, options.get("video_start"), options.get("video_end"))
    indices = [first + index for index in sample_uniform(last - first + 1, num_frames)]
    frames = torch.from_numpy(np.stack(decode_all(path))[indices]).permute(0, 3, 1, 2)
    return frames, VideoMetadata(last - first + 1, fps=info.fps, frames_indices=indices)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [{"video_start": 1.0, "video_end": 2.5}, {"video_start": 1.03}, {"video_end": 1}],
    ids=str,
)
def test_a_part_of_a_video_is_read_as_by_qwens_tools(family, film, options):
    """Tokens, which tell times in some models, positions, and pixels."""
    reader = reader_of(family)
    batch = by_processor(
        reader.processor, chat((film, {}))[0]["content"], [told_by_qwen(film, options, 6)]
    )
    expected = ModelInputs.from_processor(reader.parts, batch, HOSTS)
    prompt, videos = sample(reader, chat((film, {**options, "nframes": 6})))
    inputs, pixels = reader.read(prompt, videos, HOSTS, StageTimer(HOSTS))
    assert torch.equal(inputs.input_ids, expected.input_ids)
    assert torch.equal(inputs.position_ids, expected.position_ids)
    patches = [inputs.visual.patches[0]]
    (chunk,) = inputs.with_pixels(pixels).visual.pixels.chunks(patches)
    (whole,) = expected.visual.pixels.chunks(patches)
    for name in chunk.values.keys() & {"pixel_values", "pixel_values_videos"}:
        ours = chunk.values[name]
        theirs = whole.values[name]
        torch.testing.assert_close(ours.flatten(), theirs.flatten(), rtol=0, atol=0)


def test_frames_lie_within_the_part(film):
    """Both ends count. At a rate they are taken from the part's first frame on."""
    for options, expected in (
        ({"video_start": 1, "video_end": 2, "nframes": 3}, [25, 38, 50]),
        ({"video_start": 1.01, "video_end": 1.99, "nframes": 2}, [26, 49]),
        ({"video_start": 1, "video_end": 1.08, "nframes": 30}, [25, 26, 27]),
        ({"video_start": 1, "video_end": 1.03}, [25]),
        ({"video_start": 3, "video_end": 50, "nframes": 2}, [75, 99]),
        ({"video_start": 1, "video_end": 3, "fps": 1}, [25, 50, 75]),
        ({"video_start": 1.02, "video_end": 3, "fps": 1}, [26, 51]),
        ({"video_start": 1, "fps": 5, "max_frames": 2}, [25, 99]),
        ({"video_start": 0.0, "nframes": 2}, [0, 99]),
        ({"video_start": 1, "video_end": 3, "fps": 1, "min_frames": 5}, [25, 38, 50, 63, 75]),
    ):
        assert frames_of(film, options) == expected, options


def test_min_frames_is_the_least_number(film):
    for options, asked, expected in (
        ({"fps": 1, "min_frames": 6}, {}, sample_uniform(100, 6)),
        ({"fps": 1, "min_frames": 4}, {}, [0, 25, 50, 75]),
        ({"fps": 1, "min_frames": 12}, {"num_frames": 3}, sample_uniform(100, 12)),
        ({"fps": 10, "min_frames": 5, "max_frames": 6}, {}, sample_uniform(100, 6)),
        ({"min_frames": 5}, {"num_frames": 3}, sample_uniform(100, 5)),
        ({"min_frames": 5}, {"num_frames": 6}, sample_uniform(100, 6)),
        ({"min_frames": 1000, "fps": 1}, {}, list(range(100))),
    ):
        assert frames_of(film, options, **asked) == expected, options


def test_a_part_at_a_variable_rate_has_the_files_own_times(tmp_path):
    path = str(encode(tmp_path / "a.mkv", n=len(TIMES), pts=TIMES, size=(56, 84), bframes=0))
    assert frames_of(path, {"video_start": 1.7, "video_end": 9.05, "nframes": 30}) == [
        25,
        26,
        27,
        28,
    ]
    # Nearest to 0, 10 and 20 s after it.
    assert frames_of(path, {"video_start": 1.7, "fps": 0.1}) == [25, 29, 30]
    reader = reader_of("qwen2_5_vl")
    prompt, videos = sample(
        reader, chat((path, {"video_start": 1.7, "video_end": 19.1, "nframes": 4}))
    )
    # The last frame of the part is shown until the next one.
    told = reader.lay_out(prompt, videos).batch["second_per_grid_ts"].item()
    assert told == pytest.approx(2 * (24.34 - 1.7) / 4, abs=1e-3)
    reader = reader_of("qwen3_vl")
    prompt, videos = sample(
        reader, chat((path, {"video_start": 3.9, "video_end": 9.1, "nframes": 4}))
    )
    text = reader.tokenizer.decode(reader.lay_out(prompt, videos).batch["input_ids"][0])
    assert [float(time) for time in re.findall(r"<([\d.]+) seconds>", text)] == pytest.approx(
        [3.95, 9.075], abs=0.051
    )


WRONG = [
    (
        {"video_start": 2, "video_end": 2},
        PromptError,
        "video_start of a video is 2, but video_end is 2",
    ),
    (
        {"video_start": 3, "video_end": 1.5},
        PromptError,
        "video_start of a video is 3, but video_end is 1.5",
    ),
    ({"video_end": 0}, PromptError, "video_start of a video is 0, but video_end is 0"),
    (
        {"video_start": -1},
        PromptError,
        "video_start of a video must be a number of seconds, not negative, not -1",
    ),
    (
        {"video_end": "2"},
        PromptError,
        "video_end of a video must be a number of seconds, not negative, not '2'",
    ),
    (
        {"video_start": float("nan")},
        PromptError,
        "must be a number of seconds, not negative, not nan",
    ),
    ({"video_start": 60}, VideoError, "video_start is 60 s, but the video lasts 4.000 s"),
    (
        {"video_start": 1.01, "video_end": 1.03},
        VideoError,
        "no frame between video_start 1.01 s and video_end 1.03",
    ),
    (
        {"min_frames": 3, "max_frames": 2},
        PromptError,
        "min_frames of a video is 3, but max_frames is 2",
    ),
]


def error_job(hosts: HostGroup, path: str) -> list[str]:
    """Every error of one engine, which answers in between."""
    engine = Engine(
        families.build_model("qwen2_5_vl"), families.build_processor("qwen2_5_vl"), hosts
    )
    found = []
    for options, _, _ in WRONG:
        try:
            engine.prefill(messages=chat((path, options)))
            found.append("none")
        except ValueError as error:
            found.append(str(error))
    engine.prefill(messages=chat((path, {"video_start": 1})), num_frames=2)
    return found


def test_wrong_ranges_are_named_on_every_host(pool, film):
    for found in pool.run(2, error_job, film):
        for (options, _, message), error in zip(WRONG, found, strict=True):
            assert message in error, (options, error)
    for options, kind, _ in WRONG:
        with pytest.raises(kind):
            frames_of(film, options)


def logits_job(
    hosts: HostGroup, family: str, requests: list[list[dict]], **options
) -> list[torch.Tensor]:
    engine = Engine(
        families.build_model(family, dtype=torch.float64),
        families.build_processor(family),
        hosts,
        PrefillConfig(method="zigzag_ring" if hosts.size > 1 else "full"),
        **options,
    )
    return [engine.prefill(messages=messages).logits for messages in requests]


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_hosts_that_share_a_part_of_a_video_prefill_as_transformers(pool, film, family):
    """Beside another part of the same file."""
    parts = [{"video_start": 1, "video_end": 2.5}, {"video_start": 2.2}]
    messages = chat(*[(film, {**options, "nframes": 6}) for options in parts])
    shown = [told_by_qwen(film, options, 6) for options in parts]
    batch = by_processor(families.build_processor(family), messages[0]["content"], shown)
    expected = families.build_model(family, dtype=torch.float64)(**batch).logits[:, -1]
    for (logits,) in pool.run(2, logits_job, family, [messages]):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def different_job(hosts: HostGroup, path: str) -> None:
    engine = Engine(
        families.build_model("qwen2_5_vl"), families.build_processor("qwen2_5_vl"), hosts
    )
    with pytest.raises((ValueError, RuntimeError), match="the options beside videos and images"):
        engine.prefill(messages=chat((path, {"video_start": hosts.rank, "nframes": 4})))


def test_hosts_that_are_asked_about_different_parts_say_so(pool, film):
    pool.run(2, different_job, film)


@torch.no_grad()
@pytest.mark.parametrize("reuse", ["exact", "kv"])
def test_another_part_of_the_same_file_is_not_mistaken_for_it(film, reuse):
    """Nor the same frames of a longer part, which lie further apart in time."""
    parts = [
        {"video_start": 0, "video_end": 2},
        {"video_start": 1, "video_end": 3},
        {"video_start": 0, "video_end": 2.9},
    ]
    requests = [chat((film, {**options, "fps": 1})) for options in [*parts, {}, parts[0]]]
    found = logits_job(HOSTS, "qwen2_5_vl", requests, reuse=ReuseConfig(mode=reuse))
    for messages, logits in zip(requests, found, strict=True):
        (expected,) = logits_job(HOSTS, "qwen2_5_vl", [messages])
        torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize(
    "options",
    [{"video_start": 1, "video_end": 3}, {"video_start": 2.5}, {"video_end": 0.8}],
    ids=str,
)
def test_of_a_part_that_is_heard_only_its_own_sound_is(tmp_path, options):
    """As long as its frames are shown, from the first one on."""
    path = audio_files.write(
        tmp_path / "a.mkv", [(0, 4)], "flac", audio_files.RATE, video=(0, 4), size=(56, 84)
    )
    family = families.OMNI
    info = probe(path)
    reader = reader_of(family)
    first, last = range_by_qwen(info, options.get("video_start"), options.get("video_end"))
    frames, told = told_by_qwen(path, options, 10)
    content = [{"type": "video"}, {"type": "text", "text": ASKED}]
    text = reader.processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    rate = audio_files.RATE
    batch = families.build_processor(family)(
        text=[text],
        videos=[frames],
        video_metadata=[told],
        do_sample_frames=False,
        fps=10 * info.fps / (last - first + 1),
        audio=[plain_samples(path)[round(first / 25 * rate) : round((last + 1) / 25 * rate)]],
        audio_kwargs={"max_length": 8 * rate},
        load_audio_from_video=True,
        audio_from_video_indices=[0],
        return_tensors="pt",
    )
    expected = ModelInputs.from_processor(reader.parts, dict(batch), HOSTS)
    prompt, videos = sample(reader, chat((path, {**options, "nframes": 10}), question=ASKED))
    inputs, _ = reader.read(prompt, videos, HOSTS, StageTimer(HOSTS))
    assert torch.equal(inputs.input_ids, expected.input_ids)
    assert torch.equal(inputs.position_ids, expected.position_ids)
    assert inputs.audio.lengths == expected.audio.lengths
    torch.testing.assert_close(
        inputs.audio.spectrograms[0], expected.audio.spectrograms[0], rtol=0, atol=1e-3
    )
    assert inputs.audio.sources[0].part[0] == round(first / 25 * rate)
