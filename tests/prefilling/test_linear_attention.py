"""Hybrid models: their linear attention is split over the hosts exactly, whatever their attention
computes."""

import threading

import pytest
import torch
from transformers import DynamicCache

import apbv
from apbv import (
    Engine,
    HostGroup,
    ModelInputs,
    PrefillConfig,
    PrefillResult,
    ReduceConfig,
    ReuseConfig,
    SamplingParams,
    SpeculativeConfig,
)
from apbv.errors import InvalidConfigError, StorageError
from apbv.model.parts import inspect_model
from apbv.prefilling import split_linear_attention
from apbv.testing.simulated import simulate

from apbv_tests import families
from apbv_tests.answers import plain_tokens
from apbv_tests.engines import build_engine
from apbv_tests.oracle import DenseOracle, as_double, oracle_of, run_oracle, with_attention
from apbv_tests.prompts import (
    UNCOMPRESSED,
    batch_of,
    build,
    check_prefill,
    hugging_face,
    hugging_face_on,
    kv_of,
    prefill_job,
    prefilled,
    processed,
    relative_error,
    reset_rope,
    text_batch,
    unwritten_memory_is_nan,
    video_batch,
)

CLOSE = 1e-4  # the rule computes in fp32


def exact_job(hosts: HostGroup, prompts: list, settings: dict, most_tokens: int) -> list:
    """What is made of every prompt, and the states that this host has after it."""
    results = []
    with pytest.MonkeyPatch.context() as patch:
        if (
            threading.current_thread() is threading.main_thread()
        ):  # not a simulated host, of the test's process
            patch.setattr(split_linear_attention, "MOST_TOKENS", most_tokens)
        for family, length, asked in prompts:
            state, result = prefilled(
                hosts, family, batch_of(family, length), asked, settings, torch.float32
            )
            result.states = []
            for tensors in state.kv.states.tensors:
                result.states.append(tuple(tensor.clone() for tensor in tensors))
            results.append(result)
    return results


# Of up to 16 blocks some of 1 to 3 tokens, which a convolution sees beyond; blocks and chunks of
# unequal lengths.
LENGTHS = {1: (40, 300), 2: (19, 301), 3: (29, 160), 4: (31, 151), 8: (27, 190)}
APBV = {"method": "apbv", "passing_len": UNCOMPRESSED, "anchor_len": 8}
EXACT = [(num_hosts, APBV, 37) for num_hosts in LENGTHS] + [
    (3, APBV | {"anchor_len": 0}, 4096),
    (3, APBV | {"zigzag": False, "fused_query": False, "overlap": False}, 11),
    (2, APBV | {"kv": "sharded"}, 4096),
    (3, {"method": "zigzag_ring"}, 37),
    (2, {"method": "ulysses"}, 4096),
    (3, {"method": "full", "kv": "sharded"}, 37),
]


@pytest.mark.parametrize(("num_hosts", "settings", "most_tokens"), EXACT)
def test_what_is_exact_equals_hugging_face(on_hosts, monkeypatch, num_hosts, settings, most_tokens):
    """Logits and KV; and on every host the states after the prompt, as all of them may have to
    decode."""
    monkeypatch.setattr(split_linear_attention, "MOST_TOKENS", most_tokens)
    prompts = [("qwen3_next", length, length - 6) for length in LENGTHS[num_hosts]]
    prompts.append((("qwen3_5", "qwen3_5_moe")[num_hosts % 2], None, None))
    every = on_hosts(num_hosts, exact_job, prompts, settings, most_tokens)
    for (family, length, _), *results in zip(prompts, *every, strict=True):
        expected, cache = hugging_face_on(family, torch.float32, length)
        check_prefill(results, expected, kv_of(cache), CLOSE)
        states = [
            kv
            for kv, layer in zip(kv_of(cache), cache.layers, strict=True)
            if not hasattr(layer, "keys")
        ]
        for result in results:
            for ours, theirs in zip(result.states, states, strict=True):
                assert all(relative_error(*pair) < CLOSE for pair in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("family", "num_hosts", "zigzag"), [("qwen3_next", 2, True), ("qwen3_5", 3, False)]
)
def test_attention_is_compressed_and_linear_attention_is_not(on_hosts, family, num_hosts, zigzag):
    """A dense mask over the whole prompt, which the model's own linear layers read in one piece."""
    batch, asked = (video_batch(family), None) if family == "qwen3_5" else (text_batch(150), 140)
    settings = {"passing_len": 3, "anchor_len": 30, "zigzag": zigzag}
    results = on_hosts(num_hosts, prefill_job, family, batch, asked, settings)
    num_blocks = num_hosts * (2 if zigzag else 1)
    oracle = DenseOracle(max(30, results[0].start), results[0].query_start, num_blocks, 3)
    model = build(family, torch.float64)
    reset_rope(model)
    expected = run_oracle(model, as_double(batch), oracle)
    for result in results:
        assert relative_error(result.logits, expected) < CLOSE
    exact, _ = hugging_face(family, torch.float64, as_double(batch))
    assert relative_error(expected, exact) > 10 * CLOSE  # something was compressed


