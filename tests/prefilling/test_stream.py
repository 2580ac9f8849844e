"""Videos that are read, encoded and exchanged chunk by chunk, against transformers on the whole
video."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
import torch

from apbv import (
    Engine,
    HostGroup,
    PrefillConfig,
    SpeculativeConfig,
    UnsupportedModelError,
    VideoConfig,
)
from apbv.input.media.video import VideoError, probe
from apbv.input.prompts.pixels import KeptPixels, SourcePixels, VideoReader, ahead
from apbv.input.prompts.tokenized_prompt import SampledVideo
from apbv.input.prompts.visual import VisualInput, VisualItem
from apbv.prefilling.encoding.vision import agree_on_chunks
from apbv.stats import StageTimer

from apbv_tests import families, video_files
from apbv_tests.engines import QUESTION
from apbv_tests.pairs import each_choice
from apbv_tests.prompts import by_processor, sampled

FRAMES = 13
ONE_PATCH = VideoConfig(chunk_bytes=1)
PREFILL = PrefillConfig(video=ONE_PATCH)


def logits_job(hosts: HostGroup, family: str, clip: str, settings: dict):
    """The prompt's last logits, and how many chunks the vision tower was given."""
    model = families.build_model(family, dtype=torch.float64)
    config = PrefillConfig(method="zigzag_ring", video=ONE_PATCH, **settings)
    engine = Engine(model, families.build_processor(family), hosts, config)
    name = "get_image_features" if family == "internvl" else "get_video_features"
    encode = getattr(model.model, name)
    calls = []

    def counted(*args, **kwargs):
        calls.append(1)
        return encode(*args, **kwargs)

    setattr(model.model, name, counted)
    state = engine.prefill(QUESTION, video=clip, num_frames=FRAMES)
    share = len(state.inputs.visual.patches[hosts.rank])
    return state.logits, len(calls), share


@torch.no_grad()
def logits_by_transformers(family: str, clip: Path) -> torch.Tensor:
    """The last logits that the model computes by itself, of frames that PyAV decoded by itself."""
    model = families.build_model(family, dtype=torch.float64)
    processor = families.build_processor(family)
    content = [{"type": "video"}, {"type": "text", "text": QUESTION}]
    return model(**by_processor(processor, content, [sampled(clip, FRAMES)])).logits[:, -1]


@each_choice(
    family=["llava_onevision", "qwen2_5_vl", "qwen3_vl", "internvl"], num_hosts=[1, 2, 3, 2]
)
def test_chunks_of_one_patch_prefill_as_the_whole(pool, clip, family, num_hosts):
    expected = logits_by_transformers(family, clip)
    results = pool.run(num_hosts, logits_job, family, str(clip), {})
    for logits, num_calls, share in results:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert num_calls == share > 1  # pixels are fp32, whatever the model is


def late_damage(folder: Path) -> str:
    """A file of which one frame near the end, number 27, cannot be decoded."""
    path = video_files.encode(folder / "whole.mp4", n=30, bframes=0, gop=5, size=(64, 96))
    at, size, *_ = video_files.packets_of(path)[27]
    broken = folder / "broken.mp4"
    # The header's start is wiped out, so the decoder refuses what the container calls a frame.
    video_files.overwrite(path, broken, at + 4, b"\x1f" * min(size - 4, 40))
    return str(broken)


def failures_job(hosts: HostGroup, path: str, broken: str, good: str) -> list[tuple]:
    """How requests end that fail on the last host, with a draft; threads left, and what is answered
    afterwards."""
    speculate = SpeculativeConfig(strategy="vanilla", draft_model=path)
    engine = Engine.from_pretrained(path, prefill=PREFILL, hosts=hosts, speculate=speculate)
    good = {"video": good, "num_frames": 8, "max_new_tokens": 2}
    ended = []

    def fail(begun: str, stage: str) -> None:
        if begun == stage and hosts.rank == hosts.size - 1:
            raise RuntimeError("the caller cannot go on")

    requests = [{**good, "video": broken, "num_frames": 30}]
    requests += [
        {**good, "on_stage": partial(fail, stage=stage)} for stage in ("decode_video", "exchange")
    ]
    engine.generate(QUESTION, **good)
    for request in requests:
        before = threading.active_count()
        with pytest.raises(Exception) as raised:  # and is kept, as a log or a debugger keeps it
            engine.generate(QUESTION, **request)
        left = threading.active_count() - before
        failure = f"{raised.typename}: {raised.value}"
        ended.append((failure, left, engine.generate(QUESTION, **good).token_ids))
    return ended


def test_a_failure_on_one_host_fails_all_and_breaks_nothing(pool, checkpoints, clip, tmp_path):
    """Of a file whose late frame is damaged, when several chunks have been exchanged; and of a
    host's caller."""
    broken = late_damage(tmp_path)
    first, last = pool.run(2, failures_job, str(checkpoints("qwen3_vl")), broken, str(clip))
    reasons = ["VideoError: ", *["RuntimeError: the caller cannot go on"] * 2]
    for (there, *_, tokens), (own, _, others), reason in zip(first, last, reasons, strict=True):
        assert own.startswith(reason)
        # A fault, as the caller's, is quoted; an error of a kind is the same on both.
        quoted = re.match(f"HostError: host 1 failed in .*{reason}", there)
        assert there == own if reason.startswith("VideoError") else quoted
        assert tokens == others == first[0][2]
    assert "broken.mp4" in last[0][0]
    assert all(left <= 0 for _, left, _ in first + last), "threads go on after the request"


