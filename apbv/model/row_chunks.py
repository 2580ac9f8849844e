"""Runs a decoder's norms and MLPs on a long prompt in chunks of rows, in a context manager.

What they compute of a row depends on that row alone, and between input and output they hold several
times as much: an MLP three times its width, a norm two copies in fp32. Of 148,000 tokens that is 17
GB in a layer of Qwen2.5-VL-7B; in chunks it is :data:`CHUNK_BYTES`.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from .families import DecoderSizes
from .parts import ModelParts

# What the rows of a chunk may hold between input and output, by type of device. On a GPU a chunk's
# matrix products still have a thousand tiles; on a CPU what is written has a chance to be in a
# cache when it is read.
CHUNK_BYTES = {"cuda": 512 * 2**20, "cpu": 32 * 2**20}
# Fewer rows would make a matrix product slower than it has to be; and of a GPU's tiles none is to
# be cut in two.
_FEWEST_ROWS = 512
_ROWS_OF_A_TILE = 256
_FP32_COPIES_OF_NORM = 2


@contextmanager
def rows_in_chunks(parts: ModelParts, most_rows: int) -> Iterator[None]:
    """Run the decoder's norms and MLPs on a long input in chunks of rows; restored even on errors.

    Modules whose chunks are as long as any input are left alone. Hooks on the modules see whole
    inputs and outputs. With tensor parallelism every member of a host makes the same chunks, so
    that the sums over members that end an MLP come in the same order on all of them.

    Args:
        most_rows: the rows of the longest input.
    """
    decoder: Any = parts.language_model
    itemsize = parts.dtype.itemsize
    # Of a row a norm of several calls holds copies in fp32, and the result before its weights.
    norm_rows = chunk_rows(parts.device, parts.hidden_size * (4 * _FP32_COPIES_OF_NORM + itemsize))
    if getattr(decoder.norm, "is_fused", False):
        norm_rows = most_rows  # which holds nothing but its result
    mlp_rows = chunk_rows(
        parts.device,
        mlp_row_bytes(parts.sizes, itemsize, parts.tensor_parallel[1], parts.is_expert_parallel),
    )
    modules: list[tuple[Any, int]] = [(decoder.norm, norm_rows)]
    for layer in decoder.layers:
        modules += [(layer.input_layernorm, norm_rows), (layer.post_attention_layernorm, norm_rows)]
        modules.append((layer.mlp, mlp_rows))
    with ExitStack() as stack:
        for module, rows in modules:
            before = vars(module).get("forward")  # somebody else's wrapper, if any
            # It is one of these where another such block of this model is around.
            if most_rows > rows and not isinstance(before, _InChunks):
                module.forward = _InChunks(module.forward, rows)
                stack.callback(_restore_forward, module, before)
        yield


def _restore_forward(module: nn.Module, wrapper: Callable | None) -> None:
    """Give a module the wrapper that it had, or else the forward of its class."""
    if wrapper is None:
        del module.forward
    else:
        module.forward = wrapper


def chunk_rows(device: torch.device, row_bytes: int) -> int:
    """Return the rows of a chunk, at most.

    Args:
        row_bytes: what one row holds between input and output.
    """
    chunk_bytes = CHUNK_BYTES.get(device.type, CHUNK_BYTES["cuda"])
    return max(chunk_bytes // row_bytes // _ROWS_OF_A_TILE * _ROWS_OF_A_TILE, _FEWEST_ROWS)


def mlp_row_bytes(
    sizes: DecoderSizes, itemsize: int, tensor_parallel: int = 1, expert_parallel: bool = False
) -> int:
    """Return an MLP's activations per row: the gate, the other projection, and their product.

    Each of a row's experts has these, a copy of the row, and its own result before and after its
    weight.

    Args:
        tensor_parallel: T, the processes that share the columns of the MLP.
        expert_parallel: whether each has whole experts instead. They allocate rows for those of
            others, too.
    """
    width = ceil(sizes.intermediate / tensor_parallel)
    if expert_parallel:
        experts_width = sizes.routed_width + ceil(sizes.shared_width / tensor_parallel)
        width = max(experts_width, ceil(sizes.dense_width / tensor_parallel))
    num_values = 3 * width + 3 * sizes.chosen_experts * sizes.hidden
    return num_values * itemsize


@dataclass(frozen=True)
class _InChunks:
    """Applies a row-wise function to ``[1, S, d]``, in chunks of nearly equal length.

    Attributes:
        forward: the function.
        most_rows: the rows of a chunk, at most.
    """

    forward: Callable[[Tensor], Tensor]
    most_rows: int

    def __call__(self, states: Tensor) -> Tensor:
        num_rows = states.shape[1]
        if num_rows <= self.most_rows:
            return self.forward(states)
        num_chunks = ceil(num_rows / self.most_rows)
        whole_tiles = ceil(ceil(num_rows / num_chunks) / _ROWS_OF_A_TILE)
        rows = min(whole_tiles * _ROWS_OF_A_TILE, self.most_rows)
        out: Tensor | None = None
        for start in range(0, num_rows, rows):
            # Without the stride of the longer batch, for which torch multiplies by a batch of
            # weights.
            result = self.forward(states[0, start : start + rows][None])
            if out is None:
                out = result.new_empty(1, num_rows, result.shape[-1])
            out[:, start : start + rows] = result
        assert out is not None  # there are rows
        return out
