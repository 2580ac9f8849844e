"""Drafting on another host: the tokens of decoding without, whatever the timing and whoever is lost."""

import random
import time
import warnings
from collections import Counter
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch

from apbv import HostError, HostGroup, SpeculativeConfig
from apbv.config import SamplingConfig
from apbv.decode.answer import generate_tokens
from apbv.speculate import pipeline
from apbv.speculate.draft import Draft
from apbv.speculate.pace import Pace
from apbv.speculate.pair import Pair
from apbv.speculate.pipeline import draft_beside, generate_beside_draft
from apbv.speculate.verify import verify_window

from answers import answer_by
from drafters import PATTERNS, STEPS, VOCABULARY, decoders
from patience import GROUP_TIMEOUT, limit
from prompts import build, text_batch
from table_model import NUM_SAMPLES, TableModel, surprise_of, tables

# ---- the pipeline, with a scripted draft ----


class ScriptedStream:
    """Writes the answer, errs where it is told to, and takes its time."""

    def __init__(self, answer: list[int], pattern, delay: float = 0.0, fail_after: int | None = None):
        self.answer, self.pattern, self.delay, self.left = answer, pattern, delay, fail_after

    def stream(self, sequence):
        said = list(sequence[1:])
        for place in range(100):
            if self.left == 0:
                raise RuntimeError("out of memory")
            self.left = None if self.left is None else self.left - 1
            time.sleep(random.uniform(0, self.delay))
            right = self.answer[len(said)] if said == self.answer[: len(said)] and len(said) < STEPS else 0
            said.append(right if self.pattern(place) else (right + 1) % VOCABULARY)
            yield said[-1], None


class SlowDecoder:
    """A decoder that takes its time."""

    def __init__(self, decoder, delay: float):
        self._decoder, self._delay = decoder, delay
        self.take_back, self.hosts = decoder.take_back, decoder.hosts

    def advance(self, tokens):
        time.sleep(random.uniform(0, self._delay))
        return self._decoder.advance(tokens)


def pipeline_job(hosts: HostGroup, kv: str, runs: list[dict], draft_timeout: float = GROUP_TIMEOUT):
    """Each run's tokens and statistics on the target's hosts; what the draft said at the end on the last one."""
    config = SpeculativeConfig(strategy="vanilla", draft_host=True, draft_timeout=draft_timeout)
    pair = Pair.of(hosts, config)
    batch, model = text_batch(60), build("llama", torch.float64)
    single = HostGroup.single()
    decoder, state, _ = decoders(model, single, batch, 48, "gathered")
    plain = generate_tokens(answer_by(decoder, state, SamplingConfig(max_new_tokens=STEPS)))
    results = []
    for run in runs:
        settings = {
            "pattern": "all",
            "gamma": 5,
            "most": STEPS,
            "end": None,
            "delays": (0, 0),
            "fail_after": None,
            "late": 0,
            "auto": False,
        } | run
        config = SpeculativeConfig(strategy="vanilla", draft_host=True, num_draft_tokens=settings["gamma"])
        with pair.beginning(config, VOCABULARY, False):
            pass
        if pair.is_draft:
            stream = ScriptedStream(
                plain, PATTERNS[settings["pattern"]], settings["delays"][0], settings["fail_after"]
            )
            try:
                tokens, *_ = draft_beside(pair.link, Draft(stream, 0), 0, stops_with_target=settings["auto"])
                results.append(tokens)
            except (HostError, RuntimeError) as error:
                results.append(str(error))
                pair.link = None
                break
            continue
        decoder, state, look = decoders(model, pair.hosts, batch, 48, kv)
        time.sleep(settings["late"])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            answer = answer_by(
                SlowDecoder(decoder, settings["delays"][1]),
                state,
                SamplingConfig(max_new_tokens=settings["most"]),
                () if settings["end"] is None else (plain[settings["end"]],),
            )
            tokens, stats = generate_beside_draft(answer, pair.open_link(), Pace(settings["gamma"]))
        if stats.lost_draft:
            pair.link = None
        cache = look()
        length = None if cache is None else cache.get_seq_length()
        results.append((tokens, stats, length, [str(w.message) for w in caught if "draft host" in str(w.message)]))
    return plain, results


def check(results, runs: list[dict]) -> list:
    """Every host has the tokens of plain decoding, up to where the run ends; returns host 0's results."""
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


@pytest.mark.parametrize(
    ("num_hosts", "kv"),
    [
        (2, "gathered"),
        pytest.param(3, "gathered", marks=pytest.mark.exhaustive),
        pytest.param(3, "sharded", marks=pytest.mark.thorough),
    ],
)
def test_a_pipeline_changes_no_token(pool, num_hosts, kv):
    runs = [{"pattern": pattern, "gamma": gamma} for pattern in PATTERNS for gamma in (1, 2, 5, 13)]
    runs += [{"most": most, "pattern": "all but the last"} for most in range(1, 10)]
    runs += [{"end": place, "gamma": 4} for place in range(1, 12)]
    answers = check(pool.run(num_hosts, pipeline_job, kv, runs), runs)
    stats = {(run.get("pattern"), run.get("gamma")): answer[1] for run, answer in zip(runs, answers, strict=True)}
    # Five at a time once the pipeline runs, up to three times as many at first; one where nothing is right.
    assert STEPS // 5 - 2 <= stats["all", 5].num_target_forwards <= STEPS // 5
    assert stats["all", 5].num_pre_verify == 0
    assert stats["none", 5].num_target_forwards == STEPS - 1 and stats["none", 5].num_post_verify == 0
    assert STEPS - 3 <= stats["all", 1].num_target_forwards <= STEPS - 1