def too_few_job(hosts: HostGroup, clip: str) -> str:
    """What is raised where the last host's tower makes a row too few, before a prompt that
    succeeds."""
    model = families.build_model("qwen2_5_vl")
    engine = Engine(model, families.build_processor("qwen2_5_vl"), hosts, PREFILL)
    encode = model.model.get_video_features

    def shortened(*args, **kwargs):
        features = encode(*args, **kwargs)
        features.pooler_output = [
            rows[: len(rows) - (hosts.rank == hosts.size - 1)] for rows in features.pooler_output
        ]
        return features

    model.model.get_video_features = shortened
    with pytest.raises(
        UnsupportedModelError, match="the model's tower returned 5 embeddings for 6 pl"
    ) as raised:
        engine.prefill(QUESTION, video=clip, num_frames=FRAMES)
    model.model.get_video_features = encode
    engine.prefill(QUESTION, video=clip, num_frames=FRAMES)
    return raised.typename


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_a_tower_has_to_make_a_row_for_every_placeholder(pool, clip, num_hosts):
    assert pool.run(num_hosts, too_few_job, str(clip)) == ["UnsupportedModelError"] * num_hosts


def pixels_of(
    clip: Path | str, first: int = 0, num_patches: int = 6
) -> tuple[SourcePixels, list[range]]:
    frames = tuple(range(first, first + 2 * num_patches))
    grid = torch.tensor([[num_patches, 4, 6]])
    timer = StageTimer(HostGroup.single("cpu"))
    video = SampledVideo(probe(clip), frames, grid=grid)
    reader = VideoReader(video, 2, families.build_processor("qwen2_vl"), timer)
    chunks = [range(patch, patch + 1) for patch in range(num_patches)]
    return SourcePixels(((range(num_patches), reader),), timer), chunks


def test_kept_pixels_serve_two_towers_at_once(clip):
    pixels, chunks = pixels_of(clip)
    expected = [chunk.values["pixel_values_videos"] for chunk in pixels.chunks(chunks)]
    assert len(expected) == len(chunks)
    kept = KeptPixels(pixels)
    with ThreadPoolExecutor(2) as executor:
        seen = [*executor.map(lambda _: list(kept.chunks(chunks)), range(2))]
    for found in seen:
        assert all(
            torch.equal(a.values["pixel_values_videos"], b)
            for a, b in zip(found, expected, strict=True)
        )
    assert all(a is b for a, b in zip(*seen, strict=True)), "the file was read twice"


def test_kept_pixels_fail_for_everybody(tmp_path):
    pixels, chunks = pixels_of(late_damage(tmp_path), first=20, num_patches=5)
    kept = KeptPixels(pixels)
    for _ in range(2):
        with pytest.raises(VideoError, match="cannot be decoded"):
            list(kept.chunks(chunks))


def test_what_runs_ahead_runs_one_ahead_and_ends_with_its_user():
    made = []
    ended = threading.Event()
    go_on = threading.Semaphore(2)

    def items():
        try:
            for number in range(100):
                go_on.acquire()
                made.append(number)
                yield number
        finally:
            ended.set()

    running = ahead(items())
    for number in range(2):
        assert next(running) == number
        go_on.release()
    running.close()
    # The one in use and the one after it; nobody asked for more.
    assert ended.is_set() and len(made) <= 4


@pytest.mark.parametrize(
    ("patches", "patch_bytes", "budget", "size"),
    # Small ones are not worth cutting finely; eight chunks of a share; as many as fit; never none.
    [(64, 2**20, 2**30, 32), (640, 2**20, 2**30, 80), (640, 2**26, 2**28, 4), (640, 2**26, 1, 1)],
)
def test_chunks_fit_in_memory(patches, patch_bytes, budget, size):
    row_starts = (*range(0, 4 * patches, 4), 4 * patches + 1)
    video = VisualInput(
        (VisualItem("video", row_starts[-1], patches, 1, patch_bytes),),
        (range(patches),),
        0,
        row_starts,
    )
    chunks = video.chunks(0, budget)
    assert len(chunks[0]) == size
    assert list(chain.from_iterable(chunks)) == list(range(patches))
    rows = list(chain.from_iterable(map(video.rows_of, chunks)))
    assert rows == list(range(video.num_rows)), "the row behind the last frame is the last chunk's"


def chunks_job(hosts: HostGroup) -> int:
    return agree_on_chunks(hosts, hosts.device, 100 + hosts.rank)


def test_all_hosts_encode_as_much_at_a_time_as_the_one_with_least_room(pool):
    assert pool.run(2, chunks_job) == [100, 100]
