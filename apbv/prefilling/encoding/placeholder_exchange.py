"""Exchanges embeddings of visual and audio tokens between hosts, overlapped with encoding.

Every host encodes its share in chunks. In round r each host sends the rows of its chunk r to the
hosts that need them, with a failure flag; during the transfer it encodes the next chunk. A host
that failed keeps taking part, with rows of zeros, until all hosts know of it: no host then waits
for ever, and the group can serve the next request.

Without frame parallelism every host encodes everything, as a single process does, and keeps the
rows of its own tokens: nothing is exchanged.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...device.copies import numbers_in, to_device
from ...errors import HostError, RequestCancelled
from ...hosts import HostGroup, Pending
from ...hosts.row_exchange import MovedRows, start_moving
from ...input.prompts.audio_input import AudioInput
from ...input.prompts.model_inputs import ModelInputs
from ...input.prompts.visual import VisualInput
from ...layout import ContextLayout
from ...model.forward import LayerRows
from ...model.parts import ModelParts
from ...stats import StageTimer
from ..cancelling import Stop
from .audio import audio_rows
from .vision import VisualRows, agree_on_chunks, all_rows, require_as_many

# Rounds by which a host with cheaper frames may run ahead of the slowest.
_MOST_ROUNDS_UNDER_WAY = 4


@dataclass
class PlaceholderRows:
    """Rows of a host's local tokens, until they are merged into the prompt's embeddings.

    Attributes:
        streams: the embeddings of visual tokens, ``[rows, d]`` in local order, and then the L
            vectors that deepstack adds after the first layers, ``[rows, d]`` each; None for a
            prompt without visual tokens, and once merged.
        audio: the embeddings of audio tokens, ``[rows, d]`` in local order; None for a prompt
            without audio, and once merged.
    """

    streams: list[Tensor] | None = None
    audio: Tensor | None = None

    def merge_into(self, parts: ModelParts, input_ids: Tensor, positions: Tensor) -> LayerRows:
        """Embed local tokens, replacing placeholders by the rows, and drop the rows.

        Args:
            input_ids: ``[1, S]`` of this host's tokens, in CPU memory, so that a GPU need not be
                waited for.
            positions: the tokens' rotary positions, ``[1, S]`` or ``[3, 1, S]``.

        Returns:
            The input of the first layer, with what deepstack adds behind it.
        """
        device = parts.device
        embeds = parts.embed_tokens(to_device(input_ids, device))
        streams = self.streams
        audio = self.audio
        self.streams = None
        self.audio = None
        if audio is not None:
            embeds[0].index_copy_(0, _places(parts.is_audio(input_ids), device), audio)
        rows = LayerRows(embeds, to_device(positions, device))
        if streams is not None:
            main, *deepstack = streams
            visual_places = _places(parts.is_visual(input_ids), device)
            embeds[0].index_copy_(0, visual_places, main)
            if deepstack:
                rows.added = deque(deepstack)
                rows.added_rows = visual_places
        return rows


def _places(mask: Tensor, device: torch.device) -> Tensor:
    """Return the places of a mask ``[1, S]`` in CPU memory that are true, on a device."""
    return to_device(mask[0].nonzero().flatten(), device)


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
    explained: Callable[[], AbstractContextManager] = nullcontext,
) -> PlaceholderRows:
    """Encode the prompt's frames and audio, and return the rows of local tokens; collective.

    With frame parallelism this host encodes its share, and sends every host the rows of its local
    tokens, and no others. Without it this host encodes everything.

    Args:
        source: makes the visual rows of this host's share. The model's audio tower makes the audio
            rows.
        chunk_bytes: as in :class:`apbv.VideoConfig`, where the hosts have not agreed on chunks yet.
        stop: asked on host 0 before each chunk; true ends the encoding on all hosts.
        explained: returns a context that explains an allocator's error, before other hosts are told
            of it.

    Raises:
        ApbvError: a frame cannot be read, or a tower makes another number of rows than the prompt
            has placeholders.
        RequestCancelled: ``stop`` was true.
        HostError: another host failed.
    """
    rows = PlaceholderRows()
    tokens = inputs.input_ids[0]
    audio = inputs.audio
    visual = inputs.visual
    if audio is not None:
        job = _EncodingJob(
            media=audio,
            is_row=parts.is_audio(tokens),
            chunks=[audio.chunks(host) for host in range(_num_shares(audio, hosts))],
            source=partial(audio_rows, parts, audio, timer),
            explained=explained,
        )
        (rows.audio,) = job.run(parts, layout, hosts, timer, stop)
    if visual is not None:
        num_bytes = visual.chunk_bytes or agree_on_chunks(hosts, parts.device, chunk_bytes)
        job = _EncodingJob(
            media=visual,
            is_row=parts.is_visual(tokens),
            chunks=[visual.chunks(host, num_bytes) for host in range(_num_shares(visual, hosts))],
            source=source,
            num_streams=1 + parts.sizes.deepstack,
            explained=explained,
        )
        rows.streams = job.run(parts, layout, hosts, timer, stop)
    return rows


def _num_shares(media: VisualInput | AudioInput, hosts: HostGroup) -> int:
    """Return the number of parts into which the encoding is divided."""
    return hosts.size if media.is_shared_out else 1


@dataclass(frozen=True)
class _EncodingJob:
    """Encoding of a prompt's frames, or of its audio.

    Attributes:
        media: the frames or the audio; says which rows belong to temporal patches, or to units of
            audio.
        is_row: bool ``[n]``, which of the prompt's tokens are rows.
        chunks: of every host, the patches or units of its chunks; a single entry, with everything,
            if the encoding is not shared out.
        source: makes the rows of chunks.
        num_streams: how many vectors of the model's width a row has.
        explained: see :func:`encode_and_exchange`.
    """

    media: VisualInput | AudioInput
    is_row: Tensor
    chunks: list[list[range]]
    source: VisualRows
    num_streams: int = 1
    explained: Callable[[], AbstractContextManager] = nullcontext

    def run(
        self,
        parts: ModelParts,
        layout: ContextLayout,
        hosts: HostGroup,
        timer: StageTimer,
        stop: Stop | None,
    ) -> list[Tensor]:
        """Encode; return the rows of this host's tokens, ``[rows, d]`` by stream; collective."""
        if self.media.is_shared_out:
            return _Rounds(self, parts, layout, hosts).run(timer, stop)
        widths = [parts.hidden_size] * self.num_streams
        with hosts.local_stage("encode"), self.explained():
            streams = all_rows(parts, self.media, self.chunks[0], self.source, widths, hosts, stop)
            return _take(streams, _rows_of(layout, hosts.rank, self.is_row))


