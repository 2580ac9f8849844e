"""Drafting on another host: the tokens of decoding without, whatever the timing and whoever is lost."""

import json
import os
import random
import socket
import subprocess
import sys
import textwrap
import time
import warnings
from collections import Counter

import pytest
import torch
from test_drafting import QUESTION
from test_engine import clip, infer  # noqa: F401  (a fixture)
from test_prefill import build, text_batch
from test_speculate import PATTERNS, STEPS, VOCABULARY, decoders
from test_verify import NUM_SAMPLES, TableModel, surprise_of, tables

from apbv import Engine, HostError, HostGroup, PrefillConfig, SpeculativeConfig
from apbv.config import KEEP_POLICIES, SamplingConfig
from apbv.decode.decoder import generate_tokens
from apbv.speculate import strategies
from apbv.speculate.draft import Draft
from apbv.speculate.drafters import ModelDrafter
from apbv.speculate.pair import Pair
from apbv.speculate.pipeline import draft_beside, generate_beside_draft

import families
from patience import GROUP_TIMEOUT, limit

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
        self.take_back = decoder.take_back

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
    plain = generate_tokens(decoder, state.logits[0], 60, single, SamplingConfig(max_new_tokens=STEPS), ())
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
            tokens, stats = generate_beside_draft(
                SlowDecoder(decoder, settings["delays"][1]),
                pair.open_link(),
                state.logits[0],
                60,
                pair.hosts,
                SamplingConfig(max_new_tokens=settings["most"]),
                () if settings["end"] is None else (plain[settings["end"]],),
                settings["gamma"],
            )
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


@pytest.mark.parametrize(("num_hosts", "kv"), [(2, "gathered"), (3, "gathered"), (3, "sharded")])
def test_a_pipeline_changes_no_token(pool, num_hosts, kv):
    runs = [{"pattern": pattern, "gamma": gamma} for pattern in PATTERNS for gamma in (1, 2, 5, 13)]
    runs += [{"most": most, "pattern": "all but the last"} for most in range(1, 16)]
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
            tokens, _ = generate_beside_draft(
                model, pair.open_link(), model.p_logits[0], 0, pair.hosts, sampling, (), 2
            )
        counts[tuple(tokens)] += 1
    return counts


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


