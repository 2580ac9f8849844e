"""Drafting on another host: the tokens of decoding without, whatever the timing and whoever is
lost."""

import queue
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count, pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from apbv import Engine, HostError, HostGroup, SpeculativeConfig, demo
from apbv.config import SamplingParams
from apbv.decode.answer import generate_tokens
from apbv.hosts import Pending
from apbv.speculate.drafters.draft import Draft
from apbv.speculate.drafters.tree import Tree
from apbv.speculate.loops import pipeline
from apbv.speculate.loops.link import DONE, GO_ON, Link, Pair
from apbv.speculate.loops.pace import Pace
from apbv.speculate.loops.pipeline import draft_beside, generate_beside_draft
from apbv.speculate.verify import verify_window

from apbv_tests.answers import answer_by
from apbv_tests.drafters import PATTERNS, STEPS, VOCABULARY, decoders
from apbv_tests.fresh_hosts import described
from apbv_tests.patience import GROUP_TIMEOUT, HANGING
from apbv_tests.prompts import build, text_batch
from apbv_tests.table_model import NUM_SAMPLES, TableModel, surprise_of, tables

# ---- the pipeline, with a scripted draft ----


def scripted(answer: list[int], pattern, fail_after: int | None = None):
    """A draft that writes the answer, and errs or fails where it is told to."""

    numbers = count()

    def stream(sequence, num_verified):
        said = list(sequence[1:])
        for place in range(100):
            if next(numbers) == fail_after:
                raise RuntimeError("out of memory")
            right = answer[len(said)] if said == answer[: len(said)] and len(said) < STEPS else 0
            said.append(right if pattern(place) else (right + 1) % VOCABULARY)
            yield said[-1], None

    return SimpleNamespace(stream=stream)


def pipeline_job(hosts: HostGroup, kv: str, runs: list[dict]):
    """Each run's tokens and statistics on the target's hosts; what the draft said at the end on the
    last one."""
    config = SpeculativeConfig(strategy="vanilla", draft_host=True, draft_timeout=GROUP_TIMEOUT)
    pair = Pair.of(hosts, config)
    batch = text_batch(60)
    model = build("llama", torch.float64)
    decoder, state, _ = decoders(model, HostGroup.single(), batch, 48, "gathered")
    plain = generate_tokens(answer_by(decoder, state, SamplingParams(max_new_tokens=STEPS)))
    results = []
    for run in runs:
        gamma = run.get("gamma", 5)
        pattern = PATTERNS[run.get("pattern", "all")]
        with pair.beginning(replace(config, num_draft_tokens=gamma), VOCABULARY, False):
            pass
        if pair.is_draft:
            try:
                stream = scripted(plain, pattern, run.get("fail_after"))
                results.append(draft_beside(pair.link, Draft(stream, 0), 0)[0])
                continue
            except RuntimeError as error:
                pair.link.send_failure()
                results.append(str(error))
                break
        decoder, state, look = decoders(model, pair.hosts, batch, 48, kv)
        end = (plain[run["end"]],) if "end" in run else ()
        answer = answer_by(
            decoder, state, SamplingParams(max_new_tokens=run.get("most", STEPS)), end
        )
        passes = []
        link = pair.link
        if (
            "waits" in run
        ):  # a pass takes a second, by this clock, and so does every wait for the draft
            pair.hosts.clock = lambda passes=passes: float(len(passes))
            decoder.advance = counted(decoder.advance, passes)
            if link is not None:
                link.receive_first = counted(type(link).receive_first.__get__(link), passes)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tokens, stats = generate_beside_draft(answer, pair, Pace(gamma, not run.get("waits")))
        cache = look()
        length = None if cache is None else cache.get_seq_length()
        results.append(
            (tokens, stats, length, [str(w.message) for w in caught if "draft" in str(w.message)])
        )
    return plain, results


def check(results, runs: list[dict]) -> list:
    """Every host has the tokens of plain decoding, up to where the run ends; returns host 0's
    results."""
    *targets, (plain, drafted) = results
    for host, (_, answers) in enumerate(targets):
        for run, (tokens, _, length, _) in zip(runs, answers, strict=True):
            expected = plain[: run.get("most", STEPS)]
            if "end" in run:
                expected = plain[: plain.index(plain[run["end"]]) + 1]
            assert tokens == expected, f"host {host}: {run}"
            if host == 0:
                assert length == 60 + len(tokens) - 1
    for (tokens, *_), said in zip(targets[0][1], drafted, strict=False):
        assert isinstance(said, str) or said == tokens
    return targets[0][1]


