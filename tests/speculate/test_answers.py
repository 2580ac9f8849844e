"""Every way to draft, through the engine: the answer of decoding without one, from what the draft
should see."""

import json
import runpy
from functools import partial

import pytest

from apbv import Engine, HostGroup, PrefillConfig, SamplingParams
from apbv.config import KEEP_POLICIES
from apbv.errors import InvalidConfigError
from apbv.prefilling.reduction.choosing import keep_even
from apbv.request.request import Question, Request, RequestSettings
from apbv.stats import StageTimer

from apbv_tests import families
from apbv_tests.configs import speculative_config
from apbv_tests.engines import CAPTION, QUESTION, build_engine
from apbv_tests.fresh_hosts import described
from apbv_tests.scripts import INFER, infer

STEPS = 7
SAMPLED = {"temperature": 1.0, "top_p": 0.95, "seed": 5}
PENALISED = SamplingParams(max_new_tokens=STEPS, repetition_penalty=1.6, presence_penalty=0.2)


def caption(prompt) -> str:
    """A captioner; it sees the source and the question."""
    assert prompt.videos or prompt.pictures
    assert QUESTION in prompt.text
    return CAPTION


def answers_job(
    hosts: HostGroup, family: str, kv: str, ways: list, request: dict, draft_seed: int = 1
):
    if "sampling" not in request:
        request = {"max_new_tokens": STEPS, **request}
    answers = []
    for way in ways:
        speculate = None
        if way is not None:
            settings = {"keep_losing_draft": True, **way}
            speculate = speculative_config(**settings)
        engine = build_engine(hosts, family, kv, speculate, draft_seed, caption)
        answer = engine.generate(QUESTION, **request)
        answers.append((answer.token_ids, answer.stats["speculation"]))
    return answers


def on_one_host(clip, way: dict | None, draft_seed: int = 1, **request):
    request = {"video": str(clip), "num_frames": 12, **request}
    return answers_job(HostGroup.single(), "qwen2_5_vl", "gathered", [way], request, draft_seed)[0]


# ---- no way changes an answer ----


HIPPO = {"strategy": "hippo", "keep_ratio": 0.3}
SEEN = [{"strategy": "specvlm", "keep": keep, "keep_ratio": 0.3} for keep in KEEP_POLICIES]
SEEN += [{**HIPPO, "prune": "kv"}, {**HIPPO, "num_draft_tokens": "auto"}]
SEEN += [{**HIPPO, "hippo_terms": (term,), "prune": "kv"} for term in ("time", "attention")]
SEEN += [{**HIPPO, "num_tree_nodes": 12}, {"strategy": "ngram"}]
SEEN += [
    {"strategy": "tabed", "ensemble": "MTCP*", "keep": "full"},
    {"strategy": "std", "num_tree_nodes": 12},
]
SEEN += [
    {"strategy": "streaming", "keep_ratio": 0.3},
    {"strategy": "layerskip", "num_tree_nodes": 12},
]
SHARED = [{"strategy": name} for name in ("hippo", "parallelvlm")]
SHARED += [{"strategy": "std", "num_tree_nodes": nodes} for nodes in (None, 12)]
SHARED += [
    {"strategy": "layerskip", "layer_ratio": 0.3},
    {"strategy": "streaming", "num_tree_nodes": 12},
]
SHARED += [{"strategy": "tabed", "ensemble": "MTCP*", "keep": "hippo", "keep_ratio": 0.3}]
CHAINS = [{"strategy": name} for name in ("vanilla", "hippo", "parallelvlm", "std", "ngram")]
CHAINS += [
    {"strategy": "specvlm", "keep_ratio": 0.3, "prune": "kv"},
    {"strategy": "streaming", "keep_ratio": 0.3},
    {"strategy": "layerskip", "layer_ratio": 0.3},
]
OF_TEXT = [{"strategy": name} for name in ("specvlm", "std", "tabed", "layerskip", "streaming")]
CASES = {
    "one host": ("qwen2_5_vl", 1, "gathered", SEEN, "video"),
    "shares": ("qwen2_5_vl", 2, "sharded", SHARED, "video"),
    # What differs between families is how the draft's prompt is put together.
    "deep features": ("qwen3_vl", 2, "sharded", SHARED[:1], "video"),
    "drawn": ("qwen2_5_vl", 2, "gathered", [{"strategy": "sd_tree"}], "drawn"),
    "penalised": ("qwen2_5_vl", 2, "gathered", [*SEEN[-3:], *SHARED[:3]], "penalised"),
    "a text": ("llama", 2, "sharded", OF_TEXT, "text"),
    "too short to be split": ("llama", 2, "gathered", OF_TEXT[1:], "nothing"),
    "an image": ("qwen2_5_vl", 2, "gathered", OF_TEXT, "image"),
    "a hybrid": ("qwen3_5", 1, "gathered", CHAINS, "video"),
    "a hybrid's shares": ("qwen3_5", 2, "sharded", CHAINS, "video"),
    "a hybrid with experts": ("qwen3_5_moe", 3, "gathered", CHAINS[:4], "penalised"),
    "a hybrid's text": ("qwen3_next", 2, "gathered", CHAINS[:5], "text"),
}


