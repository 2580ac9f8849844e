"""What StageTimer and Recorder measure, by clocks that move only when a test says so."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from apbv import HostGroup
from apbv.stats import StageTimer, overlapping_seconds

from apbv_tests.one_stream import Gpu


class ClockedHosts(HostGroup):
    """A single host whose time is ``now``."""

    def __init__(self, device: str = "cpu"):
        super().__init__(device=torch.device(device), timeout=0.0)
        self.now = 0.0

    def clock(self) -> float:
        return self.now


def test_stages_that_overlap_are_all_busy():
    hosts = ClockedHosts()
    timer = StageTimer(hosts)
    # From 0 to 4 one thread reads the video, from 1 to 6 another encodes; from 6 to 7 the first
    # prefills.
    encoding = timer.stage("encode")
    with ThreadPoolExecutor(1) as other:
        with timer.stage("decode_video"):
            hosts.now = 1.0
            other.submit(encoding.__enter__).result()
            hosts.now = 4.0
        hosts.now = 6.0
        other.submit(encoding.__exit__, None, None, None).result()
    with timer.stage("prefill"):
        hosts.now = 7.0
    figures = timer.summary()
    busy = {name: ms for name, ms in figures["stages_ms"].items() if ms}
    assert busy == {"decode_video": 4000.0, "encode": 5000.0, "prefill": 1000.0}
    assert figures["total_ms"] == 7000.0 and figures["overlap_ms"] == pytest.approx(3000.0)


OVERLAPS = [
    ([], 0),
    ([(0, 2), (2, 3), (5, 6)], 0),
    ([(3, 6), (0, 4)], 1),
    ([(0, 10), (2, 3), (4, 6)], 3),
]


@pytest.mark.parametrize(("runs", "seconds"), OVERLAPS, ids=str)
def test_the_overlap_is_what_the_sum_has_more_than_the_time(runs, seconds):
    assert overlapping_seconds([("encode", *run) for run in runs]) == seconds


# ---- on a GPU ----


def test_a_gpus_time_is_measured_without_waiting_for_it(monkeypatch):
    hosts = ClockedHosts("cuda:0")
    gpu = Gpu(hosts, monkeypatch)
    timer = StageTimer(hosts)
    with timer.stage("encode"):
        gpu.launch(5.0)
        hosts.now = 1.0
    with timer.stage("decode_video"):  # on the host, while the GPU is busy
        hosts.now = 3.0
    with timer.stage("prefill"):
        gpu.launch(4.0)
    timer.mark_prefilled()
    assert hosts.now == 3.0 and not gpu.num_waits
    figures = timer.summary()
    measured = {name: ms for name, ms in figures["stages_ms"].items() if ms}
    assert measured == pytest.approx({"encode": 5000.0, "decode_video": 2000.0, "prefill": 4000.0})
    assert figures["ttft_ms"] == pytest.approx(9000.0) and figures["total_ms"] == pytest.approx(
        9000.0
    )
    assert figures["overlap_ms"] == pytest.approx(2000.0)


def test_that_the_host_sees_late_what_its_gpu_has_done_lengthens_no_stage(monkeypatch):
    hosts = ClockedHosts("cuda:0")
    gpu, wait, lags = Gpu(hosts, monkeypatch), hosts.wait_for_device, iter(range(100))

    def late(event) -> None:
        wait(event)
        hosts.now += next(lags)

    monkeypatch.setattr(hosts, "wait_for_device", late)
    timer = StageTimer(hosts)
    for seconds in (2.0, 3.0):
        with timer.stage("exchange"):
            gpu.launch(seconds)
    for _ in range(2):
        figures = timer.summary()
        assert (
            figures["stages_ms"]["exchange"] == pytest.approx(5000.0) and not figures["overlap_ms"]
        )


def test_the_first_token_ends_when_the_host_knows_it(monkeypatch):
    """The host has read the token then: nothing that the GPU does later belongs to it."""
    hosts = ClockedHosts("cuda:0")
    gpu = Gpu(hosts, monkeypatch)
    timer = StageTimer(hosts)
    with timer.stage("prefill"):
        gpu.launch(4.0)
    timer.mark_prefilled()
    with timer.stage("decode"):
        hosts.now = 4.5
        timer.mark_first_token()
        gpu.launch(10.0)
    assert timer.summary()["ttft_ms"] == 4500.0
