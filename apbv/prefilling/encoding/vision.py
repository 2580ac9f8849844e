"""Encodes frames in parallel (APB-V, Section 3.1): each host runs the vision tower on its share.

A *row* belongs to one visual placeholder token: the vision tower's embedding and, for models with
deepstack, the L vectors that are added to the hidden states after the first layers, concatenated:
``[rows, (1 + L) * d]``. Rows are numbered in prompt order.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, nullcontext
from functools import partial
from math import isqrt
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from ...device.copies import to_device
from ...errors import UnsupportedModelError
from ...hosts import HostGroup
from ...input.prompts.audio_input import AudioInput
from ...input.prompts.pixels import PixelChunk
from ...input.prompts.visual import VisualInput
from ...model.parts import ModelParts
from ...model.vision_attention import packed_attention
from ...stats import StageTimer, free_host_memory_bytes, free_memory_bytes
from ..cancelling import Stop, require_going_on

# The default chunk size: at most 5,000 or so of a Qwen tower's patches, which keep a GPU busy, and
# 1/16 of the free memory.
_MOST_CHUNK_BYTES = 2**28
_SHARE_OF_MEMORY = 16

# Makes the rows of one host's share of the visual input: given the temporal patches of each chunk,
# as VisualInput.chunks returns them, it yields the rows [rows, (1 + L) * d] of each chunk, in
# order, and has to be closed.
VisualRows = Callable[[Sequence[range]], Generator[Tensor, None, None]]


def tower_rows(
    parts: ModelParts, visual: VisualInput, timer: StageTimer | None, chunks: Sequence[range]
) -> Generator[Tensor, None, None]:
    """Run the model's vision tower on this host's pixels, chunk by chunk; see :data:`VisualRows`.

    Args:
        timer: times the tower; None: nothing is timed.
    """
    if visual.pixels is None:
        return
    share = visual.patches[visual.host]
    with closing(visual.pixels.chunks(chunks)) as pixels:
        for chunk in pixels:
            with nullcontext() if timer is None else timer.stage("encode"):
                rows = _encode(parts, visual, chunk)
            if timer is not None:
                timer.progress("encode", chunk.patches.stop - share.start, len(share))
            yield rows


@torch.no_grad()
def _encode(parts: ModelParts, visual: VisualInput, chunk: PixelChunk) -> Tensor:
    """Run the vision tower on a chunk, and return the rows ``[rows, (1 + L) * d]``."""
    with packed_attention(parts.packed_vision_tower):
        features = _features(parts, chunk.kind, chunk.on(parts.device))
    layers = [features.pooler_output]
    deepstack = getattr(features, "deepstack_features", None)
    if deepstack is not None:
        layers += deepstack
    streams = []
    for layer in layers:
        if isinstance(layer, (list, tuple)):  # one tensor per item
            layer = torch.cat(list(layer))
        streams.append(layer.reshape(-1, layer.shape[-1]))
    if chunk.kind == "video":
        streams[0] = parts.family.end_video(
            parts.model,
            streams[0],
            num_rows=len(visual.rows_of(chunk.patches)),
            num_ending=visual.ending_rows_of(chunk.patches),
        )
    rows = torch.cat(streams, dim=-1).to(parts.dtype)
    is_kept = visual.kept_of(chunk.patches)
    if is_kept is None:
        return rows
    return rows[to_device(is_kept.nonzero().flatten(), rows.device)]


def _features(parts: ModelParts, kind: str, pixels: Mapping[str, Any]) -> Any:
    """Return the vision tower's output for pixels of a kind of item, ``"video"`` or ``"image"``."""
    if kind == "video":
        return parts.family.encode_video(parts.model, pixels)
    return parts.family.encode_images(parts.model, pixels)


def encode_pooled(parts: ModelParts, visual: VisualInput) -> Tensor:
    """Run the vision tower on this host's share, pooling features 2 x 2 before the projector.

    Args:
        parts: a model with a :attr:`~apbv.model.parts.ModelParts.projector`.

    Returns:
        As :func:`encode_visual`; all patches of a cell have the same row.
    """
    assert parts.projector is not None  # as the caller has seen
    hook = parts.projector.register_forward_pre_hook(_pool_cells)
    try:
        return encode_visual(parts, visual)
    finally:
        hook.remove()


def _pool_cells(projector: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    """Replace the features ``[N, T, d]`` of every patch by the mean of its 2 x 2 cell.

    A class token before them stays as it is, and so does everything where a patch is missing.
    """
    features = args[0]
    num_patches = features.shape[1]
    side = isqrt(num_patches)
    num_on_grid = side**2
    if num_patches - num_on_grid > 1:  # neither a square grid nor one behind a class token
        return args
    patches = features[:, -num_on_grid:]
    class_token = features[:, :-num_on_grid]
    grid = patches.unflatten(1, (side, side)).permute(0, 3, 1, 2)  # [N, d, side, side]
    means = avg_pool2d(grid, 2, ceil_mode=True, count_include_pad=False)
    spread = means.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)[..., :side, :side]
    pooled = spread.flatten(2).transpose(1, 2)  # [N, side * side, d]
    return (torch.cat([class_token, pooled], dim=1),)