def request_of(kind: str, clip) -> dict:
    video = {"video": str(clip), "num_frames": 12}
    return {
        "video": video,
        "drawn": {**video, **SAMPLED},
        "penalised": {**video, "sampling": PENALISED},
        "text": {"context": "one two three four five six seven eight nine ten " * 3},
        "image": {"images": [families.synthetic_image()]},
        "nothing": {},
    }[kind]


@pytest.mark.parametrize("case", CASES)
def test_no_way_to_draft_changes_an_answer(pool, clip, case):
    family, num_hosts, kv, ways, kind = CASES[case]
    request = request_of(kind, clip)
    for host, (plain, *answers) in enumerate(
        pool.run(num_hosts, answers_job, family, kv, [None, *ways], request)
    ):
        assert len(set(plain[0])) > 3
        for way, (tokens, figures) in zip(ways, answers, strict=True):
            assert tokens == plain[0], f"host {host}: {way}"
            settings = speculative_config(**{"keep_losing_draft": True, **way}).shared
            del settings["num_tree_nodes"]  # that of the tree that was drafted
            assert settings.items() <= figures.items()
            assert figures["num_target_forwards"] >= 1
            assert kind != "drawn" or figures["num_tree_nodes"] == 25


ALL = {"keep_ratio": 1.0}
SEES_ALL = [{"strategy": "vanilla"}, {"strategy": "std", **ALL}]
SEES_ALL += [
    {"strategy": "specvlm", "keep": "even", **ALL},
    {"strategy": "specvlm", "prune": "kv", **ALL},
]
SEES_ALL += [{"strategy": name, "num_tree_nodes": 25, **ALL} for name in ("specvlm", "std")]
SEES_ALL += [{"strategy": "streaming", **ALL}, {"strategy": "layerskip", "layer_ratio": 1.0}]
SEES_ALL += [{"strategy": "tabed", "ensemble": "M"}]


def test_a_draft_that_is_the_target_and_sees_all_is_always_right(pool, clip):
    """The target itself drafts, with the seed it is built with: so its prompt, positions and KV
    must be right."""
    request = {"video": str(clip), "num_frames": 12}
    for answers in pool.run(2, answers_job, "qwen3_vl", "sharded", SEES_ALL, request, 0):
        for way, (_, figures) in zip(SEES_ALL, answers, strict=True):
            assert figures["num_target_forwards"] == 1, way  # 6 tokens at once
            assert figures["num_tree_nodes"] or figures["num_accepted"] == figures["num_drafted"]
    penalised = {**request, "sampling": PENALISED}
    for answers in pool.run(
        2, answers_job, "qwen3_vl", "sharded", SEES_ALL[:1] + SEES_ALL[-3:-1], penalised, 0
    ):
        assert [figures["num_target_forwards"] for _, figures in answers] == [1] * 3
    sampled = {**request, "temperature": 1.0, "top_p": 0.9, "seed": 3}
    for ((_, figures),) in pool.run(
        2, answers_job, "qwen3_vl", "sharded", SEES_ALL[:1], sampled, 0
    ):
        assert figures["acceptance_rate"] == 1.0


def test_a_draft_model_that_the_strategy_has_no_use_for_is_ignored(clip):
    """Also in a batch, where the target drafts itself with all of its KV, so that it is always
    right."""
    model = families.build_model("qwen2_5_vl")
    draft = families.build_model("qwen2_5_vl", layers=1)
    way = speculative_config(strategy="std", keep_losing_draft=True, **ALL)
    engine = Engine(
        model, families.build_processor("qwen2_5_vl"), HostGroup.single(), None, None, way, draft
    )
    asked = {"prompt": QUESTION, "video": str(clip), "num_frames": 12}
    ((_, answer),) = engine.generate_all([asked], sampling=SamplingParams(max_new_tokens=STEPS))
    figures = answer.stats["speculation"]
    assert figures["num_accepted"] == figures["num_drafted"] > 0


