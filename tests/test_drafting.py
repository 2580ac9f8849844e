"""Every way to draft, through the engine: the answer of decoding without one."""

import pytest
import torch
from test_engine import QUESTION, clip  # noqa: F401  (a fixture)

from apbv import Engine, HostGroup, PrefillConfig, SpeculativeConfig, demo
from apbv.speculate import STRATEGIES
from apbv.speculate.drafters import NgramDrafter

import families

STEPS = 24


def build_engine(hosts: HostGroup, family: str, kv: str, speculate: SpeculativeConfig | None, draft_seed: int):
    model = families.build_model(family, dtype=torch.float64)
    draft = None
    if speculate and STRATEGIES[speculate.strategy].needs_draft_model:
        draft = families.build_model(family, dtype=torch.float64, seed=draft_seed)
    processor = families.build_processor(family)
    return Engine(model, processor, hosts, PrefillConfig(kv=kv), speculate=speculate, draft=draft)


def answers_job(hosts: HostGroup, family: str, kv: str, ways: list, request: dict, draft_seed: int):
    answers = []
    for way in ways:
        speculate = None if way is None else SpeculativeConfig(**way)
        engine = build_engine(hosts, family, kv, speculate, draft_seed)
        answer = engine.generate(QUESTION, max_new_tokens=STEPS, **request)
        answers.append((answer.token_ids, answer.stats["speculation"]))
    return answers


def ways(kv: str) -> list[dict]:
    """Every strategy, and every way to choose what its draft sees."""
    found = [{"strategy": name} for name, s in STRATEGIES.items() if kv == "gathered" or not s.needs_gathered_kv]
    keeps = ("hippo", "uv_prune", "random", "uniform_frames", "full")
    return found + [{"strategy": "specvlm", "keep": keep, "keep_ratio": 0.3} for keep in keeps]


@pytest.mark.parametrize("kv", ["gathered", "sharded"])
@pytest.mark.parametrize("num_hosts", [1, 2, 3])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "llava_onevision"])
def test_no_way_to_draft_changes_an_answer(pool, clip, family, num_hosts, kv):  # noqa: F811
    request = {"video": str(clip), "num_frames": 12}
    for host, answers in enumerate(pool.run(num_hosts, answers_job, family, kv, [None, *ways(kv)], request, 1)):
        plain = answers[0][0]
        assert len(set(plain)) > 3
        for way, (tokens, figures) in zip(ways(kv), answers[1:], strict=True):
            assert tokens == plain, f"host {host}: {way}"
            assert figures["strategy"] == way["strategy"] and figures["num_target_forwards"] >= 1


SEES_ALL = [
    {"strategy": "vanilla"},
    {"strategy": "specvlm", "keep": "hippo", "keep_ratio": 1.0},
    {"strategy": "specvlm", "keep": "attention", "keep_ratio": 1.0},
    {"strategy": "std", "keep_ratio": 1.0},
    {"strategy": "streaming", "keep_ratio": 1.0},
    {"strategy": "layerskip", "layer_ratio": 1.0},
]


@pytest.mark.parametrize("num_hosts", [1, 3])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl", "qwen3_vl"])
def test_a_draft_that_is_the_target_and_sees_all_is_always_right(pool, clip, family, num_hosts):  # noqa: F811
    """The target itself drafts, with the seed it is built with: so its prompt, positions and KV must be right."""
    request = {"video": str(clip), "num_frames": 12, "temperature": 0.0}
    for answers in pool.run(num_hosts, answers_job, family, "gathered", SEES_ALL, request, 0):
        for way, (_, figures) in zip(SEES_ALL, answers, strict=True):
            assert figures["num_accepted"] == figures["num_drafted"] > 0, way
            assert figures["num_target_forwards"] == 4  # 23 tokens, up to 6 at once


def test_sampling_with_an_equal_draft_accepts_everything(pool, clip):  # noqa: F811
    request = {"video": str(clip), "num_frames": 12, "temperature": 1.0, "top_p": 0.9, "seed": 3}
    for answers in pool.run(2, answers_job, "qwen2_5_vl", "gathered", SEES_ALL[:1], request, 0):
        assert answers[0][1]["acceptance_rate"] == 1.0


def test_text_and_images(pool):
    context = "one two three four five six seven eight nine ten " * 3
    texts = [None, {"strategy": "vanilla"}, {"strategy": "specvlm"}, {"strategy": "std"}, {"strategy": "ngram"}]
    for answers in pool.run(2, answers_job, "llama", "gathered", texts, {"context": context}, 1):
        assert all(tokens == answers[0][0] for tokens, _ in answers)
    images = {"images": [families.synthetic_image()]}
    for answers in pool.run(2, answers_job, "qwen2_5_vl", "gathered", texts, images, 1):
        assert all(tokens == answers[0][0] for tokens, _ in answers)


def test_the_demo_pair_drafts_most_of_a_description():
    speculate = SpeculativeConfig(strategy="vanilla")
    engine = Engine.from_pretrained("demo", speculate=speculate, dtype="float32")
    video = {"video": demo.video_path(), "num_frames": 2048}
    answer = engine.generate("describe the clip shot by shot", **video, max_new_tokens=60)
    plain = Engine.from_pretrained("demo", dtype="float32")
    assert (
        answer.token_ids == plain.generate("describe the clip shot by shot", **video, max_new_tokens=60).token_ids
    )
    assert answer.stats["speculation"]["tokens_per_target_forward"] > 3
    assert answer.stats["stages_ms"]["draft"] > 0


def test_lookup_takes_the_latest_longest_match():
    drafter = NgramDrafter([5, 6, 7, 8, 5, 6, 9])
    assert drafter.propose([1, 5, 6], 3).tokens == [9, 1, 5]
    assert drafter.propose([6, 7], 2).tokens == [8, 5]
    assert drafter.propose([4], 2).tokens == []


@pytest.mark.parametrize(
    ("settings", "kv", "draft", "message"),
    [
        ({"strategy": "magic"}, "gathered", None, "unknown strategy 'magic'"),
        ({"strategy": "std"}, "sharded", None, "needs kv='gathered'"),
        ({"strategy": "vanilla"}, "gathered", None, "needs a draft model"),
        ({"strategy": "vanilla"}, "gathered", "qwen3_vl", "does not read the prompts of this qwen2_5_vl model"),
        ({"keep": "best"}, "gathered", None, "keep must be one of"),
        ({"keep_ratio": 0}, "gathered", None, "keep_ratio must lie in"),
        ({"num_draft_tokens": 0}, "gathered", None, "num_draft_tokens must lie in"),
    ],
)
def test_what_cannot_work_is_refused(settings, kv, draft, message):
    with pytest.raises(ValueError, match=message):
        Engine(
            families.build_model("qwen2_5_vl"),
            families.build_processor("qwen2_5_vl"),
            HostGroup.single(),
            PrefillConfig(kv=kv),
            speculate=SpeculativeConfig(**settings),
            draft=draft and families.build_model(draft),
        )


def test_frames_of_an_image_cannot_be_kept():
    engine = build_engine(HostGroup.single(), "qwen2_5_vl", "gathered", SpeculativeConfig(keep="hippo"), 1)
    with pytest.raises(ValueError, match="the prompt has no video"):
        engine.generate(QUESTION, images=[families.synthetic_image()])
