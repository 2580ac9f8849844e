"""What a layer's attention does before it waits for other hosts, and that it writes every row of
its result."""

import torch

from apbv import HostGroup
from apbv.hosts import Pending
from apbv.prefilling.methods import METHODS

from apbv_tests.configs import prefill_config

ANCHOR = 8
QUERY = 10
PASSED = 4
BLOCK = 17
HOSTS = 3
TOKENS = ANCHOR + 2 * HOSTS * BLOCK + QUERY
CONFIG = {"anchor_len": ANCHOR, "passing_len": PASSED}


def recording(hosts: HostGroup, events: list) -> None:
    """Note when each gathering of this group is started, and when it is first waited for."""
    gather = hosts.all_gather
    count = 0

    def all_gather(tensor):
        nonlocal count
        number = count
        count = count + 1
        events.append(("start", number))
        exchange = gather(tensor)

        def finish():
            events.append(("wait", number))
            return exchange.wait()

        return Pending(finish, exchange.ready)

    hosts.all_gather = all_gather


def order_job(hosts: HostGroup, settings: dict) -> list[tuple]:
    """What one layer does: transfers, and attention as (queries, keys of each segment, causal)."""
    config = prefill_config(**CONFIG, **settings)
    kind = METHODS["apbv"]
    events = []
    method = kind(kind.plan(hosts.size, TOKENS, 0, TOKENS - QUERY, config), hosts, config, 1)
    attend = method.attend

    def noted(q, segments, scale, **options):
        keys = tuple(k.shape[2] for k, _ in segments)
        events.append(("attend", q.shape[2], keys, options["causal_last"]))
        return attend(q, segments, scale, **options)

    method.attend = noted
    recording(hosts, events)
    try:
        rows = sum(map(len, method.layout.local_spans(hosts.rank)))
        q, k, v = (torch.randn(1, heads, rows, 16) for heads in (4, 2, 2))
        out = method(q, k, v, 0.25, 0)
    finally:
        del hosts.all_gather
    assert out.transpose(1, 2).is_contiguous(), "the model would copy it"
    return events


def test_own_keys_are_attended_to_before_anything_is_waited_for(pool):
    triangle = ("attend", ANCHOR + BLOCK, (ANCHOR + BLOCK,), True)
    for host, events in enumerate(pool.run(HOSTS, order_job, {})):
        first_wait = events.index(("wait", 0))
        # Both passing blocks and the query's partial result are on their way, and the first
        # triangle is computed.
        assert [event for event in events[:first_wait] if event[0] == "start"] == [
            ("start", n) for n in range(3)
        ]
        assert events[first_wait - 1] == triangle
        second = ("attend", BLOCK, (ANCHOR, *[PASSED] * (2 * HOSTS - 1 - host), BLOCK), True)
        behind = [("wait", 0), ("wait", 1), second, ("wait", 2)]
        if host > 0:  # host 0's first block is the first of all, and has nothing to wait for
            behind.insert(1, ("attend", BLOCK, (PASSED,) * host, False))
        if host == HOSTS - 1:  # and the last host's second block comes right behind all first ones
            behind = [*behind[:2], second, ("wait", 1), ("wait", 2)]
        assert events[first_wait:] == behind


def test_without_overlap_every_transfer_is_waited_for_at_once(pool):
    for host, events in enumerate(pool.run(HOSTS, order_job, {"overlap": False})):
        for number in range(3):
            start = events.index(("start", number))
            assert events[start + 1] == ("wait", number)
        # So there is nothing to gain from a triangle of its own: its keys come with the others.
        first = ("attend", ANCHOR + BLOCK, (*[PASSED] * host, ANCHOR + BLOCK), True)
        assert first in events
