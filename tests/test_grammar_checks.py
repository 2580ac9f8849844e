"""Schemas and grammars that nobody could wait for are refused, in a process that limits end."""

import json
import os
import signal
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest

from apbv import Engine, SamplingParams
from apbv.grammar.checks import GrammarCheckError, GrammarChecks
from apbv.grammar.grammars import Grammars

from apbv_tests.hard_schemas import many_patterns
from apbv_tests.patience import HANGING, wait_for

LOOP = {"$ref": "#/$defs/loop"}
LATER = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": LOOP},
    "required": ["a", "b"],
}
OPTIONAL = {f"p{place}": {"type": "string"} for place in range(2000)}
ENDLESS = (
    "its references lead back to themselves without an end"  # seen before anything is compiled
)
REFUSED = {
    "many patterns": (many_patterns(), "too complex: it takes too long, or too much memory"),
    "a wide multiple": (
        {"type": "integer", "multipleOf": 999_983},
        "too complex: it takes too long, or too much memory",
    ),
    "itself": ({"$ref": "#"}, ENDLESS),
    "one another": ({**LOOP, "$defs": {"loop": {"$ref": "#/$defs/b"}, "b": LOOP}}, ENDLESS),
    "a loop in a property": ({**LATER, "$defs": {"loop": LOOP}}, ENDLESS),
    "2,000 optional properties": ({"type": "object", "properties": OPTIONAL}, "too complex: "),
    "no schema": ({"type": 7}, "not supported: "),
}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained("demo", dtype="float32")


@pytest.fixture
def grammars(engine) -> Grammars:
    return Grammars(engine.tokenizer, engine.parts.vocab_size, engine.parts.eos_token_ids)


def children_of(process: int) -> list[str]:
    with open(f"/proc/{process}/task/{process}/children") as file:
        return file.read().split()


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_answer_can_follow_is_refused_with_the_reason_and_nothing_stays(grammars, name):
    schema, reason = REFUSED[name]
    with pytest.raises(ValueError, match=f"JSON schema.*{reason}") as error:
        grammars.check(json.dumps(schema))
    assert "\n" not in str(error.value) and "rmatcher" not in str(error.value)
    grammars.check(json.dumps({"type": "object"}))
    (checker,) = (each for each in children_of(os.getpid()) if is_of(each, grammars))
    wait_for(lambda: not children_of(int(checker)))


def is_of(process: str, grammars: Grammars) -> bool:
    return int(process) == grammars.checks.process.pid


def test_a_call_of_the_library_is_refused_too(engine):
    for sampling, kind in (
        (SamplingParams(json_schema=json.dumps(many_patterns())), "JSON schema"),
        (SamplingParams(grammar='start: start "a"'), "grammar"),
    ):
        with pytest.raises(ValueError, match=f"this {kind} (is too complex|allows no answer)"):
            engine.generate("x", sampling=sampling)


def test_the_same_is_checked_once(grammars, monkeypatch):
    checked = []
    check = GrammarChecks.check
    monkeypatch.setattr(GrammarChecks, "check", lambda *given: checked.append(1) or check(*given))
    for schema in ({"type": "object"}, {"type": 7}, {"type": "object"}):
        for _ in range(2):
            try:
                grammars.check(json.dumps(schema))
            except ValueError:
                assert schema == {"type": 7}
    assert len(checked) == 2


def test_what_runs_too_long_holds_nobody_up(grammars):
    """More than may be checked at once, of which each takes all the time that it may."""
    told = []

    def check(number: int) -> None:
        try:
            grammars.check(json.dumps(many_patterns(name=str(number))))
        except (ValueError, GrammarCheckError) as error:
            told.append(str(error))

    threads = [threading.Thread(target=check, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    grammars.check(json.dumps({"type": "string"}))
    assert len(told) < len(threads)
    for thread in threads:
        thread.join(HANGING)
    assert len(told) == len(threads) and all(
        "too complex" in each or "try again" in each for each in told
    )


@contextmanager
def full(grammars: Grammars):
    """Every place is taken."""
    lanes = grammars.checks.lanes
    taken = [lane.places for lane in lanes for _ in range(8) if lane.places.acquire(blocking=False)]
    try:
        yield
    finally:
        for places in taken:
            places.release()


def test_whoever_leaves_waits_no_longer(grammars):
    is_wanted = iter([True, True, False])
    with full(grammars), pytest.raises(GrammarCheckError):
        grammars.check('{"type": "object"}', is_wanted=lambda: next(is_wanted))
    with pytest.raises(GrammarCheckError, match="not wanted"):
        grammars.check(json.dumps(many_patterns()), is_wanted=lambda: False)
    grammars.check('{"type": "object"}')


def test_a_wait_for_others_ends(grammars):
    lanes = [replace(lane, max_wait=0.0) for lane in grammars.checks.lanes]
    grammars.checks.lanes = lanes
    with full(grammars), pytest.raises(GrammarCheckError, match="try again later"):
        grammars.check('{"type": "object"}')


def test_more_than_may_wait_are_told_so_at_once(grammars):
    lanes = [replace(lane, queue=threading.Semaphore(0)) for lane in grammars.checks.lanes]
    grammars.checks.lanes = lanes
    with pytest.raises(GrammarCheckError, match="try again later"):
        grammars.check('{"type": "object"}')


def test_a_process_that_was_killed_is_replaced_and_the_last_one_ends_with_its_grammars(grammars):
    grammars.check('{"type": "object"}')
    process = grammars.checks.process
    os.kill(process.pid, signal.SIGKILL)
    process.wait(HANGING)
    grammars.check('{"type": "string"}')
    replaced = grammars.checks.process
    assert replaced.pid != process.pid and replaced.poll() is None
    grammars.checks.close()
    assert replaced.poll() == 0


def test_a_process_that_does_not_start_is_no_fault_of_the_schema(grammars, monkeypatch):
    monkeypatch.setattr("apbv.grammar.checks._SCRIPT", "no such file")
    with pytest.raises(GrammarCheckError, match=r"cannot check|does not work"):
        grammars.check('{"type": "object"}')
