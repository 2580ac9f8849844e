"""Gives every host the embeddings of its visual and audio tokens, while they are still being computed.

Every host encodes its share in chunks. In round r each host sends the rows of its chunk r to the hosts that need
them, and says whether it failed; while they travel, it encodes the next. A host that failed goes on taking part,
with rows of zeros, until everybody has heard of it: so no host waits in vain, and the group can serve the next
request.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from ..hosts import Exchange, HostError, HostGroup
from ..input.audio import AudioInput
from ..input.model_inputs import ModelInputs
from ..input.visual import VisualInput
from ..layout import ContextLayout, intersect
from ..model.parts import ModelParts
from ..stats import StageTimer
from .cancelling import RequestCancelled
from .encode import VisualRows, agree_on_chunks
from .encode_audio import AudioTowerRows

_MOST_ROUNDS_UNDER_WAY = 4  # so far may a host that has easier frames run ahead of the slowest


class LocalVisual:
    """Holds the rows of a host's local tokens, until they are merged into the prompt's embeddings.

    Attributes:
        streams: of every visual row, in local order, what becomes its token's embedding, ``[rows, d]``, and then
            the L vectors that deepstack adds after the first layers; None for a prompt that shows nothing, and
            once merged.
        audio: of every audio row, in local order, its token's embedding, ``[rows, d]``; None for a prompt without
            sound, and once merged.
    """

    def __init__(self, streams: list[Tensor] | None = None, audio: Tensor | None = None):
        self.streams, self.audio = streams, audio

    @classmethod
    def of_rows(cls, rows: Tensor | None, parts: ModelParts, audio: Tensor | None = None) -> "LocalVisual":
        """Hold rows ``[rows, (1 + L) * d]`` as a vision tower makes them, and those of an audio tower."""
        if rows is None:
            return cls(audio=audio)
        return cls(list(rows.split(rows.shape[-1] // (1 + parts.num_deepstack_layers), dim=-1)), audio)

    def merge_into(self, parts: ModelParts, input_ids: Tensor) -> tuple[Tensor, dict]:
        """Embed local tokens, with the rows in place of their placeholders, and forget the rows.

        Args:
            input_ids: ``[1, S]`` of this host's tokens, in host memory, so that a GPU need not be waited for.

        Returns:
            Embeddings ``[1, S, d]`` and the language model's further keyword arguments.
        """
        embeds = parts.embed_tokens(input_ids.to(parts.device))
        if self.audio is not None:
            _put(self.audio, embeds, parts.is_audio(input_ids))
            self.audio = None
        if self.streams is None:
            return embeds, {}
        (main, *deepstack), self.streams = self.streams, None
        mask = parts.is_visual(input_ids)
        _put(main, embeds, mask)
        if not deepstack:
            return embeds, {}
        mask = mask.to(parts.device)
        return embeds, {"visual_pos_masks": mask, "deepstack_visual_embeds": ReadOnce(deepstack)}


def _put(rows: Tensor, embeds: Tensor, mask: Tensor) -> None:
    """Put rows ``[rows, d]`` in place of the embeddings ``[1, S, d]`` that a mask in host memory finds."""
    embeds[0].index_copy_(0, mask[0].nonzero().flatten().to(embeds.device), rows)


class ReadOnce(list):
    """A list whose items are forgotten when they have been read, as by the layers that add them."""

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
    check: Callable[[], None] = lambda: None,
) -> LocalVisual:
    """Encode this host's share, and send every host the rows of its local tokens, and no others; collective.

    Args:
        source: makes the visual rows of this host's share; those of sound come from the model's audio tower.
        chunk_bytes: as in :class:`apbv.VideoConfig`, where the hosts have not agreed on chunks yet.
        check: called before each chunk; what it raises ends the encoding on all hosts.

    Raises:
        ValueError: a frame cannot be read, or a tower makes another number of rows than the prompt has
            placeholders.
        HostError: another host failed.
    """
    local, tokens = LocalVisual(), inputs.input_ids[0]
    audio, visual = inputs.audio, inputs.visual
    if audio is not None:
        shares = _Shares(audio, parts.is_audio(tokens), [audio.chunks(host) for host in range(hosts.size)])
        (local.audio,) = _exchange(parts, AudioTowerRows(parts, audio, timer), shares, layout, hosts, timer, check)
    if visual is not None:
        num_bytes = visual.chunk_bytes or agree_on_chunks(hosts, parts.device, chunk_bytes)
        chunks = [visual.chunks(host, num_bytes) for host in range(hosts.size)]
        shares = _Shares(visual, parts.is_visual(tokens), chunks, 1 + parts.num_deepstack_layers)
        local.streams = _exchange(parts, source, shares, layout, hosts, timer, check)
    return local


@dataclass(frozen=True)
class _Shares:
    """What hosts encode of a prompt's images and videos, or of its sound.

    Attributes:
        source: says which rows belong to temporal patches, or to units of sound.
        is_row: ``[n]``, which of the prompt's tokens are rows.
        chunks: of every host, the patches or units of its chunks.
        num_streams: how many vectors of the model's width a row has.
    """

    source: VisualInput | AudioInput
    is_row: Tensor
    chunks: list[list[range]]
    num_streams: int = 1


def _exchange(
    parts: ModelParts,
    source: VisualRows,
    shares: _Shares,
    layout: ContextLayout,
    hosts: HostGroup,
    timer: StageTimer,
    check: Callable[[], None],
) -> list[Tensor]:
    """Encode and exchange one kind of rows; return those of this host's tokens, stream by stream ``[rows, d]``."""
    rounds = _Rounds(parts, shares, layout, hosts)
    with hosts.collective_stage("encode"), closing(source.chunks(shares.chunks[hosts.rank])) as chunks:
        error = rounds.run(chunks, timer, check)
    if hosts.broadcast_ints([isinstance(error, RequestCancelled)], 1)[0]:
        raise RequestCancelled
    with hosts.local_stage("encode"):
        if error is not None:
            raise error
    return rounds.local


