"""Simulated hosts: the results of real ones, and clocks that add up."""

import random
import threading

import pytest
import torch

from apbv import HostError, HostGroup, ModelInputs, PrefillConfig, prefill
from apbv.hosts import Moment
from apbv.model.parts import inspect_model
from apbv.prefilling.methods import METHODS
from apbv.testing.simulated import Lap, Network, share_weights, simulate

from apbv_tests import families
from apbv_tests.one_stream import Gpu
from apbv_tests.pairs import each_choice, pairwise


def prefill_job(hosts: HostGroup, models, settings: dict):
    model = models[hosts.rank] if models else families.build_model("qwen2")
    ids = torch.randint(0, 250, (1, 151), generator=torch.Generator().manual_seed(3))
    inputs = ModelInputs.from_processor(
        inspect_model(model), {"input_ids": ids}, hosts, query_start=140
    )
    state = prefill(
        model, inputs, hosts=hosts, config=PrefillConfig(passing_len=5, anchor_len=11, **settings)
    )
    cache = state.to_dynamic_cache()
    kv = None if cache is None else [(layer.keys, layer.values) for layer in cache.layers]
    assert state.method == settings["method"]
    return state.logits, kv, state.timer.summary()["comm_bytes"]


@each_choice(num_hosts=(2, 3, 2, 3, 2, 3, 2, 3, 4), method=sorted(METHODS))
def test_results_and_bytes_are_those_of_real_hosts(pool, num_hosts, method):
    real = pool.run(num_hosts, prefill_job, None, {"method": method})
    models = [share_weights(families.build_model("qwen2")) for _ in range(num_hosts)]
    simulated = simulate(num_hosts, prefill_job, models, {"method": method})
    for theirs, ours in zip(real, simulated, strict=True):
        assert ours[2] == theirs[2]
        torch.testing.assert_close(ours[:2], theirs[:2], rtol=1e-5, atol=1e-5)


# ---- clocks ----


class Clock:
    """Time that passes only when a job says so."""

    now = 0.0

    def __call__(self, seconds: float = 0.0) -> float:
        self.now += seconds
        return self.now


BYTE = torch.zeros(1, dtype=torch.uint8)
SLOW = Network(bandwidth=100.0, latency=0.5)


def late_gather(hosts, work):
    work(float(hosts.rank))
    hosts.all_gather(BYTE.expand(200)).wait()


def hidden(hosts, work):
    exchange = hosts.all_gather(BYTE.expand(100))
    work(1.0)
    exchange.wait()
    work(0.25)


def two_at_once(hosts, work):
    exchanges = [hosts.all_gather(BYTE.expand(100)) for _ in range(2)]
    exchanges[1].wait()


def late_shift(hosts, work):
    work(3.0 if hosts.rank == 0 else 1.0)
    hosts.shift(BYTE.expand(100), (100,)).wait()


def uneven(hosts, work):
    parts = [BYTE.expand(100 * (1 + host)) for host in range(hosts.size)]
    hosts.all_to_all(parts, [(100 * (1 + hosts.rank),)] * hosts.size).wait()


def broadcast(hosts, work):
    work(2.0 if hosts.rank == 1 else 0.0)
    tensor = torch.full((100,), hosts.rank, dtype=torch.uint8)
    assert (hosts.broadcast(tensor, source=1) == 1).all()


ENDS = [
    # From when the last host joins: two steps of half a second and 200 bytes.
    (late_gather, SLOW, [2 + 2 * (0.5 + 2.0)] * 3),
    (hidden, Network(bandwidth=1000.0), [1.25] * 2),
    (hidden, SLOW, [1.75] * 2),
    (two_at_once, SLOW, [3.0] * 2),  # over the same link
    # Host 1 hears from host 0, which is late; host 2 from host 1; host 0 was late itself.
    (late_shift, SLOW, [4.5, 4.5, 2.5]),
    (uneven, SLOW, [2 * (0.5 + size) for size in (1, 2, 3)]),
    (broadcast, SLOW, [3.5, 2.0, 3.5]),
]


@pytest.mark.parametrize(
    ("job", "network", "ends"), ENDS, ids=lambda value: getattr(value, "__name__", "")
)
def test_what_every_hosts_clock_shows_when_its_job_is_done(job, network, ends):
    clock = Clock()

    def timed(hosts: HostGroup) -> float:
        job(hosts, clock)
        return hosts.clock()

    assert simulate(len(ends), timed, network=network, clock=clock) == pytest.approx(ends)


def test_a_recorded_pace_replaces_measured_times():
    """Two noisy runs: each host is slow once. At the mean pace neither waits for the other."""
    clock = Clock()

    def job(hosts, noise):
        clock(1.0 + noise[hosts.rank])
        hosts.barrier()
        clock(2.0)
        return hosts.clock(), hosts.laps

    first = simulate(2, job, [4.0, 0.0], clock=clock)
    second = simulate(2, job, [0.0, 4.0], clock=clock)
    assert [end for end, _ in first + second] == [7.0] * 4
    paces = []
    for (_, laps), (_, other_laps) in zip(first, second, strict=True):
        pace = []
        for lap, other_lap in zip(laps, other_laps, strict=True):
            pace.append(Lap((lap.cpu + other_lap.cpu) / 2))
        paces.append(pace)
    assert simulate(2, job, [100.0, 100.0], clock=clock, paces=paces) == [
        (5.0, paces[0]),
        (5.0, paces[1]),
    ]
    with pytest.raises(ValueError, match="host 0 reads its clock more often"):
        simulate(2, job, [0.0, 0.0], clock=clock, paces=[pace[:1] for pace in paces])