# Layers of attention among those of the decoder: 1, 3, 5 and 7 of eight, so only the first is an
# early one.
COMPRESSED = {
    "a separate query": {"fused_query": False},
    "APB": {"method": "apb"},
    "early": {"early_passing_len": 8},
    "a schedule": {"passing_weights": (2, 0.5)},
    "early, a separate query": {"passing_len": 0, "early_passing_len": 5, "method": "apb"},
}


def deep_model():
    return families.build_model("qwen3_next", dtype=torch.float64, layers=8)


def deep_job(hosts: HostGroup, batch: dict, query_start: int, settings: dict) -> torch.Tensor:
    model = deep_model()
    inputs = ModelInputs.from_processor(inspect_model(model), batch, hosts, query_start)
    with unwritten_memory_is_nan():
        return apbv.prefill(model, inputs, hosts=hosts, config=PrefillConfig(**settings)).logits


@torch.no_grad()
@pytest.mark.parametrize(
    ("variant", "num_hosts"), [(name, 2 + row % 2) for row, name in enumerate(COMPRESSED)]
)
def test_what_ranks_and_passes_pairs_is_that_of_the_dense_oracle(on_hosts, variant, num_hosts):
    """Also where the query runs on its own after the context, in whose pass it only ranks."""
    settings = {"passing_len": 3, "anchor_len": 11, **COMPRESSED[variant]}
    batch = text_batch(131 + num_hosts)
    results = on_hosts(num_hosts, deep_job, batch, 121, settings)
    model = deep_model()
    oracle = oracle_of(settings, num_hosts, 121, 0)
    expected = run_oracle(model, batch, oracle)
    for logits in results:
        assert relative_error(logits, expected) < CLOSE
    exact = model(**batch).logits[:, -1]
    assert relative_error(expected, exact) > 10 * CLOSE


