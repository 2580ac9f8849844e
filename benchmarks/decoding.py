"""Measure decoding steps over a long KV cache, with apbv and with transformers' own attention.

    python benchmarks/decoding.py --tokens 2048 32768 --dtype bfloat16 --json decoding.jsonl
    python benchmarks/decoding.py --model qwen2.5-vl-7b --tokens 131072  # on a GPU
    python benchmarks/decoding.py --model demo --tokens 272 --batch 1 4 16

A step is a forward pass over 1 token, as in autoregressive decoding, or over several, as in
verification, which are then rolled back. The KV is random. Every round interleaves all variants.
Each variant's logits are compared with transformers', first and last: a wrong one gets an error
instead of a speed, and the exit status is 1. On a GPU apbv's steps are CUDA graphs, and eager steps
are also reported. ``--batch`` decodes several answers instead, sequentially, in one batch, and in
one batch of transformers, padded on the left.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import apbv  # noqa: F401  (before transformers: see apbv.compat.torchvision_guard)

# isort: split
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache

from apbv import DecodeConfig, HostGroup, SamplingParams
from apbv.compat.versions import CACHE_ARGUMENT
from apbv.decode.answer import Answer, generate_tokens
from apbv.decode.batch import Batch
from apbv.device.allocator import keep_freed_memory
from apbv.kv.placement import GatheredKV
from apbv.model.attention import apbv_attention
from apbv.model.parts import ModelParts, inspect_model
from apbv.reporting import report_error
from apbv.request.request import Question, Request, RequestSettings
from apbv.runner.batch_steps import BatchRunner, OwnKV
from apbv.runner.decoder import Decoder
from apbv.stats import StageTimer
from apbv.testing.random_models import CONFIGS

from support.arguments import parser_of
from support.bench import load_model
from support.processes import synchronize
from support.records import columns_of, fields_of, report

# Allowed difference, relative to the largest logit: two ways round differently in a few layers.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}


@dataclass
class Way:
    """One way to decode.

    Attributes:
        name: its name in tables.
        run: what is timed.
        error: largest error of its logits, relative to the largest logit.
        ms: milliseconds of a step, or of a token of every answer, one entry for every round.
    """

    name: str
    run: Callable[[], object]
    error: float = 0.0
    ms: list[float] = field(default_factory=list)


@torch.no_grad()
def measure(
    ways: Sequence[Way], rounds: int, warmup: int, device: torch.device, num_steps: int = 1
) -> None:
    """Time all ways in turn; ``num_steps`` is how many steps a run has."""
    for number in range(warmup + rounds):
        for way in ways:
            synchronize(device)
            began = time.perf_counter()
            way.run()
            synchronize(device)
            if number >= warmup:
                way.ms.append((time.perf_counter() - began) * 1e3 / num_steps)


@torch.no_grad()
def compare(ways: Sequence[Way]) -> None:
    """Compare the steps' logits with the first way's.

    To be called again after the measurement: a CUDA graph does not repeat the first step, but a
    later one.
    """
    expected = ways[0].run().double()
    for way in ways:
        error = relative_error(way.run().double(), expected)
        # Torch's maximum is NaN, if one of them is.
        way.error = float(torch.tensor([way.error, error]).max())


def relative_error(logits: Tensor, expected: Tensor) -> float:
    """Return the largest error, relative to the largest logit."""
    return float((logits - expected).abs().max() / expected.abs().max())


def with_transformers(
    parts: ModelParts,
    cache: DynamicCache,
    ids: Tensor,
    num_steps: int = 1,
    pads: Tensor | None = None,
) -> Callable[[], Tensor]:
    """Return decoding by the model as it was loaded, with a DynamicCache, as ``generate`` does it.

    The first step is over ids ``[B, S]``, each other one over the most probable token behind the
    one before; the logits are those of the first, ``[B, S, V]``.

    Args:
        pads: how many tokens of padding each prompt of a batch has on its left, ``[B]``.
    """
    num_tokens = cache.get_seq_length()
    all_tokens = num_tokens + ids.shape[1] + num_steps - 1
    mask = None
    if pads is not None:
        mask = (torch.arange(all_tokens, device=parts.device) >= pads[:, None]).long()

    def step(tokens: Tensor) -> Tensor:
        past = cache.get_seq_length()
        stop = past + tokens.shape[1]
        position_ids = torch.arange(past, stop, device=parts.device)[None]
        if pads is not None:
            position_ids = position_ids - pads[:, None]
        if parts.uses_mrope:
            position_ids = position_ids.expand(3, -1, -1)
        outputs = parts.language_model(
            inputs_embeds=parts.embed_tokens(tokens),
            position_ids=position_ids,
            attention_mask=None if mask is None else mask[:, :stop],
            **{CACHE_ARGUMENT: cache},
            use_cache=True,
        )
        return parts.lm_head(outputs.last_hidden_state)

    def run() -> Tensor:
        first_logits = step(ids)
        logits = first_logits
        while cache.get_seq_length() < all_tokens:
            logits = step(logits[:, -1:].argmax(dim=-1))
        cache.crop(num_tokens - all_tokens)
        return first_logits

    return run


def with_apbv(parts: ModelParts, cache: DynamicCache, ids: Tensor) -> Callable[[], Tensor]:
    """Return the step of apbv's decoder over ids ``[1, S]``; its logits are ``[1, S, V]``."""
    num_tokens = cache.get_seq_length()
    tokens = ids[0].tolist()
    kv = GatheredKV(cache, num_tokens, HostGroup.single(parts.device))
    decoder = Decoder(parts, kv, num_tokens)

    def step() -> Tensor:
        logits = decoder.advance(tokens)
        decoder.take_back(len(tokens))
        return logits[None]

    return step


