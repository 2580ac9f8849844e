"""Further questions about the same video or text: what is computed again, and what they are
answered."""

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from apbv import Engine, HostGroup, PrefillConfig, ReuseConfig, SpeculativeConfig, demo
from apbv.kv.cache import first_tokens
from apbv.prefilling.reuse import ByteBoundedCache

FRAMES = 16
STEPS = 4
QUESTIONS = ("name the letters in order", "how many letters are shown", "name the letters in order")
TEXT = "The quick brown fox jumps over the lazy dog. " * 4
APPROXIMATE = {"passing_len": 4}
EXACT = {"passing_len": 10**6}


def demo_engine(
    hosts: HostGroup, mode: str | None = None, speculate=None, max_bytes=2**30, **settings
) -> Engine:
    kept = None if mode is None else ReuseConfig(mode=mode, max_bytes=max_bytes)
    options = {"reuse": kept, "prefill": PrefillConfig(**settings), "speculate": speculate}
    return Engine.from_pretrained("demo", hosts=hosts, dtype="float32", **options)


def ask(engine: Engine, question: str, video: Path | None = None, frames: int = FRAMES):
    return engine.generate(
        question, video=video or demo.video_path(), num_frames=frames, max_new_tokens=STEPS
    )


def questions_job(hosts: HostGroup, mode: str | None, settings: dict, speculate=None, videos=None):
    """Answers, what was reused, and how often the vision tower and the language model's first layer
    ran on how many tokens."""
    engine = demo_engine(hosts, mode, speculate, **settings)
    encoded = []
    run = []
    tower = engine.model.model.visual
    layer = engine.model.get_decoder().layers[0]

    def note_tower(*_) -> None:
        encoded.append(1)

    def note_layer(module, args, output) -> None:
        run.append(args[0].shape[1])

    tower.register_forward_hook(note_tower)
    layer.register_forward_hook(note_layer)
    answers = []
    for question, video in zip(QUESTIONS, videos or [None] * len(QUESTIONS), strict=True):
        encoded.clear()
        run.clear()
        answer = ask(engine, question, video)
        answers.append(
            (answer.token_ids, answer.stats["reused"], len(encoded), run[0] if run else 0)
        )
    return answers


@pytest.fixture(scope="module")
def plain(pool) -> list:
    """The tokens of the answers of full attention, without anything that is kept."""
    answers = pool.run(1, questions_job, None, {})[0]
    assert [reused for _, reused, *_ in answers] == [None] * 3
    return [tokens for tokens, *_ in answers]


@pytest.mark.parametrize(
    ("hosts", "mode", "settings", "speculate"),
    [
        (1, "kv", {}, SpeculativeConfig(strategy="ngram")),
        (2, "kv", {**EXACT, "kv": "sharded"}, None),
        (2, "kv", EXACT, SpeculativeConfig(strategy="vanilla", draft_model="demo")),
        (2, "exact", EXACT, None),
    ],
)
def test_what_is_kept_of_an_exact_method_changes_no_answer(
    pool, plain, hosts, mode, settings, speculate
):
    """And with KV the language model's first pass is over the question only."""
    way = {"kv": "kv", "exact": "embeddings"}[mode]
    needs_draft = bool(speculate and speculate.draft_model)
    for rank, answers in enumerate(pool.run(hosts, questions_job, mode, settings, speculate)):
        assert [tokens for tokens, *_ in answers] == plain
        assert [reused for _, reused, *_ in answers] == [None, way, way]
        if rank == 0:
            for *_, encoded, run in answers[1:]:
                assert encoded <= needs_draft
                assert run < 20 or mode == "exact"


def approximate_job(hosts: HostGroup, kv: str):
    """The second question's logits, beside Hugging Face's own attention over the KV that the first
    left."""
    engine = demo_engine(hosts, "kv", kv=kv, **APPROXIMATE)
    video = {"video": demo.video_path(), "num_frames": FRAMES}
    (first, second) = QUESTIONS[:2]
    state = engine.prefill(first, **video)
    cache = state.to_dynamic_cache()
    again = engine.prefill(second, **video)
    assert (again.reused, again.exact, again.method) == ("kv", False, "apbv")
    assert engine.prefill(first, **video).logits.equal(engine.prefill(first, **video).logits)
    if hosts.rank != 0:
        return again.logits, None
    start = again.inputs.query_start
    inputs = again.inputs
    with torch.no_grad():
        hidden = engine.model.get_decoder()(
            inputs_embeds=engine.model.get_input_embeddings()(inputs.input_ids[:, start:]),
            position_ids=inputs.position_ids[..., start:],
            past_key_values=first_tokens(cache, start, DynamicCache()),
        ).last_hidden_state
        return again.logits, engine.model.lm_head(hidden[:, -1])


