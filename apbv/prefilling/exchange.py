"""Exchanges embeddings of visual and audio tokens between hosts, overlapped with encoding.

Every host encodes its share in chunks. In round r each host sends the rows of its chunk r to the
hosts that need them, with a failure flag; during the transfer it encodes the next chunk. A host
that failed keeps taking part, with rows of zeros, until all hosts know of it: no host then waits
for ever, and the group can serve the next request.

Without frame parallelism every host encodes everything, as a single process does, and keeps the
rows of its own tokens: nothing is exchanged.
"""

from collections import deque
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..hosts import Exchange, HostError, HostGroup
from ..input.audio import AudioInput
from ..input.model_inputs import ModelInputs
from ..input.visual import VisualInput
from ..layout import ContextLayout
from ..model.parts import ModelParts
from ..stats import StageTimer
from ..transfer import numbers_in, to_device
from .cancelling import RequestCancelled, Stop
from .encode import VisualRows, agree_on_chunks, all_rows, require_as_many
from .encode_audio import audio_rows
from .moving import start_moving

_MOST_ROUNDS_UNDER_WAY = (
    4  # rounds by which a host with cheaper frames may run ahead of the slowest
)


@dataclass
class LocalVisual:
    """Rows of a host's local tokens, until they are merged into the prompt's embeddings.

    Attributes:
        streams: for every visual row, in local order, its token's embedding, ``[rows, d]``, and
            then the L vectors that deepstack adds after the first layers; None for a prompt without
            visual tokens, and once merged.
        audio: of every audio row, in local order, its token's embedding, ``[rows, d]``; None for a
            prompt without audio, and once merged.
    """

    streams: list[Tensor] | None = None
    audio: Tensor | None = None

    def merge_into(self, parts: ModelParts, input_ids: Tensor) -> tuple[Tensor, dict]:
        """Embed local tokens, replacing placeholders by the rows, and drop the rows.

        Args:
            input_ids: ``[1, S]`` of this host's tokens, in CPU memory, so that a GPU need not be
                waited for.

        Returns:
            Embeddings ``[1, S, d]`` and the language model's further keyword arguments.
        """
        embeds = parts.embed_tokens(to_device(input_ids, parts.device))
        (main, *deepstack) = self.streams or [None]
        audio = self.audio
        self.streams = self.audio = None
        is_visual = parts.is_visual(input_ids)
        for rows, mask in ((main, is_visual), (audio, parts.is_audio(input_ids))):
            if rows is not None:
                embeds[0].index_copy_(
                    0, to_device(mask[0].nonzero().flatten(), embeds.device), rows
                )
        if not deepstack:
            return embeds, {}
        mask = to_device(is_visual, parts.device)
        return embeds, {"visual_pos_masks": mask, "deepstack_visual_embeds": ReadOnce(deepstack)}


class ReadOnce(list):
    """List whose items are dropped once read, as by the layers that add them."""

    def __getitem__(self, index: int) -> Tensor:
        item = super().__getitem__(index)
        self[index] = None
        return item


@torch.no_grad()
def encode_and_exchange(
    parts: ModelParts,
    inputs: ModelInputs,
    source: VisualRows,
    layout: ContextLayout,
    hosts: HostGroup,
    timer: StageTimer,
    chunk_bytes: int | None = None,
    stop: Stop | None = None,
) -> LocalVisual:
    """Encode this host's share, and send every host the rows of its local tokens, and no others; or
    encode everything, and keep the rows of this host's tokens; collective.

    Args:
        source: makes the visual rows of this host's share; those of audio come from the model's
            audio tower.
        chunk_bytes: as in :class:`apbv.VideoConfig`, where the hosts have not agreed on chunks yet.
        stop: asked on host 0 before each chunk; true ends the encoding on all hosts.

    Raises:
        ValueError: a frame cannot be read, or a tower makes another number of rows than the prompt
            has placeholders.
        RequestCancelled: ``stop`` was true.
        HostError: another host failed.
    """
    local = LocalVisual()
    tokens = inputs.input_ids[0]
    audio = inputs.audio
    visual = inputs.visual

    def encode(
        shown: VisualInput | AudioInput,
        is_row: Tensor,
        by: VisualRows,
        *limit: int,
        num_streams: int = 1,
    ):
        if not shown.is_shared_out:
            widths = [parts.hidden_size] * num_streams
            with hosts.local_stage("encode"):
                streams = all_rows(parts, shown, shown.chunks(0, *limit), by, widths, hosts, stop)
                return _take(streams, _rows_of(layout, hosts.rank, is_row))
        chunks = [shown.chunks(host, *limit) for host in range(hosts.size)]
        return _Rounds(parts, shown, is_row, chunks, layout, hosts, num_streams).run(
            by, timer, stop
        )

    if audio is not None:
        (local.audio,) = encode(
            audio, parts.is_audio(tokens), partial(audio_rows, parts, audio, timer)
        )
    if visual is not None:
        limit = visual.chunk_bytes or agree_on_chunks(hosts, parts.device, chunk_bytes)
        local.streams = encode(
            visual, parts.is_visual(tokens), source, limit, num_streams=1 + parts.sizes.deepstack
        )
    return local


