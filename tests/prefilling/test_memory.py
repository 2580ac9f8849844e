"""What a prefill takes in memory: as it is predicted, and no more than it needs."""

import gc
import threading
import weakref
from collections.abc import Iterator
from math import prod

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import (
    AutoModelForCausalLM,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from apbv import Engine, HostGroup, PrefillConfig, ReduceConfig, VideoConfig, demo, prefill
from apbv.hosts import Exchange
from apbv.kv.cache import ShardedCache
from apbv.kv.placement import ShardedKV
from apbv.model.parts import inspect_model
from apbv.prefilling import forward
from apbv.prefilling.cancelling import RequestCancelled
from apbv.prefilling.memory import HostMemory, host_memory

import families
from pairs import each_choice
from prompts import text_batch, video_batch
from support.simulated import SimulatedHost, share_weights, simulate


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
        self.peak, self.is_paused = 0, False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        if function is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return False  # what has no numbers has nothing that a branch is for, such as rows that see no key
        out = function(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and not self.is_paused:
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes(), tensor.shape)
        self.peak = max(self.peak, self.now)
        return out

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
WIDTHS = {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28}
WIDTHS |= {"num_key_value_heads": 4, "max_position_embeddings": 2**20}
# Qwen3-30B-A3B's.
EXPERTS = {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32}
EXPERTS |= {"num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 2**20}
EXPERTS |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}


# Qwen3.5-9B's, of which every fourth layer attends.
HYBRID = {"vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 16}
HYBRID |= {"num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 2**20}
# Others have the widths that transformers gives them.
LONG = {"max_position_embeddings": 2**20}
CONFIGS = {
    "dense": (Qwen2Config, WIDTHS),
    "experts": (Qwen3MoeConfig, EXPERTS),
    "hybrid": (Qwen3_5TextConfig, HYBRID),
    "hybrid of experts": (Qwen3_5MoeTextConfig, LONG),
    "joint hybrid": (Qwen3NextConfig, LONG),
}


def measure(monkeypatch, num_layers: int, num_tokens: int, num_hosts: int, kind: str = "dense", **settings) -> list:
    """Of every host the peak in bytes, and the estimate, of a model that has shapes and no numbers."""
    shapes, counted = FakeTensorMode(allow_non_fake_inputs=True), threading.local()

    def counting(function):
        def run(*args, **kwargs):
            with shapes, counted.live:
                return function(*args, **kwargs)

        return run

    def all_gather(hosts, tensor):
        """Hold buffers as hosts of processes do: what is sent and what is received, until that is there.

        Simulated hosts would hold what this host sends for others, and would make what it receives only at the end.
        """
        live = getattr(counted, "live", None)
        if live is None:
            return gather(hosts, tensor)
        received = tensor.new_empty(hosts.size, *tensor.shape)
        live.is_paused = True
        copied = tensor.clone()
        live.is_paused = False
        exchange = gather(hosts, copied)

        def finish(sent=tensor) -> torch.Tensor:
            live.is_paused = True
            exchange.wait()
            live.is_paused = False
            return received

        return Exchange(finish)

    gather = SimulatedHost.all_gather
    monkeypatch.setattr(SimulatedHost, "all_gather", all_gather)
    monkeypatch.setattr(forward, "_forward", counting(forward._forward))
    monkeypatch.setattr(ShardedKV, "gathered", counting(ShardedKV.gathered))
    with shapes:
        of_family, widths = CONFIGS[kind]
        config = of_family(num_hidden_layers=num_layers, **widths)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    config = PrefillConfig(query_len=64, **settings)

    def job(hosts: HostGroup) -> tuple[int, HostMemory]:
        counted.live = live = LiveTensors()
        parts, batch = inspect_model(share_weights(model)), text_batch(num_tokens)
        state = prefill(parts, batch, hosts=hosts, config=config)
        device, layout = parts.device, state.layout
        return live.peak, host_memory(parts.sizes, layout, hosts.rank, config.kv, itemsize=2, device=device)

    return simulate(num_hosts, job)


@pytest.mark.parametrize(
    "settings",
    [{"kv": "gathered"}, {"method": "zigzag_ring", "kv": "sharded"}, {"kv": "sharded", "kind": "experts"}],
    ids=str,
)
def test_the_predicted_peak_is_that_of_the_tensors(monkeypatch, settings):
    """At most, and at most a quarter more, for the widths of a 7B model."""
    for peak, predicted in measure(monkeypatch, 4 if "kind" in settings else 3, 3_000, 2, **settings):
        assert max(predicted.certain.values()) <= peak
        assert 1 <= predicted.peak / peak < 1.25, (predicted, peak)


# A hybrid's kind, tokens, hosts, and settings.
HYBRIDS = [
    ("joint hybrid", 130, 2, {"method": "apbv", "kv": "sharded"}),
    ("joint hybrid", 700, 1, {"method": "full"}),
    ("joint hybrid", 300, 2, {"method": "ulysses", "kv": "gathered"}),
    ("hybrid", 900, 2, {"method": "star", "kv": "gathered"}),
    ("hybrid", 260, 3, {"method": "apb", "kv": "sharded"}),
    ("hybrid of experts", 1_500, 2, {"method": "zigzag_ring", "kv": "gathered"}),
    ("hybrid of experts", 130, 2, {"method": "full", "kv": "sharded"}),
    *(
        pytest.param(kind, num_tokens, 2, {"method": "apbv", "kv": kv}, marks=pytest.mark.thorough)
        for kind, num_tokens, kv in (
            ("joint hybrid", 20_000, "gathered"),
            ("joint hybrid", 3_000, "gathered"),
            ("hybrid", 20_000, "sharded"),
            ("hybrid of experts", 3_000, "sharded"),
        )
    ),
]


@pytest.mark.parametrize(("kind", "num_tokens", "num_hosts", "settings"), HYBRIDS, ids=str)
def test_a_hybrids_predicted_peak_is_never_too_low_and_at_most_a_twentieth_too_high(
    monkeypatch, kind, num_tokens, num_hosts, settings
):
    """Of every host, in the layer of linear attention that has most beside it: the last of eight layers' six."""
    for peak, predicted in measure(monkeypatch, 8, num_tokens, num_hosts, kind, **settings):
        assert max(predicted.certain.values()) <= peak
        assert 1 <= predicted.peak / peak <= 1.05, (predicted, peak)


def embeddings_job(hosts: HostGroup, family: str, method: str, reduce: ReduceConfig | None) -> tuple[int, list]:
    """As the fourth layer begins, how many tensors like the hidden states are in memory, and others as wide."""
    parts, batch = inspect_model(share_weights(families.build_model(family, layers=4))), video_batch(family)
    live, found = LiveTensors(), []

    def look(layer, args):
        wide = [shape for shape in live.shapes() if len(shape) > 1 and shape[-1] % families.HIDDEN == 0]
        found.append((tuple(args[0].shape), [shape for shape in wide if prod(shape) > 8 * families.HIDDEN]))

    parts.language_model.layers[3].register_forward_pre_hook(look)
    with live:
        prefill(parts, batch, hosts=hosts, config=PrefillConfig(method=method, anchor_len=8, reduce=reduce))
    given, shapes = found[0]
    return shapes.count(given), [shape for shape in shapes if shape != given]


@each_choice(
    family=["qwen3_vl", "llava_onevision", "qwen2_5_vl", "internvl"],
    method=["apbv", "star"],
    reduce=["fastvid", "slowfast", None, "dycoke"],
)
def test_of_the_embeddings_only_the_hidden_states_are_left(family, method, reduce):
    """Neither visual rows nor what they were merged into, nor what a reduction has left out, are kept behind."""
    reduce = reduce and ReduceConfig(method=reduce, ratio=0.8)
    for num_hidden, others in simulate(2, embeddings_job, family, method, reduce):
        assert num_hidden == 1 and others == []


def cancelled_job(hosts: HostGroup) -> bool:
    """Whether a prefill that its caller ends before the third layer raised that."""
    asked = iter([False, False, True])
    parts = inspect_model(share_weights(families.build_model("llama", layers=4)))
    with pytest.raises(RequestCancelled):
        prefill(parts, text_batch(400), hosts=hosts, config=PrefillConfig(), stop=lambda: next(asked))
    return True


def test_of_a_cancelled_prefill_nothing_waits_to_be_collected(monkeypatch):
    """Its KV is on its way to host 0."""
    kept, init = [], ShardedCache.__init__

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
        tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor and thing.dim() > 1]
        return [t for t in tensors if t.shape[-1] == width or (t.dtype == torch.uint8 and t.shape[-1] == 3)]

    of_others, counts = pixels_and_frames(), []

    def look(module, args):
        if len(counts) == NUM_PATCHES:
            gc.collect()
        counts.append(len(pixels_and_frames()) - len(of_others))

    # The tower sees pixels, so that what is counted is there to be counted.
    for module in (engine.model.model.visual, engine.model.get_decoder().layers[0]):
        module.register_forward_pre_hook(look)
    engine.prefill("how many letters are shown", video=demo.video_path(), num_frames=2 * NUM_PATCHES)
    *encoding, prefilling = counts
    assert len(encoding) == NUM_PATCHES and 0 < min(encoding) <= max(encoding) < 6 and prefilling == 0