def test_a_context_that_is_always_right_takes_over(pool, clip):
    """The target itself drafts; one context is its own prompt. Only the first block can be wrong.

    Where tokens are drawn, one more may be: the contexts are a batch to the draft, which rounds
    otherwise.
    """
    request = {"video": str(clip), "num_frames": 12, "max_new_tokens": 18}
    for sampled, most, kv in (({}, 2, "gathered"), ({**SAMPLED, "temperature": 0.9}, 1, "sharded")):
        ways = [{"strategy": "tabed", "ensemble": "MT*", "keep": "full", "num_draft_tokens": most}]
        ((tokens, figures),), _ = pool.run(
            2, answers_job, "qwen2_5_vl", kv, ways, {**request, **sampled}, 0
        )
        assert len(tokens) == 18 and figures["num_drafted"] - figures["num_accepted"] <= 2


# ---- what the draft sees ----


def test_the_draft_sees_what_was_asked_for(clip):
    """Of 6 frames of 2 x 3 visual tokens; "specvlm" is what the strategy of that name means by
    itself."""
    kept = {}
    for keep, ratio in (
        ("attention", 1 / 36),
        ("attention", 0.8),
        (None, 0.8),
        ("specvlm", 0.8),
        ("even", 0.8),
    ):
        hosts = HostGroup.single()
        config = speculative_config(strategy="specvlm", keep=keep, keep_ratio=ratio)
        engine = build_engine(hosts, "qwen2_5_vl", "gathered", config, 1)
        asked = Question(QUESTION, str(clip), num_frames=12)
        draft = engine.begin(
            Request(
                asked,
                StageTimer(hosts),
                RequestSettings(sampling=SamplingParams(max_new_tokens=2)),
            )
        ).draft
        kept[keep, ratio] = set(draft.kept.tolist())
        assert len(kept[keep, ratio]) == round(36 * ratio)
    assert kept["even", 0.8] == set(keep_even(36, 29).tolist())
    assert (
        kept[None, 0.8] == kept["specvlm", 0.8] not in (kept["attention", 0.8], kept["even", 0.8])
    )
    assert kept["attention", 1 / 36] <= kept["specvlm", 0.8] & kept["attention", 0.8]


def test_a_number_of_tokens_is_text_and_what_fits_of_the_video(clip):
    """STD's K + m_t; never less than one visual token, and never more than there are."""
    num_text = 0
    for beyond_text, expected in ((1, 1), (6, 6), (10_000, 36)):
        way = speculative_config(
            strategy="std", keep_tokens=num_text + beyond_text, keep_losing_draft=True
        )
        engine = build_engine(HostGroup.single(), "qwen2_5_vl", "gathered", way)
        stats = engine.generate(QUESTION, video=str(clip), num_frames=12, max_new_tokens=2).stats
        num_text = stats["num_input_tokens"] - stats["num_video_tokens"]
        assert num_text > 6 and stats["speculation"]["num_visual_tokens_drafted_from"] == expected


def test_the_command_line_speculates(clip, tmp_path):
    folder = families.save_checkpoint("qwen2_5_vl", tmp_path / "target")
    figures = tmp_path / "figures.jsonl"
    draft = families.save_checkpoint("qwen2_5_vl", tmp_path / "draft", seed=1)
    options = [
        "--model",
        folder,
        "--video",
        clip,
        "--frames",
        12,
        "--prompt",
        QUESTION,
        "--max-new-tokens",
        9,
    ]
    options += [
        "--speculate",
        "specvlm",
        "--draft-model",
        draft,
        "--keep",
        "hippo",
        "--num-draft-tokens",
        3,
    ]
    options += ["--keep-tokens", 40, "--num-tree-nodes", 8, "--keep-losing-draft"]
    result = infer(*options, "--json", figures, hosts=1)
    assert result.returncode == 0, result.stderr
    plain = Engine.from_pretrained(folder, hosts=HostGroup.single())
    record = json.loads(figures.read_text())
    assert (
        record["token_ids"]
        == plain.generate(QUESTION, video=clip, num_frames=12, max_new_tokens=9).token_ids
    )
    wanted = {"num_draft_tokens": 3, "keep": "hippo", "keep_tokens": 40, "num_tree_nodes": 8}
    assert wanted.items() <= record["speculation"].items()
    assert record["speculation"]["num_drafted"] > 0


