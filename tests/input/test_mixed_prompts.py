"""Prompts of several videos and images between texts, against transformers on the whole prompt."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from PIL import Image

from apbv import Engine, HostGroup, PrefillConfig, SpeculativeConfig, VideoConfig, prefill

from apbv_tests import families
from apbv_tests.configs import prefill_config, speculative_config
from apbv_tests.engines import write_clip
from apbv_tests.families import IMAGE_FAMILIES, VIDEO_FAMILIES
from apbv_tests.pairs import each_choice
from apbv_tests.prompts import by_processor, sampled
from apbv_tests.video_files import decode_all

QUESTION = "What differs?"
FRAMES = 6
# Which videos and images a prompt shows, with the texts between them; videos by their number,
# images likewise.
MIXES = {
    "everything": ["v0", "i0", "i1", "some text in between", "v1", "i2", "v0"],
    "two videos": ["first ", "v0", " and then ", "v1"],
    "images around a video": ["i0", "see ", "v0", " or ", "i1"],
    "images": ["i0", "i2", "one", "i1", "two", "i0"],
}


@dataclass
class Files:
    """Clips and images of different sizes; the last clip has fewer frames than are asked for."""

    videos: list[str]
    images: list[str]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    folder = tmp_path_factory.mktemp("mixed")
    videos = []
    images = []
    for number, (frames, height, width) in enumerate([(20, 84, 112), (9, 112, 56), (3, 56, 84)]):
        videos.append(folder / f"{number}.mp4")
        write_clip(videos[-1], families.synthetic_video(frames, height, width, seed=number))
    for number, (height, width) in enumerate([(84, 112), (56, 140), (168, 56)]):
        images.append(folder / f"{number}.png")
        families.synthetic_image(height, width, seed=number).save(images[-1])
    return Files([str(path) for path in videos], [str(path) for path in images])


def chat(mix: str, files: Files) -> list[dict]:
    """The chat, whose question is its last text."""
    parts = []
    for part in [*MIXES[mix], QUESTION]:
        if part[0] == "v" and part[1:].isdigit():
            parts.append({"type": "video", "video": files.videos[int(part[1:])]})
        elif part[0] == "i" and part[1:].isdigit():
            parts.append({"type": "image", "image": files.images[int(part[1:])]})
        else:
            parts.append({"type": "text", "text": part})
    return [{"role": "user", "content": parts}]


def batch_of(family: str, messages: list[dict], nested: bool = True) -> dict:
    """What a family's processor makes of all videos and images; ``nested``: these are one
    sample's."""
    content = messages[0]["content"]
    videos = [sampled(part["video"], FRAMES) for part in content if part["type"] == "video"]
    images = [
        Image.open(part["image"]).convert("RGB") for part in content if part["type"] == "image"
    ]
    return by_processor(
        families.build_processor(family), content, videos, [images] if nested and images else images
    )


@torch.no_grad()
def logits_by_transformers(family: str, messages: list[dict], nested: bool = True) -> torch.Tensor:
    """The last logits that the model computes by itself, of what its processor makes of all videos
    and images."""
    model = families.build_model(family, dtype=torch.float64)
    batch = batch_of(family, messages, nested)
    if not (
        family.startswith("glm") and "pixel_values" in batch and "pixel_values_videos" in batch
    ):
        return model(**batch).logits[:, -1]
    # GLM's counts the placeholders of both for either, and refuses: here its parts are put
    # together.
    base = model.model
    types = batch["mm_token_type_ids"]
    embeds = base.get_input_embeddings()(batch["input_ids"])
    embeds[types == 1] = torch.cat(
        base.get_image_features(
            batch["pixel_values"], batch["image_grid_thw"], return_dict=True
        ).pooler_output
    )
    embeds[types == 2] = torch.cat(
        base.get_video_features(
            batch["pixel_values_videos"], batch["video_grid_thw"], return_dict=True
        ).pooler_output
    )
    grids = {name: batch[name] for name in ("image_grid_thw", "video_grid_thw")}
    positions, _ = base.get_rope_index(batch["input_ids"], types, **grids)
    hidden = base.language_model(inputs_embeds=embeds, position_ids=positions).last_hidden_state
    return model.lm_head(hidden[:, -1])