def random_cache(parts: ModelParts, num_tokens: int, seed: int = 0) -> DynamicCache:
    """Fill a cache with random KV."""
    generator = torch.Generator(parts.device).manual_seed(seed)
    shape = (2, 1, parts.num_kv_heads, num_tokens, parts.head_dim)
    cache = DynamicCache()
    for layer in range(parts.num_layers):
        states = torch.randn(shape, generator=generator, device=parts.device).to(parts.dtype)
        keys, values = states
        cache.update(keys, values, layer)
    return cache


def padded(parts: ModelParts, prompts: Sequence["Prompt"]) -> tuple[DynamicCache, Tensor]:
    """Return the prompts' KV as one batch, padded on the left, and each one's tokens of padding."""
    most = max(prompt.num_tokens for prompt in prompts)
    pads = [most - prompt.num_tokens for prompt in prompts]
    shape = (len(prompts), parts.num_kv_heads, most, parts.head_dim)
    cache = DynamicCache()
    for layer in range(parts.num_layers):
        keys = torch.zeros(shape, dtype=parts.dtype, device=parts.device)
        values = torch.zeros(shape, dtype=parts.dtype, device=parts.device)
        for number, prompt in enumerate(prompts):
            layer_kv = prompt.kv.whole.layers[layer]
            keys[number, :, pads[number] :] = layer_kv.keys[0]
            values[number, :, pads[number] :] = layer_kv.values[0]
        cache.update(keys, values, layer)
    return cache, torch.tensor(pads, device=parts.device)


class Prompt:
    """Random KV of a given length, and logits that begin an answer to it."""

    def __init__(self, parts: ModelParts, num_tokens: int, seed: int):
        self.num_tokens = num_tokens
        cache = random_cache(parts, num_tokens, seed)
        self.kv = GatheredKV(cache, num_tokens, HostGroup.single(parts.device))
        generator = torch.Generator(parts.device).manual_seed(seed)
        self._logits = torch.randn(parts.vocab_size, generator=generator, device=parts.device)

    def begin_answer(self, parts: ModelParts, request: Request) -> Answer:
        """Return an answer that has no tokens yet."""
        decoder = Decoder(parts, self.kv, self.num_tokens)
        return Answer(decoder, self._logits, self.num_tokens, request.sampling)


@torch.no_grad()
def batch_ways(parts: ModelParts, prompts: Sequence[Prompt], num_tokens: int) -> list[Way]:
    """Return the ways to decode tokens of every answer.

    These are sequentially, in one batch, and in one batch of transformers.
    """
    # The first token takes no pass of the model.
    sampling = SamplingParams(max_new_tokens=num_tokens + 1)
    request = Request(
        Question(), StageTimer(prompts[0].kv.hosts), RequestSettings(sampling=sampling)
    )
    batch = Batch(parts)

    def one_by_one() -> None:
        with apbv_attention(parts.language_model):
            for prompt in prompts:
                generate_tokens(prompt.begin_answer(parts, request))

    def together() -> None:
        with apbv_attention(parts.language_model):
            for prompt in prompts:
                batch.join(prompt.begin_answer(parts, request))
            while len(batch):
                batch.step()

    cache, pads = padded(parts, prompts)
    ids = torch.tensor(_first_ids(len(prompts)), device=parts.device)[:, None]
    in_a_batch = with_transformers(parts, cache, ids, num_tokens, pads)
    with apbv_attention(parts.language_model):
        alone, batched = _first_logits(parts, prompts)
    batched_by_transformers = in_a_batch()[:, 0].double()
    return [
        Way("apbv, one after the other", one_by_one),
        Way("apbv, in a batch", together, relative_error(batched, alone)),
        Way("transformers, in a batch", in_a_batch, relative_error(batched_by_transformers, alone)),
    ]