# ---- captions ----


def errors_job(hosts: HostGroup, path: str) -> list[str]:
    speculate = speculative_config(strategy="tabed", ensemble="MTCP*")
    captioners = (lambda prompt: 1 / 0, lambda prompt: " \n")
    engines = [
        build_engine(hosts, "qwen2_5_vl", "gathered", speculate, 1, captioner)
        for captioner in captioners
    ]
    return [
        described(partial(engine.generate, QUESTION, video=path, num_frames=6))
        for engine in engines
    ]


def test_a_captioner_that_fails_is_one_clear_error_everywhere(pool, clip):
    for failed, blank in pool.run(2, errors_job, str(clip)):
        assert "the captioner failed: ZeroDivisionError" in failed
        assert "the captioner returned ' \\n' instead of a caption" in blank


# ---- what cannot work ----

REFUSED = [
    ({"concurrent_prefill": False}, None, "without a draft host the draft always prefills after"),
    ({"draft_host": True}, "qwen2_5_vl", "at least two hosts"),
    ({"strategy": "std", "keep": "random"}, None, "keep does not apply"),
    ({"hippo_terms": ("time", "weight")}, None, "hippo terms must be some of"),
    ({"strategy": "tabed", "prune": "kv"}, None, "prune='kv' does not apply"),
    (
        {"strategy": "tabed", "ensemble": "MM"},
        None,
        "tabed ensemble must be different letters",
    ),
    (
        {"strategy": "tabed", "ensemble": "MTCP*"},
        "qwen2_5_vl",
        "from a caption: it needs a captioner",
    ),
    (
        {"strategy": "tabed", "draft_host": True},
        "qwen2_5_vl",
        "tabed learns from every verification",
    ),
    (
        {"strategy": "sd_tree", "draft_host": True},
        "qwen2_5_vl",
        "a draft host drafts a chain of tokens",
    ),
    (
        {"strategy": "ngram", "num_tree_nodes": 8},
        None,
        "ngram drafts a chain of tokens: it cannot draft a tree",
    ),
    ({"num_tree_nodes": 0}, None, "num_tree_nodes must be an integer in 1 .. 256, not 0"),
    ({"strategy": "vanilla"}, None, "needs a draft model"),
    ({"strategy": "vanilla"}, "qwen3_vl", "it reads qwen3_vl"),
    ({"keep_ratio": 0.1, "keep_tokens": 64}, None, "give one of them"),
]


def test_a_host_that_runs_the_target_needs_it():
    draft = families.build_model("qwen2_5_vl")
    for speculate in (None, speculative_config(strategy="vanilla")):
        with pytest.raises(InvalidConfigError, match="only a draft host goes without one"):
            Engine(
                None,
                families.build_processor("qwen2_5_vl"),
                HostGroup.single(),
                speculate=speculate,
                draft=draft,
            )


def draft_host_without_model_job(hosts: HostGroup) -> str:
    model = families.build_model("qwen2_5_vl")
    processor = families.build_processor("qwen2_5_vl")
    speculate = speculative_config(strategy="vanilla", draft_host=True)
    with pytest.raises(InvalidConfigError) as caught:
        Engine(model, processor, hosts, speculate=speculate)
    return str(caught.value)


def test_a_draft_host_needs_a_draft(pool):
    for message in pool.run(2, draft_host_without_model_job):
        assert "give the draft host a draft model" in message


def test_what_cannot_work_is_refused(capsys):
    parts = (
        families.build_model("qwen2_5_vl"),
        families.build_processor("qwen2_5_vl"),
        HostGroup.single(),
    )
    for settings, draft_family, message in REFUSED:
        draft = None
        if draft_family is not None:
            draft = families.build_model(draft_family)
        with pytest.raises(ValueError, match=message):
            Engine(*parts, PrefillConfig(), speculate=speculative_config(**settings), draft=draft)
    engine = build_engine(
        HostGroup.single(), "qwen2_5_vl", "gathered", speculative_config(keep="hippo"), 1
    )
    with pytest.raises(ValueError, match="the prompt has no video"):
        engine.generate(QUESTION, images=[families.synthetic_image()])
    main = runpy.run_path(str(INFER))["main"]
    tabed = ["tabed", "--ensemble", "MTCP", "--captioner", "no.such:caption"]
    assert main(["--model", "demo", "--speculate", *tabed]) == 78
    assert "cannot load no.such:caption" in capsys.readouterr().err
