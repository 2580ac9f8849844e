"""What a GPU is asked to do at a real size: as docs/records/gpu-operations.md says, and no more than the budgets."""

from importlib.metadata import version

import pytest

from launch_counts import ANSWERS, PAGE, batch_events, prefill_events, table, table_in, token_events
from scripts import ROOT


def test_the_table_in_the_docs_is_true():
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for package in ("torch", "transformers"):
        if version(package).split("+")[0] != pinned[package]:
            pytest.skip(f"the counts are those of {package} {pinned[package]}")
    counted = table()
    assert table_in(PAGE.read_text(encoding="utf-8")) == counted, f"count anew:\n{counted}"


def test_a_token_of_one_answer_or_of_several_is_waited_for_once():
    one, several = token_events(1, 0.8), batch_events(1, 0.8)
    for events, answers in ((one, 1), (several, ANSWERS)):
        assert len(events.of("replay")) == len(events.of("wait")) == 1
        assert max(events.nbytes("to_gpu"), events.nbytes("to_host")) <= answers * 64
    assert several.num_launches <= one.num_launches
    assert len(several.of("in_graph")) < len(one.of("in_graph"))


def test_the_prompt_goes_to_the_gpu_once():
    """Token ids and rotary positions of a host's own tokens, of 8 bytes each; text needs nothing else."""
    events = prefill_events(1, 8, 1)
    assert events.nbytes("to_host") == 0
    assert events.nbytes("to_gpu") <= 8 * 4 * 1.02 * (131_072 / 8 + 2048)
