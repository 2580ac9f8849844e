"""Embedding and prefix caches, for further questions about the same video or long text.

Mode ``"exact"`` caches the vision tower's embeddings of videos and images: a further question
decodes and encodes none, and prefills the whole prompt. Mode ``"kv"`` caches the KV of all tokens
before the question: a further question prefills only itself. With an exact prefill method its
answer is that without a cache; otherwise the cached KV depends on the first question's selection.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..config import ReuseConfig
from ..hosts import HostGroup
from ..input.prompts.model_inputs import ModelInputs
from ..model.parts import ModelParts
from ..runner.decoder import Decoder
from ..stats import StageTimer
from .encoding.vision import VisualRows, stored_rows, tower_rows
from .result import PrefillResult


class ByteBoundedCache:
    """LRU cache bounded by bytes.

    Args:
        max_bytes: the limit for all values together; a larger single value is not stored.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def get(self, key: Hashable) -> Any:
        """Return the value of a key, or None."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def put(self, key: Hashable, value: Any, num_bytes: int) -> None:
        """Store a value, replacing an earlier one of the key."""
        if key in self._entries:
            self.num_bytes -= self._entries.pop(key)[1]
        if num_bytes > self.max_bytes:
            return
        self._entries[key] = value, num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self.max_bytes:
            _, (_, num_freed_bytes) = self._entries.popitem(last=False)
            self.num_bytes -= num_freed_bytes


def _rows_while_storing(
    source: VisualRows, num_rows: int, store: Callable[[Tensor], None], chunks: Sequence[range]
) -> Generator[Tensor, None, None]:
    """Yield the rows of a source, and store all of them when they are complete.

    Args:
        source: what makes the rows.
        num_rows: how many it makes.
        store: called with all rows, in CPU memory: a long video's would take much of a GPU's.
        chunks: the chunks to make, as :data:`~.encoding.vision.VisualRows` takes them.
    """
    stored = []
    num_stored = 0
    with closing(source(chunks)) as encoded:
        for rows in encoded:
            stored.append(rows.cpu())
            num_stored += len(rows)
            # Before the last rows are yielded: the consumer may not ask for more.
            if num_stored == num_rows:
                store(torch.cat(stored))
            yield rows


class Reuse:
    """Cache of embeddings or KV of one host's earlier requests.

    Attributes:
        mode: which of the two, one of :data:`apbv.config.REUSE_MODES`.
    """

    def __init__(self, config: ReuseConfig):
        self.mode = config.mode
        self._cache = ByteBoundedCache(config.max_bytes)

    def has_embeddings(self, inputs: ModelInputs, hosts: HostGroup) -> bool:
        """Return whether every host with frames has cached their embeddings; collective."""
        visual = inputs.visual
        if self.mode != "exact" or visual is None:
            return False
        has_no_frames = not visual.pieces[visual.host]
        return _all_hosts_have(hosts, has_no_frames or visual.identity in self._cache)

    def embeddings(
        self, inputs: ModelInputs, parts: ModelParts, timer: StageTimer
    ) -> VisualRows | None:
        """Return a source of this host's visual embeddings.

        Returns:
            A source that reads the cached rows if there are some, else one that runs the vision
            tower and caches its rows. None if embeddings are not cached.
        """
        visual = inputs.visual
        if self.mode != "exact" or visual is None or visual.identity is None:
            return None
        rows = self._cache.get(visual.identity)
        if rows is not None:
            return partial(stored_rows, rows, visual, parts.device)
        tower = partial(tower_rows, parts, visual, timer)
        num_rows = len(visual.pieces[visual.host])

        def store(rows: Tensor) -> None:
            self._cache.put(visual.identity, rows, rows.nbytes)

        return partial(_rows_while_storing, tower, num_rows, store)

    def find_prefix(self, inputs: ModelInputs, hosts: HostGroup) -> PrefillResult | None:
        """Return the cached prefill of a prompt with the same prefix; collective.

        Its KV ends before the question. None if a host lacks it.
        """
        if self.mode != "kv":
            return None
        prefix = self._cache.get(_prefix_key(inputs))  # under None nothing is cached
        return prefix if _all_hosts_have(hosts, prefix is not None) else None

    def store_prefix(self, prefill: PrefillResult) -> None:
        """Cache the KV of a prompt up to its question, if the prompt can be identified again."""
        if self.mode != "kv":
            return
        inputs = prefill.inputs
        key = _prefix_key(inputs)
        if key is None:
            return
        kv = prefill.kv.prefix(inputs.query_start, prefill.layout)
        if kv is not None:  # otherwise the question's KV cannot be split off
            num_bytes = kv.num_bytes
            for tensor in (prefill.logits, inputs.input_ids, inputs.position_ids):
                # A view keeps the whole storage.
                num_bytes += tensor.untyped_storage().nbytes()
            self._cache.put(key, replace(prefill, kv=kv), num_bytes)


def prefill_question(
    parts: ModelParts, inputs: ModelInputs, cached: PrefillResult, timer: StageTimer
) -> PrefillResult:
    """Prefill a prompt's question on top of the cached KV of the tokens before it; collective.

    Args:
        cached: what :meth:`Reuse.find_prefix` returned.

    Returns:
        The result, as :func:`apbv.prefill` returns it; it is ``exact`` if the stored KV is.
    """
    start = inputs.query_start
    hosts = cached.kv.hosts
    layout = replace(cached.layout, query=range(cached.layout.query.start, inputs.num_tokens))
    # The question is text, whose three rotary positions are equal: any of them will do.
    position = int(inputs.position_ids[..., start].flatten()[-1])
    with hosts.collective_stage("prefill"), timer.stage("prefill"):
        kv = cached.kv.behind(layout)
        question = inputs.input_ids[0, start:].tolist()
        decoder = Decoder(parts, kv, position, goes_back=True)
        logits = decoder.advance(question, last_only=True)
        if kv.states is not None:
            states = kv.states.copy()  # those of the cache stay
            if decoder.states is not None:
                decoder.states.replace_prompts(states)
            else:
                # Only the host that has the KV has those behind the question.
                states.before_question = states.before_last = kv.states
            kv.states = states
        if kv.attending is None:  # host 0 ran it alone
            if logits is None:  # the others receive
                logits = torch.empty(1, parts.vocab_size, dtype=parts.dtype, device=parts.device)
            logits = hosts.broadcast(logits)
        assert logits is not None  # where the KV is sharded every host has run it
    timer.mark_prefilled()
    return replace(
        cached,
        logits=logits,
        layout=layout,
        inputs=inputs.without_pixels(),
        timer=timer,
        kv=kv,
        reused="kv",
    )


def _all_hosts_have(hosts: HostGroup, has_value: bool) -> bool:
    """Return whether every host has cached a value; collective.

    Hosts cache different numbers of bytes, so they evict values at different times.
    """
    answers = hosts.gather_floats([float(has_value)])
    return all(answer[0] for answer in answers)


def _prefix_key(inputs: ModelInputs) -> Hashable:
    """Return the cache key of the KV before the question; None if it cannot be cached."""
    visual = inputs.visual
    audio = inputs.audio
    if not inputs.query_start or (visual is not None and visual.identity is None):
        return None
    if audio is not None and audio.sources is None:
        return None
    # Positions are part of it: of a longer part of a video the same frames have other times.
    tokens = inputs.input_ids[0, : inputs.query_start].numpy().tobytes()
    positions = inputs.position_ids[..., : inputs.query_start].numpy().tobytes()
    digest = hashlib.sha256(tokens + positions).digest()
    visual_identity = None if visual is None else visual.identity
    audio_sources = None if audio is None else audio.sources
    return digest, inputs.position_rule, visual_identity, audio_sources