def test_sampling_through_the_pipeline_is_distributed_as_the_targets_own(pool):
    for counts in pool.run(2, sampled_job, NUM_SAMPLES // 3):
        assert surprise_of(counts, TableModel(tables(4), tables(4, 1))) < 4


# ---- through the engine ----

BEGINNINGS = [{"prune": "prompt"}, {"prune": "prompt", "vision_first": True}, {"prune": "kv"}]


def engine_job(hosts: HostGroup, kv: str, ways: list[dict], path: str, draft_seed: int):
    family, answers = "qwen2_5_vl", []
    request = {"video": path, "num_frames": 12, "max_new_tokens": 20}
    for way in ways:
        is_draft = hosts.rank == hosts.size - 1
        model = None if is_draft else families.build_model(family, dtype=torch.float64)
        draft = families.build_model(family, dtype=torch.float64, seed=draft_seed) if is_draft else None
        speculate = SpeculativeConfig(draft_host=True, keep_losing_draft=True, **way)
        engine = Engine(
            model, families.build_processor(family), hosts, PrefillConfig(kv=kv), speculate=speculate, draft=draft
        )
        shown = []
        answer = engine.generate(QUESTION, **request, on_token=shown.append)
        again = engine.generate(QUESTION, **{**request, "max_new_tokens": 5})
        assert again.token_ids == answer.token_ids[:5] and shown == answer.token_ids
        with pytest.raises((ValueError, HostError), match=r"no-such|cannot answer this request"):
            engine.generate(QUESTION, video="no-such.mp4")
        once_more = engine.generate(QUESTION, **request)
        assert once_more.token_ids == answer.token_ids
        answers.append((answer.token_ids, once_more.stats))
    return answers


@pytest.mark.parametrize(("num_hosts", "kv"), [(2, "gathered"), (3, "sharded")])
def test_no_draft_host_changes_an_answer(pool, clip, num_hosts, kv):  # noqa: F811
    ways = [{"strategy": "vanilla"}, {"strategy": "text_only"}]
    ways += [{"strategy": "specvlm", "keep": keep, "keep_ratio": 0.3} for keep in KEEP_POLICIES]
    ways += [{"strategy": "hippo", "num_draft_tokens": "auto", **begin} for begin in BEGINNINGS]
    single = Engine(
        families.build_model("qwen2_5_vl", dtype=torch.float64),
        families.build_processor("qwen2_5_vl"),
        HostGroup.single(),
    )
    plain = single.generate(QUESTION, video=str(clip), num_frames=12, max_new_tokens=20).token_ids
    for answers in pool.run(num_hosts, engine_job, kv, ways, str(clip), 1):
        for way, (tokens, _) in zip(ways, answers, strict=True):
            assert tokens == plain, way


def test_a_draft_that_is_the_target_is_always_right(pool, clip):  # noqa: F811
    """Its prompt, its positions and its windows are right: every window of five is confirmed."""
    ways = [{"strategy": "vanilla"}]
    ways += [{"strategy": "hippo", "keep_ratio": 1.0, **begin} for begin in BEGINNINGS]
    target, draft = pool.run(2, engine_job, "gathered", ways, str(clip), 0)
    for _, stats in target:
        figures = stats["speculation"]
        assert figures["num_accepted"] == figures["num_drafted"]
        # Where scores are awaited the first window ends when they come.
        shortened = int(figures["strategy"] == "hippo")
        assert figures["num_pre_verify"] <= shortened and figures["num_target_forwards"] <= 4 + shortened
        assert figures["mean_accepted_tokens"] == figures["num_accepted"] and figures["draft_seconds"] > 0
    assert all(stats["role"] == "draft" and stats["num_drafted"] >= 20 for _, stats in draft)


def in_one_process(clip, way: dict, draft_seed: int = 1):  # noqa: F811
    family = "qwen2_5_vl"
    return Engine(
        families.build_model(family, dtype=torch.float64),
        families.build_processor(family),
        HostGroup.single(),
        speculate=SpeculativeConfig(draft_host=True, keep_losing_draft=True, **way),
        draft=families.build_model(family, dtype=torch.float64, seed=draft_seed),
    )


def raise_enough(token: int) -> None:
    raise RuntimeError("enough")


def test_a_thread_can_stand_for_the_draft_host(clip, monkeypatch):  # noqa: F811
    request = {"video": str(clip), "num_frames": 12, "max_new_tokens": 20}
    plain = Engine(
        families.build_model("qwen2_5_vl", dtype=torch.float64),
        families.build_processor("qwen2_5_vl"),
        HostGroup.single(),
    )
    expected = plain.generate(QUESTION, **request).token_ids
    ways = [{"strategy": "vanilla"}, {"strategy": "text_only", "num_draft_tokens": "auto"}]
    ways += [{"strategy": "hippo", "keep_ratio": 0.3, **begin} for begin in BEGINNINGS]
    for way in ways:
        engine = in_one_process(clip, way)
        assert engine.generate(QUESTION, **request).token_ids == expected, way
        answer = engine.generate(QUESTION, **request, timeline=True)
        assert answer.token_ids == expected and set(answer.timeline) == {"host 0", "draft host"}
        with pytest.raises(ValueError, match="no-such"):
            engine.generate(QUESTION, video="no-such.mp4")
        assert engine.generate(QUESTION, **request).token_ids == expected
        with pytest.raises(RuntimeError, match="enough"):
            engine.generate(QUESTION, **request, on_token=raise_enough)
        with pytest.raises(RuntimeError, match="enough"):
            engine.generate(QUESTION, **{**request, "max_new_tokens": 1}, on_token=raise_enough)
        assert engine.generate(QUESTION, **request).token_ids == expected
    right = in_one_process(clip, {"strategy": "vanilla"}, draft_seed=0)
    assert right.generate(QUESTION, **request).stats["speculation"]["acceptance_rate"] == 1

    def fails(self, tokens):
        raise RuntimeError("out of memory")
        yield

    monkeypatch.setattr(ModelDrafter, "stream", fails)
    with pytest.warns(UserWarning, match="out of memory|the draft host failed"):
        assert right.generate(QUESTION, **request).token_ids == expected
    assert right.generate(QUESTION, **request).token_ids == expected


def test_a_draft_that_fails_when_the_scores_come(clip, monkeypatch):  # noqa: F811
    """Also where the target has ended by then, and knows of it only from what would be the draft's account."""

    def fails(*args):
        raise RuntimeError("out of memory")

    request = {"video": str(clip), "num_frames": 12}
    engine = in_one_process(clip, {"strategy": "hippo", "prune": "kv"})
    expected = engine.generate(QUESTION, **request, max_new_tokens=9).token_ids
    with monkeypatch.context() as patched:
        patched.setattr(strategies, "_pruned", fails)
        for most in (1, 2, 9):
            with pytest.warns(UserWarning, match="going on without the draft host: the draft host failed"):
                answer = engine.generate(QUESTION, **request, max_new_tokens=most)
            assert answer.token_ids == expected[:most] and answer.stats["speculation"]["lost_draft"]
    answer = engine.generate(QUESTION, **request, max_new_tokens=9)
    assert answer.token_ids == expected and answer.stats["speculation"]["lost_draft"] is None


LOST = """
import os, sys, time, warnings
import apbv
from apbv import Engine, SpeculativeConfig
from apbv.speculate import strategies
from apbv.speculate.drafters import ModelDrafter

how, clip = sys.argv[1:]
hosts = apbv.HostGroup.from_env(timeout=600)
speculate = SpeculativeConfig(strategy="vanilla", draft_host=True, draft_timeout=2.0)
engine = Engine.from_pretrained("demo", speculate=speculate, hosts=hosts, dtype="float32")
if hosts.rank == hosts.size - 1:
    stream = ModelDrafter.stream

    def lost(self, tokens):
        for number, item in enumerate(stream(self, tokens)):
            if len(tokens) > 12 and number == 2:
                os._exit(3) if how == "dies" else time.sleep(30)
            yield item

    ModelDrafter.stream = lost
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    request = {"video": clip, "num_frames": 2048, "max_new_tokens": 60}
    answers = [engine.generate("describe the clip shot by shot", **request) for _ in range(2)]
print(answers[0].text, answers[1].text, sep="|")
print(sum("going on without the draft host" in str(w.message) for w in caught))
os._exit(0)
"""


@pytest.mark.parametrize("how", ["dies", "stalls"])
def test_a_lost_draft_host_costs_nothing_but_time(tmp_path, how):
    """Real processes, without torchrun, which would end them all."""
    from apbv import demo

    script = tmp_path / "lost.py"
    script.write_text(textwrap.dedent(LOST))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    command = [sys.executable, str(script), how, str(demo.video_path())]
    processes = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        output, _ = processes[0].communicate(timeout=limit(600.0))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    plain = Engine.from_pretrained("demo", dtype="float32")
    text = plain.generate(
        "describe the clip shot by shot", video=demo.video_path(), num_frames=2048, max_new_tokens=60
    ).text
    answers, warned = output.splitlines()[-2:]
    assert answers.split("|") == [text, text] and warned == "1"


def test_the_timeline_shows_both_sides_at_work_at_once(tmp_path):
    asked = ["--model", "demo", "--prompt", "describe the clip shot by shot", "--max-new-tokens", 80]
    drafting = ["--speculate", "hippo", "--prune", "kv", "--keep-ratio", 0.5, "--draft-host"]
    result = infer(*asked, *drafting, "--num-draft-tokens", "auto", "--timeline", tmp_path / "trace.json")
    assert result.returncode == 0, result.stderr
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert set(names.values()) == {"host 0", "draft host"}

    def spans(host: str, name: str) -> list[tuple[float, float]]:
        found = [e for e in events if e["ph"] == "X" and names[e["pid"]] == host and e["name"] == name]
        return [(e["ts"], e["ts"] + e["dur"]) for e in found]

    verified, drafted = spans("host 0", "verify"), spans("draft host", "draft")
    assert len(spans("host 0", "prefill")) == 1 and len(drafted) >= len(verified) > 2
    assert any(begin < stop and start < end for start, stop in verified for begin, end in drafted)
    # Rounds lie within the stage that they are part of.
    ((began, ended),) = spans("host 0", "decode")
    assert all(began <= start and stop <= ended for start, stop in verified)
