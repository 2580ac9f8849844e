"""Encodes frames in parallel (APB-V, Section 3.1): each host runs the vision tower on its share.

A *row* belongs to one visual placeholder token: the vision tower's embedding and, for models with
deepstack, the L vectors that are added to the hidden states after the first layers, concatenated:
``[rows, (1 + L) * d]``. Rows are numbered in prompt order.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from functools import partial
from math import isqrt

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from ..hosts import HostGroup
from ..input.audio import AudioInput
from ..input.pixels import PixelChunk
from ..input.visual import VisualInput
from ..model.parts import ModelParts
from ..model.vision_attention import packed_attention
from ..stats import StageTimer, free_host_memory_bytes, free_memory_bytes
from ..transfer import to_device
from .cancelling import Stop, require_going_on

_MOST_CHUNK_BYTES = 2**28  # by default: some 5,000 of a Qwen tower's patches, which keep a GPU busy
_SHARE_OF_MEMORY = 16


# A source of the rows of one host's share of the visual input: given the temporal patches of each
# chunk, as VisualInput.chunks returns them, it yields [rows, (1 + L) * d] of each, in order, and
# has to be closed.
VisualRows = Callable[[Sequence[range]], Iterator[Tensor]]


def tower_rows(
    parts: ModelParts, visual: VisualInput, timer: StageTimer | None, chunks: Sequence[range]
) -> Iterator[Tensor]:
    """Run the model's vision tower on this host's pixels, chunk by chunk; see :data:`VisualRows`.

    Args:
        timer: times the tower.
    """
    if visual.pixels is None:
        return
    mine = visual.patches[visual.host]
    with closing(visual.pixels.chunks(chunks)) as pixels:
        for chunk in pixels:
            with timer.stage("encode") if timer else nullcontext():
                rows = _encode(parts, visual, chunk)
            if timer:
                timer.progress("encode", chunk.patches.stop - mine.start, len(mine))
            yield rows


@torch.no_grad()
def _encode(parts: ModelParts, visual: VisualInput, chunk: PixelChunk) -> Tensor:
    with packed_attention(parts.packed_vision_tower):
        features = _features(parts, chunk.kind, chunk.on(parts.device))
    streams = []
    for layer in (features.pooler_output, *(getattr(features, "deepstack_features", None) or ())):
        # One tensor per item.
        layer = torch.cat(list(layer)) if isinstance(layer, (list, tuple)) else layer
        streams.append(layer.reshape(-1, layer.shape[-1]))
    if parts.family == "llava_onevision" and chunk.kind == "video":
        streams[0] = _with_newline_at_the_end_only(parts, streams[0], visual, chunk.patches)
    rows = torch.cat(streams, dim=-1).to(parts.dtype)
    kept = visual.kept_of(chunk.patches)
    return rows if kept is None else rows[to_device(kept.nonzero().flatten(), rows.device)]


def encode_pooled(parts: ModelParts, visual: VisualInput) -> Tensor:
    """Run the vision tower, whose features are pooled 2 x 2 before its projector, on this host's
    share.

    Args:
        parts: a model with a :attr:`~apbv.model.parts.ModelParts.projector`.

    Returns:
        As :func:`encode_visual`; all patches of a cell have the same row.
    """
    hook = parts.projector.register_forward_pre_hook(_pool_cells)
    try:
        return encode_visual(parts, visual)
    finally:
        hook.remove()


def _pool_cells(projector: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    """Replace the features ``[N, T, d]`` of every patch by the mean of its 2 x 2 cell.

    A class token before them stays as it is, and so does everything where a patch is missing.
    """
    (features,) = args
    side = isqrt(features.shape[1])
    if features.shape[1] - side**2 > 1:  # no square grid, with a class token at most
        return args
    patches = features[:, -(side**2) :]
    grid = patches.unflatten(1, (side, side)).permute(0, 3, 1, 2)  # [N, d, side, side]
    means = avg_pool2d(grid, 2, ceil_mode=True, count_include_pad=False)
    spread = means.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)[..., :side, :side]
    pooled = spread.flatten(2).transpose(1, 2)  # [N, side * side, d]
    return (torch.cat([features[:, : -(side**2)], pooled], dim=1),)


def encode_visual(parts: ModelParts, visual: VisualInput | None) -> Tensor | None:
    """Run the vision tower on this host's share of the visual input.

    Returns:
        Rows ``[len(piece), (1 + L) * d]`` in the model's dtype, none for an empty piece; None for a
        text prompt.
    """
    if visual is None:
        return None
    chunks = visual.chunks(visual.host, visual.chunk_bytes or _MOST_CHUNK_BYTES)
    (rows,) = all_rows(
        parts, visual, chunks, partial(tower_rows, parts, visual, None), [parts.row_width]
    )
    return rows


def all_rows(
    parts: ModelParts,
    shown: VisualInput | AudioInput,
    chunks: Sequence[range],
    source: VisualRows,
    widths: Sequence[int],
    hosts: HostGroup | None = None,
    stop: Stop | None = None,
) -> list[Tensor]:
    """Encode a share, chunk by chunk, to rows that are cut into several tensors: ``[rows, width]``
    of each width.

    Args:
        shown: says which rows belong to temporal patches, or to units of audio.
        chunks: the patches or units of its chunks, adjacent ones.
        source: makes their rows.
        hosts, stop: as of :func:`~apbv.prefilling.cancelling.require_going_on`, before each chunk,
            of which all of these hosts have the same.

    Raises:
        ValueError: a chunk's number of rows differs from that of the prompt's placeholders for it.
        RequestCancelled: ``stop`` was true.
    """
    num_rows = sum(map(len, map(shown.rows_of, chunks)))
    done = 0
    streams = [
        torch.empty(num_rows, width, dtype=parts.dtype, device=parts.device) for width in widths
    ]
    error = None
    with closing(source(chunks)) as encoded:
        for chunk in chunks:
            require_going_on(hosts, stop)
            if error is not None:  # others encode the same chunks, and ask before each of them
                continue
            try:
                rows = next(encoded, streams[0][:0])
                require_as_many(rows, len(shown.rows_of(chunk)))
                for stream, part in zip(streams, rows.split(widths, dim=-1), strict=True):
                    stream[done : done + len(rows)] = part
                done += len(rows)
            except Exception as caught:
                error = caught
                if stop is None:  # nobody asks
                    break
    if error is not None:
        raise error
    return streams


def sharing_hosts(shown: VisualInput | AudioInput, hosts: HostGroup) -> HostGroup:
    """Return the hosts that have a prompt's rows together: all of them, or this one alone, where
    every host has encoded everything."""
    return hosts if shown.is_shared_out else HostGroup.single(hosts.device)


def require_as_many(rows: Tensor, wanted: int) -> None:
    """Raise ValueError unless a chunk has as many rows as the prompt has placeholders for it."""
    if len(rows) != wanted:
        raise ValueError(
            f"the model's tower returned {len(rows)} embeddings for {wanted} placeholders"
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


def chunk_bytes_within(free: int) -> int:
    """Return the default chunk size for a number of free bytes."""
    return min(free // _SHARE_OF_MEMORY, _MOST_CHUNK_BYTES)


def _features(parts: ModelParts, kind: str, pixels: dict):
    """Call the model family's own get_*_features, whose first argument's name differs between
    families."""
    base = parts.model.model
    first, *rest = pixels.values()
    if parts.family == "internvl":  # its video frames are images, and so are an image's tiles
        frames = first.flatten(0, 1) if first.dim() == 5 else first
        return base.get_image_features(frames, return_dict=True)
    if kind == "video":
        return base.get_video_features(first, *rest, return_dict=True)
    named = {name: value for name, value in pixels.items() if name != "pixel_values"}
    return base.get_image_features(first, **named, return_dict=True)


def _with_newline_at_the_end_only(
    parts: ModelParts, rows: Tensor, visual: VisualInput, patches: range
) -> Tensor:
    """End every whole video, and no other chunk, with LLaVA-OneVision's learned newline row.

    transformers adds it to every piece, or (before 5.19) to none.
    """
    num_ending = visual.ending_rows_of(patches)
    rows = rows[: len(visual.rows_of(patches)) - num_ending]
    return torch.cat([rows, parts.model.model.image_newline[None].to(rows)]) if num_ending else rows