@torch.no_grad()
def test_a_second_pass_of_the_query_continues_the_states(on_hosts):
    """Star Attention: blocks see the first one and themselves, and the query, which follows,
    everything."""
    batch = text_batch(100)
    asked = 90
    num_hosts = 3
    results = on_hosts(
        num_hosts, prefill_job, "qwen3_next", batch, asked, {"method": "star"}, torch.float32
    )
    model = build("qwen3_next", torch.float32)
    cache = DynamicCache(config=model.config)
    star = DenseOracle(asked // num_hosts, asked, num_hosts - 1, 0)  # without a query in this pass
    star.scores = lambda q, k, block, *_: torch.zeros(len(block))
    with with_attention(model, star):
        model(input_ids=batch["input_ids"][:, :asked], past_key_values=cache)
    expected = model(input_ids=batch["input_ids"][:, asked:], past_key_values=cache).logits[:, -1]
    check_prefill(results, expected, kv_of(cache), CLOSE)
    exact, _ = hugging_face("qwen3_next", torch.float32, batch)
    assert relative_error(expected, exact) > 10 * CLOSE


def answers_job(
    hosts: HostGroup, prompts: list[tuple[int, str]], settings: dict
) -> list[list[int]]:
    model = build("qwen3_5", torch.float32)
    answers = []
    for frames, question in prompts:
        config = PrefillConfig(passing_len=UNCOMPRESSED, **settings)
        state = apbv.prefill(
            model, video_batch("qwen3_5", frames, question), hosts=hosts, config=config
        )
        answers.append(plain_tokens(state, model, SamplingParams(max_new_tokens=6)))
    return answers


QUESTIONS = ("What?", "Who is it?", "a b c d e f", "Why", "1 2 3", "How many are there?")
PROMPTS = list(zip((2, 5, 8, 17, 30) * 3, QUESTIONS * 3, strict=False))


@pytest.mark.parametrize(("num_hosts", "kv"), [(2, "gathered"), (3, "sharded")])
def test_answers_about_videos_are_hugging_faces(pool, num_hosts, kv):
    """Also where a prompt is too short to be split, and host 0 computes it alone."""
    prompts = PROMPTS[num_hosts % 2 :: 2]
    model = build("qwen3_5", torch.float32)
    expected = []
    for prompt in prompts:
        reset_rope(model)
        batch = video_batch("qwen3_5", *prompt)
        output = model.generate(**batch, max_new_tokens=6, min_new_tokens=6)
        expected.append(output[0, batch["input_ids"].shape[1] :].tolist())
    assert len(set(map(tuple, expected))) > len(prompts) // 2
    for answers in pool.run(num_hosts, answers_job, prompts, {"kv": kv}):
        assert answers == expected


def saving_job(hosts: HostGroup, path, family: str) -> list:
    """The answer before, and those of loaded KV, with apbv's loop and with transformers'."""
    model = build(family, torch.float32)
    batch = text_batch(120)
    state = apbv.prefill(model, batch, hosts=hosts, config=PrefillConfig(kv="sharded"))
    before = plain_tokens(state, model, SamplingParams(max_new_tokens=6))
    state.save(path)
    after = []
    for kv in ("gathered", "sharded", "gathered"):
        loaded = apbv.load(path, model, hosts=hosts, kv=kv)
        after.append(plain_tokens(loaded, model, SamplingParams(max_new_tokens=6)))
    inputs = loaded.generate_inputs()
    if inputs:
        output = model.generate(**inputs, max_new_tokens=6, min_new_tokens=6)
        after.append(output[0, loaded.num_tokens :].tolist())
    return before, after


@pytest.mark.shows("KV on disk")
@pytest.mark.parametrize("family", families.HYBRID_FAMILIES)
def test_an_answer_continues_from_saved_states(pool, tmp_path, family):
    for host, (before, after) in enumerate(pool.run(2, saving_job, tmp_path / "kv", family)):
        assert after == [before] * (4 if host == 0 else 3)


def test_without_the_states_before_the_last_token_transformers_cannot_go_on():
    """A ring shares the question out, too."""

    def inputs_of(hosts: HostGroup) -> str:
        config = PrefillConfig(method="zigzag_ring", passing_len=None)
        state = apbv.prefill(
            build("qwen3_next", torch.float32), text_batch(60), hosts=hosts, config=config
        )
        with pytest.raises(InvalidConfigError) as raised:
            state.generate_inputs()
        return str(raised.value)

    for message in simulate(2, inputs_of):
        assert "to_dynamic_cache()" in message


def reuse_job(hosts: HostGroup, clip, reuse: ReuseConfig | None, settings: dict) -> list:
    engine = build_engine(hosts, "qwen3_5", reuse=reuse, dtype=torch.float32, **settings)
    answers = []
    for question in ("What is it?", "Who are they, and why?", "Where?"):
        answer = engine.generate(question, video=str(clip), num_frames=12, max_new_tokens=6)
        answers.append((answer.token_ids, answer.stats["reused"]))
    return answers


ASKED_APART = {"fused_query": False}


@pytest.mark.parametrize(
    ("num_hosts", "kv", "more"),
    [
        (1, "gathered", {}),
        (2, "gathered", {}),
        (3, "sharded", {}),
        (2, "sharded", ASKED_APART),
        (3, "gathered", ASKED_APART),
    ],
)
def test_a_further_question_goes_on_from_the_states_before_the_first(
    pool, clip, num_hosts, kv, more
):
    settings = {"kv": kv, "passing_len": UNCOMPRESSED, **more}
    (plain,) = pool.run(1, reuse_job, clip, None, {**settings, "kv": "gathered"})
    reuse = ReuseConfig(mode="kv")
    for answers in pool.run(num_hosts, reuse_job, clip, reuse, settings):
        assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in plain]
        assert [reused for _, reused in answers] == [None, "kv", "kv"]


def apart_job(hosts: HostGroup, method: str, kv: str) -> tuple:
    """A further question, of a method that asks apart; and the answer that transformers goes on
    with."""
    engine = build_engine(
        hosts,
        "qwen3_5",
        kv=kv,
        reuse=ReuseConfig(mode="kv"),
        dtype=torch.float32,
        method=method,
        anchor_len=8,
        passing_len=6 if method == "apb" else 0,
    )
    request = {"context": "some words of a text " * 12}
    reused = []
    for question in ("What is it?", "Who?", "Who?"):
        answer = engine.generate(question, max_new_tokens=4, **request)
        reused.append((answer.stats["reused"], answer.token_ids))
    state = engine.prefill("What is it?", **request)
    own = engine.decode(state, max_new_tokens=5).token_ids
    inputs = state.generate_inputs()
    if inputs:
        out = engine.model.generate(**inputs, max_new_tokens=5, do_sample=False)
        assert out[0, state.num_tokens :].tolist() == own
    return reused


