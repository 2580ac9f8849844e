"""A GPU whose work takes the time that a test says."""

import torch


class Gpu:
    """A GPU with one stream, whose work takes time while the CPU goes on, with the events that
    torch has.

    Args:
        clock: the CPU's time is its ``now``, which a wait moves.
        head_start: seconds that the GPU sleeps where it is told to.
    """

    def __init__(self, clock, monkeypatch, head_start: float = 0.0):
        self.clock = clock
        self.free = 0.0
        self.num_waits = 0
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool):
                assert enable_timing

            def record(self, stream) -> None:
                assert stream is gpu
                self.at = gpu.free = max(gpu.free, clock.now)

            def query(self) -> bool:
                return self.at <= clock.now

            def synchronize(self) -> None:
                gpu.num_waits += 1
                clock.now = max(clock.now, self.at)

            def elapsed_time(self, end: "Event") -> float:
                assert self.at <= clock.now and end.at <= clock.now, "the GPU has not come to it"
                return (end.at - self.at) * 1e3

        def synchronize(device) -> None:
            gpu.num_waits += 1
            clock.now = max(clock.now, gpu.free)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: gpu)
        monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: gpu.launch(head_start))
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 0)

    def record_event(self, event):
        event.record(self)
        return event

    def launch(self, seconds: float) -> None:
        self.free = max(self.free, self.clock.now) + seconds