def _first_ids(num_prompts: int) -> list[int]:
    """Return a token for each answer, by which its first step is compared."""
    return [1 + number % 99 for number in range(num_prompts)]


def _first_logits(parts: ModelParts, prompts: Sequence[Prompt]) -> tuple[Tensor, Tensor]:
    """Return the logits of the first step of every answer by itself, and in a batch."""
    ids = _first_ids(len(prompts))
    rows = []
    for prompt, token in zip(prompts, ids, strict=True):
        decoder = Decoder(parts, prompt.kv, prompt.num_tokens)
        rows.append(decoder.advance([token]))
        decoder.take_back(1)
    kvs = [OwnKV(prompt.kv.continued().layers, prompt.num_tokens) for prompt in prompts]
    batched = BatchRunner(parts).run(ids, kvs)
    return torch.cat(rows).double(), batched.double()


def batches(options: argparse.Namespace, parts: ModelParts) -> Iterator[dict]:
    """Decode batches of all sizes on all lengths, and yield the records."""
    for num_tokens in tqdm(options.tokens, unit="context", disable=None):
        for size in options.batch:
            # No two prompts are equally long.
            prompts = [Prompt(parts, num_tokens + 7 * number, number) for number in range(size)]
            ways = batch_ways(parts, prompts, options.answer_tokens)
            measure(ways, options.rounds, options.warmup, parts.device, options.answer_tokens)
            for way in ways:
                record = record_of(options, ways[0], way)
                speed = None if record["ms"] is None else size / record["ms"] * 1e3
                yield {
                    "benchmark": "batch_decoding",
                    "num_tokens": num_tokens,
                    "num_answers": size,
                    "answer_tokens": options.answer_tokens,
                    "tokens_per_s": speed,
                    **record,
                }


def steps(options: argparse.Namespace, parts: ModelParts) -> Iterator[dict]:
    """Run steps in all ways on all lengths, and yield the records."""
    makers = {
        "transformers": partial(with_transformers, parts),
        "apbv": partial(with_apbv, parts),
    }
    if parts.device.type == "cuda":
        without_graphs = replace(parts, decode=DecodeConfig(cuda_graphs="off"))
        makers["apbv, no graphs"] = partial(with_apbv, without_graphs)
    for num_tokens in tqdm(options.tokens, unit="context", disable=None):
        # Each way has a cache object of its own with the same numbers.
        caches = {name: random_cache(parts, num_tokens) for name in makers}
        for num_new in options.new_tokens:
            ids = torch.arange(1, num_new + 1, device=parts.device)[None]
            ways = [Way(name, make_step(caches[name], ids)) for name, make_step in makers.items()]
            compare(ways)
            measure(ways, options.rounds, options.warmup, parts.device)
            compare(ways)
            for way in ways:
                yield {
                    "benchmark": "decoding",
                    "num_tokens": num_tokens,
                    "num_new_tokens": num_new,
                    **record_of(options, ways[0], way),
                }


def record_of(options: argparse.Namespace, baseline: Way, way: Way) -> dict:
    """Return the fields of every record, without a speed if the result is wrong."""
    ms = None
    speedup = None
    # No error that is NaN is small enough.
    if way.error <= TOLERANCE[options.dtype]:
        ms = statistics.median(way.ms)
        speedup = statistics.median(baseline.ms) / ms
    return {
        "way": way.name,
        "ms": ms,
        "speedup": speedup,
        "error": way.error if way.error < float("inf") else None,
        "tolerance": TOLERANCE[options.dtype],
        "samples": {"ms": way.ms},
        **fields_of(options, "model", "warmup", "dtype"),
    }


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of("decoding", __doc__, {"model": ["demo", *sorted(CONFIGS)]})
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    keep_freed_memory()
    dtype = getattr(torch, options.dtype)
    parts = inspect_model(load_model(options.model, dtype, HostGroup.single()))
    if options.batch:
        rows = report(options, batches(options, parts), columns_of("batch_decoding"))
    else:
        rows = report(options, steps(options, parts), columns_of("decoding"))
    wrong = [row for row in rows if row["speedup"] is None]
    for row in wrong:
        report_error(
            f"error: {row['way']} over {row['num_tokens']} tokens is off by {row['error']}, where "
            f"{row['tolerance']} is allowed"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
