"""KV that is offered to a consumer: by hosts that prefilled it, or made up in this process."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from apbv import Engine, HostGroup, PrefillConfig, demo
from apbv.kv.facts import digest_of_positions, digest_of_tokens
from apbv.kv.offers import Offers
from apbv.kv.remote import RemoteKV
from apbv.kv.sending import Share
from apbv.kv.ticket import Ticket, new_token, new_transfer

from apbv_tests.patience import GROUP_TIMEOUT, wait_for
from apbv_tests.pool import HostPool

QUESTION = "name the letters in order"
FRAMES = 40

# 8 MiB a layer, four of them in memory: more than sockets and buffers hold.
BIG = {"num_layers": 16, "num_tokens": 8192, "num_kv_heads": 4, "head_dim": 64}
Layers = list[tuple[Tensor, Tensor]]


def a_ticket(**changes) -> Ticket:
    """A ticket for KV of 12 tokens, two layers and three KV heads of eight numbers."""
    n = changes.get("num_tokens", 12)
    values = {
        "transfer": new_transfer(),
        "token": new_token(),
        "sources": (("127.0.0.1", 9),),
        "num_tokens": n,
    }
    values |= {
        "tokens_sha256": digest_of_tokens(range(n)),
        "positions_sha256": digest_of_positions(torch.arange(n)),
    }
    values |= {
        "position_rule": "vllm",
        "model": "demo",
        "config_sha256": "c",
        "weights_sha256": "w",
    }
    values |= {"revision": None, "family": "llama"}
    values |= {
        "dtype": "bfloat16",
        "num_layers": 2,
        "num_kv_heads": 3,
        "head_dim": 8,
        "method": "apbv",
    }
    return Ticket(**values | {"exact": False} | changes)


def made_up(
    num_layers: int = 2, num_tokens: int = 12, num_kv_heads: int = 3, head_dim: int = 8
) -> Layers:
    """KV ``[1, Hkv, n, D]`` whose layers differ in their memory where they are few."""
    torch.manual_seed(0)
    shape = 1, num_kv_heads, num_tokens, head_dim
    few = []
    for _ in range(min(num_layers, 4)):
        keys = torch.randn(shape).bfloat16()
        values = torch.randn(shape).bfloat16()
        few.append((keys, values))
    return [few[index % len(few)] for index in range(num_layers)]


def offer(offers: Offers, layers: Layers, tokens: list[range] | None = None) -> Ticket:
    """Offer KV that lies in this process as a prefill on one host would."""
    _, num_kv_heads, num_tokens, head_dim = layers[0][0].shape
    sizes = {"num_tokens": num_tokens, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    ticket = a_ticket(sources=(offers.address,), num_layers=len(layers), **sizes)
    share = Share(tokens or [range(num_tokens)], range(num_kv_heads), layers)
    offers.hold(ticket.transfer, ticket.token, share)
    offers.publish(ticket)
    return ticket


@dataclass(frozen=True)
class Offered:
    """What hosts have prefilled and offer.

    Attributes:
        ticket: with which it is fetched, as it comes out of a reply's JSON.
        layers: keys and values ``[Hkv, n, D]`` of every layer.
        folder: where every process says, in a file with its number, how an offer ended there.
    """

    ticket: Ticket
    layers: Layers
    folder: Path

    def ending(self) -> str | None:
        """How the offer ended, once it has."""
        ended = self.folder / "ended"
        return ended.read_text() if ended.exists() else None


@contextmanager
def offered(pool: HostPool, num_hosts: int, folder: Path, **prefill) -> Iterator[Offered]:
    """Let hosts of the pool prefill, and offer the KV, until the end of the block.

    Args:
        prefill: fields of PrefillConfig, and of :func:`_offering`.
    """
    folder.mkdir()
    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(pool.run, num_hosts, _offering, folder, prefill)
        try:
            wait_for(lambda: (folder / "ticket").exists() or running.done())
            if running.done():
                running.result()
            parts = [torch.load(path) for path in sorted(folder.glob("kv-*"))]
            layers = [
                tuple(map(torch.cat, zip(*layer, strict=True)))
                for layer in zip(*parts, strict=True)
            ]
            yield Offered(
                Ticket.from_params(json.loads((folder / "ticket").read_text())), layers, folder
            )
        finally:
            (folder / "stop").touch()
            running.result()


def _offering(hosts: HostGroup, folder: Path, prefill: dict) -> None:
    """Prefill and offer; and see to it that nothing holds the KV but the offer.

    Args:
        prefill: also ``tensor_parallel``, and ``text``, in place of the demo's video.
    """
    settings = dict(prefill)
    parallel = settings.pop("tensor_parallel", 1)
    text = settings.pop("text", None)
    if parallel > 1:
        hosts = HostGroup.from_process_group(
            hosts.process_group, "cpu", GROUP_TIMEOUT, tensor_parallel=parallel
        )
    config = PrefillConfig(**settings)
    engine = Engine.from_pretrained("demo", hosts=hosts, dtype="float32", prefill=config)

    def note(transfer: str, how: str, num_bytes: int) -> None:
        _write(folder / "ended", f"{how} {num_bytes}")

    with Offers(hosts, on_end=note) as offers:
        about = {} if text else {"video": demo.video_path(), "num_frames": FRAMES}
        state = engine.prefill(text or QUESTION, **about)
        ticket = state.offer(offers)
        cache = state.to_dynamic_cache()
        if cache is not None:
            layers = [(layer.keys[0].clone(), layer.values[0].clone()) for layer in cache.layers]
            torch.save(layers, folder / f"kv-{hosts.tensor_parallel_rank}")
        hosts.barrier()
        del state, cache
        if hosts.is_leader:
            _write(folder / "ticket", json.dumps(ticket.to_params()))
        wait_for((folder / "stop").exists, GROUP_TIMEOUT)


def _write(path: Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def fetch(ticket: Ticket, **options) -> Layers:
    """All of a ticket's KV, as a copy."""
    with RemoteKV(ticket, **options) as kv:
        return [
            (keys.clone(), values.clone()) for keys, values in kv.layers(range(ticket.num_tokens))
        ]


def changed(ticket: Ticket, **values) -> Ticket:
    """A ticket with other values."""
    return Ticket(**{**vars(ticket), **values})


def message(**values) -> bytes:
    """A message as a source reads it."""
    content = json.dumps(values).encode()
    return b"apbv-kv\x01" + len(content).to_bytes(4, "little") + content


def asking_for_all(ticket: Ticket, **values) -> bytes:
    """As a reader asks for KV."""
    parts = {
        "tokens": ticket.num_tokens,
        "kv_heads": ticket.num_kv_heads,
        "layers": ticket.num_layers,
    }
    known = {"transfer": ticket.transfer, "token": ticket.token, "reader": "me", "num_readers": 1}
    return message(
        **{"do": "fetch", **known, **{name: [0, stop] for name, stop in parts.items()}, **values}
    )


def of_memory(layers: Layers) -> list[StorageWeakRef]:
    """The memory of KV, whoever holds it."""
    return [StorageWeakRef(states.untyped_storage()) for layer in layers for states in layer]


def is_free(memory: list[StorageWeakRef]) -> bool:
    """Whether nobody holds it any more."""
    return all(reference.expired() for reference in memory)
