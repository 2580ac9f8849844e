"""VideoLLaMA 3's videos, of which its processor leaves out what repeats the frame before, against
transformers."""

from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
import torch

from apbv import (
    Engine,
    HostGroup,
    PrefillConfig,
    ReduceConfig,
    SpeculativeConfig,
    VideoConfig,
    prefill,
)
from apbv.input.media.video import VideoError, probe
from apbv.input.prompts.pixels import VideoReader, preprocess_frames
from apbv.input.prompts.prompt_reader import PromptReader
from apbv.input.prompts.repeats import kept_tokens
from apbv.input.prompts.tokenized_prompt import SampledVideo
from apbv.model.parts import inspect_model
from apbv.request.request import Question, Request
from apbv.stats import StageTimer

from apbv_tests import families, video_files
from apbv_tests.configs import prefill_config, speculative_config
from apbv_tests.pairs import each_choice
from apbv_tests.prompts import by_processor, relative_error, sampled

FAMILY = "video_llama_3"
QUESTION = "What moves?"
FRAMES = 9
SINGLE = HostGroup.single("cpu")


def partly_still(i: int, height: int, width: int) -> np.ndarray:
    """A picture whose left half changes every third time, and whose right half in the second half
    of the clip."""
    image = video_files.picture(0, height, width)
    image[:, : width // 2] += np.uint8(40 * (i // 3))
    image[:, width // 2 :] += np.uint8(25 * max(0, i - 9))
    return image


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> list[str]:
    """Without loss, so that what stands still is the same in every frame; the last clip has a
    single frame."""
    folder = tmp_path_factory.mktemp("still")
    paths = []
    for number, (n, size) in enumerate([(18, (84, 112)), (12, (112, 56)), (1, (56, 84))]):
        path = folder / f"{number}.mp4"
        paths.append(
            video_files.encode(path, n=n, size=size, draw=partly_still, x264="qp=0:scenecut=0")
        )
    return paths


def build_processor(compresses: bool = True):
    processor = families.build_processor(FAMILY)
    processor.video_processor.use_token_compression = compresses
    return processor


def sampled_video(path: str) -> SampledVideo:
    return SampledVideo(probe(path), tuple(sampled(path, FRAMES)[1].frames_indices))


def chat(paths: list[str], picture=None) -> list[dict]:
    content = [{"type": "video", "video": path} for path in paths]
    if picture is not None:
        content.insert(1, {"type": "image", "image": picture})
    return [{"role": "user", "content": [*content, {"type": "text", "text": QUESTION}]}]


def batch_of(paths: list[str], picture=None, compresses: bool = True) -> dict:
    """What the processor makes of the whole prompt."""
    content = chat(paths, picture)[0]["content"]
    videos = [sampled(path, FRAMES) for path in paths]
    images = None if picture is None else [picture]
    return by_processor(build_processor(compresses), content, videos, images)


@torch.no_grad()
def expected_logits(batch: dict) -> torch.Tensor:
    return families.build_model(FAMILY, dtype=torch.float64)(**batch).logits[:, -1]


@pytest.mark.parametrize("chunk_bytes", [1, 2**26])
def test_frames_are_compared_piece_by_piece(clips, monkeypatch, chunk_bytes):
    """A piece decodes its frames and the one before, and finds what the processor finds in the
    whole video."""
    monkeypatch.setattr("apbv.input.prompts.repeats.CHUNK_BYTES", chunk_bytes)
    processor = build_processor()
    decoded = []
    read = VideoReader.read

    def recorded(self, chunks, first=0):
        decoded.append(sum(map(len, chunks)))
        if chunk_bytes == 1:
            assert {len(chunk) for chunk in chunks} == {1}
        return read(self, chunks, first)

    monkeypatch.setattr(VideoReader, "read", recorded)
    for path in clips:
        video = sampled_video(path)
        (frames, _) = sampled(path, FRAMES)
        batch = processor.video_processor(
            videos=[frames], do_sample_frames=False, return_tensors="pt"
        )
        expected = batch["video_compression_mask"]
        num_frames = len(frames)
        if num_frames > 1:
            assert 0.2 < expected.float().mean() < 0.8, "some tokens must be left out, and some not"
        for bounds in ([0, num_frames], [0, 1, 1, num_frames], [*range(num_frames + 1)]):
            shares = [range(*pair) for pair in pairwise(bounds)]
            decoded.clear()
            pieces = [
                kept_tokens(processor, video, share, SINGLE, StageTimer(SINGLE), VideoConfig())
                for share in shares
            ]
            assert torch.equal(torch.cat(pieces).flatten(), expected)
            assert decoded == [len(share) + (share.start > 0) for share in shares if share]


def prompts_job(hosts: HostGroup, messages: list[dict], compresses: bool, settings: dict):
    """A prompt's tokens, its last logits, how many tokens each of its temporal patches has, and the
    shares."""
    model = families.build_model(FAMILY, dtype=torch.float64)
    engine = Engine(model, build_processor(compresses), hosts, prefill_config(**settings))
    state = engine.prefill(messages=messages, num_frames=FRAMES)
    visual = state.inputs.visual
    return state.inputs.input_ids, state.logits, list(map(len, visual.frames)), visual.patches


EXACT = {
    "in a ring": {"method": "zigzag_ring"},
    "apbv unpruned": {
        "method": "apbv",
        "anchor_len": 40,
        "passing_len": 10**6,
        "on_single_host": True,
    },
    "frame by frame": {"method": "full", "video": VideoConfig(chunk_bytes=1)},
    "every host all": {"method": "ulysses", "frame_parallel": False},
}


@each_choice(num_hosts=[1, 2, 3, 4], way=EXACT, compresses=[True, False], has_image=[True, False])
def test_a_prompt_has_the_tokens_that_the_processor_keeps(
    pool, clips, num_hosts, way, compresses, has_image
):
    picture = families.synthetic_image() if has_image else None
    batch = batch_of(clips, picture, compresses)
    expected = expected_logits(batch)
    mask = batch["video_compression_mask"]
    assert bool(mask.all()) != compresses
    for ids, logits, lengths, shares in pool.run(
        num_hosts, prompts_job, chat(clips, picture), compresses, EXACT[way]
    ):
        assert torch.equal(ids, batch["input_ids"])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert sum(lengths) == int(mask.sum()) + (
            batch["image_grid_thw"].prod() if has_image else 0
        )
        assert (min(lengths) == 1) == compresses, "a frame has a token at least"
        assert num_hosts == 1 or all(shares)


def batch_job(hosts: HostGroup, batch: dict):
    model = families.build_model(FAMILY, dtype=torch.float64)
    return prefill(model, batch, hosts=hosts, config=PrefillConfig(method="zigzag_ring")).logits


def test_a_callers_batch_is_shared_out_too(pool, clips):
    batch = batch_of(clips, families.synthetic_image())
    for logits in pool.run(2, batch_job, batch):
        torch.testing.assert_close(logits, expected_logits(batch), rtol=1e-4, atol=1e-4)
    whole = batch_of(clips, compresses=False)
    del whole["video_compression_mask"]  # as the model has it, all tokens are kept then
    assert relative_error(pool.run(2, batch_job, whole)[1], expected_logits(whole)) < 1e-4


def damaged_job(hosts: HostGroup, messages: list[dict]):
    """How a request fails where only the last host finds a frame damaged, and whether the group
    goes on."""
    engine = Engine(families.build_model(FAMILY), build_processor(), hosts)
    damaged = VideoError("a damaged frame") if hosts.rank == hosts.size - 1 else None
    with patch(
        "apbv.input.prompts.repeats.preprocess_frames", wraps=preprocess_frames, side_effect=damaged
    ):
        try:
            engine.prefill(messages=messages, num_frames=FRAMES)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
    return failure, engine.prefill(messages=messages, num_frames=FRAMES).num_tokens


def test_a_frame_that_cannot_be_compared_is_one_error_on_every_host(pool, clips):
    (first, num_tokens), (last, same) = pool.run(2, damaged_job, chat(clips[:1]))
    assert first == last == "VideoError: a damaged frame" and num_tokens == same


def known_job(hosts: HostGroup, messages: list[dict]):
    """Logits of one question twice, and how many frames each time were decoded to compare them.

    The second time another engine is asked, whose host 0 is given what a reader for a server has
    laid out.
    """
    found = []
    question = Question(messages=messages, num_frames=FRAMES)
    for is_laid_out in (False, True):
        model = families.build_model(FAMILY, dtype=torch.float64)
        engine = Engine(model, build_processor(), hosts, PrefillConfig(method="zigzag_ring"))
        prompt = None
        if is_laid_out and hosts.is_leader:
            reader = PromptReader(engine.parts, build_processor(), FRAMES)
            rendered = reader.render(question)
            prompt = reader.lay_out(
                rendered,
                reader.sample([engine.videos.probe(path) for path in rendered.videos], question),
            )
        with patch(
            "apbv.input.prompts.repeats.preprocess_frames", wraps=preprocess_frames
        ) as compared:
            begun = engine.begin(Request(question, StageTimer(hosts), prompt=prompt))
        found.append(
            (begun.state.logits, sum(len(call.args[1]) for call in compared.call_args_list))
        )
    return found


def test_host_0_tells_the_others_what_it_knows(pool, clips):
    expected = expected_logits(batch_of(clips))
    for (first, compared), (second, compared_again) in pool.run(2, known_job, chat(clips)):
        assert compared and not compared_again
        for logits in (first, second):
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_video_is_compared_once(clips, monkeypatch):
    reader = PromptReader(inspect_model(families.build_model(FAMILY)), build_processor(), FRAMES)
    (video,) = reader.without_repeats([sampled_video(clips[0])], SINGLE)
    monkeypatch.setattr("apbv.input.prompts.prompt_reader.kept_tokens", None)
    (again,) = reader.without_repeats([sampled_video(clips[0])], SINGLE)
    assert torch.equal(video.kept, again.kept) and not again.kept.all()


def drafted_job(hosts: HostGroup, messages: list[dict], way: SpeculativeConfig | None):
    model, draft = (families.build_model(FAMILY, dtype=torch.float64, seed=seed) for seed in (0, 1))
    engine = Engine(model, build_processor(), hosts, speculate=way, draft=draft if way else None)
    try:
        return engine.generate(messages=messages, num_frames=FRAMES, max_new_tokens=6).token_ids
    except ValueError as error:
        return str(error)


def test_drafts_read_what_is_left(pool, clips):
    messages = chat(clips[:2])
    plain = pool.run(2, drafted_job, messages, None)[0]
    assert len(plain) == 6
    for settings in (
        {"strategy": "specvlm", "keep": "attention", "keep_ratio": 0.4},
        {"strategy": "tabed", "ensemble": "MTP"},
    ):
        assert pool.run(2, drafted_job, messages, speculative_config(**settings))[0] == plain
    refused = pool.run(
        2,
        drafted_job,
        messages,
        speculative_config(strategy="specvlm", keep="hippo", keep_ratio=0.4),
    )
    assert all("set use_token_compression to false" in each for each in refused)


def reduced_job(hosts: HostGroup, messages: list[dict], compresses: bool = True):
    """The number of visual tokens after a reduction to half, or why there is none."""
    model = families.build_model(FAMILY, dtype=torch.float64)
    config = prefill_config(
        method="apbv", on_single_host=True, reduce=ReduceConfig(method="fastvid", ratio=0.5)
    )
    engine = Engine(model, build_processor(compresses), hosts, config)
    try:
        state = engine.prefill(messages=messages, num_frames=FRAMES)
    except ValueError as error:
        return str(error)
    return state.reduction.num_before, state.reduction.num_after


def test_reductions_of_frames_need_them_whole(pool, clips):
    for said in pool.run(2, reduced_job, chat(clips[:1])):
        assert "compares whole frames" in said and "use_token_compression" in said
    total = batch_of(clips[:1], compresses=False)["video_compression_mask"].numel()
    assert set(pool.run(2, reduced_job, chat(clips[:1]), False)) == {(total, total // 2)}