def counted(function, calls: list):
    def noted(*args):
        calls.append(1)
        return function(*args)

    return noted


def failing_target_job(hosts: HostGroup) -> str:
    """The target fails while it verifies; what each host says of that."""
    drafting = {
        "strategy": "vanilla",
        "draft_model": "demo",
        "draft_host": True,
        "draft_timeout": GROUP_TIMEOUT,
    }
    speculate = SpeculativeConfig(**drafting)
    engine = Engine.from_pretrained("demo", hosts=hosts, speculate=speculate, dtype="float32")
    if hosts.rank == 0:
        engine.model.lm_head.register_forward_pre_hook(fails_at(4))
    request = {"video": demo.video_path(), "num_frames": 16, "max_new_tokens": 12}
    return described(lambda: engine.generate("name the letters in order", **request))


def fails_at(number: int):
    calls = count(1)

    def fail(*_) -> None:
        if next(calls) == number:
            raise RuntimeError("out of memory")

    return fail


def test_a_draft_host_hears_of_a_target_that_fails(pool):
    target, draft = pool.run(2, failing_target_job)
    assert target == "RuntimeError: out of memory"
    assert draft == "HostError: the target's hosts failed"


RUNS = [
    {"pattern": "all", "gamma": 5},
    {"pattern": "none", "gamma": 5},
    {"pattern": "all", "gamma": 1},
]
RUNS += [{"pattern": "alternating", "gamma": 2}, {"pattern": "all but the first", "gamma": 5}]
RUNS += [{"pattern": "all but the last", "gamma": 13}]
RUNS += [{"most": most, "pattern": "all but the last"} for most in (1, 2, 5, 6)]
RUNS += [{"end": place, "gamma": 4} for place in (1, 4, 5)]


def test_a_pipeline_changes_no_token(pool):
    answers = check(pool.run(3, pipeline_job, "sharded", RUNS), RUNS)
    all_right, none, one, *_ = [stats for _, stats, *_ in answers]
    # Five at a time once the pipeline runs, up to three times as many at first; one where nothing
    # is right.
    assert STEPS // 5 - 2 <= all_right.num_target_forwards <= STEPS // 5
    assert none.num_target_forwards == STEPS - 1
    assert STEPS - 3 <= one.num_target_forwards <= STEPS - 1
    # Three windows while the target prefills, which verifies the first token; the first pass
    # verifies the others.
    first, *others = all_right.of_draft.windows
    assert first == 15 and max(others) == 5


def test_a_losing_draft_host_rests_until_the_next_request(pool):
    runs = [{"pattern": "none", "gamma": 3, "waits": True}] * 2 + [
        {"pattern": "none", "gamma": 3, "waits": False}
    ]
    *lost, kept = check(pool.run(3, pipeline_job, "gathered", runs), runs)
    for _, stats, _, said in lost:
        assert len(said) == 1
        assert "longer than without" in stats.switched_off
        assert stats.num_drafted < 3 * STEPS
        assert stats.lost_draft is None and stats.num_target_forwards == STEPS - 1
    assert kept[1].switched_off is None and not kept[3]


@pytest.mark.parametrize("fail_after", [0, 11])
def test_the_target_goes_on_without_a_draft_that_fails(pool, fail_after):
    runs = [{"pattern": "all", "fail_after": fail_after}, {"most": 7}]
    answers = check(pool.run(3, pipeline_job, "sharded", runs), runs)
    (_, stats, _, warned), (_, alone, _, silent) = answers
    assert "the draft host failed" in stats.lost_draft and len(warned) == 1
    assert alone.lost_draft == stats.lost_draft and not silent and alone.num_drafted == 0