@pytest.mark.parametrize("kv", ["gathered", "sharded"])
def test_kept_kv_of_an_approximate_method_is_the_first_questions(pool, kv):
    (logits, reference), (on_host_1, _) = pool.run(2, approximate_job, kv)
    for expected in (on_host_1, reference):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_what_changed_is_read_again(pool, tmp_path):
    """Another file of the same name; and after that the old one is not taken for it either."""
    videos = [
        shutil.copy(demo.video_path(), tmp_path / name) for name in ("a.mp4", "b.mp4", "a.mp4")
    ]
    answers = pool.run(2, questions_job, "exact", EXACT, None, videos)[0]
    assert [reused for _, reused, *_ in answers] == [None, None, "embeddings"]
    engine = demo_engine(HostGroup.single("cpu"), "kv")
    assert ask(engine, QUESTIONS[0], videos[0]).stats["reused"] is None
    assert ask(engine, QUESTIONS[0], videos[0], frames=FRAMES // 2).stats["reused"] is None
    assert ask(engine, QUESTIONS[1], videos[0]).stats["reused"] == "kv"
    videos[0].touch()
    assert ask(engine, QUESTIONS[1], videos[0]).stats["reused"] is None


def forgetful_job(hosts: HostGroup):
    """Host 1 has lost what host 0 still has."""
    engine = demo_engine(hosts, "kv", max_bytes=2**30 if hosts.rank == 0 else 1, kv="sharded")
    answers = [ask(engine, question) for question in QUESTIONS]
    return [answer.token_ids for answer in answers], [answer.stats["reused"] for answer in answers]


def test_all_hosts_have_it_or_none(pool, plain):
    assert pool.run(2, forgetful_job) == [(plain, [None] * 3)] * 2


def test_a_text_is_kept_too_and_what_cannot_be_is_refused():
    for settings in ({"mode": "always"}, {"max_bytes": 0}, {"max_bytes": 1.5}):
        with pytest.raises(ValueError):
            ReuseConfig(**settings)
    with pytest.raises(ValueError, match="specvlm watches"):
        demo_engine(HostGroup.single("cpu"), "kv", SpeculativeConfig(strategy="specvlm"))
    engine = demo_engine(HostGroup.single("cpu"), "kv")
    plain = Engine(engine.model, engine.processor, engine.hosts)
    for question, reused in zip(QUESTIONS, (None, "kv", "kv"), strict=True):
        answer = engine.generate(question, context=TEXT, max_new_tokens=4)
        assert answer.stats["reused"] == reused
        assert (
            answer.token_ids == plain.generate(question, context=TEXT, max_new_tokens=4).token_ids
        )
    other = TEXT.replace("fox", "cat")
    assert engine.generate(QUESTIONS[0], context=other, max_new_tokens=1).stats["reused"] is None


def test_kv_at_one_rules_positions_is_not_kept_for_the_other():
    engine = demo_engine(HostGroup.single("cpu"), "kv")
    video = {"video": demo.video_path(), "num_frames": FRAMES}
    rules = ("vllm", "transformers", "vllm", "transformers")
    states = [engine.prefill(QUESTIONS[0], **video, positions=rule) for rule in rules]
    assert [state.reused for state in states] == [None, None, "kv", "kv"]
    for first, again in zip(states[:2], states[2:], strict=True):
        assert torch.equal(first.inputs.position_ids, again.inputs.position_ids)


KEYS = st.sampled_from("abcdef")


@given(st.lists(st.tuples(KEYS, st.integers(0, 12), KEYS), max_size=30), st.integers(1, 20))
def test_the_bound_holds_and_what_was_not_used_for_longest_goes_first(puts, bound):
    cache = ByteBoundedCache(bound)
    order = []
    for number, (key, size, read) in enumerate(puts):
        cache.get(read)
        order.sort(key=lambda entry: entry[0] == read)
        cache.put(key, number, size)
        order = [(other, *rest) for other, *rest in order if other != key]
        if size <= bound:
            order.append((key, number, size))
        while sum(size for *_, size in order) > bound:
            order.pop(0)
        assert cache.num_bytes == sum(size for *_, size in order) <= bound
        kept = [key for key, *_ in order]
        for key in "abcdef":
            assert (key in cache) == (key in kept), key
    for key, number, _ in order:
        assert cache.get(key) == number
