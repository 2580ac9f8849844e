"""Prompts that are reduced before the language model, against transformers' own model on what is left of them."""

from dataclasses import replace

import pytest
import torch
from early_oracle import reduced_logits, whole_videos

from apbv import HostGroup, PrefillConfig, ReduceConfig, prefill
from apbv.config.names import VIDEO_REDUCER_NAMES
from apbv.prefilling.reduction import EARLY_REDUCERS

import families
from fresh_hosts import described
from pairs import each_choice
from prompts import UNCOMPRESSED, as_inputs, build, reset_rope, text_batch, video_batch

DOUBLE = torch.float64
WAYS = {
    "full": {"method": "full"},
    "ring": {"method": "zigzag_ring", "kv": "sharded"},
    "apbv": {"method": "apbv", "passing_len": UNCOMPRESSED, "anchor_len": 0, "on_single_host": True},
    "every host all": {"method": "ulysses", "frame_parallel": False},
}


def reduced(method: str, ratio: float, way: str = "full") -> PrefillConfig:
    return PrefillConfig(reduce=ReduceConfig(method=method, ratio=ratio), **WAYS[way])


def prefill_job(hosts: HostGroup, family: str, batch: dict, config: PrefillConfig):
    inputs = as_inputs(family, batch, None, hosts, DOUBLE, config.frame_parallel)
    state = prefill(build(family, DOUBLE), inputs, hosts=hosts, config=config)
    figures = None if state.reduction is None else state.reduction.figures
    return state.logits, state.num_tokens, figures, state.exact


def processed(family: str, *shown, text: str = "Which?") -> dict:
    """What the processor makes of videos ``[T, 3, h, w]`` and images, in this order, and a question."""
    from transformers.video_utils import VideoMetadata

    processor, videos = families.build_processor(family), [each for each in shown if torch.is_tensor(each)]
    kinds = ["video" if torch.is_tensor(each) else "image" for each in shown]
    content = [{"type": kind} for kind in kinds] + [{"type": "text", "text": text}]
    asked = [{"role": "user", "content": content}]
    times = [VideoMetadata(len(video), fps=8.0, frames_indices=list(range(len(video)))) for video in videos]
    return dict(
        processor(
            text=[processor.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)],
            videos=videos or None,
            images=[each for each in shown if not torch.is_tensor(each)] or None,
            do_sample_frames=False,
            return_tensors="pt",
            **({"video_metadata": times} if videos else {}),
        )
    )


def check(pool, num_hosts: int, family: str, batch: dict, config: PrefillConfig) -> None:
    model, reduce = build(family, DOUBLE), config.reduce
    reset_rope(model)
    expected, length = reduced_logits(model, batch, whole_videos(family, batch), reduce.method, reduce.ratio)
    reset_rope(model)
    num_tokens = batch["input_ids"].shape[1]
    for logits, num_left, figures, exact in pool.run(num_hosts, prefill_job, family, batch, config):
        assert num_left == length < num_tokens and not exact
        assert figures["num_video_tokens_before"] - figures["num_video_tokens_after"] == num_tokens - length
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


# With deepstack, a row behind the video, and frames that hosts have to exchange.
CASES = [("qwen3_vl", "fastvid", 3), ("llava_onevision", "dycoke", 3), ("internvl", "fastvid", 2)]
CASES += [("qwen2_vl", "hippo", 2), ("qwen2_5_vl", "hippo", 1), (families.OMNI, "slowfast", 3)]


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{family}-{method}" for family, method, _ in CASES])
def test_a_reduced_prompt_is_prefilled_as_by_transformers(pool, number):
    family, method, num_hosts = CASES[number]
    config = reduced(method, (0.5, 0.2, 0.001)[number % 3], [*WAYS][number % 4])
    check(pool, num_hosts, family, video_batch(family), config)


@each_choice(family=["llava_onevision", "qwen3_vl"], way=["apbv", "ring"])
def test_what_hardly_moves_is_reduced_on_the_host_where_it_begins(pool, family, way):
    """Frames of the last hosts come to the first, and with them the row behind the video."""
    video = families.synthetic_video(29, 56, 70)
    video[9:] = video[8] + torch.arange(20).view(-1, 1, 1, 1) // 4
    check(pool, 3, family, processed(family, video), reduced("fastvid", 0.3, way))


@each_choice(family=["qwen2_5_vl", "qwen3_vl"], method=EARLY_REDUCERS, ratio=[0.4, 0.1], num_hosts=[1, 2, 3])
def test_every_video_of_a_prompt_is_reduced_and_no_image(pool, family, method, ratio, num_hosts):
    videos = [families.synthetic_video(*shape, seed=n) for n, shape in enumerate([(14, 56, 84), (20, 84, 56)])]
    batch = processed(family, videos[0], families.synthetic_image(84, 56), videos[1])
    check(pool, num_hosts, family, batch, reduced(method, ratio, "ring"))


def test_with_all_tokens_left_it_is_the_whole_prompt(pool):
    family = "llava_onevision"
    batch = video_batch(family)
    plain = pool.run(2, prefill_job, family, batch, PrefillConfig(**WAYS["ring"]))
    for method in EARLY_REDUCERS:
        whole = pool.run(2, prefill_job, family, batch, reduced(method, 1.0, "ring"))
        for (logits, *rest), (expected, length, *_) in zip(whole, plain, strict=True):
            assert rest == [length, None, True] and torch.equal(logits, expected)


# ---- what cannot be reduced, and hosts that fail ----


def refusal_job(hosts: HostGroup, pictures: dict) -> list[str]:
    video, text = video_batch("qwen2_5_vl"), text_batch(30)
    asked = [(batch, reduced(name, 0.5)) for name in VIDEO_REDUCER_NAMES for batch in (pictures, text)]
    asked += [(video, replace(reduced("hippo", 0.1, "apbv"), anchor_len=30))]
    asked += [(video, reduced("hippo", 0.5 if hosts.rank else 0.25))]
    model = build("qwen2_5_vl", DOUBLE)
    return [described(lambda b=b, c=c: prefill(model, b, hosts=hosts, config=c)) for b, c in asked]


def test_what_cannot_be_reduced_is_refused_on_every_host(pool):
    for *without_video, anchor, unlike in pool.run(
        2, refusal_job, processed("qwen2_5_vl", families.synthetic_image(84, 112))
    ):
        for pictures, text in zip(without_video[::2], without_video[1::2], strict=True):
            assert pictures.endswith("the prompt has images only") and text.endswith("the prompt has no video")
        assert "anchor_len=30 leaves no context" in anchor and "hippo leaves 6 of 60 visual tokens" in anchor
        assert (
            unlike.startswith("HostError") and "the prefill configuration or the model of host 1 differs" in unlike
        )