def test_what_is_drafted_while_the_target_prefills_is_verified_at_once(pool):
    """Three windows at most, however much time there is."""
    runs = [{"late": limit(1.5), "gamma": 4, "pattern": pattern} for pattern in PATTERNS]
    answers = check(pool.run(2, pipeline_job, "gathered", runs), runs)
    stats = dict(zip(PATTERNS, (answer[1] for answer in answers), strict=True))
    windows = [span.details["tokens"] for span in stats["all"].of_draft.spans if span.name == "draft"]
    assert windows[0] == 12 and max(windows[1:]) == 4
    # The prefill verifies the first, the first pass the other eleven and the next window's first.
    assert next(span.details["tokens"] for span in stats["all"].record.spans if span.name == "verify") == 12
    assert stats["all but the first"].num_drafted == stats["none"].num_drafted


def test_a_window_can_be_as_long_as_the_target_takes(pool):
    """The target takes three times as long as a drafted token, on average; eight would keep it waiting."""
    runs = [{"gamma": 16 if auto else 8, "delays": (0.06, 0.18), "auto": auto} for auto in (True, False)]
    answers = check(pool.run(2, pipeline_job, "gathered", runs), runs)
    lengths = []
    for _, stats, *_ in answers:
        lengths.append([s.details["tokens"] for s in stats.of_draft.spans if s.name == "draft"][1:])
    assert sum(lengths[0]) / len(lengths[0]) < 8 and max(lengths[1]) == 8


def test_time_changes_nothing(pool):
    random.seed(1)
    delays = [(0.01, 0), (0, 0.01), (0.01, 0.01)]
    runs = [{"pattern": p, "delays": d, "most": 20} for d in delays for p in ("alternating", "all but the last")]
    check(pool.run(2, pipeline_job, "gathered", runs), runs)


@pytest.mark.parametrize("fail_after", [0, 1, 3, 11])
def test_the_target_goes_on_without_a_draft_that_fails(pool, fail_after):
    runs = [{"pattern": "all", "fail_after": fail_after}, {"most": 7}]
    answers = check(pool.run(3, pipeline_job, "sharded", runs), runs)
    (_, stats, _, warned), (_, alone, _, silent) = answers
    assert "the draft host failed" in stats.lost_draft and len(warned) == 1
    assert alone.lost_draft is None and not silent and alone.num_drafted == 0


def sampled_job(hosts: HostGroup, count: int):
    """Counts of three tokens, drawn through the pipeline."""
    config = SpeculativeConfig(strategy="vanilla", draft_host=True, num_draft_tokens=2)
    pair = Pair.of(hosts, config)
    model = TableModel(tables(4), tables(4, 1))
    counts: Counter = Counter()
    for seed in range(count):
        with pair.beginning(config, 4, True):
            pass
        model.seed, model.said = seed, []
        sampling = SamplingConfig(max_new_tokens=3, temperature=1.0, seed=seed)
        if pair.is_draft:
            tokens, *_ = draft_beside(pair.link, Draft(TableStream(model), 0), 0)
        else:
            tokens, _ = generate_beside_draft(model.answer(sampling, pair.hosts), pair.open_link(), Pace(2))
        counts[tuple(tokens)] += 1
    return counts


def judged_job(hosts: HostGroup, count: int) -> list[list[tuple[int, int]]]:
    """For every answer: where each part of a window that was judged begins, and how long it is."""
    config = SpeculativeConfig(strategy="vanilla", draft_host=True, num_draft_tokens=3)
    pair, model, answers = Pair.of(hosts, config), TableModel(tables(4), tables(4)), []

    def listened(proposal, logits, index, sampling):
        answers[-1].append((index, len(proposal.tokens)))
        return verify_window(proposal, logits, index, sampling)

    for seed in range(count):
        answers.append([])
        with pair.beginning(config, 4, True):
            pass
        model.seed, model.said = seed, []
        if pair.is_draft:
            draft_beside(pair.link, Draft(TableStream(model), 0), 0)
            continue
        sampling = SamplingConfig(max_new_tokens=20, temperature=1.0, seed=seed)
        with patch.object(pipeline, "verify_window", listened):
            generate_beside_draft(model.answer(sampling, pair.hosts), pair.open_link(), Pace(3))
    return answers


def test_no_place_of_the_sequence_is_judged_by_another_ones_numbers(pool):
    """The target itself drafts and is always right: so every part begins where the one before ended."""
    for parts in pool.run(2, judged_job, 5)[0]:
        assert len(parts) > 3 and any(length > 1 for _, length in parts)
        for (index, length), (following, _) in pairwise(parts):
            assert following == index + length


class TableStream:
    """The table's draft; the prompt's last token is 0, as for the target."""

    def __init__(self, model: TableModel):
        self.model = model

    def stream(self, sequence):
        said = list(sequence)
        while True:
            proposal = self.model.propose(said, 1, index=len(said) - 1)
            said += proposal.tokens
            yield proposal.tokens[0], proposal.q[0]


@pytest.mark.parametrize("count", [NUM_SAMPLES // 8, pytest.param(NUM_SAMPLES // 3, marks=pytest.mark.exhaustive)])
def test_sampling_through_the_pipeline_is_distributed_as_the_targets_own(pool, count):
    for counts in pool.run(2, sampled_job, count):
        assert surprise_of(counts, TableModel(tables(4), tables(4, 1))) < 4
