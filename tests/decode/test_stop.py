"""Ending an answer early, or a request before it began; on every host alike, by every way to decode."""

import pytest

from apbv import Engine, HostGroup, PrefillConfig, RequestCancelled, SpeculativeConfig, demo

QUESTION, FRAMES = "name the letters in order", 24

WAYS = {
    "plain": None,
    "window": SpeculativeConfig(strategy="vanilla", draft_model="demo"),
    "tree": SpeculativeConfig(strategy="sd_tree", draft_model="demo"),
    "thread": SpeculativeConfig(strategy="vanilla", draft_model="demo", draft_host=True),
}


def stops_job(hosts: HostGroup, way: str, kv: str, at: list[int]) -> list:
    """Answers in full, then stopped after so many tokens each; and how often host 0 asked."""
    engine = Engine.from_pretrained(
        "demo", hosts=hosts, prefill=PrefillConfig(kv=kv), speculate=WAYS[way], dtype="float32"
    )
    request = {"video": demo.video_path(), "num_frames": FRAMES, "max_new_tokens": 12}
    full = engine.generate(QUESTION, **request)
    answers = [(full.token_ids, full.finish_reason, None, None)]
    for count in at:
        asked, shown = [], []

        def stop(tokens, count=count, asked=asked) -> bool:
            asked.append(list(tokens))
            return len(tokens) == count

        answer = engine.generate(QUESTION, **request, stop=stop, on_token=shown.append)
        answers.append((answer.token_ids, answer.finish_reason, shown, asked))
    return answers


@pytest.mark.parametrize(
    ("way", "hosts", "kv"),
    [
        ("plain", 1, "gathered"),
        ("plain", 2, "sharded"),
        ("window", 2, "gathered"),
        ("tree", 2, "sharded"),
        ("thread", 1, "gathered"),
    ],
)
def test_an_answer_ends_where_host_0_says(pool, way, hosts, kv):
    (full, reason, *_), *_ = pool.run(hosts, stops_job, way, kv, [])[0]
    assert len(full) > 4 and reason == "stop"  # an end token
    for rank, answers in enumerate(pool.run(hosts, stops_job, way, kv, [1, 2, 4])):
        for count, (tokens, reason, shown, asked) in zip((1, 2, 4), answers[1:], strict=True):
            assert (tokens, reason, shown) == (full[:count], "stop", full[:count])
            before = [[], []]  # before the prompt is read, and after
            assert asked == (before + [full[:length] for length in range(1, count + 1)] if rank == 0 else [])


def cancelled_job(hosts: HostGroup, times_asked: int) -> tuple[str, list[int]]:
    engine = Engine.from_pretrained("demo", hosts=hosts, dtype="float32")
    request = {"video": demo.video_path(), "num_frames": FRAMES, "max_new_tokens": 3}
    asked = []

    def stop(tokens) -> bool:
        asked.append(tokens)
        return len(asked) == times_asked

    with pytest.raises(RequestCancelled) as error:
        engine.generate(QUESTION, **request, stop=stop)
    assert not hosts.is_broken
    return str(error.value), engine.generate(QUESTION, **request).token_ids


def test_a_request_can_be_cancelled_before_it_is_prefilled(pool):
    for times_asked in (1, 2):
        (message, tokens), *others = pool.run(2, cancelled_job, times_asked)
        assert "cancelled before" in message and len(tokens) == 3
        assert others == [(message, tokens)]


def fails_while_asked_job(hosts: HostGroup) -> str:
    engine = Engine.from_pretrained("demo", hosts=hosts, dtype="float32")

    def stop(tokens) -> bool:
        raise ZeroDivisionError("of the caller's")

    with pytest.raises((ZeroDivisionError, RuntimeError)) as error:
        engine.generate(QUESTION, video=demo.video_path(), num_frames=FRAMES, stop=stop)
    assert not hosts.is_broken
    return str(error.value)


def test_an_error_while_asked_reaches_every_host(pool):
    assert all("of the caller's" in message for message in pool.run(2, fails_while_asked_job))
