"""This module runs a language model over new tokens behind a cache, step by step."""

import torch
from torch import Tensor

from ..hosts import HostGroup
from ..kernels.backends import choose
from ..model.attention import ChosenKV, NewTokenAttention
from ..model.parts import ModelParts
from ..transfer import to_device
from ..warn import warn_caller
from .graphs import CapturedSteps, CaptureError
from .step import NewTokens, forward

# Windows and trees are shorter; of longer inputs, such as a prompt's end, hardly two are equally long.
MOST_CAPTURED = 64


class ModelRunner:
    """A ModelRunner runs a language model over new tokens, and appends their KV to a cache.

    On a GPU, steps of one size are recorded as a CUDA graph where that is possible (:mod:`.graphs`): a step of a
    7B model launches a thousand kernels, which takes longer than to compute them.

    Args:
        parts: the model.
        cache: of the tokens before; it appends in place.
        hosts: over whom the KV is spread; None: it is all here.
        prompt: the KV of a prompt that is not in the cache; None: it is.
    """

    def __init__(self, parts: ModelParts, cache, hosts: HostGroup | None = None, prompt: ChosenKV | None = None):
        self._parts, self._cache, self._hosts, self._prompt = parts, cache, hosts, prompt
        self._captured = None
        if may_record(parts, hosts):
            self._captured = CapturedSteps(parts, cache, prompt)

    @torch.no_grad()
    def run(self, new: NewTokens, last_only: bool = False) -> Tensor:
        """Run the model on S tokens; return the logits after each, ``[S, V]``, or after the last, ``[1, V]``."""
        if self._captured is not None and len(new) <= MOST_CAPTURED:
            try:
                return self._captured.run(new, last_only)
            except CaptureError as error:
                self._captured = None
                give_up_graphs(self._parts, error)
        device = self._parts.device
        visible = None if new.visible is None else to_device(new.visible, device)
        attention = NewTokenAttention(self._parts.backend, visible, self._hosts, self._prompt)
        positions = to_device(new.positions, device)
        return forward(self._parts, to_device(new.ids, device), positions, self._cache, attention, last_only)


def may_record(parts: ModelParts, hosts: HostGroup | None) -> bool:
    """Return whether steps are recorded as graphs; warn where they are wanted, and cannot be."""
    if not wants_graphs(parts):
        return False
    obstacle = why_not_captured(parts, hosts)
    if obstacle is not None:
        warn_caller(f"decoding without CUDA graphs: {obstacle}")
    return obstacle is None


def give_up_graphs(parts: ModelParts, error: CaptureError) -> None:
    """Warn that a step could not be recorded, and remember that for answers to come."""
    if not isinstance(error.__cause__, torch.OutOfMemoryError):  # which another answer may be spared
        parts.capture_failures.append(str(error))
    warn_caller(f"decoding goes on without CUDA graphs: {error}")


def wants_graphs(parts: ModelParts) -> bool:
    """Return whether a model's steps are to be recorded where they can be: on a GPU, if not switched off."""
    return parts.decode.cuda_graphs == "auto" and parts.device.type == "cuda"


def why_not_captured(parts: ModelParts, hosts: HostGroup | None) -> str | None:
    """Return what keeps a model's steps from being captured on its GPU, or None if nothing does."""
    if hosts is not None:
        return "the KV lies in shares, over which hosts exchange results in every layer"
    if parts.tensor_parallel[1] > 1:
        return "the members of a host exchange results in every layer"
    if parts.capture_failures:
        return parts.capture_failures[0]
    backend = choose(parts.backend, torch.empty(0, dtype=parts.dtype, device=parts.device))
    if backend != "triton":
        return f"the {backend} attention waits for the number of keys"
    return None
