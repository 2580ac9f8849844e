"""How long windows are and when a draft is dropped: by costs that the tests choose, never by time
that passes."""

import random
import warnings
from collections import Counter
from itertools import product
from unittest.mock import patch

import pytest
import torch

from apbv import HostGroup
from apbv.config import SamplingParams
from apbv.decode.answer import generate_tokens
from apbv.speculate.drafters.tree import Tree
from apbv.speculate.loops.pace import TRIAL_PASSES, Pace, best_windows
from apbv.speculate.loops.pipeline import DraftReport, PipelineStats
from apbv.speculate.loops.serial import generate_speculatively
from apbv.stats import Recorder

from apbv_tests.answers import answer_by
from apbv_tests.drafters import PATTERNS, STEPS, ScriptedDrafter, ScriptedTree, decoders
from apbv_tests.pairs import each_choice
from apbv_tests.prompts import build, text_batch

# ---- the decision ----


def best_window(cost_ratio: float, acceptance: float) -> int:
    (window,) = best_windows([acceptance], 1, cost_ratio, 1.0, 16)
    return window


@each_choice(cost_ratio=[1, 0.5, 3, 12], acceptance=[0.0, 0.2, 0.6, 0.9, 1.0])
def test_the_best_window_is_that_of_the_least_time_per_token(cost_ratio, acceptance):
    """AnsweredRequest by outcome: of the first k tokens accepted and then none, and of all."""

    def time_per_token(gamma: int) -> float:
        chances = [acceptance**k * (1 - acceptance) for k in range(gamma)] + [acceptance**gamma]
        tokens = sum(chance * (k + 1) for k, chance in enumerate(chances))
        return (gamma + cost_ratio) / tokens

    best = best_window(cost_ratio, acceptance)
    assert time_per_token(best) == pytest.approx(min(map(time_per_token, range(17))))
    assert best >= best_window(cost_ratio, acceptance / 2)
    # Where a drafted token costs as much as a pass of the target, there is nothing to gain.
    assert [best_window(cost_ratio, chance) for chance in (0.0, 1.0)] == [
        0,
        16 if cost_ratio > 1 else 0,
    ]


def rounds_of(
    pace: Pace, count: int, chance: float, draft: float, verify: float, extra=0.0, seed=0
):
    """Seconds and tokens of so many rounds, or until the draft is dropped."""
    generator = random.Random(seed)
    seconds = 0.0
    tokens = 0
    windows = []
    for _ in range(count):
        if pace.is_losing():
            break
        (window,) = pace.windows([pace.acceptance.rate])
        windows.append(window)
        accepted = next((k for k in range(window) if generator.random() >= chance), window)
        spent = window * draft, verify + extra * window
        pace.learn(window, *spent, accepted + 1)
        if window:
            pace.acceptance.learn(window, accepted)
        seconds = seconds + sum(spent)
        tokens = tokens + accepted + 1
    return seconds, tokens, windows


def test_auto_follows_costs_and_acceptance():
    """One cost ratio, two drafts; and a target whose pass grows with the window."""
    good = Pace("auto")
    bad = Pace("auto")
    dear = Pace("auto", keep_losing_draft=False)
    _, _, of_good = rounds_of(good, 60, 0.95, 1.0, 7.0)
    _, _, of_bad = rounds_of(bad, 60, 0.3, 1.0, 7.0)
    _, _, of_dear = rounds_of(dear, 60, 0.95, 1.0, 7.0, extra=6.0)
    assert good.most == 16 and of_good[:4] == [4, 0, 0, 0]
    assert min(of_good[20:]) > max(of_bad[20:]) and max(of_bad[20:]) <= 4
    assert max(of_good[-20:]) <= best_window(7.0, 0.99)
    assert max(of_dear[40:]) < min(of_good[40:])


def test_the_number_of_an_answer_by_itself_does_not_depend_on_time():
    """But for passes without drafted tokens, at fixed places; of a draft that is never judged there
    are none."""
    assert set(rounds_of(Pace(3), 200, 0.0, 9.0, 1.0)[2]) == {Pace(3).most} == {3}
    of_two = [
        rounds_of(Pace(3, keep_losing_draft=False), 200, 0.9, *costs)[2]
        for costs in ((0.1, 1.0), (0.0, 7.0))
    ]
    assert of_two[0] == of_two[1] and set(of_two[0]) == {0, 3}
    without = [place for place, window in enumerate(of_two[0]) if not window]
    expected = []
    for start in range(0, 256, 64):
        expected += [start + 1, start + 2, start + 3]
    assert without == expected


@pytest.mark.parametrize(
    ("wanted", "draft", "extra", "chance"),
    [(1, 2.0, 0.0, 0.5), (5, 0.5, 0.5, 0.3), ("auto", 1.0, 0.0, 0.0)],
)
def test_a_losing_draft_costs_its_trial_and_no_more(wanted, draft, extra, chance):
    """A drafted token costs as much as half a pass of the target, or more: no window can win."""
    pace = Pace(wanted, keep_losing_draft=False)
    seconds, tokens, windows = rounds_of(pace, 1000, chance, draft, 1.0, extra)
    assert pace.is_losing() and len(windows) < 200
    round_cost = max(windows) * (draft + extra) + 1
    assert TRIAL_PASSES <= seconds - tokens <= TRIAL_PASSES + 2 * round_cost
    # In any unit of time.
    again = rounds_of(
        Pace(wanted, keep_losing_draft=False), 1000, chance, draft / 1024, 1 / 1024, extra / 1024
    )
    assert again[2] == windows
    # Something else may delay the first pass that the rounds are compared with.
    misled = Pace(wanted, keep_losing_draft=False)
    misled.learn(1, 0.0, 1.0)
    misled.learn(0, 0.0, 1000.0)
    assert len(rounds_of(misled, 1000, chance, draft, 1.0, extra)[2]) < 200
    stubborn = Pace(wanted)
    assert len(rounds_of(stubborn, 300, chance, draft, 1.0, extra)[2]) == 300
    assert not stubborn.is_losing()


