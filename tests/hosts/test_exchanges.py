"""HostGroup's exchanges over real gloo processes: of what the group reaches, and by way of host
memory."""

from pathlib import Path

import pytest
import torch

from apbv import HostGroup
from apbv.hosts import collectives
from apbv.hosts.collectives import Collectives

from apbv_tests.fresh_hosts import described, pattern
from apbv_tests.patience import wait_for
from apbv_tests.staged import staged_job

DTYPES = (torch.bfloat16, torch.float32, torch.uint8)


def all_gather_job(hosts: HostGroup):
    for dtype in DTYPES:
        for shape in ((2, 1, 3, 7, 5), (1,), (), (3, 0, 2)):
            before = hosts.bytes_received
            mine = pattern(hosts.rank, shape, dtype)
            gathered = hosts.all_gather(mine).wait()
            assert gathered.dtype == dtype
            assert torch.equal(
                gathered, torch.stack([pattern(h, shape, dtype) for h in range(hosts.size)])
            )
            assert hosts.bytes_received - before == (hosts.size - 1) * mine.nbytes
    strided = hosts.all_gather(pattern(hosts.rank, (5, 3), torch.float32).t()).wait()
    assert torch.equal(strided[-1], pattern(hosts.size - 1, (5, 3), torch.float32).t())


PART_SHAPES = {
    "uneven": lambda sender, receiver: (1 + 2 * sender + receiver, 3),
    "only to the last": lambda sender, receiver: (5, 2) if receiver > sender else (0, 2),
    "all empty": lambda sender, receiver: (0, 4),
}


def all_to_all_job(hosts: HostGroup):
    for number, (kind, shape_of) in enumerate(PART_SHAPES.items()):
        dtype = DTYPES[number % 3]
        before = hosts.bytes_received
        parts = [
            pattern(hosts.rank + 10 * h, shape_of(hosts.rank, h), dtype) for h in range(hosts.size)
        ]
        shapes = [shape_of(h, hosts.rank) for h in range(hosts.size)]
        received = hosts.all_to_all(parts, shapes).wait()
        for host, (part, shape) in enumerate(zip(received, shapes, strict=True)):
            assert part.dtype == dtype
            assert torch.equal(part, pattern(host + 10 * hosts.rank, shape, dtype)), kind
        payload = sum(part.nbytes for host, part in enumerate(received) if host != hosts.rank)
        assert hosts.bytes_received - before == payload


def broadcast_job(hosts: HostGroup):
    for dtype in DTYPES:
        before = hosts.bytes_received
        tensor = pattern(hosts.rank, (1, 77), dtype)
        last = hosts.size - 1
        assert hosts.broadcast(tensor) is tensor
        assert torch.equal(tensor, pattern(0, (1, 77), dtype))
        assert hosts.bytes_received - before == (tensor.nbytes if hosts.rank else 0)
        assert torch.equal(
            hosts.broadcast(pattern(hosts.rank, (3, 5), dtype), last), pattern(last, (3, 5), dtype)
        )


def shift_job(hosts: HostGroup):
    """Hosts pass on tensors of different lengths, twice, the second time what they got."""
    for dtype in (torch.bfloat16, torch.float64):
        held = pattern(hosts.rank, (2, hosts.rank + 1), dtype)
        owner = hosts.rank
        for _ in range(2):
            before = hosts.bytes_received
            owner = (owner - 1) % hosts.size
            held = hosts.shift(held, (2, owner + 1)).wait()
            assert held.dtype == dtype and torch.equal(held, pattern(owner, (2, owner + 1), dtype))
            assert hosts.bytes_received - before == (held.nbytes if hosts.size > 1 else 0)


def control_job(hosts: HostGroup):
    before = hosts.bytes_received
    assert hosts.broadcast_ints([2**62, -1, 0] if hosts.rank == 0 else None, 3) == [2**62, -1, 0]
    floats = [hosts.rank + 1e-12, -float("inf"), 1e300]
    assert hosts.gather_floats(floats) == [
        [h + 1e-12, -float("inf"), 1e300] for h in range(hosts.size)
    ]
    assert hosts.gather_json("é" * hosts.rank) == ["é" * h for h in range(hosts.size)]
    hosts.barrier()
    hosts.require_same("the prompt", b"the same")
    hosts.let_others_report()
    assert hosts.bytes_received == before, "statuses and tokens are not payload"