@pytest.mark.parametrize(
    ("method", "kv"), [("apb", "sharded"), ("apb", "gathered"), ("star", "sharded")]
)
def test_states_before_a_question_that_is_asked_apart_are_kept(pool, method, kv):
    first, *others = pool.run(2, apart_job, method, kv)
    assert [reused for reused, _ in first] == [None, "kv", "kv"]
    assert first[1] == first[2]
    assert all(other == first for other in others)


def earlier_states_job(hosts: HostGroup, settings: dict) -> list[list[torch.Tensor]]:
    """The states before the question, before the last token and behind it, of every layer."""
    engine = build_engine(hosts, "qwen3_next", dtype=torch.float32, **settings)
    states = engine.prefill("What is it?", context="some words of a text " * 12).kv.states
    found = []
    for each in (states.before_question, states.before_last, states):
        found.append([tensor.clone() for of_layer in each.tensors for tensor in of_layer])
    return found


def test_states_around_a_question_that_is_asked_apart_are_those_of_one_process(pool):
    settings = {"passing_len": UNCOMPRESSED}
    (expected,) = pool.run(1, earlier_states_job, settings)
    for host in pool.run(2, earlier_states_job, {**settings, **ASKED_APART}):
        for there, here in zip(expected, host, strict=True):
            for tensor, own in zip(there, here, strict=True):
                torch.testing.assert_close(own, tensor, rtol=1e-3, atol=1e-4)


def test_saved_states_of_another_model_are_not_read(tmp_path):
    hosts = HostGroup.single("cpu")
    batch = text_batch(40)
    apbv.prefill(families.build_model("qwen3_next"), batch, hosts=hosts).save(tmp_path)
    other = families.build_model("qwen3_next", seed=1)
    with pytest.raises(StorageError, match="other weights"):
        apbv.load(tmp_path, other, hosts=hosts)


def test_what_hybrids_cannot_do_is_refused(checkpoints):
    path = checkpoints("qwen3_5")
    hosts = HostGroup.single("cpu")
    model = build("qwen3_5", torch.float32)
    processor = families.build_processor("qwen3_5")
    for strategy, message in (
        ("sd_tree", "reads one token after the other, and no branches"),
        ("tabed", "pads the contexts of its draft"),
    ):
        settings = {"speculate": SpeculativeConfig(strategy=strategy, draft_model=str(path))}
        with pytest.raises(InvalidConfigError, match=message):
            Engine.from_pretrained(path, hosts=hosts, **settings)
        with pytest.raises(InvalidConfigError, match=message):
            Engine(model, processor, hosts, **settings, draft=model)
    state = apbv.prefill(model, video_batch("qwen3_5"), hosts=hosts)
    with pytest.raises(
        InvalidConfigError, match=r"offer\(\) transfers keys and values, but no states"
    ):
        PrefillResult.offer(state, None)
    engine = Engine(model, processor, hosts)
    assert engine.batching_obstacle is None
    questions = [
        {"prompt": "What?", "context": "word " * 30},
        {"prompt": "Who?", "context": "word " * 20},
    ]
    questions = [
        question | {"sampling": SamplingParams(max_new_tokens=4)} for question in questions
    ]
    alone = [engine.generate(**question).token_ids for question in questions]
    together = dict(engine.generate_all(questions))
    assert [together[index].token_ids for index in range(2)] == alone


@pytest.mark.shows("reduction")
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_prompts_of_videos_and_images_are_reduced_before_the_language_model(on_hosts, family):
    """Then all layers read the rest, as they would a shorter prompt."""
    batch = processed(
        family, families.synthetic_video(8, 56, 70), families.synthetic_image(56, 70), "What?"
    )
    settings = APBV | {"reduce": ReduceConfig(method="fastvid", ratio=0.5)}
    one, *_ = on_hosts(1, prefill_job, family, batch, None, settings, torch.float32)
    for result in on_hosts(3, prefill_job, family, batch, None, settings, torch.float32):
        assert result.num_tokens < batch["input_ids"].shape[1]
        assert relative_error(result.logits, one.logits) < CLOSE
