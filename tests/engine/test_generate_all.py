"""Several questions at once, and answers in pieces: each is that of the question alone, on every
host."""

from unittest import mock

import pytest

from apbv import HostError, HostGroup, SamplingParams
from apbv.decode.batch import Batch
from apbv.model.parts import inspect_model
from apbv.prefilling import memory
from apbv.speculate.loops.speculative_batch import SpeculativeBatch
from apbv.speculate.strategies.table import draft_batching_obstacle
from apbv.stats import StageTimer

from apbv_tests import families
from apbv_tests.configs import speculative_config
from apbv_tests.engines import build_engine

LOST = 77  # the seed of an answer that finds no memory on its decode host
SETTINGS = {"num_draft_tokens": 3, "keep_losing_draft": True}
# How they are answered, where the KV is, and whether in one batch.
WAYS = [
    (None, "gathered", True),
    ({"strategy": "hippo", "prune": "kv", "keep_ratio": 0.5}, "gathered", True),
    ({"strategy": "std", "keep_ratio": 0.5}, "gathered", True),
    ({"strategy": "std"}, "sharded", False),
]


def asked_job(hosts: HostGroup, clip: str, way: dict | None, kv: str):
    config = None if way is None else speculative_config(**{**SETTINGS, **way})
    engine = build_engine(hosts, "qwen2_5_vl", kv, config)
    questions = [
        {"prompt": "What happens here?", "video": clip, "num_frames": 8},
        {"prompt": "And who is it that comes in?", "video": clip, "num_frames": 4},
        {"prompt": "Why?", "video": f"{clip}.missing"},
        {"prompt": "When does it end?", "video": clip, "num_frames": 8},
        {"prompt": "Where?", "sampling": SamplingParams(max_new_tokens=9, temperature=1.2, seed=4)},
        {"prompt": "With whom?", "sampling": SamplingParams(seed=LOST)},
    ]
    sampling = SamplingParams(max_new_tokens=9)
    with pytest.raises(ValueError, match="max_together must be at least 1, not 0"):
        next(engine.generate_all([], max_together=0))
    join = Batch.join
    num_joined = 0

    def joined(batch, answer, draft=None):
        nonlocal num_joined
        if answer.sampling.seed == LOST:
            raise RuntimeError("out of memory")
        num_joined += 1
        return join(batch, answer, draft)

    with mock.patch.object(Batch, "join", joined):
        found = dict(engine.generate_all(iter(questions), sampling=sampling, max_together=3))
    error = found.pop(2)
    lost = found.pop(5)
    assert engine.batching_obstacle or "out of memory" in str(lost)
    alone = {n: engine.generate(**{"sampling": sampling, **questions[n]}) for n in found}
    names = "token_ids", "text", "finish_reason", "videos"
    same = [
        all(getattr(found[n], name) == getattr(alone[n], name) for name in names) for n in found
    ]
    drafted = [
        (answer.stats["speculation"] or {}).get("num_drafted", 0) for answer in found.values()
    ]
    keys = [set(found[n].stats) == set(alone[n].stats) for n in found]
    tokens = {number: answer.token_ids for number, answer in found.items()}
    return tokens, same, keys, drafted, str(error), engine.batching_obstacle, num_joined


@pytest.mark.parametrize(("way", "kv", "in_batch"), WAYS)
def test_each_answer_is_that_of_the_question_alone(pool, clip, way, kv, in_batch):
    first, second = pool.run(2, asked_job, str(clip), way, kv)
    tokens, same, keys, drafted, error, why, num_joined = first
    assert sorted(tokens) == [0, 1, 3, 4] and all(same) and all(keys), same
    assert "missing" in error and (why is None) == in_batch
    assert way is None or all(drafted)
    assert second[0] == tokens and second[3] == drafted and "missing" in second[4]
    assert [num_joined, second[-1]] == ([2, 2] if in_batch else [0, 0])


