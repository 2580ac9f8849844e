"""Simulated hosts: the results of real ones, and clocks that add up."""

import threading

import pytest
import torch

from apbv import HostError, HostGroup, ModelInputs, PrefillConfig, prefill
from apbv.hosts.simulated import Link, Network, share_weights, simulate
from apbv.model.parts import inspect_model
from apbv.prefilling.methods import METHODS

import families

# ---- results ----


def prefill_job(hosts: HostGroup, models, settings: dict):
    model = models[hosts.rank] if models else families.build_model("qwen2")
    ids = torch.randint(0, 250, (1, 151), generator=torch.Generator().manual_seed(3))
    inputs = ModelInputs.from_processor(inspect_model(model), {"input_ids": ids}, hosts, query_start=140)
    state = prefill(model, inputs, hosts=hosts, config=PrefillConfig(passing_len=5, anchor_len=11, **settings))
    summary = state.timer.summary()
    cache = state.to_dynamic_cache()
    kv = None if cache is None else [(layer.keys, layer.values) for layer in cache.layers]
    assert state.method == settings["method"]
    return state.logits, kv, summary["comm_bytes"]


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("num_hosts", [2, 3, 8])
@pytest.mark.each_choice
def test_results_and_bytes_are_those_of_real_hosts(pool, num_hosts, method):
    real = pool.run(num_hosts, prefill_job, None, {"method": method})
    model = families.build_model("qwen2")
    models = [share_weights(model) for _ in range(num_hosts)]
    simulated = simulate(num_hosts, prefill_job, models, {"method": method})
    for theirs, ours in zip(real, simulated, strict=True):
        assert ours[2] == theirs[2]
        torch.testing.assert_close(ours[:2], theirs[:2], rtol=1e-5, atol=1e-5)


def test_shared_weights_are_the_same_memory():
    model = families.build_model("qwen2_5_vl")
    twin = share_weights(model)
    assert twin is not model and twin.model is not model.model
    theirs = {name: tensor.data_ptr() for name, tensor in twin.state_dict().items()}
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == theirs


# ---- clocks ----


class Clock:
    """Time that passes only when a job says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds


def run(num_hosts: int, job, network: Network | None = None) -> list[float]:
    """What every host's clock shows when its job is done."""
    clock = Clock()

    def timed(hosts: HostGroup) -> float:
        job(hosts, clock.work)
        return hosts.clock()

    return simulate(num_hosts, timed, network=network, clock=clock)


BYTE = torch.zeros(1, dtype=torch.uint8)
SLOW = Network(Link(bandwidth=100.0, latency=0.5))


def test_hosts_work_side_by_side_and_wait_for_the_slowest():
    def job(hosts, work):
        work(1.0 + hosts.rank)
        hosts.barrier()
        work(10.0 * (hosts.size - hosts.rank))

    assert run(3, job) == [33.0, 23.0, 13.0]


def test_a_recorded_pace_replaces_measured_times():
    """Two noisy runs: each host is slow once. At the mean pace neither waits for the other."""
    clock = Clock()

    def job(hosts, noise):
        clock.work(1.0 + noise[hosts.rank])
        hosts.barrier()
        clock.work(2.0)
        return hosts.clock(), hosts.laps

    runs = [simulate(2, job, noise, clock=clock) for noise in ([4.0, 0.0], [0.0, 4.0])]
    assert [[end for end, _ in run] for run in runs] == [[7.0, 7.0], [7.0, 7.0]]
    paces = [[sum(laps) / 2 for laps in zip(*(run[host][1] for run in runs), strict=True)] for host in range(2)]
    again = simulate(2, job, [100.0, 100.0], clock=clock, paces=paces)
    assert again == [(5.0, paces[0]), (5.0, paces[1])]
    with pytest.raises(ValueError, match="host 0 reads its clock more often"):
        simulate(2, job, [0.0, 0.0], clock=clock, paces=[pace[:1] for pace in paces])


def test_an_all_gather_takes_as_long_as_its_ring():
    def job(hosts, work):
        work(float(hosts.rank))
        hosts.all_gather(BYTE.expand(200)).wait()

    # From when the last host joins: two steps of half a second and 200 bytes.
    assert run(3, job, SLOW) == pytest.approx([2 + 2 * (0.5 + 2.0)] * 3)


