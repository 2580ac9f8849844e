"""Prompts that are reduced before the language model, against transformers' own model on what is
left of them."""

import pytest
import torch

from apbv import HostGroup, ReduceConfig
from apbv.config import REDUCER_NAMES
from apbv.prefilling.reduction import REDUCERS

from apbv_tests import families
from apbv_tests.fresh_hosts import described
from apbv_tests.oracle import decoder_inputs
from apbv_tests.pairs import each_choice
from apbv_tests.prompts import (
    UNCOMPRESSED,
    build,
    prefill_job,
    processed,
    reset_rope,
    text_batch,
    video_batch,
)
from apbv_tests.reduction_oracle import DEFINITIONS


@torch.no_grad()
def reduced_logits(
    model, batch: dict, videos: list[tuple[int, int, int]], method: str, ratio: float
):
    """The last logits ``[1, V]`` of transformers' own language model on a reduced prompt, and its
    length.

    What the model makes of the whole prompt is taken on its way into the language model, reduced,
    and run again.

    Args:
        batch: what the processor returned.
        videos: frames, height and width in tokens of the prompt's videos, which come first among
            its visual tokens of this kind; behind a video there may be rows of no frame, as many as
            are left over.
    """
    decoder = model.get_decoder()
    taken = decoder_inputs(model, batch)
    embeds = taken["inputs_embeds"][0]
    ids = batch["input_ids"][0]
    hidden = embeds.shape[1]
    deepstack = list(taken.get("deepstack_visual_embeds") or [])
    tokens = video_tokens(model.config, ids, videos)
    mask = taken["visual_pos_masks"][0].reshape(-1, len(ids))[0] if deepstack else ids < 0
    numbers = mask.long().cumsum(0) - 1
    total = sum(len(each) for each in tokens)
    count = max(1, round(ratio * total))
    before = 0
    stays = torch.ones(len(ids), dtype=torch.bool)
    embeds = embeds.clone()
    for (num_frames, height, width), places in zip(videos, tokens, strict=True):
        share = (before + len(places)) * count // total - before * count // total
        before += len(places)
        streams = [embeds[places], *(layer[numbers[places]] for layer in deepstack)]
        frames = torch.cat(streams, dim=-1).view(num_frames, height * width, -1)
        kept = DEFINITIONS[method](frames, height, width, share, hidden) if share else {}
        stays[places] = False
        for (frame, place), row in kept.items():
            token = places[frame * height * width + place]
            stays[token] = True
            main, *others = row.split(hidden)
            embeds[token] = main
            for layer, value in zip(deepstack, others, strict=True):
                layer[numbers[token]] = value
    position_ids = taken.get("position_ids")
    if position_ids is None:
        position_ids = torch.arange(len(ids))[None]
    extra = {}
    if deepstack:
        left = [layer[stays[mask]] for layer in deepstack]
        extra = {"visual_pos_masks": mask[stays][None], "deepstack_visual_embeds": left}
    hidden_states = decoder(
        inputs_embeds=embeds[stays][None],
        attention_mask=torch.ones(
            1, int(stays.sum()), dtype=torch.long
        ),  # else gaps mean several sequences
        position_ids=position_ids[..., stays],
        use_cache=False,
        **extra,
    ).last_hidden_state
    return model.lm_head(hidden_states[:, -1]), int(stays.sum())