class LocalChannel:
    """One end of a one-way channel between two threads, which a link uses like a group of two
    hosts."""

    def __init__(self, rank: int, messages: queue.Queue, timeout: float):
        self.rank = rank
        self.bytes_received = 0
        self._messages = messages
        self._timeout = timeout
        self._received: dict[int, Tensor] = {}
        self._num_requested = 0
        self._num_received = 0

    def start_broadcast(self, tensor: Tensor, source: int) -> Pending:
        """Send or receive as :class:`HostGroup` does: the nth message requested is the nth message
        sent."""
        if self.rank == source:
            self._messages.put(tensor.clone())
            return Pending(lambda: tensor)
        number = self._num_requested
        self._num_requested += 1

        def finish() -> Tensor:
            if not self._fetch(number, self._timeout):
                raise HostError(f"the other thread did not answer within {self._timeout:g} s")
            self.bytes_received += tensor.nbytes
            return self._received.pop(number)

        return Pending(finish, lambda: self._fetch(number, 0.0))

    def _fetch(self, number: int, timeout: float) -> bool:
        """Return whether this message has arrived, or arrives in time."""
        while self._num_received <= number:
            try:
                self._received[self._num_received] = self._messages.get(
                    timeout > 0, timeout or None
                )
            except queue.Empty:
                return False
            self._num_received += 1
        return True


def ends_of_link() -> list[Link]:
    """Both ends between two threads: the target's and the draft's."""
    ways = (queue.Queue(), queue.Queue())
    ends = []
    for rank in (0, 1):
        channels = [LocalChannel(rank, messages, HANGING) for messages in ways]
        ends.append(Link(*channels))
    return ends


def links(window: int) -> list[Link]:
    """Both ends between two threads, which have agreed on a request."""
    ends = ends_of_link()
    for link in ends:
        link.begin(True, window, 4, False)
    assert all(link.other_is_ready() for link in ends)
    return ends


@pytest.mark.parametrize(("stops", "windows"), [(True, [3, 3, 3]), (False, [12, 4, 3])])
def test_a_window_can_be_as_long_as_the_target_takes(stops, windows):
    """And once it is known that the answer has ended, or goes on otherwise, none is longer."""
    target, draft = links(4)
    verdicts = iter([GO_ON, GO_ON, DONE])

    def stream(sequence, num_verified):
        for place in range(100):
            if place == 2:  # the target judges each window while its third token is written
                target.send_verdict(next(verdicts), len(sequence) - 1, 7)
            yield place, None

    drafting = Draft(SimpleNamespace(stream=stream), 0)
    _, report = draft_beside(draft, drafting, 0, stops_with_target=stops)
    assert report.windows == windows


# ---- drawn answers ----


def drawn_beside_a_thread(model: TableModel, seed: int, most: int, gamma: int) -> list[int]:
    model.seed = seed
    model.said = []

    def stream(sequence, num_verified):  # the prompt's last token is 0, as for the target
        said = list(sequence)
        while True:
            proposal = model.propose(said, Tree.chain(1), index=len(said) - 1)
            said += proposal.tokens
            yield proposal.tokens[0], proposal.q[0]

    target, draft = ends_of_link()
    pair = Pair(None, False, target)
    config = SpeculativeConfig(draft_host=True, num_draft_tokens=gamma)
    for each in (pair, Pair(None, True, draft)):
        with each.beginning(config, 4, drawn=True):
            pass  # neither side has anything to read
    sampling = SamplingParams(max_new_tokens=most, temperature=1.0, seed=seed)
    with ThreadPoolExecutor(1) as executor:
        drafting = executor.submit(draft_beside, draft, Draft(SimpleNamespace(stream=stream), 0), 0)
        tokens, _ = generate_beside_draft(model.answer(sampling), pair, Pace(gamma))
        assert drafting.result()[0] == tokens
    return tokens


def test_no_place_of_the_sequence_is_judged_by_another_ones_numbers(monkeypatch):
    """The target itself drafts and is always right: so every part begins where the one before
    ended."""
    parts = []
    model = TableModel(tables(4), tables(4))

    def listened(proposal, logits, index, sampling):
        parts.append((index, len(proposal.tokens)))
        return verify_window(proposal, logits, index, sampling)

    monkeypatch.setattr(pipeline, "verify_window", listened)
    for seed in range(5):
        parts.clear()
        drawn_beside_a_thread(model, seed, 20, 3)
        assert len(parts) > 3 and any(length > 1 for _, length in parts)
        for (index, length), (following, _) in pairwise(parts):
            assert following == index + length


@pytest.mark.thorough
def test_sampling_through_the_pipeline_is_distributed_as_the_targets_own():
    model = TableModel(tables(4), tables(4, 1))
    counts = Counter(
        tuple(drawn_beside_a_thread(model, seed, 3, 2)) for seed in range(NUM_SAMPLES // 2)
    )
    assert surprise_of(counts, model) < 4