class _Rounds:
    """The exchange of all hosts' rows of one kind, chunk by chunk.

    Attributes:
        local: of this host's tokens ``[rows, d]``, as many as there are streams; apart, so that they can be freed
            apart.
    """

    def __init__(self, parts: ModelParts, shares: _Shares, layout: ContextLayout, hosts: HostGroup):
        self._shares, self._hosts = shares, hosts
        # before[t]: rows before token t, so that a span of tokens maps to a run of rows.
        before = torch.nn.functional.pad(shares.is_row.long().cumsum(0), (1, 0)).tolist()
        self._needed = [
            [range(before[span.start], before[span.stop]) for span in layout.local_spans(host)]
            for host in range(hosts.size)
        ]
        # Whose rows this host takes, and who takes its own.
        self._partners = [hosts.rank] if shares.source.replicated or hosts.size == 1 else [*range(hosts.size)]
        num_rows = sum(map(len, self._needed[hosts.rank]))
        width = parts.language_model.config.hidden_size
        self._nothing = torch.empty(0, shares.num_streams * width, dtype=parts.dtype, device=parts.device)
        self.local = [self._nothing.new_empty(num_rows, width) for _ in range(shares.num_streams)]

    def run(self, chunks: Iterator[Tensor], timer: StageTimer, check: Callable[[], None]) -> Exception | None:
        """Encode and exchange everything, or as much as there is until a host fails; return this host's error."""
        under_way: deque[tuple[int, Exchange, Exchange]] = deque()
        error, go_on = None, True
        for number in range(max(map(len, self._shares.chunks))):
            outgoing = None
            if error is None:
                try:
                    check()
                    outgoing = self._outgoing(number, chunks)
                except Exception as caught:
                    error = caught
            under_way.append(self._start(number, outgoing, error is not None))
            if len(under_way) == _MOST_ROUNDS_UNDER_WAY:
                go_on, failure = self._finish(*under_way.popleft(), timer)
                error = error or failure
            if not go_on:
                break
        for late in under_way:
            _, failure = self._finish(*late, timer)
            error = error or failure
        return error

    def _chunk(self, sender: int, number: int) -> range:
        """Return the rows of a host's chunk; none behind its last."""
        chunks = self._shares.chunks[sender]
        return self._shares.source.rows_of(chunks[number]) if number < len(chunks) else range(0)

    def _sent(self, sender: int, number: int, receiver: int) -> list[range]:
        """Return those rows of a host's chunk that another one needs, of each of its runs."""
        return [intersect(self._chunk(sender, number), run) for run in self._needed[receiver]]

    def _outgoing(self, number: int, chunks: Iterator[Tensor]) -> list[Tensor]:
        """Make the rows of this host's next chunk, and sort them by receiver."""
        rank, made = self._hosts.rank, self._chunk(self._hosts.rank, number)
        # A reduction may have left no row of a chunk, which the source makes all the same.
        rows = next(chunks, self._nothing) if number < len(self._shares.chunks[rank]) else self._nothing
        if len(rows) != len(made):
            raise ValueError(
                f"the model's tower made {len(rows)} embeddings where the prompt has {len(made)} placeholders"
            )
        outgoing = []
        for host in self._partners:
            sent = [rows[run.start - made.start : run.stop - made.start] for run in self._sent(rank, number, host)]
            outgoing.append(torch.cat([rows[:0], *sent]))
        return outgoing

    def _start(self, number: int, outgoing: list[Tensor] | None, failed: bool) -> tuple[int, Exchange, Exchange]:
        """Send a round's rows, or as many zeros; return its number, and the rows and failures that come."""
        rank, width = self._hosts.rank, self._nothing.shape[1]
        if outgoing is None:
            counts = [sum(map(len, self._sent(rank, number, host))) for host in self._partners]
            outgoing = [self._nothing.new_zeros(count, width) for count in counts]
        failures = self._hosts.start_gathering(torch.tensor([failed], dtype=torch.uint8))
        if len(self._partners) == 1:
            return number, Exchange(lambda: outgoing), failures
        shapes = [(sum(map(len, self._sent(host, number, rank))), width) for host in self._partners]
        return number, self._hosts.all_to_all(outgoing, shapes), failures

    def _finish(
        self, number: int, rows: Exchange, failures: Exchange, timer: StageTimer
    ) -> tuple[bool, Exception | None]:
        """Put a round's rows into their places; return whether all hosts go on, and what failed here."""
        failure = None
        try:
            with timer.stage("exchange"):
                received = rows.wait()
                if not failures.wait().any():
                    for host, of_host in zip(self._partners, received, strict=True):
                        self._place(self._sent(host, number, self._hosts.rank), of_host)
        except HostError:
            raise
        except Exception as caught:  # the caller's on_stage, say: to be told in the next round
            failure = caught
        rows.wait()
        return not failures.wait().any(), failure

    def _place(self, sent: list[range], rows: Tensor) -> None:
        taken = place = 0
        for part, run in zip(sent, self._needed[self._hosts.rank], strict=True):
            if part:
                start = place + part.start - run.start
                streams = rows[taken : taken + len(part)].split(self.local[0].shape[1], dim=-1)
                for local, stream in zip(self.local, streams, strict=True):
                    local[start : start + len(part)] = stream
                taken += len(part)
            place += len(run)