def whole_videos(family: str, batch: dict) -> list[tuple[int, int, int]]:
    """Frames, height and width in tokens of a prompt's videos, from what the processor returned."""
    if "video_grid_thw" in batch:
        return [(t, h // 2, w // 2) for t, h, w in batch["video_grid_thw"].tolist()]
    pixels = (
        batch["pixel_values_videos"] if "pixel_values_videos" in batch else batch["pixel_values"]
    )
    frames = pixels.shape[1] if pixels.dim() == 5 else pixels.shape[0]
    return [(frames, 2, 2)] * (pixels.shape[0] if pixels.dim() == 5 else 1)


def video_tokens(
    config, ids: torch.Tensor, videos: list[tuple[int, int, int]]
) -> list[torch.Tensor]:
    """The tokens of every video's frames."""
    token_id = getattr(config, "video_token_id", None)
    if (
        token_id is None or not (ids == token_id).any()
    ):  # InternVL's config has none; GLM's frames are images
        token_id = config.image_token_id
    places = (ids == token_id).nonzero().flatten()
    found = []
    ending = 0
    spare = len(places) - sum(frames * height * width for frames, height, width in videos)
    for frames, height, width in videos:
        size = frames * height * width
        found.append(places[ending : ending + size])
        ending += size + spare // len(videos)
    return found


DOUBLE = torch.float64
WAYS = {
    "full": {"method": "full"},
    "ring": {"method": "zigzag_ring", "kv": "sharded"},
    "apbv": {
        "method": "apbv",
        "passing_len": UNCOMPRESSED,
        "anchor_len": 0,
        "on_single_host": True,
    },
    "every host all": {"method": "ulysses", "frame_parallel": False},
}


def reduced(method: str, ratio: float, way: str = "full") -> dict:
    return {"reduce": ReduceConfig(method=method, ratio=ratio), **WAYS[way]}


def check(pool, num_hosts: int, family: str, batch: dict, settings: dict) -> None:
    model = build(family, DOUBLE)
    reduce = settings["reduce"]
    reset_rope(model)
    expected, length = reduced_logits(
        model, batch, whole_videos(family, batch), reduce.method, reduce.ratio
    )
    reset_rope(model)
    num_tokens = batch["input_ids"].shape[1]
    for result in pool.run(num_hosts, prefill_job, family, batch, None, settings):
        assert result.num_tokens == length < num_tokens and not result.exact
        assert result.reduction.num_before - result.reduction.num_after == num_tokens - length
        torch.testing.assert_close(result.logits, expected, rtol=1e-5, atol=1e-5)


# With deepstack, a row behind the video, and frames that hosts have to exchange.
CASES = [("qwen3_vl", "fastvid", 3), ("llava_onevision", "dycoke", 3), ("internvl", "fastvid", 2)]
CASES += [("qwen2_vl", "dycoke", 2), ("qwen2_5_vl", "dycoke", 1), (families.OMNI, "slowfast", 3)]
CASES += [("qwen3_vl_moe", "slowfast", 2), ("glm4v", "fastvid", 2), ("glm46v", "dycoke", 3)]
CASES += [
    ("glm4v_moe", "slowfast", 2),
    ("video_llama_3", "fastvid", 2),
    ("llava_next_video", "dycoke", 3),
    ("glm_ocr", "fastvid", 2),
]
RATIOS = (0.5, 0.2, 0.001)
CASES = [(*case, RATIOS[row % 3], [*WAYS][row % 4]) for row, case in enumerate(CASES)]


@pytest.mark.shows("reduction")
@pytest.mark.parametrize(("family", "method", "num_hosts", "ratio", "way"), CASES)
def test_a_reduced_prompt_is_prefilled_as_by_transformers(
    pool, family, method, num_hosts, ratio, way
):
    check(pool, num_hosts, family, video_batch(family), reduced(method, ratio, way))


@each_choice(family=["llava_onevision", "qwen3_vl"], way=["apbv", "ring"])
def test_what_hardly_moves_is_reduced_on_the_host_where_it_begins(pool, family, way):
    """Frames of the last hosts come to the first, and with them the row behind the video."""
    video = families.synthetic_video(29, 56, 70)
    video[9:] = video[8] + torch.arange(20).view(-1, 1, 1, 1) // 4
    check(pool, 3, family, processed(family, video, "Which?"), reduced("fastvid", 0.3, way))


@each_choice(
    family=["qwen2_5_vl", "qwen3_vl"], method=REDUCERS, ratio=[0.4, 0.1], num_hosts=[1, 2, 3]
)
def test_every_video_of_a_prompt_is_reduced_and_no_image(pool, family, method, ratio, num_hosts):
    videos = [
        families.synthetic_video(*shape, seed=n)
        for n, shape in enumerate([(14, 56, 84), (20, 84, 56)])
    ]
    batch = processed(family, videos[0], families.synthetic_image(84, 56), videos[1], "Which?")
    check(pool, num_hosts, family, batch, reduced(method, ratio, "ring"))


def test_with_all_tokens_left_it_is_the_whole_prompt(pool):
    family = "llava_onevision"
    batch = video_batch(family)
    plain = pool.run(2, prefill_job, family, batch, None, WAYS["ring"])
    for method in REDUCERS:
        whole = pool.run(2, prefill_job, family, batch, None, reduced(method, 1.0, "ring"))
        for found, expected in zip(whole, plain, strict=True):
            assert (found.num_tokens, found.reduction, found.exact) == (
                expected.num_tokens,
                None,
                True,
            )
            assert torch.equal(found.logits, expected.logits)


# ---- what cannot be reduced, and hosts that fail ----


def refusal_job(hosts: HostGroup, pictures: dict) -> list[str]:
    video = video_batch("qwen2_5_vl")
    text = text_batch(30)
    asked = [(batch, reduced(name, 0.5)) for name in REDUCER_NAMES for batch in (pictures, text)]
    asked += [(video, reduced("dycoke", 0.1, "apbv") | {"anchor_len": 30})]
    asked += [(video, reduced("dycoke", 0.5 if hosts.rank else 0.25))]
    return [
        described(prefill_job, hosts, "qwen2_5_vl", batch, None, settings)
        for batch, settings in asked
    ]


def test_what_cannot_be_reduced_is_refused_on_every_host(pool):
    pictures = processed("qwen2_5_vl", families.synthetic_image(84, 112), "Which?")
    for *without_video, anchor, unlike in pool.run(2, refusal_job, pictures):
        assert all("the prompt has images only" in refused for refused in without_video[::2])
        assert all("the prompt has no video" in refused for refused in without_video[1::2])
        assert "anchor_len=30 leaves no context" in anchor
        assert unlike.startswith(
            "HostError: the prefill configuration must be the same on every host: reduce.ratio is"
        )