def in_flight_job(hosts: HostGroup):
    """Five exchanges at once, of different sizes and kinds, waited for in reverse order, one
    twice."""
    before = hosts.bytes_received
    exchanges = [
        hosts.all_gather(pattern(hosts.rank, (4, 1 + i), torch.bfloat16)) for i in range(4)
    ]
    parts = [pattern(hosts.rank, (h + 1,), torch.float32) for h in range(hosts.size)]
    swapped = hosts.all_to_all(parts, [(hosts.rank + 1,)] * hosts.size)
    del parts
    for host, received in enumerate(swapped.wait()):
        assert torch.equal(received, pattern(host, (hosts.rank + 1,), torch.float32))
    for i, exchange in reversed(list(enumerate(exchanges))):
        expected = torch.stack([pattern(h, (4, 1 + i), torch.bfloat16) for h in range(hosts.size)])
        assert torch.equal(exchange.wait(), expected)
    assert exchanges[0].wait() is exchanges[0].wait()
    assert hosts.bytes_received - before == (hosts.size - 1) * (
        2 * 4 * (1 + 2 + 3 + 4) + 4 * (hosts.rank + 1)
    )


def all_kinds_job(hosts: HostGroup):
    for job in (
        all_gather_job,
        all_to_all_job,
        broadcast_job,
        shift_job,
        control_job,
        in_flight_job,
    ):
        job(hosts)


@pytest.mark.parametrize(
    ("hosts", "way"), [(1, "direct"), (2, "staged"), (3, "staged"), (4, "direct")]
)
def test_what_is_sent_arrives_and_is_counted(pool, hosts, way):
    pool.run(hosts, *([] if way == "direct" else [staged_job]), all_kinds_job)


def asynchronous_job(hosts: HostGroup, started: Path):
    """Host 1 joins only once host 0's calls have returned; calls that block would keep both from
    going on."""
    if hosts.rank == 1:
        wait_for(started.exists)
    exchange = hosts.all_gather(torch.full((3,), hosts.rank))
    swapped = hosts.all_to_all([torch.full((2,), hosts.rank)] * 2, [(2,)] * 2)
    if hosts.rank == 0:
        started.touch()
    assert exchange.wait().tolist() == [[0, 0, 0], [1, 1, 1]]
    assert [part.tolist() for part in swapped.wait()] == [[0, 0], [1, 1]]


@pytest.mark.parametrize("way", ["direct", "staged"])
def test_an_exchange_is_started_without_waiting(pool, tmp_path, way):
    pool.run(2, *([] if way == "direct" else [staged_job]), asynchronous_job, tmp_path / "started")


def held_tensors_job(hosts: HostGroup):
    """A thread holds what was gathered, as gloo's may for a moment: whoever drains the group waits
    for it."""
    held = []
    naps = []

    class HoldingCollectives(Collectives):
        """Holds what it sends and receives."""

        def _exchange(self, sent, received, begin, result):
            def begin_and_hold(*tensors):
                held.extend(tensors)
                return begin(*tensors)

            return super()._exchange(sent, received, begin_and_hold, result)

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            held.clear()

    with pytest.MonkeyPatch.context() as patch:
        control = HoldingCollectives(hosts.groups.control, hosts.watch)
        control.all_gather(torch.zeros(1)).wait()
        patch.setattr(collectives.time, "sleep", nap)
        control.drain()
    assert len(naps) >= 3


def test_a_group_is_drained_of_what_gloo_still_holds(pool):
    pool.run(2, held_tensors_job)


def different_job(hosts: HostGroup):
    return described(hosts.require_same, "the prompt", b"b" if hosts.rank == 2 else b"a")


def test_values_that_differ_are_refused_on_every_host(pool):
    assert (
        pool.run(3, different_job)
        == ["HostError: the prompt of host 2 differs from that of host 0"] * 3
    )


def different_settings_job(hosts: HostGroup) -> tuple[str, str]:
    def stage(**settings):
        with hosts.local_stage("reading the settings") as agreement:
            agreement.settings("the request", settings)

    last = hosts.rank == hosts.size - 1
    nested = {
        "prefill": {"method": "star" if last else "apbv", "kv": "gathered"},
        "seed": 7 if last else None,
    }
    missing = {} if last else {"seed": 7}
    failures = described(lambda: stage(**nested)), described(lambda: stage(**missing))
    stage(seed=7, text="x" * 10**4)  # the group stays usable
    return failures


def test_settings_that_differ_are_named_with_both_values_on_every_host(pool):
    start = "HostError: the request must be the same on every host: "
    several = (
        "prefill.method is 'star' on host 2, but 'apbv' on host 0; seed is 7 on host 2, but None "
        "on host 0"
    )
    missing = "seed is None on host 2, but 7 on host 0"
    assert pool.run(3, different_settings_job) == [(start + several, start + missing)] * 3


def different_calls_job(hosts: HostGroup) -> str:
    def stage():
        with hosts.local_stage("a stage") as agreement:
            if hosts.rank == 0:
                agreement.content("the prompt", b"a")

    return described(stage)


def test_hosts_that_make_different_calls_are_told(pool):
    assert (
        pool.run(2, different_calls_job) == ["HostError: host 1 makes another call than host 0"] * 2
    )
