"""What a prefill takes in memory: as it is predicted, and no more than it needs."""

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from math import prod

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only
from transformers import (
    AutoModelForCausalLM,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from apbv import Engine, HostGroup, PrefillConfig, ReduceConfig, VideoConfig, demo, prefill
from apbv.errors import RequestCancelled
from apbv.hosts import Pending
from apbv.kv.cache import ShardedCache
from apbv.kv.placement import ShardedKV
from apbv.model.parts import inspect_model
from apbv.prefilling import forward
from apbv.prefilling.memory import HostMemory, host_memory
from apbv.prefilling.methods import METHODS
from apbv.testing.simulated import SimulatedHost, share_weights, simulate

from apbv_tests import families
from apbv_tests.configs import prefill_config
from apbv_tests.pairs import each_choice, pairwise
from apbv_tests.prompts import text_batch, video_batch


def _tensors(tree) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor))


class LiveTensors(TorchDispatchMode):
    """Counts the storages that were made since this mode is on; of the thread that it is on in.

    Attributes:
        peak: the most bytes that were in memory at once.
        is_paused: whether storages that are made are not counted.
    """

    def __init__(self):
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int, torch.Size]] = {}
        self.peak = 0
        self.is_paused = False
        self._most = 0  # bytes that are in memory now, at most

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        if function is torch.ops.aten._local_scalar_dense.default and isinstance(
            args[0], FakeTensor
        ):
            # What has no numbers has nothing that a branch is for, such as rows that see no key.
            return False
        out = function(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and not self.is_paused:
                self._made[storage._cdata] = (
                    StorageWeakRef(storage),
                    storage.nbytes(),
                    tensor.shape,
                )
                self._most += storage.nbytes()
        if self._most > self.peak:  # else it is no new peak, whichever of them still live
            self._most = self.now
            self.peak = max(self.peak, self._most)
        return out

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count what the block makes."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    @property
    def now(self) -> int:
        """The bytes that are in memory now."""
        return sum(num_bytes for _, num_bytes, _ in self._living())

    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes with which the storages were made that are in memory now."""
        return [tuple(shape) for _, _, shape in self._living()]

    def _living(self):
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        return self._made.values()


# Qwen2.5-VL-7B's decoder.
WIDTHS = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
}
WIDTHS |= {"num_key_value_heads": 4, "max_position_embeddings": 2**20, "num_hidden_layers": 3}
# Qwen3-30B-A3B's.
EXPERTS = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
}
EXPERTS |= {"num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 2**20}
EXPERTS |= {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 4,
}


# Of a hybrid's last layer of linear attention there are states and KV before.
FEW_LAYERS = {"num_hidden_layers": 5}
FEW_LAYERS["layer_types"] = [
    f"{kind}_attention" for kind in ("linear", "full", "full", "linear", "full")
]
# Qwen3.5-9B's.
HYBRID = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 16,
}
HYBRID |= {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 2**20,
    **FEW_LAYERS,
}
# Others have the widths that transformers gives them: Qwen3-Next-80B-A3B's, and Qwen3.5-35B-A3B's.
LONG = {"max_position_embeddings": 2**20, **FEW_LAYERS}
CONFIGS = {
    "dense": (Qwen2Config, WIDTHS),
    "experts": (Qwen3MoeConfig, EXPERTS),
    "hybrid": (Qwen3_5TextConfig, HYBRID),
    "hybrid of experts": (Qwen3_5MoeTextConfig, LONG),
    "joint hybrid": (Qwen3NextConfig, LONG),
}


def _buffers(hosts: HostGroup, sent, shapes=None) -> tuple:
    """What an all-gather, or with shapes an all-to-all, sends and receives: one buffer each."""
    if shapes is None:
        return sent, sent.new_empty(hosts.size, *sent.shape)
    packed = torch.cat([tensor.reshape(-1) for tensor in sent])
    counts = [prod(shape) for shape in shapes]
    parts = packed.new_empty(sum(counts)).split(counts)
    return packed, [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]


def measure(monkeypatch, num_tokens: int, num_hosts: int, kind: str = "dense", **settings) -> list:
    """Of every host the peak in bytes, and the estimate, of a model that has shapes and no
    numbers."""
    shapes = FakeTensorMode(allow_non_fake_inputs=True)
    counted = threading.local()

    def counting(function):
        def run(*args, **kwargs):
            with shapes, counted.live:
                return function(*args, **kwargs)

        return run

    def buffered(start):
        """Hold an exchange's buffers as hosts of processes do: what is sent and what is received,
        until that is there.

        Simulated hosts would hold what this host sends for others, and would make what it receives
        only at the end.
        """

        def started(hosts, *args):
            live = getattr(counted, "live", None)
            if live is None:
                return start(hosts, *args)
            sent, received = _buffers(hosts, *args)
            with live.paused():
                exchange = start(hosts, *tree_map_only(torch.Tensor, torch.clone, args))

            def finish(sent=sent):
                with live.paused():
                    exchange.wait()
                return received

            return Pending(finish)

        return started

    def broadcast(hosts, tensor, source=0):
        """Receive where the tensor lies, as hosts of processes do."""
        live = getattr(counted, "live", None)
        with live.paused() if live else nullcontext():
            return own_broadcast(hosts, tensor, source)

    own_broadcast = SimulatedHost.broadcast
    monkeypatch.setattr(SimulatedHost, "broadcast", broadcast)
    monkeypatch.setattr(SimulatedHost, "all_gather", buffered(SimulatedHost.all_gather))
    monkeypatch.setattr(SimulatedHost, "all_to_all", buffered(SimulatedHost.all_to_all))
    monkeypatch.setattr(forward, "run_prompt", counting(forward.run_prompt))
    monkeypatch.setattr(ShardedKV, "gathered", counting(ShardedKV.gathered))
    with shapes:
        of_family, widths = CONFIGS[kind]
        model = AutoModelForCausalLM.from_config(of_family(**widths), dtype=torch.bfloat16).eval()
    if "hybrid" in kind:  # of a rule's chunks three are enough, as all but the first are alike

        def few(count: int) -> range:
            return range(min(count, 3))

        monkeypatch.setattr(sys.modules[type(model).__module__], "range", few, raising=False)
    config = prefill_config(query_len=64, **settings)

    def job(hosts: HostGroup) -> tuple[int, HostMemory]:
        live = LiveTensors()
        counted.live = live
        parts = inspect_model(share_weights(model))
        batch = text_batch(num_tokens)
        state = prefill(parts, batch, hosts=hosts, config=config)
        by_layer = METHODS[state.method].gathers_by_layer(config)
        return live.peak, host_memory(
            parts.sizes,
            state.layout,
            hosts.rank,
            config.kv,
            itemsize=2,
            device=parts.device,
            by_layer=by_layer,
            asks_apart=METHODS[state.method].asks_apart(config),
            question_start=state.inputs.query_start,
        )

    return simulate(num_hosts, job)


@pytest.mark.parametrize(
    "settings",
    [
        {"kv": "gathered"},
        {"method": "zigzag_ring", "kv": "sharded"},
        {"kv": "sharded", "kind": "experts"},
    ],
    ids=str,
)
def test_the_predicted_peak_is_that_of_the_tensors(monkeypatch, settings):
    """At most, and at most a quarter more, for the widths of a 7B model."""
    for peak, predicted in measure(monkeypatch, 3_000, 2, **settings):
        assert max(predicted.certain.values()) <= peak
        assert 1 <= predicted.peak / peak < 1.25, (predicted, peak)


# A hybrid's kind, tokens, hosts, and settings.
HYBRIDS = [
    ("joint hybrid", 130, 2, {"method": "star", "kv": "gathered"}),
    ("joint hybrid", 700, 1, {"method": "full", "kv": "sharded"}),
    pytest.param(
        *("joint hybrid", 10_000, 2, {"method": "apbv", "kv": "gathered", "zigzag": False}),
        marks=pytest.mark.thorough,
    ),
    ("hybrid", 130, 2, {"method": "full", "kv": "gathered"}),
    (
        "hybrid",
        500,
        2,
        {"method": "apbv", "kv": "gathered", "fused_query": False, "anchor_query": True},
    ),
    ("hybrid", 900, 2, {"method": "ulysses", "kv": "gathered"}),
    ("hybrid of experts", 130, 3, {"method": "star", "kv": "gathered"}),
    ("hybrid of experts", 1_500, 2, {"method": "zigzag_ring", "kv": "gathered"}),
    ("hybrid of experts", 300, 2, {"method": "apb", "kv": "sharded"}),
]
VARIANTS = [
    {"method": "full"},
    {"method": "apbv"},
    {"method": "apbv", "fused_query": False},
    {"method": "apbv", "split_anchor": True},
    {"method": "apbv", "anchor_query": True, "zigzag": False},
    {"method": "apb"},
    {"method": "star"},
    {"method": "zigzag_ring"},
    {"method": "ulysses"},
]


def assert_close(found: list[tuple[int, HostMemory]]) -> None:
    """No estimate is under the peak, nor more than a twentieth over it."""
    for peak, predicted in found:
        assert max(predicted.certain.values()) <= peak
        assert 1 <= predicted.peak / peak <= 1.05, (predicted, peak)


@pytest.mark.parametrize(("kind", "num_tokens", "num_hosts", "settings"), HYBRIDS, ids=str)
def test_a_hybrids_predicted_peak_is_never_too_low_and_at_most_a_twentieth_too_high(
    monkeypatch, kind, num_tokens, num_hosts, settings
):
    """Of every host."""
    assert_close(measure(monkeypatch, num_tokens, num_hosts, kind, **settings))


@pytest.mark.thorough
@pairwise(
    kind=["joint hybrid", "hybrid", "hybrid of experts"],
    num_tokens=[130, 500, 1_500, 5_000, 10_000, 20_000],
    num_hosts=[1, 2, 3, 4],
    kv=["sharded", "gathered"],
    settings=VARIANTS,
)
def test_so_it_is_with_all_methods_lengths_and_numbers_of_hosts(
    monkeypatch, kind, num_tokens, num_hosts, kv, settings
):
    """Of every host."""
    assert_close(measure(monkeypatch, num_tokens, num_hosts, kind, kv=kv, **settings))


def embeddings_job(
    hosts: HostGroup, family: str, method: str, reduce: ReduceConfig | None
) -> tuple[int, list]:
    """As the fourth layer begins, how many tensors like the hidden states are in memory, and others
    as wide."""
    parts = inspect_model(share_weights(families.build_model(family, layers=4)))
    batch = video_batch(family)
    live = LiveTensors()
    found = []

    def look(layer, args):
        wide = [
            shape for shape in live.shapes() if len(shape) > 1 and shape[-1] % families.HIDDEN == 0
        ]
        found.append(
            (tuple(args[0].shape), [shape for shape in wide if prod(shape) > 8 * families.HIDDEN])
        )

    parts.language_model.layers[3].register_forward_pre_hook(look)
    with live:
        prefill(
            parts,
            batch,
            hosts=hosts,
            config=PrefillConfig(method=method, anchor_len=8, reduce=reduce),
        )
    given, shapes = found[0]
    return shapes.count(given), [shape for shape in shapes if shape != given]


@each_choice(
    family=["qwen3_vl", "llava_onevision", "qwen2_5_vl", "internvl"],
    method=["apbv", "star"],
    reduce=["fastvid", "slowfast", None, "dycoke"],
)
def test_of_the_embeddings_only_the_hidden_states_are_left(family, method, reduce):
    """Neither visual rows nor what they were merged into, nor what a reduction has left out, are
    kept behind."""
    config = None
    if reduce is not None:
        config = ReduceConfig(method=reduce, ratio=0.8)
    for num_hidden, others in simulate(2, embeddings_job, family, method, config):
        assert num_hidden == 1
        assert others == []


def cancelled_job(hosts: HostGroup) -> bool:
    """Whether a prefill that its caller ends before the third layer raised that."""
    asked = iter([False, False, True])
    parts = inspect_model(share_weights(families.build_model("llama", layers=4)))
    with pytest.raises(RequestCancelled):
        prefill(
            parts, text_batch(400), hosts=hosts, config=PrefillConfig(), stop=lambda: next(asked)
        )
    return True


def test_of_a_cancelled_prefill_nothing_waits_to_be_collected(monkeypatch):
    """Its KV is on its way to host 0."""
    kept = []
    init = ShardedCache.__init__

    def noted(cache, *args, **kwargs):
        kept.append(weakref.ref(cache))
        init(cache, *args, **kwargs)

    monkeypatch.setattr(ShardedCache, "__init__", noted)
    gc.disable()
    try:
        assert all(simulate(2, cancelled_job)) and len(kept) == 2
        assert [cache() for cache in kept] == [None, None]
    finally:
        gc.enable()


NUM_PATCHES = 3


def test_neither_frames_nor_pixels_are_kept_for_the_layers():
    one_patch = PrefillConfig(video=VideoConfig(chunk_bytes=1))
    engine = Engine.from_pretrained("demo", hosts=HostGroup.single("cpu"), prefill=one_patch)
    processor = engine.processor.video_processor
    width = 3 * processor.temporal_patch_size * processor.patch_size**2

    def pixels_and_frames() -> list[torch.Tensor]:
        tensors = [
            thing for thing in gc.get_objects() if type(thing) is torch.Tensor and thing.dim() > 1
        ]
        return [
            t
            for t in tensors
            if t.shape[-1] == width or (t.dtype == torch.uint8 and t.shape[-1] == 3)
        ]

    of_others = pixels_and_frames()
    counts = []

    def look(module, args):
        if len(counts) == NUM_PATCHES:
            gc.collect()
        counts.append(len(pixels_and_frames()) - len(of_others))

    # The tower sees pixels, so that what is counted is there to be counted.
    for module in (engine.model.model.visual, engine.model.get_decoder().layers[0]):
        module.register_forward_pre_hook(look)
    engine.prefill(
        "how many letters are shown", video=demo.video_path(), num_frames=2 * NUM_PATCHES
    )
    *encoding, prefilling = counts
    assert len(encoding) == NUM_PATCHES
    assert 0 < min(encoding) <= max(encoding) < 6
    assert prefilling == 0
