"""Decodes several answers in one batch, beside one after the other."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from torch import Tensor
from transformers import DynamicCache

from apbv import HostGroup, SamplingParams
from apbv.decode.answer import Answer, generate_tokens
from apbv.decode.batch import Batch
from apbv.decode.batch_steps import BatchRunner, OwnKV
from apbv.decode.runner import Decoder
from apbv.input.request import Question, Request
from apbv.kv.placement import GatheredKV
from apbv.model.attention import apbv_attention
from apbv.model.parts import ModelParts
from apbv.stats import StageTimer, synchronize

from .steps import relative_error

ALONE, TOGETHER = "apbv, one after the other", "apbv, in a batch"


class Prompt:
    """Random KV of so many tokens, and logits that begin an answer to it."""

    def __init__(self, parts: ModelParts, cache: DynamicCache, logits: Tensor):
        num_tokens = cache.get_seq_length()
        self.kv, self.logits = GatheredKV(cache, num_tokens, HostGroup.single(parts.device)), logits

    def begin_answer(self, parts: ModelParts, request: Request) -> Answer:
        """Return an answer that has no tokens yet."""
        decoder = Decoder(parts, self.kv, self.kv.num_tokens)
        return Answer(decoder, self.logits, self.kv.num_tokens, request.sampling)


@dataclass
class BatchWay:
    """One way to decode several answers.

    Attributes:
        name: its name in tables.
        error: largest error of a step's logits, relative to the largest logit of a step alone.
        ms: milliseconds for a token of every answer, one entry for every round.
    """

    name: str
    error: float = 0.0
    ms: list[float] = field(default_factory=list)


@torch.no_grad()
def measure_batch(
    parts: ModelParts, prompts: Sequence[Prompt], num_tokens: int, rounds: int, warmup: int
) -> list[BatchWay]:
    """Decode so many tokens of every answer, one after the other and in one batch, in turn."""
    alone, together = BatchWay(ALONE), BatchWay(TOGETHER)
    hosts = prompts[0].kv.hosts
    sampling = SamplingParams(max_new_tokens=num_tokens + 1)  # the first takes no pass of the model
    request = Request(Question(), StageTimer(hosts), sampling=sampling)
    with apbv_attention(parts.language_model):
        together.error = _error(parts, prompts)
        batch = Batch(parts)
        for number in range(warmup + rounds):
            for way in (alone, together):
                synchronize(parts.device)
                began = time.perf_counter()
                if way is alone:
                    for prompt in prompts:
                        generate_tokens(prompt.begin_answer(parts, request))
                else:
                    for prompt in prompts:
                        batch.join(prompt, request)
                    while len(batch):
                        batch.step()
                synchronize(parts.device)
                if number >= warmup:
                    way.ms.append((time.perf_counter() - began) * 1e3 / num_tokens)
    return [alone, together]


def _error(parts: ModelParts, prompts: Sequence[Prompt]) -> float:
    """Return by how much a batch's logits are off, relative to the largest logit."""
    ids = [1 + number % 99 for number in range(len(prompts))]
    rows = []
    for prompt, token in zip(prompts, ids, strict=True):
        decoder = Decoder(parts, prompt.kv, prompt.kv.num_tokens)
        rows.append(decoder.advance([token]))
        decoder.take_back(1)
    expected = torch.cat(rows).double()
    kvs = [OwnKV(prompt.kv.continued().layers, prompt.kv.num_tokens) for prompt in prompts]
    found = BatchRunner(parts).run(ids, kvs).double()
    return relative_error(found, expected)


def median_ms(way: BatchWay) -> float:
    """Return the median time for a token of every answer."""
    return statistics.median(way.ms)