@pytest.mark.parametrize("wanted", [5, "auto"])
@pytest.mark.parametrize("slow", range(8))
def test_a_winning_draft_stays_whatever_holds_it_up_once(wanted, slow):
    """The first round is slow everywhere; in another, of drafting or of measuring, something else
    holds it up."""
    for seed in range(4):
        pace = Pace(wanted, keep_losing_draft=False)
        pace.learn(pace.most, 0.0, 1000.0, 1)
        _, _, before = rounds_of(pace, slow, 0.7, 0.1, 1.0, seed=seed)
        (window,) = pace.windows([pace.acceptance.rate])
        pace.learn(window, 0.1 * window, 1000.0, 1)
        _, _, after = rounds_of(pace, 300, 0.7, 0.1, 1.0, seed=seed)
        assert len(before) == slow
        assert len(after) == 300
        assert [*before, window, *after].count(0) == 15
        assert min(each for each in after[-100:] if each) > 1


def test_what_a_draft_has_saved_is_counted():
    """By an unlucky streak a draft that has paid is not dropped, and by one as long as what it
    saved it is."""
    pace = Pace(4, keep_losing_draft=False)
    rounds_of(pace, 40, 1.0, 0.25, 1.0)  # each of 36 rounds saves 3 passes
    assert len(rounds_of(pace, 60, 0.0, 0.25, 1.0)[2]) == 60
    _, _, windows = rounds_of(pace, 200, 0.0, 0.25, 1.0)
    assert len(windows) - windows.count(0) == 36 * 3 + TRIAL_PASSES - 60 + 3


# ---- in the loops, on real hosts ----


def loops_job(hosts: HostGroup):
    """Tokens, statistics and time on host 0 of chains and trees, which lose or win; and of the
    target alone."""
    model = build("llama", torch.float64)
    batch = text_batch(60)
    decoder, state, _ = decoders(model, hosts, batch, 48, "sharded")
    answer = generate_tokens(answer_by(decoder, state, SamplingParams(max_new_tokens=STEPS + 8)))
    results = []
    costs = Counter()

    def timed(function, seconds):
        def taking(*args):
            costs["now"] += seconds
            return function(*args)

        return taking

    with patch.object(hosts, "clock", lambda: float(costs["now"])):
        for is_winning, is_tree in product((False, True), repeat=2):
            costs["now"] = 0.0
            price = 0.01 if is_winning else 0.5
            decoder, state, _ = decoders(model, hosts, batch, 48, "sharded")
            decoder.advance = timed(decoder.advance, 1.0)
            if is_tree:
                drafter = ScriptedTree(answer, lambda place, right=0 if is_winning else None: right)
                tree = Tree.of(9, 3)
            else:
                drafter = ScriptedDrafter(answer, PATTERNS["all" if is_winning else "none"])
                tree = None
            drafter.propose = timed(drafter.propose, 3 * price)
            greedy = answer_by(decoder, state, SamplingParams(max_new_tokens=STEPS))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                pace = Pace(3, keep_losing_draft=False)
                drafter = drafter if hosts.is_leader else None
                tokens, stats = generate_speculatively(greedy, drafter, pace, tree)
            said = [str(w.message) for w in caught if "without the draft" in str(w.message)]
            results.append((is_winning, tokens, stats.summary(len(tokens)), costs["now"], said))
    return answer[:STEPS], results


def test_a_losing_draft_is_switched_off_on_all_hosts_and_a_winning_one_kept(pool):
    (plain, on_leader), (_, elsewhere) = pool.run(2, loops_job)
    assert all(tokens == plain for _, tokens, *_ in (*on_leader, *elsewhere))
    for is_winning, _, figures, seconds, said in on_leader:
        if is_winning:
            assert figures["switched_off"] is None and seconds < STEPS / 2 and not said
            continue
        assert "longer than without" in figures["switched_off"] and len(said) == 1
        assert 3 < figures["switched_off_after"] < STEPS - 5
        assert figures["mean_accepted_tokens"] == 1
        assert figures["rounds"] < figures["num_target_forwards"] == STEPS - 1
        assert seconds <= STEPS - 1 + TRIAL_PASSES + 2 * 2.5  # the first round, and the last


# ---- the figures ----


def test_a_draft_beside_that_had_nothing_to_do_took_no_time():
    """Which is 0 seconds; only those of a draft that was lost are not known."""
    stats = PipelineStats(record=Recorder())
    assert stats.times()["draft_seconds"] is stats.times()["draft_idle_seconds"] is None
    stats.of_draft = DraftReport(windows=[], drafting=0.0, idle=0.0)
    assert (stats.times()["draft_seconds"], stats.times()["draft_idle_seconds"]) == (0, 0)