def test_communication_hides_behind_computation_and_no_further():
    def job(hosts, work):
        exchange = hosts.all_gather(BYTE.expand(100))
        work(1.0)
        exchange.wait()
        work(0.25)

    def impatient(hosts, work):
        hosts.all_gather(BYTE.expand(100)).wait()
        work(1.25)

    assert run(2, job, Network(Link(bandwidth=1000.0))) == pytest.approx([1.25] * 2)
    assert run(2, job, SLOW) == pytest.approx([1.75] * 2)
    assert run(2, impatient, SLOW) == pytest.approx([2.75] * 2)


def test_exchanges_under_way_share_the_link():
    def job(hosts, work):
        exchanges = [hosts.all_gather(BYTE.expand(100)) for _ in range(3)]
        for exchange in exchanges:
            exchange.wait()

    assert run(2, job, SLOW) == pytest.approx([4.5] * 2)


def test_a_shift_waits_for_the_neighbour_alone():
    def job(hosts, work):
        work(3.0 if hosts.rank == 0 else 1.0)
        hosts.shift(BYTE.expand(100), (100,)).wait()

    # Host 1 hears from host 0, which is late; host 2 from host 1; host 0 was late itself.
    assert run(3, job, SLOW) == pytest.approx([4.5, 4.5, 2.5])


def test_an_all_to_all_is_received_one_after_the_other():
    def job(hosts, work):
        parts = [BYTE.expand(100 * (1 + host)) for host in range(hosts.size)]
        hosts.all_to_all(parts, [(100 * (1 + hosts.rank),)] * hosts.size).wait()

    assert run(3, job, SLOW) == pytest.approx([2 * (0.5 + size) for size in (1, 2, 3)])


def test_a_broadcast_costs_the_receivers():
    def job(hosts, work):
        work(2.0 if hosts.rank == 1 else 0.0)
        tensor = torch.full((100,), hosts.rank, dtype=torch.uint8)
        assert (hosts.broadcast(tensor, source=1) == 1).all()

    assert run(3, job, SLOW) == pytest.approx([3.5, 2.0, 3.5])


def test_the_slower_tier_is_the_bottleneck_of_a_ring_between_groups():
    tiers = Network(Link(bandwidth=1000.0), Link(bandwidth=10.0), group_size=2)

    def gather(hosts, work):
        hosts.all_gather(BYTE.expand(100)).wait()

    def shift(hosts, work):
        hosts.shift(BYTE.expand(100), (100,)).wait()

    assert run(4, gather, tiers) == pytest.approx([3 * 10.0] * 4)
    assert run(4, shift, tiers) == pytest.approx([10.0, 0.1, 10.0, 0.1])


# ---- failures: an error, never a wait without end ----


def test_a_failing_host_is_named_by_the_others():
    seen = []

    def job(hosts):
        try:
            with hosts.collective_stage("prefill"):
                if hosts.rank == 1:
                    raise ValueError("bad layer")
                hosts.all_gather(BYTE).wait()
        except HostError as error:
            seen.append(str(error))
            raise

    with pytest.raises(ValueError, match="bad layer"):
        simulate(3, job)
    assert seen == ["host 1 failed in prefill: ValueError: bad layer"] * 2


def test_a_local_failure_reaches_all_and_the_group_lives_on():
    def job(hosts):
        try:
            with hosts.local_stage("reading"):
                if hosts.rank == 0:
                    raise ValueError("no such file")
        except (ValueError, HostError) as error:
            hosts.barrier()
            return str(error)

    assert simulate(2, job) == ["no such file", "host 0 failed in reading: ValueError: no such file"]


@pytest.mark.parametrize("leaves", [0, 2])
def test_a_host_that_leaves_early_ends_the_others(leaves):
    def job(hosts):
        hosts.barrier()
        if hosts.rank != leaves:
            hosts.barrier()

    with pytest.raises(HostError, match="no longer take part"):
        simulate(3, job)
    assert threading.active_count() < 10


def test_a_host_may_leave_while_the_others_still_read_what_it_sent():
    def job(hosts):
        exchange = hosts.all_gather(BYTE + hosts.rank)
        if hosts.rank == 0:
            return None
        return exchange.wait().flatten().tolist()

    assert simulate(3, job) == [None, [0, 1, 2], [0, 1, 2]]


def test_errors_of_a_job_come_through():
    def job(hosts):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        simulate(1, job)
