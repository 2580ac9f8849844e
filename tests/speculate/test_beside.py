"""A draft on a host of its own, through the engine: the answer of decoding without it."""

import warnings
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import pytest

from apbv import (
    Engine,
    HostError,
    HostGroup,
    InvalidConfigError,
    ReduceConfig,
    SamplingParams,
)
from apbv.prefilling.prefiller import Prefiller
from apbv.request.request import Question, Request
from apbv.speculate.drafters.drafters import ModelDrafter
from apbv.speculate.loops.link import Link
from apbv.stats import StageTimer

from apbv_tests.configs import speculative_config
from apbv_tests.engines import QUESTION, build_engine
from apbv_tests.patience import HANGING, wait_for

HIPPO = {"strategy": "hippo", "keep_ratio": 0.3}
WAYS = [{"strategy": "vanilla"}, {**HIPPO, "prune": "kv"}, {"strategy": "text_only"}]
WAYS += [{**HIPPO, "num_draft_tokens": "auto"}]
IN_TURN = {"concurrent_prefill": False}
WAYS += [{"strategy": "vanilla", **IN_TURN}, {**HIPPO, "prune": "kv", **IN_TURN}]
WAYS += [{"strategy": "parallelvlm", "uv_layer": 1, "keep_ratio": 0.3, **IN_TURN}]
# Whatever the clip shows, tokens that came before come again.
PENALISED = SamplingParams(max_new_tokens=9, presence_penalty=-2.0, frequency_penalty=-2.0)
REPEATING = SamplingParams(max_new_tokens=9, repetition_penalty=1.6)


def engine_of(
    hosts: HostGroup, way: dict | None, draft_seed: int = 1, kv: str = "gathered", **prefill
) -> Engine:
    speculate = None
    if way is not None:
        settings = {"draft_host": True, "keep_losing_draft": True, **way}
        speculate = speculative_config(**settings)
    return build_engine(hosts, "qwen2_5_vl", kv, speculate, draft_seed, **prefill)


@pytest.fixture(scope="module")
def request_(clip) -> dict:
    return {"video": str(clip), "num_frames": 12, "max_new_tokens": 9}


@pytest.fixture(scope="module")
def plain(request_) -> list[int]:
    return engine_of(HostGroup.single(), None).generate(QUESTION, **request_).token_ids


def out_of_memory(*args):
    raise RuntimeError("out of memory")


def engine_job(hosts: HostGroup, ways: list[dict], request: dict) -> list:
    """Answers and figures, also after requests that fail."""
    answers = []
    for way in ways:
        engine = engine_of(hosts, way)
        shown = []
        answer = engine.generate(QUESTION, **request, on_token=shown.append)
        assert shown == answer.token_ids
        with pytest.raises((ValueError, HostError), match=r"no-such|cannot answer this request"):
            engine.generate(QUESTION, video="no-such.mp4")
        again = engine.generate(QUESTION, **request)
        answers += [(answer.token_ids, answer.stats), (again.token_ids, again.stats)]
    return answers


def unbatched_job(hosts: HostGroup) -> list[str]:
    """What the engine says of batches, which neither side has."""
    engine = engine_of(hosts, WAYS[0])
    request = Request(Question(QUESTION), StageTimer(engine.hosts))
    said = []
    for call in (engine.batch, lambda: engine.begin(request), engine.alone):
        with pytest.raises(InvalidConfigError) as raised:
            call()
        said.append(str(raised.value))
    with engine.attention():  # of no model
        return said


def test_batches_of_a_draft_host_are_refused_in_a_sentence(pool):
    target, draft = pool.run(2, unbatched_job)
    assert all(text.startswith("ParallelSpeculation answers one request") for text in target)
    assert all(text.startswith("a draft host decodes no batches") for text in draft)