# ---- clocks of GPUs: all hosts' work is in one stream, and counts as if each had a GPU ----


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = property(lambda self: True)


def gpu_job(hosts, clock: Clock, gpu: Gpu, scripts: list[list[tuple]]) -> Moment:
    """Do what this host's script says, and return the moment when its GPU is done."""
    exchange = None
    for step, *seconds in scripts[hosts.rank]:
        if step == "launch":
            clock(seconds[0])
            gpu.launch(seconds[1])
        elif step == "gather":
            exchange = hosts.all_gather(BYTE.expand(100).as_subclass(OnGpu))
        elif step == "wait":
            exchange.wait()
        elif step == "agree":
            hosts.settle()
            hosts.start_gathering(BYTE).wait()
    return hosts.moment()


def on_gpus_of_their_own(scripts: list[list[tuple]], link: Network) -> list[float]:
    """When every host's GPU is done where each has a GPU, by plain loops over the same steps."""
    cpu = [0.0] * len(scripts)
    gpu = [0.0] * len(scripts)
    for steps in zip(*scripts, strict=True):
        begun = [max(times) for times in zip(cpu, gpu, strict=True)]
        for host, (step, *seconds) in enumerate(steps):
            if step == "launch":
                cpu[host] += seconds[0]
                gpu[host] = max(gpu[host], cpu[host]) + seconds[1]
            elif step == "gather":
                arrival = max(begun) + (len(scripts) - 1) * link.seconds(100)
            elif step == "wait":
                gpu[host] = max(gpu[host], arrival)
            elif step == "agree":
                cpu[host] = max(begun)
    return [max(times) for times in zip(cpu, gpu, strict=True)]


def layers(num_hosts: int, launching: tuple, computing: tuple, seed: int) -> list[list[tuple]]:
    """Scripts of layers that compute while they gather, as long as drawn between bounds."""
    drawn = random.Random(seed)

    def launch():
        return "launch", drawn.uniform(*launching), drawn.uniform(*computing)

    scripts = []
    for _ in range(num_hosts):
        script = []
        for layer in range(6):
            script += [launch(), launch(), ("gather",), launch(), ("wait",), launch()]
            if layer == 3:
                script.append(("agree",))
        scripts.append(script)
    return scripts


@pairwise(num_hosts=(2, 3, 5), speed=("slow GPU", "slow CPU", "fast link"), seed=(0, 1, 2, 3))
def test_gpus_count_as_if_every_host_had_one(monkeypatch, num_hosts, speed, seed):
    launching, computing = (
        ((0.9, 1.1), (0.1, 0.2)) if speed == "slow CPU" else ((0.1, 0.2), (0.9, 1.1))
    )
    scripts = layers(num_hosts, launching, computing, seed)
    link = Network(bandwidth=1e6 if speed == "fast link" else 100.0)
    clock = Clock()
    gpu = Gpu(clock, monkeypatch, head_start=10.0)

    def job(hosts):
        moment = gpu_job(hosts, clock, gpu, scripts)
        waits = gpu.num_waits
        (end,) = hosts.seconds_at([moment])
        return end, waits

    # That an idle GPU waits for a first launch does not show: at the beginning, and where the hosts
    # agree.
    ends, waits = zip(
        *simulate(num_hosts, job, network=link, device="cuda", clock=clock), strict=True
    )
    assert ends == pytest.approx(
        on_gpus_of_their_own(scripts, link), abs=2 * min(launching[1], computing[1])
    )
    assert min(waits) == 0  # of the host that was done first


# ---- failures: an error, never a wait without end ----


def test_a_failing_host_is_named_by_the_others():
    seen = []

    def job(hosts, kind):
        try:
            with getattr(hosts, kind)("prefill"):
                if hosts.rank == 1:
                    raise ValueError("bad layer")
                if kind == "collective_stage":
                    hosts.all_gather(BYTE).wait()
        except (HostError, ValueError) as error:
            seen.append(f"{type(error).__name__}: {error}")
            if kind == "collective_stage":
                raise
        hosts.barrier()

    simulate(3, job, "local_stage")  # after which the group lives on
    with pytest.raises(ValueError, match="bad layer"):
        simulate(3, job, "collective_stage")
    assert seen.count("HostError: host 1 failed in prefill: ValueError: bad layer") == 4


def test_a_host_that_leaves_early_ends_the_others():
    def job(hosts):
        hosts.barrier()
        if hosts.rank != 2:
            hosts.barrier()

    before = threading.active_count()
    with pytest.raises(HostError, match="no longer take part"):
        simulate(3, job)
    assert threading.active_count() <= before