def _rows_of(layout: ContextLayout, host: int, is_row: Tensor) -> Tensor:
    """Return the numbers of the rows of a host's tokens, in local order.

    Args:
        is_row: ``[n]``, which of the prompt's tokens are rows.
    """
    number = is_row.cumsum(0) - 1  # of the row that a token is
    local = numbers_in(*layout.local_spans(host))
    return number[local[is_row[local]]]


def _take(streams: list[Tensor], places: Tensor) -> list[Tensor]:
    """Return some rows of every stream, which is dropped then, unless they are all, in order."""
    if torch.equal(places, torch.arange(len(streams[0]))):
        return streams
    places = to_device(places, streams[0].device)
    taken = []
    while streams:
        taken.append(streams.pop(0)[places])
    return taken


class _Rounds:
    """Exchange of all hosts' rows of one kind, chunk by chunk.

    Args:
        shown: says which rows belong to temporal patches, or to units of audio.
        is_row: ``[n]``, which of the prompt's tokens are rows.
        chunks: of every host, the patches or units of its chunks.
        num_streams: how many vectors of the model's width a row has.
    """

    def __init__(
        self,
        parts: ModelParts,
        shown: VisualInput | AudioInput,
        is_row: Tensor,
        chunks: list[list[range]],
        layout: ContextLayout,
        hosts: HostGroup,
        num_streams: int = 1,
    ):
        self._hosts = hosts
        self._chunks = chunks[hosts.rank]
        self._num_rows = shown.num_rows
        num_rounds = max(map(len, chunks))
        # Of every host, the rows of its local tokens; by round, those it makes.
        self._needed: list[Tensor] = []
        self._made: list[list[Tensor]] = []
        for host, of_host in enumerate(chunks):
            self._needed.append(_rows_of(layout, host, is_row))
            runs = [*map(shown.rows_of, of_host), *[range(0)] * (num_rounds - len(of_host))]
            self._made.append([*map(numbers_in, runs)])
        num_rows = len(self._needed[hosts.rank])
        width = parts.hidden_size
        self._nothing = torch.empty(0, num_streams * width, dtype=parts.dtype, device=parts.device)
        # Of this host's tokens; streams are separate tensors, so that they can be freed separately.
        self._local = [self._nothing.new_empty(num_rows, width) for _ in range(num_streams)]

    def run(self, source: VisualRows, timer: StageTimer, stop: Stop | None) -> list[Tensor]:
        """Encode and exchange everything; return the rows of this host's tokens, ``[rows, d]`` by
        stream."""
        hosts = self._hosts
        self._error = None
        with hosts.collective_stage("encode"), closing(source(self._chunks)) as chunks:
            under_way: deque[tuple[Tensor, Exchange, Exchange]] = deque()
            for number in range(len(self._made[0])):
                rows = None
                if self._error is None:
                    try:
                        if stop is not None and hosts.is_leader and stop():
                            raise RequestCancelled
                        rows = next(chunks, self._nothing)
                        require_as_many(rows, len(self._made[hosts.rank][number]))
                    except Exception as caught:
                        self._error = caught
                under_way.append(self._start(number, rows if self._error is None else None))
                is_full = len(under_way) == _MOST_ROUNDS_UNDER_WAY
                if is_full and not self._finish(*under_way.popleft(), timer):
                    break
            for late in under_way:
                self._finish(*late, timer)
        if hosts.broadcast_ints([isinstance(self._error, RequestCancelled)], 1)[0]:
            raise RequestCancelled
        with hosts.local_stage("encode"):
            if self._error is not None:
                raise self._error
        return self._local

    def _start(self, number: int, rows: Tensor | None) -> tuple[Tensor, Exchange, Exchange]:
        """Send a round's rows, or after a failure as many zeros.

        Returns:
            Which of this host's rows the round brings, the rows to come, and the failures to come.
        """
        failures = self._hosts.start_gathering(torch.tensor([rows is None], dtype=torch.uint8))
        held = [of_host[number] for of_host in self._made]
        rank = self._hosts.rank
        if rows is None:
            rows = self._nothing.new_zeros(len(held[rank]), self._nothing.shape[1])
        is_made = torch.zeros(self._num_rows, dtype=torch.bool)
        is_made[torch.cat(held)] = True
        wanted = [needed[is_made[needed]] for needed in self._needed]
        places = is_made[self._needed[rank]].nonzero().flatten()
        return places, start_moving(rows, held, wanted, self._hosts), failures

    def _finish(
        self, places: Tensor, rows: Exchange, failures: Exchange, timer: StageTimer
    ) -> bool:
        """Store a round's rows; return whether all hosts continue."""
        try:
            with timer.stage("exchange"):
                received = rows.wait()
                if not failures.wait().any():
                    for which, of_host in received:
                        at = to_device(places[which], of_host.device)
                        streams = of_host.chunk(len(self._local), dim=-1)
                        for local, stream in zip(self._local, streams, strict=True):
                            local.index_copy_(0, at, stream)
        except HostError:
            raise
        except Exception as caught:  # such as the caller's on_stage: sent in the next round
            self._error = self._error or caught
        rows.wait()
        return not failures.wait().any()