def test_no_draft_host_changes_an_answer(pool, request_, plain):
    for host, answers in enumerate(pool.run(2, engine_job, WAYS, request_)):
        for place, (tokens, stats) in enumerate(answers):
            assert tokens == plain, WAYS[place // 2]
            if host:
                assert stats["role"] == "draft" and stats["num_drafted"] > 0
            else:
                assert "role" not in stats
                assert stats["speculation"]["strategy"] == WAYS[place // 2]["strategy"]


def reduced_job(hosts: HostGroup, request: dict) -> dict:
    """The figures of an answer after a prompt that cannot be pruned, which is refused before the
    draft begins."""
    engine = engine_of(hosts, WAYS[0], reduce=ReduceConfig(method="dycoke"))
    with pytest.raises((ValueError, HostError), match="prunes redundancy"):
        engine.generate(QUESTION)
    return engine.generate(QUESTION, **request).stats


def test_a_prompt_that_cannot_be_pruned_does_not_cost_the_draft_host(pool, request_):
    target, draft = pool.run(2, reduced_job, request_)
    assert draft["num_drafted"] > 0 and target["speculation"]["lost_draft"] is None


@pytest.mark.parametrize("num_frames", [10, 12])
@pytest.mark.parametrize("sampling", [PENALISED, REPEATING], ids=["wanted again", "unwanted"])
def test_a_draft_host_penalises_as_the_target_does(pool, request_, num_frames, sampling):
    """So that a draft that is the target is always right: in double precision no two tokens nearly
    tie."""
    request = dict(request_, sampling=sampling, num_frames=num_frames)
    del request["max_new_tokens"]
    engine = engine_of(HostGroup.single(), None)
    expected = engine.generate(QUESTION, **request).token_ids
    unpenalised = dict(request, sampling=SamplingParams(max_new_tokens=9))
    plain = engine.generate(QUESTION, **unpenalised).token_ids
    (stats, _), _ = pool.run(2, own_draft_job, WAYS[0], request)
    assert stats["token_ids"] == expected
    assert sampling is not PENALISED or expected != plain
    assert stats["speculation"]["num_accepted"] == stats["speculation"]["num_drafted"] > 0


def own_draft_job(hosts: HostGroup, way: dict, request: dict):
    """The figures, and the rows of the prompt that the draft kept of its KV."""
    prune_prompt = ModelDrafter.prune_prompt
    with patch.object(
        ModelDrafter, "prune_prompt", autospec=True, side_effect=prune_prompt
    ) as noted:
        stats = engine_of(hosts, way, 0).generate(QUESTION, **request).stats
    kept = []
    for call in noted.call_args_list:
        (_, rows) = call.args
        kept += rows.tolist()
    return stats, kept


@pytest.mark.parametrize("begins", [None, {"prune": "kv"}], ids=str)
def test_a_draft_that_is_the_target_is_always_right(pool, request_, begins):
    """Its prompt, its positions and its windows are right: every window of five is confirmed."""
    if begins is None:
        way = {"strategy": "vanilla"}
    else:
        way = {"strategy": "hippo", "keep_ratio": 1.0, **begins}
    (stats, _), (_, pruned) = pool.run(2, own_draft_job, way, request_)
    # The prompt's last token is not among them: it is run again, so that its logits begin the
    # answer.
    assert pruned == (
        list(range(stats["num_input_tokens"] - 1)) if begins == {"prune": "kv"} else []
    )
    figures = stats["speculation"]
    assert figures["num_accepted"] == figures["num_drafted"]
    # Where scores are awaited the first window ends when they come.
    shortened = int(begins is not None)
    assert figures["num_target_forwards"] <= 2 + shortened
    assert figures["mean_accepted_tokens"] == figures["num_accepted"]
    assert figures["draft_seconds"] > 0


DIFFERENT = [
    {"temperature": 0.7},
    {"seed": 4, "temperature": 0.7},
    {"max_new_tokens": 3},
    {"num_frames": 4},
]


def different_job(hosts: HostGroup, request: dict) -> None:
    for settings in DIFFERENT:
        engine = engine_of(hosts, WAYS[0])
        is_draft = hosts.rank == 1
        given = {**request, **settings} if is_draft else request
        with pytest.raises(ValueError, match="the draft host has other settings for this request"):
            engine.generate(QUESTION, **given)
        stats = engine.generate(QUESTION, **request).stats
        assert stats["num_drafted" if is_draft else "speculation"]


def test_a_draft_host_with_other_settings_is_an_error_on_both_sides(pool, request_):
    """Distributions that only one side sends would be read as others; the next request is
    answered."""
    pool.run(2, different_job, request_)


# ---- drafts that are lost ----


def lost_draft_job(hosts: HostGroup, way: dict, request: dict, place: tuple, most: int):
    """What becomes of a request whose draft fails, and what is warned of."""
    engine = engine_of(hosts, way)
    request = dict(request, max_new_tokens=most)
    (where, name) = place
    where = import_module(where) if isinstance(where, str) else where
    with patch.object(where, name, out_of_memory), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            answer = engine.generate(QUESTION, **request)
        except RuntimeError as error:
            return str(error)
    said = [str(warning.message) for warning in caught if "draft host" in str(warning.message)]
    return answer.token_ids, said, answer.stats["speculation"]["lost_draft"]


# The second also where the target has ended by then, and knows of it only from what would be the
# draft's account.
@pytest.mark.parametrize(
    "place",
    [(ModelDrafter, "stream"), ("apbv.speculate.strategies.builders", "_prune_kv")],
    ids=["drafting", "pruning"],
)
@pytest.mark.parametrize("most", [9, 1])
def test_a_lost_draft_costs_one_warning(pool, request_, plain, place, most):
    way = {**HIPPO, "prune": "kv", "draft_timeout": HANGING}
    (tokens, said, why), failed = pool.run(2, lost_draft_job, way, request_, place, most)
    assert tokens == plain[:most] and "the draft host failed" in why and failed == "out of memory"
    assert len(said) == 1 and "going on without the draft host" in said[0]


# ---- the draft begins while the target prefills: shown by the order of events, never by times ----

UV_PRUNE = {"strategy": "parallelvlm", "uv_layer": 1, "keep_ratio": 0.3}
EVEN = {"strategy": "specvlm", "keep": "even", "keep_ratio": 0.3}


def prefill_job(
    hosts: HostGroup, way: dict, settings: dict, request: dict, folder: Path, layer: int, call: int
):
    """Tokens of two requests; the target's host 0 enters a layer only when the draft has written a
    first token.

    Args:
        layer, call: which one it stands still before, and in which of its calls since the request
            began.
    """
    engine = engine_of(hosts, way, passing_len=4, **settings)
    begun = folder / "begun"
    calls = []
    links = []
    send_first = Link.send_first
    begin = Link.begin

    def begun_link(link, *args) -> None:
        links.append(link)
        begin(link, *args)

    def stand_still(*args) -> None:
        calls.append(layer)
        if len(calls) == call:
            wait_for(begun.exists)

    if engine.model is not None and hosts.rank == 0:
        layers = engine.model.get_decoder().layers
        layers[layer].register_forward_pre_hook(stand_still)
        # The draft has read the request, too, before the target begins.
        layers[0].register_forward_pre_hook(lambda *args: wait_for(links[-1].answer.ready))

    def noted(self, *args) -> None:
        send_first(self, *args)
        begun.touch()

    with patch.object(Link, "send_first", noted), patch.object(Link, "begin", begun_link):
        return [engine.generate(QUESTION, **request).token_ids for _ in range(2)]


@pytest.mark.parametrize(
    ("num_hosts", "way", "settings", "layer", "call"),
    [
        (2, UV_PRUNE, {}, 2, 1),
        # With a query pass of its own the question reaches layer L in the second pass.
        (3, UV_PRUNE, {"method": "apb", "kv": "sharded"}, 2, 2),
        (3, EVEN, {}, 0, 1),
    ],
    ids=str,
)
def test_a_draft_begins_before_the_target_has_prefilled(
    pool, request_, tmp_path, num_hosts, way, settings, layer, call
):
    """By UV-Prune before the target's last layer, by a choice without its scores before its
    first."""
    arguments = way, settings, {**request_, "max_new_tokens": 6}, tmp_path, layer, call
    run = pool.run(num_hosts, prefill_job, *arguments)
    assert all(answers == run[0] and answers[0] == answers[1] for answers in run)


# ---- or only when the target has prefilled ----


def order_job(hosts: HostGroup, way: dict, request: dict):
    """Tokens, and what this host does, in order."""
    engine = engine_of(hosts, way, passing_len=4)
    events = []
    run = Prefiller.run
    send = Link.send_verdict
    expect = Link.expect_verdict

    def prefilled(*args):
        state = run(*args)
        events.append("prefilled")
        return state

    def sent(*args, **named):
        events.append("told")
        send(*args, **named)

    def expected(*args):
        def heard(verdict):
            events.append("heard")
            return verdict

        return expect(*args).then(heard)

    def noted(name: str):
        function = getattr(module_of[name], name)

        def called(*args, **named):
            events.append(name)
            return function(*args, **named)

        return patch.object(module_of[name], name, called)

    module_of = {
        "encode_visual": import_module("apbv.speculate.strategies.builders"),
        "run_prompt": import_module("apbv.speculate.drafters.draft"),
    }
    with (
        patch.object(Prefiller, "run", prefilled),
        patch.object(Link, "send_verdict", sent),
        patch.object(Link, "expect_verdict", expected),
        noted("encode_visual"),
        noted("run_prompt"),
    ):
        answer = engine.generate(QUESTION, **request)
    return answer.token_ids, events


def plain_job(hosts: HostGroup, request: dict) -> list[int]:
    return engine_of(hosts, None, passing_len=4).generate(QUESTION, **request).token_ids


@pytest.mark.parametrize("num_hosts", [2, 3])
@pytest.mark.parametrize("way", [way for way in WAYS if IN_TURN.items() <= way.items()], ids=str)
def test_a_draft_in_turn_prefills_when_the_target_has(pool, request_, num_hosts, way):
    """The target tells it so when its prefill has ended, and the draft does nothing before it has
    heard that."""
    plain = pool.run(num_hosts - 1, plain_job, request_)[0]
    (tokens, target), *_, (_, draft) = pool.run(num_hosts, order_job, way, request_)
    assert tokens == plain
    assert target[:2] == ["prefilled", "told"]
    assert draft[:2] == ["heard", "encode_visual"] and "run_prompt" in draft


def test_by_default_it_does_not_wait(pool, request_):
    *_, (_, draft) = pool.run(2, order_job, {"strategy": "vanilla"}, request_)
    assert draft[:2] == ["encode_visual", "run_prompt"]


def failing_job(hosts: HostGroup, request: dict):
    """How a request ends whose prefill fails, for which the draft waits."""
    engine = engine_of(hosts, {"strategy": "vanilla", **IN_TURN})
    with (
        patch("apbv.speculate.loops.beside.Prefiller.run", out_of_memory),
        pytest.raises((RuntimeError, HostError)) as raised,
    ):
        engine.generate(QUESTION, **request)
    return str(raised.value)


def test_a_draft_in_turn_hears_of_a_prefill_that_failed(pool, request_):
    target, draft = pool.run(2, failing_job, request_)
    assert target == "out of memory" and draft == "the target's hosts failed"