def logits_job(hosts: HostGroup, family: str, messages: list[dict], settings: dict):
    """The prompt's last logits, and how many temporal patches every host encodes."""
    model = families.build_model(family, dtype=torch.float64)
    engine = Engine(model, families.build_processor(family), hosts, prefill_config(**settings))
    state = engine.prefill(messages=messages, num_frames=FRAMES)
    return state.logits, [len(share) for share in state.inputs.visual.patches]


EXACT = {
    "in a ring": {"method": "zigzag_ring"},
    "apbv unpruned": {
        "method": "apbv",
        "anchor_len": 40,
        "passing_len": 10**6,
        "on_single_host": True,
    },
    "patch by patch": {"method": "full", "video": VideoConfig(chunk_bytes=1)},
    "every host all": {"method": "ulysses", "frame_parallel": False},
}


@each_choice(family=VIDEO_FAMILIES, mix=MIXES, num_hosts=[3, 2, 1, 4], way=EXACT)
def test_a_mixed_prompt_prefills_as_in_transformers(pool, files, family, mix, num_hosts, way):
    require_as_in_transformers(pool, num_hosts, family, chat(mix, files), EXACT[way])


@each_choice(family=IMAGE_FAMILIES, num_hosts=[3, 2, 1, 4], way=EXACT)
def test_images_between_texts_prefill_as_in_transformers(pool, files, family, num_hosts, way):
    require_as_in_transformers(pool, num_hosts, family, chat("images", files), EXACT[way])


def require_as_in_transformers(pool, num_hosts, family, messages, settings) -> None:
    # Images of one sample, unless the processor takes only a list of all images.
    expected = logits_by_transformers(family, messages)
    for logits, shares in pool.run(num_hosts, logits_job, family, messages, settings):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert all(shares), "every host has something to encode"


def batch_job(hosts: HostGroup, family: str, messages: list[dict], nested: bool):
    """The last logits of a batch that the caller's processor made, and how many hosts encode some
    of it."""
    model = families.build_model(family, dtype=torch.float64)
    config = PrefillConfig(method="zigzag_ring")
    state = prefill(model, batch_of(family, messages, nested), hosts=hosts, config=config)
    return state.logits, sum(map(bool, state.inputs.visual.patches))


@pytest.mark.parametrize(
    ("family", "mix", "nested"),
    [
        ("qwen3_vl", "everything", False),
        ("internvl", "everything", False),
        ("llava_onevision", "images", True),  # several images of one sample are not cut into tiles
        ("llava", "images", False),
        ("llava_next", "images", False),
        ("llava_next_video", "everything", False),
    ],
)
def test_a_callers_batch_is_shared_out_too(pool, files, family, mix, nested):
    messages = chat(mix, files)
    expected = logits_by_transformers(family, messages, nested)
    if nested:
        tiled = logits_by_transformers(family, messages, nested=False)
        assert not torch.allclose(tiled, expected, rtol=1e-2), "the case must be one that differs"
    for logits, num_hosts in pool.run(2, batch_job, family, messages, nested):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert num_hosts == 2


def one_frame_job(hosts: HostGroup, family: str, messages: list[dict]):
    """The last logits of a prompt with one frame of each video, and how many frames were read."""
    model = families.build_model(family, dtype=torch.float64)
    engine = Engine(
        model, families.build_processor(family), hosts, PrefillConfig(method="zigzag_ring")
    )
    state = engine.prefill(messages=messages, num_frames=1)
    return state.logits, len(state.inputs.visual.row_starts) - 1


