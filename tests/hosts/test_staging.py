"""Hosts that share a device: the engine's answers are those of hosts that do not, and a failure
reaches all."""

import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from apbv import Engine, HostGroup, PrefillConfig, SpeculativeConfig
from apbv.hosts import in_thread
from apbv.hosts.collectives import StagedCollectives, wait_in_thread

from apbv_tests import families
from apbv_tests.engines import QUESTION
from apbv_tests.fresh_hosts import Store, described, exchange_in_stage, run_fresh, told_job
from apbv_tests.patience import GROUP_TIMEOUT, HANGING
from apbv_tests.staged import staged_group, staged_job

DRAFT_HOST = SpeculativeConfig(strategy="specvlm", draft_host=True, draft_timeout=GROUP_TIMEOUT)


def answer_job(
    hosts: HostGroup, clip: Path, prefill: PrefillConfig, speculate: SpeculativeConfig | None
):
    model, draft = (families.build_model("qwen2_5_vl", seed=seed) for seed in (0, 1))
    processor = families.build_processor("qwen2_5_vl")
    draft = draft if speculate else None
    engine = Engine(model, processor, hosts, prefill, speculate=speculate, draft=draft)
    result = engine.generate(QUESTION, video=clip, num_frames=8, max_new_tokens=4)
    return result.token_ids, result.stats["comm_bytes"]


SETTINGS = [(3, "apbv", "gathered", DRAFT_HOST), (2, "zigzag_ring", "sharded", None)]


@pytest.mark.parametrize(("num_hosts", "method", "kv", "speculate"), SETTINGS)
def test_answers_are_the_same_by_either_way(pool, clip, num_hosts, method, kv, speculate):
    asked = clip, PrefillConfig(method=method, kv=kv, passing_len=4), speculate
    direct = pool.run(num_hosts, answer_job, *asked)
    staged = pool.run(num_hosts, staged_job, answer_job, *asked)
    if speculate is None:  # a draft host drafts as much as it has time for
        assert staged == direct
    assert staged[0][0] == direct[0][0]
    assert sum(direct[0][1]) > 0


def failing_job(hosts: HostGroup) -> str:
    """Host 1 fails amid exchanges."""
    return described(
        exchange_in_stage, staged_group(hosts), ValueError("bad") if hosts.rank == 1 else None
    )


def test_a_failure_reaches_those_who_wait(tmp_path):
    outcomes = run_fresh(Store(tmp_path), 3, told_job, tmp_path, failing_job)
    quoted = "HostError: host 1 failed in encode: ValueError: bad"
    assert [outcome.result for outcome in outcomes] == [quoted, "ValueError: bad", quoted]
    assert [outcome.exit_status for outcome in outcomes] == [0] * 3, (
        "nobody waits for the thread at exit"
    )
    assert max(outcome.seconds for outcome in outcomes) < HANGING


def test_an_exchange_begins_when_the_one_before_has_ended():
    """Else their order would be that of threads, and another on every host."""
    happened = []
    may_end = threading.Event()

    def broadcast(tensors: list[torch.Tensor], options) -> SimpleNamespace:
        number = int(tensors[0][0])
        happened.append(("began", number))

        def wait(limit=None) -> None:
            assert may_end.wait(HANGING)
            happened.append(("ended", number))

        return SimpleNamespace(wait=wait, is_completed=may_end.is_set)

    watch = SimpleNamespace(
        is_broken=False, require_whole=lambda: None, wait=lambda call: call.wait()
    )
    collectives = StagedCollectives(SimpleNamespace(broadcast=broadcast), watch)
    exchanges = [collectives.broadcast(torch.full((3,), number), 0) for number in range(3)]
    time.sleep(0.1)  # in which the others could begin
    may_end.set()
    for exchange in exchanges:
        exchange.wait()
    assert happened == [(what, number) for number in range(3) for what in ("began", "ended")]


@pytest.mark.parametrize("error", [None, RuntimeError("Connection closed by peer")])
def test_an_exchange_that_ends_as_a_wait_gives_up_has_its_own_outcome(error):
    """It is complete, or fails, right after a wait for it has run out of time."""

    def wait(timeout=None) -> None:
        if timeout is not None or error is not None:
            raise RuntimeError("Operation timed out!") if timeout is not None else error

    work, watch = (
        SimpleNamespace(wait=wait, is_completed=lambda: True),
        SimpleNamespace(is_broken=False),
    )
    assert in_thread(partial(wait_in_thread, work, watch)).exception() is error


LEAVING = """
import time
from apbv.hosts import in_thread

class Held:
    def __del__(self):
        time.sleep(0.5)
        print("freed", flush=True)

in_thread(lambda held=Held(): time.sleep(0.2)).result()
"""


@pytest.mark.thorough
def test_the_interpreter_waits_until_a_call_has_freed_what_it_held():
    assert (
        subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True).stdout
        == "freed\n"
    )