@overload
def encode_visual(parts: ModelParts, visual: VisualInput) -> Tensor: ...


@overload
def encode_visual(parts: ModelParts, visual: None) -> None: ...


def encode_visual(parts: ModelParts, visual: VisualInput | None) -> Tensor | None:
    """Run the vision tower on this host's share of the visual input.

    Returns:
        Rows ``[rows of the share, (1 + L) * d]`` in the model's dtype; None for a text prompt.
    """
    if visual is None:
        return None
    chunks = visual.chunks(visual.host, visual.chunk_bytes or _MOST_CHUNK_BYTES)
    source = partial(tower_rows, parts, visual, None)
    streams = all_rows(parts, visual, chunks, source, [parts.row_width])
    return streams[0]


def all_rows(
    parts: ModelParts,
    media: VisualInput | AudioInput,
    chunks: Sequence[range],
    source: VisualRows,
    widths: Sequence[int],
    hosts: HostGroup | None = None,
    stop: Stop | None = None,
) -> list[Tensor]:
    """Encode a share, chunk by chunk; return the rows cut into streams, ``[rows, width]`` each.

    Args:
        media: says which rows belong to temporal patches, or to units of audio.
        chunks: the patches or units of the share's chunks, which are adjacent.
        source: makes their rows.
        widths: the width of every stream.
        hosts: hosts that encode the same chunks, and cancel together; None: nobody cancels.
        stop: see :func:`~apbv.prefilling.cancelling.require_going_on`; asked before each chunk.

    Raises:
        UnsupportedModelError: a chunk's number of rows differs from that of the prompt's
            placeholders for it.
        RequestCancelled: ``stop`` was true.
    """
    num_rows = sum(len(media.rows_of(chunk)) for chunk in chunks)
    streams = [
        torch.empty(num_rows, width, dtype=parts.dtype, device=parts.device) for width in widths
    ]
    no_rows = streams[0][:0]
    num_encoded = 0
    error: Exception | None = None
    with closing(source(chunks)) as encoded:
        for chunk in chunks:
            if hosts is not None:
                require_going_on(hosts, stop)
            if error is not None:  # others encode the same chunks, and ask before each of them
                continue
            try:
                rows = next(encoded, no_rows)
                require_as_many(rows, len(media.rows_of(chunk)))
                for stream, part in zip(streams, rows.split(widths, dim=-1), strict=True):
                    stream[num_encoded : num_encoded + len(rows)] = part
                num_encoded += len(rows)
            except Exception as caught:
                error = caught
                if stop is None:  # nobody asks
                    break
    if error is not None:
        raise error
    return streams


def sharing_hosts(media: VisualInput | AudioInput, hosts: HostGroup) -> HostGroup:
    """Return the hosts that have a prompt's rows together: all, or this one if it has them all."""
    return hosts if media.is_shared_out else HostGroup.single(hosts.device)


def require_as_many(rows: Tensor, num_placeholders: int) -> None:
    """Raise UnsupportedModelError unless a chunk has as many rows as the prompt has placeholders
    for it."""
    if len(rows) != num_placeholders:
        raise UnsupportedModelError(
            f"the model's tower returned {len(rows)} embeddings for {num_placeholders} placeholders"
        )


def agree_on_chunks(hosts: HostGroup, device: torch.device, chunk_bytes: int | None = None) -> int:
    """Return the chunk size in bytes on which all hosts agree; collective.

    Args:
        device: of the vision tower.
        chunk_bytes: as in :class:`apbv.VideoConfig`; the smallest of all hosts counts.
    """
    if chunk_bytes is None:
        chunk_bytes = chunk_bytes_within(min(free_host_memory_bytes(), free_memory_bytes(device)))
    return int(min(hosts.gather_floats([chunk_bytes]))[0])


def chunk_bytes_within(num_free_bytes: int) -> int:
    """Return the default chunk size for a number of free bytes."""
    return min(num_free_bytes // _SHARE_OF_MEMORY, _MOST_CHUNK_BYTES)


def stored_rows(
    rows: Tensor, visual: VisualInput, device: torch.device, chunks: Sequence[range]
) -> Generator[Tensor, None, None]:
    """Yield cached embeddings; see :data:`VisualRows`.

    Args:
        rows: ``[rows, (1 + L) * d]`` of this host's share, in CPU memory.
        device: the device on which they are needed.
    """
    first = visual.pieces[visual.host].start
    for chunk in chunks:
        of_chunk = visual.rows_of(chunk)
        yield rows[of_chunk.start - first : of_chunk.stop - first].to(device)