def crowded_job(hosts: HostGroup, clip: str):
    engine = build_engine(hosts, "qwen2_5_vl")
    batch = engine.batch()
    most = 0

    def free_memory_bytes(device, swaps) -> int:
        nonlocal most
        most = max(most, len(batch))
        return 0 if batch else 2**40

    questions = [
        {"prompt": prompt, "video": clip, "num_frames": 8} for prompt in ("What?", "Who?", "Why?")
    ]
    sampling = SamplingParams(max_new_tokens=9)
    patched = mock.patch.object(memory, "free_memory_bytes", free_memory_bytes)
    with patched, mock.patch.object(engine, "batch", lambda: batch):
        found = dict(engine.generate_all(questions, sampling=sampling))
    assert [found[n].text for n in range(3)] == [
        engine.generate(**q, sampling=sampling).text for q in questions
    ]
    return most


def test_a_prompt_without_room_waits_for_an_answer_to_end(pool, clip):
    assert pool.run(2, crowded_job, str(clip)) == [1, 0]


@pytest.mark.parametrize(
    ("strategy", "settings", "why"),
    [
        ("tabed", {}, "learns"),
        ("sd_tree", {}, "tree"),
        ("vanilla", {"draft_host": True}, "draft host"),
    ],
)
def test_drafts_that_draft_alone(strategy, settings, why):
    config = speculative_config(strategy=strategy, **settings)
    assert why in draft_batching_obstacle(config)
    with pytest.raises(ValueError, match=f"cannot batch answers with drafts: .*{why}"):
        SpeculativeBatch(inspect_model(families.build_model("llama")), config)


def closed_job(hosts: HostGroup) -> tuple[list[int], bool, list[int]]:
    """The answers before the iterator is closed, whether stages are left open, and an answer."""
    engine = build_engine(hosts, "llama")
    questions = [
        {"prompt": prompt, "sampling": SamplingParams(max_new_tokens=length)}
        for prompt, length in (("What?", 2), ("Who?", 200), ("Why?", 200))
    ]
    open_stages = 0
    stage = StageTimer.stage

    class Counted:
        """A stage that only leaving it ends, not its collection as garbage."""

        def __init__(self, timer, name):
            self._stage = stage(timer, name)

        def __enter__(self):
            nonlocal open_stages
            open_stages += 1
            return self._stage.__enter__()

        def __exit__(self, *error):
            nonlocal open_stages
            open_stages -= 1
            return self._stage.__exit__(*error)

    with mock.patch.object(StageTimer, "stage", lambda *named: Counted(*named)):
        answers = engine.generate_all(questions)
        number, _ = next(answers)
        assert open_stages > 0
        answers.close()
    return number, open_stages, engine.generate("What?", max_new_tokens=2).token_ids


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_an_iterator_that_is_closed_early_leaves_no_stage_open(pool, num_hosts):
    found = pool.run(num_hosts, closed_job)
    assert [(number, left) for number, left, _ in found] == [(0, 0)] * num_hosts
    assert all(tokens == found[0][2] for *_, tokens in found)


def exhausted(pieces):
    """All pieces, and what the iterator returns."""
    found = []
    while True:
        try:
            found.append(next(pieces))
        except StopIteration as end:
            return found, end.value


def streamed_job(hosts: HostGroup, clip: str, kv: str):
    engine = build_engine(hosts, "qwen2_5_vl", kv)
    given = {"prompt": "Who?", "video": clip, "num_frames": 8}
    expected = engine.generate(**given, max_new_tokens=12)
    pieces, answer = exhausted(engine.stream(**given, max_new_tokens=12))
    assert (
        answer.token_ids == expected.token_ids
        and "".join(pieces) == answer.text
        and len(pieces) > 1
    ), expected
    with pytest.raises((ValueError, HostError), match="missing"):
        next(engine.stream("Who?", video=f"{clip}.missing"))
    left = engine.stream(**given, max_new_tokens=400)
    next(left)
    if hosts.is_leader:
        return left.close()
    return len(exhausted(left)[1].token_ids)


@pytest.mark.parametrize("kv", ["gathered", "sharded"])
def test_an_answer_in_pieces_ends_where_host_0_closes_it(pool, clip, kv):
    _, num_tokens = pool.run(2, streamed_job, str(clip), kv)
    assert 1 <= num_tokens < 400