def _rows_of(layout: ContextLayout, host: int, is_row: Tensor) -> Tensor:
    """Return the numbers of the rows of a host's tokens, in local order.

    Args:
        is_row: ``[n]``, which of the prompt's tokens are rows.
    """
    row_of_token = is_row.cumsum(0) - 1
    local_tokens = numbers_in(*layout.local_spans(host))
    return row_of_token[local_tokens[is_row[local_tokens]]]


def _take(streams: list[Tensor], rows: Tensor) -> list[Tensor]:
    """Return some rows of every stream; a stream is freed once its rows are copied."""
    takes_all_in_order = torch.equal(rows, torch.arange(len(streams[0])))
    if takes_all_in_order:
        return streams
    rows = to_device(rows, streams[0].device)
    taken = []
    while streams:
        taken.append(streams.pop(0)[rows])
    return taken


@dataclass(frozen=True)
class _Round:
    """A round whose rows are on their way.

    Attributes:
        places: which of this host's rows it brings.
        rows: the rows.
        failures: of every host, whether it has failed.
    """

    places: Tensor
    rows: Pending[list[MovedRows]]
    failures: Pending[Tensor]


class _Rounds:
    """Exchange of all hosts' rows of one kind, chunk by chunk.

    Args:
        job: what is encoded.
        layout: the tokens of every host.
    """

    def __init__(
        self, job: _EncodingJob, parts: ModelParts, layout: ContextLayout, hosts: HostGroup
    ):
        self._hosts = hosts
        self._source = job.source
        self._explained = job.explained
        self._chunks = job.chunks[hosts.rank]
        self._num_rows = job.media.num_rows
        self._num_rounds = max(len(chunks) for chunks in job.chunks)
        self._error: Exception | None = None

        # Of every host, the rows of its local tokens, and by round the rows that it makes.
        self._needed: list[Tensor] = []
        self._made: list[list[Tensor]] = []
        for host, chunks in enumerate(job.chunks):
            self._needed.append(_rows_of(layout, host, job.is_row))
            made = [numbers_in(job.media.rows_of(chunk)) for chunk in chunks]
            while len(made) < self._num_rounds:
                made.append(numbers_in(range(0)))
            self._made.append(made)

        width = parts.hidden_size
        self._no_rows = torch.empty(
            0, job.num_streams * width, dtype=parts.dtype, device=parts.device
        )
        # The result. Streams are separate tensors, so that they can be freed separately.
        num_local_rows = len(self._needed[hosts.rank])
        self._local = [
            self._no_rows.new_empty(num_local_rows, width) for _ in range(job.num_streams)
        ]

    def run(self, timer: StageTimer, stop: Stop | None) -> list[Tensor]:
        """Encode and exchange everything; return this host's rows, ``[rows, d]`` by stream."""
        hosts = self._hosts
        with (
            hosts.collective_stage("encode"),
            self._explained(),
            closing(self._source(self._chunks)) as encoded,
        ):
            under_way: deque[_Round] = deque()
            for number in range(self._num_rounds):
                rows = self._encode_next(number, encoded, stop)
                under_way.append(self._start(number, rows))
                if len(under_way) == _MOST_ROUNDS_UNDER_WAY:
                    all_go_on = self._finish(under_way.popleft(), timer)
                    if not all_go_on:
                        break
            for late in under_way:
                self._finish(late, timer)
        is_cancelled = isinstance(self._error, RequestCancelled)
        if hosts.broadcast_ints([int(is_cancelled)], 1)[0]:
            raise RequestCancelled
        with hosts.local_stage("encode"), self._explained():
            if self._error is not None:
                raise self._error
        return self._local

    def _encode_next(
        self, number: int, encoded: Iterator[Tensor], stop: Stop | None
    ) -> Tensor | None:
        """Return the rows that this host makes in a round; None once it has failed."""
        if self._error is not None:
            return None
        try:
            if stop is not None and self._hosts.is_leader and stop():
                raise RequestCancelled
            rows = next(encoded, self._no_rows)
            require_as_many(rows, len(self._made[self._hosts.rank][number]))
        except Exception as caught:
            self._error = caught
            return None
        return rows

    def _start(self, number: int, rows: Tensor | None) -> _Round:
        """Send a round's rows; after a failure zeros in their place."""
        rank = self._hosts.rank
        has_failed = rows is None
        failures = self._hosts.start_gathering(torch.tensor([has_failed], dtype=torch.uint8))
        made = [rounds[number] for rounds in self._made]
        if rows is None:
            rows = self._no_rows.new_zeros(len(made[rank]), self._no_rows.shape[1])
        is_made = torch.zeros(self._num_rows, dtype=torch.bool)
        is_made[torch.cat(made)] = True
        needed_now = [needed[is_made[needed]] for needed in self._needed]
        return _Round(
            places=is_made[self._needed[rank]].nonzero().flatten(),
            rows=start_moving(rows, made, needed_now, self._hosts),
            failures=failures,
        )

    def _finish(self, arriving: _Round, timer: StageTimer) -> bool:
        """Store a round's rows; return whether all hosts continue."""
        try:
            with timer.stage("exchange"):
                received = arriving.rows.wait()
                if not arriving.failures.wait().any():
                    for moved in received:
                        self._store(arriving.places[moved.places], moved.rows)
        except HostError:
            raise
        except Exception as caught:  # such as the caller's on_stage: sent in the next round
            if self._error is None:
                self._error = caught
        arriving.rows.wait()
        return not arriving.failures.wait().any()

    def _store(self, places: Tensor, rows: Tensor) -> None:
        """Copy rows, ``[m, streams * d]``, to their places in the result."""
        places = to_device(places, rows.device)
        streams = rows.chunk(len(self._local), dim=-1)
        for local, stream in zip(self._local, streams, strict=True):
            local.index_copy_(0, places, stream)