@pytest.mark.parametrize("family", ["qwen3_vl", "internvl"])
def test_a_video_may_be_one_frame(pool, files, family):
    """Which Qwen3-VL's processor takes only if it is repeated, as the others' do by themselves."""
    messages = chat("two videos", files)
    times = 2 if family == "qwen3_vl" else 1
    videos = []
    for path in files.videos[:2]:
        _, told = sampled(path, 1)
        told.frames_indices = [0] * times
        videos.append(
            (torch.from_numpy(decode_all(path)[0]).permute(2, 0, 1).repeat(times, 1, 1, 1), told)
        )
    with torch.no_grad():
        model = families.build_model(family, dtype=torch.float64)
        batch = by_processor(families.build_processor(family), messages[0]["content"], videos)
        expected = model(**batch).logits[:, -1]
    for logits, num_patches in pool.run(2, one_frame_job, family, messages):
        assert num_patches == 2
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def answers_job(
    hosts: HostGroup, family: str, messages: list[dict], ways: list[SpeculativeConfig | None]
):
    """What is answered in each way; the draft is another model than the target."""
    target = families.build_model(family, dtype=torch.float64, seed=0)
    draft = families.build_model(family, dtype=torch.float64, seed=1)
    answers = []
    for way in ways:
        engine = Engine(
            target,
            families.build_processor(family),
            hosts,
            speculate=way,
            draft=None if way is None else draft,
        )
        answer = engine.generate(messages=messages, num_frames=FRAMES, max_new_tokens=8)
        answers.append((answer.token_ids, [len(video.frames) for video in answer.videos]))
    return answers


@pytest.mark.thorough
def test_drafts_read_mixed_prompts(pool, files):
    """No choice of visual tokens changes an answer, where frames have different numbers of them."""
    ways = [
        speculative_config(strategy="specvlm", keep=keep, keep_ratio=0.4)
        for keep in ("hippo", "specvlm")
    ]
    ways.append(speculative_config(strategy="tabed", ensemble="MTP"))
    (plain, *others), *_ = pool.run(
        3, answers_job, "qwen2_5_vl", chat("everything", files), [None, *ways]
    )
    assert plain[1] == [FRAMES] * 3 and len(plain[0]) == 8
    assert all(tokens == plain[0] for tokens, _ in others)


def failing_job(hosts: HostGroup, messages: list[dict]):
    """How a request fails, and whether the group answers the next."""
    engine = Engine(families.build_model("qwen2_vl"), families.build_processor("qwen2_vl"), hosts)
    try:
        engine.prefill(messages=messages, num_frames=FRAMES)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    return failure, engine.prefill("still there?").num_tokens


def different_files_job(hosts: HostGroup, given: list[dict]):
    """How a request fails that names other files on every host."""
    engine = Engine(families.build_model("qwen2_vl"), families.build_processor("qwen2_vl"), hosts)
    try:
        engine.prefill("a?", **given[hosts.rank])
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_files_that_differ_between_hosts_are_refused(pool, files, tmp_path):
    """The images have the same height and width, so that the prompt is the same."""
    paths = [str(tmp_path / name) for name in ("a.png", "b.png")]
    Image.new("RGB", (60, 60)).save(paths[0])
    families.synthetic_image(60, 60).save(paths[1])
    images = [{"images": [path]} for path in paths]
    videos = [{"video": files.videos[:n]} for n in (1, 0)]
    for given in (images, videos):
        for failure in pool.run(2, different_files_job, given):
            assert failure.startswith(
                "HostError: the number of videos, or an image file, of host 1 differs"
            )


@pytest.mark.parametrize("how", ["cut short", "missing video"])
def test_what_cannot_be_read_is_one_error_on_every_host(pool, files, tmp_path, how):
    """Also where only one host decodes it."""
    spoilt = tmp_path / ("spoilt.mp4" if how == "missing video" else "spoilt.png")
    if how == "cut short":
        data = Path(files.images[1]).read_bytes()
        spoilt.write_bytes(data[: len(data) // 2])
    kind = "video" if how == "missing video" else "image"
    messages = chat("everything", files)
    places = [place for place, part in enumerate(messages[0]["content"]) if part["type"] == kind]
    messages[0]["content"][places[-1]] = {"type": kind, kind: str(spoilt)}
    results = pool.run(3, failing_job, messages)
    assert all(spoilt.name in failure and num_tokens for failure, num_tokens in results), results
    own = "VideoError" if kind == "video" else "PromptError"
    assert sum(failure.startswith(own) for failure, _ in results) >= 1
    assert all(failure.startswith((own, "HostError: host ")) for failure, _ in results)
