"""``torch.cuda`` as it is on a machine with GPUs, as far as the project and transformers use it."""

import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace
from unittest.mock import patch

import torch

from .graphs import Graph
from .machine import Machine
from .streams import DEFAULT_STREAM
from .tensors import GpuTensor

CAPABILITY = (9, 0)
_TOTAL_MEMORY = 80 << 30


class Cuda:
    """Makes ``torch.cuda`` that of a machine.

    Attributes:
        machine: the machine.
    """

    def __init__(self, machine: Machine):
        self.machine = machine
        self._local = threading.local()
        sizes = {
            "multi_processor_count": 132,
            "shared_memory_per_block_optin": 232448,
            "L2_cache_size": 50 << 20,
        }
        names = {
            "name": "a pretended H100",
            "major": CAPABILITY[0],
            "minor": CAPABILITY[1],
            "warp_size": 32,
        }
        self.properties = SimpleNamespace(**names, **sizes, total_memory=_TOTAL_MEMORY)

    @property
    def current_device(self) -> int:
        return getattr(self._local, "device", 0)

    def set_device(self, device) -> None:
        self._local.device = self.index_of(device)

    def index_of(self, device) -> int:
        """Return a GPU's number, of what torch.cuda takes for a device."""
        index = (
            device
            if isinstance(device, int)
            else None
            if device is None
            else torch.device(device).index
        )
        return self.current_device if index is None else index

    def properties_of(self, device=None) -> SimpleNamespace:
        return SimpleNamespace(**vars(self.properties), uuid=f"GPU-{self.index_of(device)}")

    def install(self, stack: ExitStack) -> None:
        """Put the stand-ins in place until the stack is closed."""
        machine = self.machine
        streams = self.machine.streams
        cuda = self

        class Event:
            def __init__(self, enable_timing=False, blocking=False, interprocess=False):
                self._moment = None
                self._at = 0.0
                self._asked = False

            def record(self, stream=None):
                self._moment = streams.moment(None if stream is None else stream.number)
                self._at = time.perf_counter()

            def wait(self, stream=None):
                if self._moment is not None:
                    streams.wait(self._moment, None if stream is None else stream.number)

            def synchronize(self):
                machine.wait("event", self._moment or streams.moment())

            def query(self):
                # Not yet, when first asked: who asks has to bear that.
                asked = self._asked
                self._asked = True
                if asked and self._moment is not None:
                    streams.host_waits(self._moment)
                return asked

            def elapsed_time(self, other):
                return (other._at - self._at) * 1e3

        class Stream:
            def __init__(self, device=None, priority=0, number=None):
                index = cuda.index_of(device)
                self.number = streams.take(index, priority) if number is None else number
                self.device, self.priority = (
                    torch.device("cuda", index),
                    streams.priority_of(self.number),
                )
                if number is None and self.number in machine.captured_in:
                    machine.find(
                        f"stream {self.number} is handed out again, in which graphs are captured"
                    )

            def record_event(self, event=None):
                event = event or Event()
                event.record(self)
                return event

            def wait_event(self, event):
                event.wait(self)

            def wait_stream(self, stream):
                streams.wait(streams.moment(stream.number), self.number)

            def synchronize(self):
                machine.wait("stream", streams.moment(self.number))

            def __eq__(self, other):
                return isinstance(other, Stream) and other.number == self.number

            def __hash__(self):
                return self.number

        class on_stream:
            def __init__(self, stream):
                self._stream = stream
                self._before = DEFAULT_STREAM

            def __enter__(self):
                self._before = streams.current
                if self._stream is not None:
                    streams.current = self._stream.number
                return self

            def __exit__(self, *_):
                streams.current = self._before

        class on_device:
            def __init__(self, device):
                self._index = cuda.index_of(device)

            def __enter__(self):
                self._before = cuda.current_device
                cuda._local.device = self._index

            def __exit__(self, *_):
                cuda._local.device = self._before

        OurGraph = type("OurGraph", (Graph,), {"machine": machine})
        graph = type("graph", (torch.cuda.graph,), {"default_capture_stream": None})

        def synchronize(device=None):
            machine.wait("synchronize", streams.everything())

        def nothing(*_, **__):
            return None

        def tell_allocator(tensor, stream):
            if isinstance(tensor, GpuTensor):
                machine.note("lent", "record_stream")
                streams.tell_allocator(tensor.inner, stream.number)

        def empty_cache():
            if machine.captured_pools:
                raise machine.refuse(
                    "the cache is emptied while the allocator believes that a graph is captured"
                )

        def leave_pool(device, pool):
            if pool not in machine.captured_pools:
                raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
            machine.captured_pools.remove(pool)

        stand_ins = {
            **dict.fromkeys(
                ("is_available", "is_bf16_supported", "is_initialized"), lambda *_, **__: True
            ),
            **dict.fromkeys(
                ("max_memory_allocated", "memory_allocated", "memory_reserved"), lambda *_: 0
            ),
            **dict.fromkeys(("reset_peak_memory_stats", "_lazy_init", "_sleep"), nothing),
            "CUDAGraph": OurGraph,
            "Event": Event,
            "Stream": Stream,
            "current_device": lambda: self.current_device,
            "current_stream": lambda device=None: Stream(device, number=streams.current),
            "device": on_device,
            "device_count": lambda: machine.num_gpus,
            "empty_cache": empty_cache,
            "get_device_capability": lambda device=None: CAPABILITY,
            "get_device_name": lambda device=None: self.properties.name,
            "get_device_properties": self.properties_of,
            "graph": graph,
            "graph_pool_handle": lambda: (id(object()), 1),
            "is_current_stream_capturing": lambda: machine.capturing is not None,
            "mem_get_info": lambda device=None: (_TOTAL_MEMORY, _TOTAL_MEMORY),
            "set_device": self.set_device,
            "set_stream": lambda stream: setattr(streams, "current", stream.number),
            "stream": on_stream,
            "synchronize": synchronize,
        }
        pinned = machine.pinned
        pinning = {
            "pin_memory": lambda t, *_: pinned.add(t.clone()),
            "is_pinned": lambda t, *_: t in pinned,
        }
        for where, values in (
            (torch.cuda, stand_ins),
            (torch.cuda.graphs, {"CUDAGraph": OurGraph}),
            (torch._C, {"_host_emptyCache": nothing, "_cuda_endAllocateToPool": leave_pool}),
            (torch.cuda.nccl, {"version": lambda: (2, 28, 9)}),
            (torch.Tensor, {**pinning, "record_stream": tell_allocator}),
        ):
            for name, value in values.items():
                stack.enter_context(patch.object(where, name, value, create=True))
