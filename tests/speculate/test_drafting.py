"""Every way to draft, through the engine: the answer of decoding without one."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from apbv import Engine, HostGroup, PrefillConfig, SpeculativeConfig, demo
from apbv.config import KEEP_POLICIES, SamplingConfig
from apbv.model.parts import inspect_model
from apbv.prefilling.reduction.choosing import keep_even
from apbv.speculate import STRATEGIES
from apbv.speculate.drafters import ModelDrafter, NgramDrafter
from apbv.speculate.picture import draw_kept

import families
from answers import decoder_behind
from engines import QUESTION, build_engine
from scripts import infer

STEPS = 24


def answers_job(hosts: HostGroup, family: str, kv: str, ways: list, request: dict, draft_seed: int):
    answers = []
    for way in ways:
        speculate = None if way is None else SpeculativeConfig(**way)
        engine = build_engine(hosts, family, kv, speculate, draft_seed)
        answer = engine.generate(QUESTION, max_new_tokens=STEPS, **request)
        answers.append((answer.token_ids, answer.stats["speculation"]))
    return answers


def ways(num_hosts: int) -> list[dict]:
    """Every strategy, and every way to choose what its draft sees."""
    found = [{"strategy": name} for name, way in STRATEGIES.items() if num_hosts > 1 or not way.needs_passing]
    found += [{"strategy": "hippo", "hippo_terms": (term,), "prune": "kv"} for term in ("time", "attention")]
    found += [{"strategy": "specvlm", "keep": keep, "keep_ratio": 0.3} for keep in KEEP_POLICIES]
    return [{**way, "num_draft_tokens": "auto" if number % 3 == 0 else 5} for number, way in enumerate(found)]


EVERY, FIRST_HALF, SECOND_HALF = slice(None), slice(0, None, 2), slice(1, None, 2)


@pytest.mark.parametrize(
    ("family", "num_hosts", "kv", "share"),
    [
        ("qwen2_5_vl", 1, "gathered", FIRST_HALF),
        ("qwen2_5_vl", 2, "sharded", SECOND_HALF),
        ("qwen3_vl", 2, "sharded", EVERY),
        ("internvl", 3, "gathered", EVERY),
        *(
            pytest.param("qwen2_5_vl", hosts, kv, EVERY, marks=pytest.mark.exhaustive)
            for hosts in (1, 2, 3)
            for kv in ("gathered", "sharded")
        ),
    ],
    ids=str,
)
def test_no_way_to_draft_changes_an_answer(pool, clip, family, num_hosts, kv, share):
    """Two cases share out the ways between them."""
    request = {"video": str(clip), "num_frames": 12}
    # What differs between families is how the draft's prompt is put together.
    asked = [way for way in ways(num_hosts) if family == "qwen2_5_vl" or way.get("keep") in ("hippo", "uv_prune")]
    asked = asked[share]
    for host, answers in enumerate(pool.run(num_hosts, answers_job, family, kv, [None, *asked], request, 1)):
        plain = answers[0][0]
        assert len(set(plain)) > 3
        for way, (tokens, figures) in zip(asked, answers[1:], strict=True):
            assert tokens == plain, f"host {host}: {way}"
            assert figures["strategy"] == way["strategy"] and figures["num_target_forwards"] >= 1


SEES_ALL = [
    {"strategy": "vanilla"},
    {"strategy": "specvlm", "keep": "hippo", "keep_ratio": 1.0},
    {"strategy": "specvlm", "keep": "attention", "keep_ratio": 1.0},
    {"strategy": "specvlm", "prune": "kv", "keep_ratio": 1.0},
    {"strategy": "specvlm", "keep": "attention_per_frame", "keep_ratio": 1.0},
    {"strategy": "specvlm", "keep": "even", "keep_ratio": 1.0},
    {"strategy": "std", "keep_ratio": 1.0},
    {"strategy": "streaming", "keep_ratio": 1.0},
    {"strategy": "layerskip", "layer_ratio": 1.0},
]
SEES_ALL = [{**way, "keep_losing_draft": True} for way in SEES_ALL]  # so that time decides nothing


@pytest.mark.parametrize(
    ("family", "num_hosts", "kv"),
    [
        pytest.param("qwen2_5_vl", 1, "gathered", marks=pytest.mark.thorough),
        pytest.param("qwen2_5_vl", 3, "sharded", marks=pytest.mark.thorough),
        ("internvl", 2, "gathered"),
        ("qwen3_vl", 2, "sharded"),
    ],
)
def test_a_draft_that_is_the_target_and_sees_all_is_always_right(pool, clip, family, num_hosts, kv):
    """The target itself drafts, with the seed it is built with: so its prompt, positions and KV must be right."""
    request = {"video": str(clip), "num_frames": 12, "temperature": 0.0}
    for answers in pool.run(num_hosts, answers_job, family, kv, SEES_ALL, request, 0):
        for way, (_, figures) in zip(SEES_ALL, answers, strict=True):
            assert figures["num_accepted"] == figures["num_drafted"] > 0, way
            assert figures["num_target_forwards"] == 4  # 23 tokens, up to 6 at once


def test_sampling_with_an_equal_draft_accepts_everything(pool, clip):
    request = {"video": str(clip), "num_frames": 12, "temperature": 1.0, "top_p": 0.9, "seed": 3}
    for answers in pool.run(2, answers_job, "qwen2_5_vl", "gathered", SEES_ALL[:1], request, 0):
        assert answers[0][1]["acceptance_rate"] == 1.0


@pytest.mark.parametrize("kv", ["gathered", "sharded"])
@pytest.mark.thorough
def test_text_and_images(pool, kv):
    context = "one two three four five six seven eight nine ten " * 3
    names = ("vanilla", "specvlm", "std", "std_apbv", "layerskip", "ngram")
    texts = [None, *({"strategy": name} for name in names)]
    for answers in pool.run(2, answers_job, "llama", kv, texts, {"context": context}, 1):
        assert all(tokens == answers[0][0] for tokens, _ in answers)
    # Too short to be split: host 0 has all of the KV.
    for answers in pool.run(2, answers_job, "llama", kv, texts, {}, 1):
        assert all(tokens == answers[0][0] for tokens, _ in answers)
    images = {"images": [families.synthetic_image()]}
    for answers in pool.run(2, answers_job, "qwen2_5_vl", kv, texts, images, 1):
        assert all(tokens == answers[0][0] for tokens, _ in answers)


def test_the_demo_pair_drafts_most_of_a_description():
    speculate = SpeculativeConfig(strategy="vanilla", keep_losing_draft=True)
    engine = Engine.from_pretrained("demo", speculate=speculate, dtype="float32")
    video = {"video": demo.video_path(), "num_frames": 2048}
    answer = engine.generate("describe the clip shot by shot", **video, max_new_tokens=60)
    plain = Engine.from_pretrained("demo", dtype="float32")
    assert (
        answer.token_ids == plain.generate("describe the clip shot by shot", **video, max_new_tokens=60).token_ids
    )
    assert answer.stats["speculation"]["tokens_per_target_forward"] > 3
    assert answer.stats["stages_ms"]["draft"] > 0


def test_the_picture_of_what_the_draft_saw(tmp_path):
    """Each frame under its number; small ones are enlarged, here four times; and what it means, below."""
    frames = np.full((3, 16, 24, 3), (200, 100, 0), dtype=np.uint8)
    kept = np.zeros((3, 2, 3), dtype=bool)
    kept[1, 0, 2] = True
    pixels = np.asarray(draw_kept(frames, kept, [0, 7, 15], columns=2))
    lit = np.argwhere((pixels == (200, 100, 0)).all(axis=-1))
    top, left = 16, 96 + 6  # the second frame: under its caption, behind the gap
    assert lit.min(axis=0).tolist() == [top, left + 64]
    assert lit.max(axis=0).tolist() == [top + 31, left + 95] and len(lit) == 32 * 32
    dark = (pixels == (50, 25, 0)).all(axis=-1)
    assert dark.sum() == 3 * 64 * 96 - len(lit)
    # Of the second row the caption is written on, of its second place nothing; the legend fills the lines below.
    below = 2 * (16 + 64 + 6)
    assert (pixels[:16, :96] < 128).any() and (pixels[below // 2 : below // 2 + 16, :96] < 128).any()
    assert (pixels[below // 2 : below, left:] == 255).all()
    assert pixels.shape[1] == 2 * 96 + 6 and (pixels.shape[0] - below) % 16 == 0
    assert (pixels[below:] < 128).any()


def test_the_command_line_speculates_and_draws(clip, tmp_path):
    families.save_checkpoint("qwen2_5_vl", tmp_path / "target")
    families.save_checkpoint("qwen2_5_vl", tmp_path / "draft", seed=1)
    options = ["--model", tmp_path / "target", "--video", clip, "--frames", 12, "--prompt", QUESTION]
    options += ["--max-new-tokens", 9]
    speculating = ["--speculate", "specvlm", "--draft-model", tmp_path / "draft", "--keep", "hippo"]
    speculating += ["--num-draft-tokens", 3, "--keep-tokens", 40, "--save-kept", tmp_path / "kept.png"]
    plain = infer(*options, "--json", tmp_path / "plain.jsonl")
    result = infer(*options, *speculating, "--json", tmp_path / "figures.jsonl")
    assert plain.returncode == 0 and result.returncode == 0, result.stderr
    assert result.stdout == plain.stdout
    figures = json.loads((tmp_path / "figures.jsonl").read_text())
    assert figures["token_ids"] == json.loads((tmp_path / "plain.jsonl").read_text())["token_ids"]
    assert figures["speculation"]["num_draft_tokens"] == 3 and figures["speculation"]["keep"] == "hippo"
    assert figures["speculation"]["keep_tokens"] == 40
    # 12 frames are merged in pairs; six pictures in three columns.
    assert Image.open(tmp_path / "kept.png").width == 3 * 96 + 2 * 6
    wrong = infer(*options, "--speculate", "ngram", "--save-kept", tmp_path / "none.png", hosts=1)
    assert wrong.returncode == 1 and "error (host 0): ngram does not choose the same visual tokens" in wrong.stderr


def test_the_draft_sees_what_was_asked_for(clip):
    """Of 6 frames of 2 x 3 visual tokens; "specvlm" is what the strategy of that name means by itself."""
    kept = {}
    for keep, ratio in (("attention", 1 / 36), ("attention", 0.8), (None, 0.8), ("specvlm", 0.8), ("even", 0.8)):
        speculate = SpeculativeConfig(strategy="specvlm", keep=keep, keep_ratio=ratio)
        engine = build_engine(HostGroup.single(), "qwen2_5_vl", "gathered", speculate, 1)
        answer = engine.generate(QUESTION, video=str(clip), num_frames=12, max_new_tokens=2)
        assert answer.kept.shape == (6, 2, 3)
        kept[keep, ratio] = set(answer.kept.flatten().nonzero().flatten().tolist())
        assert len(kept[keep, ratio]) == round(36 * ratio)
    assert kept["even", 0.8] == set(keep_even(36, 29).tolist())
    assert kept[None, 0.8] == kept["specvlm", 0.8] not in (kept["attention", 0.8], kept["even", 0.8])
    assert kept["attention", 1 / 36] <= kept["specvlm", 0.8] & kept["attention", 0.8]


def test_a_draft_that_guides_itself_sees_what_it_attends_to(clip):
    """With the target as its own draft that is what the target attends to, however it is read."""
    kept = []
    for way in ({"keep": "attention"}, {"keep": "draft_guided"}, {"keep": "draft_guided", "prune": "kv"}):
        speculate = SpeculativeConfig(strategy="specvlm", keep_ratio=0.3, keep_losing_draft=True, **way)
        engine = build_engine(HostGroup.single(), "qwen2_5_vl", "gathered", speculate, 0)
        answer = engine.generate(QUESTION, video=str(clip), num_frames=12, max_new_tokens=3)
        kept.append(answer.kept)
    assert all(torch.equal(other, kept[0]) for other in kept[1:])
    speculate = SpeculativeConfig(strategy="tabed", keep="draft_guided", keep_ratio=0.3)
    engine = build_engine(HostGroup.single(), "qwen2_5_vl", "gathered", speculate, 0)
    answer = engine.generate(QUESTION, video=str(clip), num_frames=12, max_new_tokens=3)
    assert torch.equal(answer.kept, kept[0])


def test_lookup_takes_the_latest_longest_match():
    drafter = NgramDrafter([5, 6, 7, 8, 5, 6, 9])
    assert drafter.propose([1, 5, 6], 3).tokens == [9, 1, 5]
    assert drafter.propose([6, 7], 2).tokens == [8, 5]
    assert drafter.propose([4], 2).tokens == []


@pytest.mark.parametrize(
    ("settings", "kv", "draft", "message"),
    [
        ({"strategy": "magic"}, "gathered", None, "strategy must be one of vanilla, "),
        (
            {"strategy": "text_only", "draft_host": True},
            "gathered",
            "qwen2",
            "the draft does not read the target's",
        ),
        ({"strategy": "std_apbv"}, "sharded", None, "this one passes nothing"),
        ({"strategy": "std", "keep": "random"}, "gathered", None, "keep does not apply"),
        ({"hippo_terms": ("time", "weight")}, "gathered", None, "hippo_terms must be some of"),
        ({"strategy": "tabed", "prune": "kv"}, "gathered", None, "prune='kv' does not apply"),
        ({"prune": "hedge"}, "gathered", None, "prune must be one of"),
        ({"vision_first": True}, "gathered", None, "vision_first needs keep='hippo'"),
        ({"strategy": "vanilla"}, "gathered", None, "needs a draft model"),
        ({"strategy": "vanilla"}, "gathered", "qwen3_vl", "does not read the target's prompts: qwen3_vl"),
        ({"keep": "best"}, "gathered", None, "keep must be one of"),
        ({"keep_ratio": 0}, "gathered", None, "keep_ratio must lie in"),
        ({"keep_tokens": 0}, "gathered", None, "keep_tokens must lie in"),
        ({"keep_ratio": 0.1, "keep_tokens": 64}, "gathered", None, "give one of them"),
        ({"strategy": "vanilla", "keep_tokens": 64}, "gathered", None, "keep_tokens does not apply"),
        ({"strategy": "std_apbv", "keep_tokens": 64}, "gathered", None, "keep_tokens does not apply"),
        ({"num_draft_tokens": 0}, "gathered", None, "num_draft_tokens must lie in 1 .. 256 or be 'auto'"),
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


@pytest.mark.parametrize("keep", ["hippo", "attention_per_frame", "uniform_frames"])
def test_frames_of_an_image_cannot_be_kept(keep):
    engine = build_engine(HostGroup.single(), "qwen2_5_vl", "gathered", SpeculativeConfig(keep=keep), 1)
    with pytest.raises(ValueError, match="the prompt has no video"):
        engine.generate(QUESTION, images=[families.synthetic_image()])


def test_a_draft_says_nothing_that_the_target_cannot_read():
    """And reads what it has no token for as something else, instead of failing."""
    model = families.build_model("llama", dtype=torch.float64)
    parts = inspect_model(model)
    cache = model(input_ids=torch.arange(20)[None]).past_key_values
    drafter = ModelDrafter(parts, cache, 20, 20, SamplingConfig(temperature=1.0), vocab_size=12)
    proposal = drafter.propose([5, parts.vocab_size + 3], 30)
    assert max(proposal.tokens) < 12 and proposal.q.shape == (30, 12)
    assert cache.get_seq_length() == 20 + 2 + 29


@pytest.mark.parametrize("strategy", ["vanilla", "std"])
def test_in_half_precision_every_token_is_the_targets_choice_or_as_good(clip, strategy):
    """In bf16 a window's logits are not those of one token at a time: they differ by the rounding of a forward."""
    family, request = "qwen2_5_vl", {"video": str(clip), "num_frames": 12}
    model, processor = families.build_model(family, dtype=torch.bfloat16), families.build_processor(family)
    draft = families.build_model(family, dtype=torch.bfloat16) if strategy == "vanilla" else None
    speculate = SpeculativeConfig(strategy=strategy, keep_ratio=0.5, keep_losing_draft=True)
    engine = Engine(model, processor, HostGroup.single(), speculate=speculate, draft=draft)
    answer = engine.generate(QUESTION, **request, max_new_tokens=STEPS)
    assert answer.stats["speculation"]["num_accepted"] > 0
    state = engine.prefill(QUESTION, **request)
    decoder = decoder_behind(state, model)
    # Teacher-forced, one token at a time.
    rows = [state.logits[0], *(decoder.advance([token])[-1] for token in answer.token_ids[:-1])]
    for row, token in zip(rows, answer.token_ids, strict=True):
        # Two roundings of the highest logit in either forward: bf16 has 8 bits of precision.
        assert row.max() - row[token] <= 4 * 2**-8 * row.abs().max()
