"""A draft on a host, or a thread, of its own, through the engine: the answer of decoding without it."""

import json
import os
import socket
import subprocess
import sys
import textwrap

import pytest
import torch

from apbv import Engine, HostError, HostGroup, PrefillConfig, SpeculativeConfig
from apbv.config import KEEP_POLICIES
from apbv.speculate import builders
from apbv.speculate.drafters import ModelDrafter

import families
from engines import QUESTION
from patience import limit
from scripts import infer

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


@pytest.mark.parametrize(
    ("num_hosts", "kv", "policies"),
    [
        (2, "gathered", ["full", "even"]),
        (3, "sharded", ["uv_prune"]),
        pytest.param(2, "gathered", KEEP_POLICIES, marks=pytest.mark.thorough),
        pytest.param(3, "sharded", KEEP_POLICIES, marks=pytest.mark.exhaustive),
    ],
    ids=lambda value: "every policy" if value is KEEP_POLICIES else None,
)
def test_no_draft_host_changes_an_answer(pool, clip, num_hosts, kv, policies):
    """A choice by what the target makes of the prompt, early or late, and one that asks nobody."""
    ways = [{"strategy": "vanilla"}, {"strategy": "text_only"}]
    ways += [{"strategy": "specvlm", "keep": keep, "keep_ratio": 0.3} for keep in policies]
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


def test_a_draft_that_is_the_target_is_always_right(pool, clip):
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


def in_one_process(clip, way: dict, draft_seed: int = 1):
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


def test_a_thread_can_stand_for_the_draft_host(clip, monkeypatch):
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


def test_a_draft_that_fails_when_the_scores_come(clip, monkeypatch):
    """Also where the target has ended by then, and knows of it only from what would be the draft's account."""

    def fails(*args):
        raise RuntimeError("out of memory")

    request = {"video": str(clip), "num_frames": 12}
    engine = in_one_process(clip, {"strategy": "hippo", "prune": "kv"})
    expected = engine.generate(QUESTION, **request, max_new_tokens=9).token_ids
    with monkeypatch.context() as patched:
        patched.setattr(builders, "_prune_kv", fails)
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


@pytest.mark.parametrize("how", ["dies", pytest.param("stalls", marks=pytest.mark.thorough)])
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
