"""Computes APB-V's attention (Section 3.3, Algorithm 1), one call per layer on every host.

Legend: A anchor, B(v) context block of virtual host v, Q query; q_A, k_A, v_A their states. Host h
holds [A | B(h) | B(2H-1-h) | Q], or [A | B(h) | Q] without zigzag. With ``anchor_query`` A is a
copy of prefix, question and start of the context, as in APB, which is dropped after the prefill.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...config import METHOD_FACTS, PrefillConfig
from ...hosts import Pending
from ...kernels import select_topk
from ...kernels.segments import Segment
from ...kernels.torch_attention import empty_output
from ...layout import ContextLayout, plan_layout, with_question_in_anchor
from ...model.attention import gather_and_merge
from .base import PartialAttention, PrefillMethod
from .importance import RANKED_BY_PROBABILITY, importance_of


@dataclass(frozen=True)
class LayerQKV:
    """Queries, keys and values of this host's tokens in one layer.

    Attributes:
        q, k, v, scale, layer: the arguments of :meth:`PrefillMethod.__call__`.
        pairs: the keys and values that :meth:`pair` has returned, by their rows.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    layer: int
    pairs: dict[range, Segment] = field(default_factory=dict)

    def pair(self, rows: range) -> Segment:
        """Return the keys and values of some rows, the same tensors each time."""
        if rows not in self.pairs:
            self.pairs[rows] = _rows(self.k, rows), _rows(self.v, rows)
        return self.pairs[rows]


def _rows(states: Tensor, rows: range) -> Tensor:
    return states[:, :, rows.start : rows.stop]


class ApbvMethod(PrefillMethod):
    """APB-V: blocks see the anchor, all earlier blocks' best KV pairs, and themselves.

    The query sees all.
    """

    name = "apbv"
    facts = METHOD_FACTS["apbv"]

    def prepare(self) -> None:
        layout = self.layout
        hosts = self.hosts
        config = self.config
        self.separate_query = self.asks_apart(config)
        blocks = layout.virtual_hosts(hosts.rank)
        # The places of the anchor that each host computes. Of this host's, all rows, and those
        # whose KV it keeps.
        self._anchor_parts = [layout.anchor_part(host) for host in range(layout.num_hosts)]
        self._anchor = range(len(self._anchor_parts[hosts.rank]))
        self._kept_anchor = layout.kept_anchor_rows(hosts.rank)
        # The rows of each virtual host's block on this host.
        *rows_of_blocks, self._query = layout.block_rows(hosts.rank)
        self._blocks = dict(zip(blocks, rows_of_blocks, strict=True))
        # Every host sends its first block in the first exchange, its second in the next. For each
        # exchange, the virtual hosts whose blocks it carries, in the order of the hosts.
        virtual_hosts = [layout.virtual_hosts(host) for host in range(layout.num_hosts)]
        self._senders = list(zip(*virtual_hosts, strict=True))
        # Ranking a block's keys needs the lse of the query's attention to the block, which is
        # computed anyway.
        is_ranked_by_lse = config.importance in RANKED_BY_PROBABILITY
        self._shares_lse = config.ablation.fused_query and is_ranked_by_lse

    @classmethod
    def plan(
        cls,
        num_hosts: int,
        num_tokens: int,
        context_start: int,
        query_start: int,
        config: PrefillConfig,
    ) -> ContextLayout:
        config = cls.in_force(config)
        layout = plan_layout(
            num_hosts=num_hosts,
            num_tokens=num_tokens,
            context_start=context_start,
            query_start=query_start,
            anchor_len=0 if config.anchor_query else config.anchor_len,
            passing_len=config.passing_len,
            zigzag=config.ablation.zigzag,
            early_passing_len=config.early_passing_len,
            passing_budget=config.passing_budget,
            passing_weights=config.passing_weights,
        )
        if not config.anchor_query:
            return layout
        return with_question_in_anchor(layout, context_start, config.anchor_len)

    @classmethod
    def asks_apart(cls, config: PrefillConfig) -> bool:
        return not cls.in_force(config).ablation.fused_query

    @classmethod
    def gathers_by_layer(cls, config: PrefillConfig) -> bool:
        config = cls.in_force(config)
        return config.ablation.fused_query and super().gathers_by_layer(config)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int) -> Tensor:
        states = LayerQKV(q, k, v, scale, layer)
        out = empty_output(q)
        # Every transfer starts as soon as its data exists, and is waited for only when it is needed
        # (Figure 5).
        anchor = self._start_anchor(states)
        seen: dict[int, PartialAttention] = {}
        sent = [self._start_passing(block, states, seen) for block in self._blocks]
        query_out = self._start_query(states, anchor, seen, _rows(out, self._query))
        if self.blocks is None and not self.layout.splits_anchor:
            self._attend_densely(states, sent, out)
        else:
            self._attend_in_parts(states, anchor, sent, out)
        # Even for unneeded data: its buffers must not be freed while they are written.
        anchor.wait()
        for exchange in sent:
            if exchange is not None:
                exchange.wait()
        query_out.wait()
        return out

    def _attend_densely(self, states: LayerQKV, sent: list[Pending | None], out: Tensor) -> None:
        """Attend from the anchor to itself, and from every block to all that it sees.

        A block sees the anchor, the passing block and itself.
        """
        first, *others = self._blocks
        self._attend_first(first, states, sent, out)
        for block in others:
            rows = self._blocks[block]
            segments = [
                states.pair(self._anchor),
                *self._passing_segments(block, sent),
                states.pair(rows),
            ]
            self.attend(
                _rows(states.q, rows),
                segments,
                states.scale,
                causal_last=True,
                out=_rows(out, rows),
            )

    def _attend_in_parts(
        self,
        states: LayerQKV,
        anchor: Pending[Segment],
        sent: list[Pending | None],
        out: Tensor,
    ) -> None:
        """Attend within each block, and apart from that to anchor and passing blocks.

        Within a block attention may be sparse. Where it is dense, only the first block's is
        computed apart, during the transfers. What of the anchor this host computes comes last, when
        the other parts have arrived in any case.
        """
        is_during_transfers = self.config.ablation.overlap
        for block, rows in self._blocks.items():
            # With Star Attention host 0's block is the anchor.
            if not len(rows):
                continue
            q = _rows(states.q, rows)
            out_block = _rows(out, rows)
            own = states.pair(rows)
            within_block = None
            if self.blocks is not None or is_during_transfers:
                within_block = self.attend_within(q, own, states.scale)
            is_during_transfers = False
            segments = self._passing_segments(block, sent)
            # A block that begins the prompt sees no copy of its start.
            if block > 0 or not self.layout.anchor_copy:
                segments.insert(0, anchor.wait())
            if within_block is None:
                segments.append(own)
                self.attend(q, segments, states.scale, causal_last=True, out=out_block)
            elif segments:
                before_block = self.attend(q, segments, states.scale, causal_last=False)
                self.merge([within_block, before_block], out_block)
            else:
                within_out, _ = within_block
                out_block.copy_(within_out)

        # The last of the anchor's keys that it sees are those of its own rows.
        k, v = anchor.wait()
        seen = range(self._anchor_parts[self.hosts.rank].stop)
        self.attend(
            _rows(states.q, self._anchor),
            [(_rows(k, seen), _rows(v, seen))],
            states.scale,
            causal_last=True,
            out=_rows(out, self._anchor),
        )

    def _attend_first(
        self, block: int, states: LayerQKV, sent: list[Pending | None], out: Tensor
    ) -> None:
        """Attend from the anchor and this host's first block, whose rows are adjacent.

        Together they are one triangle, because a block sees all of the anchor. It is computed
        during the transfer of the passing block, even if that has already arrived: results must not
        depend on the transfer's speed. A block that begins the prompt sees no copy of its start.
        """
        if block == 0 and self.layout.anchor_copy:
            for rows in (self._anchor, self._blocks[block]):
                q = _rows(states.q, rows)
                segments = [states.pair(rows)]
                self.attend(q, segments, states.scale, causal_last=True, out=_rows(out, rows))
            return
        rows = range(self._anchor.start, self._anchor.stop + len(self._blocks[block]))
        q = _rows(states.q, rows)
        kv = states.pair(rows)
        if block > 0 and sent[0] is not None and self.config.ablation.overlap:
            triangle = self.attend(q, [kv], states.scale, causal_last=True)
            q_block = _rows(states.q, self._blocks[block])
            segments = self._passing_segments(block, sent)
            passed = self.attend(q_block, segments, states.scale, causal_last=False)
            # The anchor's queries, which come first, see no passing block.
            self.merge([triangle, passed], _rows(out, rows))
        else:
            self.attend(
                q,
                [*self._passing_segments(block, sent), kv],
                states.scale,
                causal_last=True,
                num_anchor_queries=len(self._anchor),
                out=_rows(out, rows),
            )

    def _start_anchor(self, states: LayerQKV) -> Pending[Segment]:
        """Start to send this host's part of the anchor to all hosts.

        Returns:
            The keys and values of the whole anchor, ``[B, Hkv, l_a, D]`` each.
        """
        k, v = states.pair(self._anchor)
        if not self.layout.splits_anchor:
            return Pending(lambda: (k, v))
        lengths = [len(part) for part in self._anchor_parts]
        buffer = torch.stack((k, v))
        num_missing = max(lengths) - k.shape[2]
        if num_missing:  # all hosts' buffers are equally long
            buffer = pad(buffer, (0, 0, 0, num_missing))

        def joined(received: Tensor) -> Segment:
            # [H, 2, B, Hkv, longest part, D] to [2, B, Hkv, l_a, D]
            parts = [part[..., :length, :] for part, length in zip(received, lengths, strict=True)]
            whole_k, whole_v = torch.cat(parts, dim=-2)
            return whole_k, whole_v

        exchange = self.hosts.all_gather(buffer).then(joined)
        if not self.config.ablation.overlap:
            exchange.wait()
        return exchange

    def _start_passing(
        self, block: int, states: LayerQKV, seen: dict[int, PartialAttention]
    ) -> Pending | None:
        """Start to send this block's l_p most important KV pairs to all hosts.

        Args:
            seen: gets the query's attention to this block, if its lse was needed to rank the pairs.

        Returns:
            The exchange, of ``[2, B, Hkv, most passed, D]`` from each host; None if this layer's
            blocks pass nothing on.
        """
        layout = self.layout_in(states.layer)
        if layout.max_passed == 0:
            return None
        k = states.k
        # Every block fills a buffer of the same size; no host reads more rows than a block passes.
        buffer = k.new_empty(2, *k.shape[:2], layout.max_passed, k.shape[3])
        # No block comes after the last one: its buffer is a dummy.
        if block < len(layout.blocks) - 1:
            self._fill_passing(buffer, block, layout.num_passed(block), states, seen)
        exchange = self.hosts.all_gather(buffer)
        if not self.config.ablation.overlap:
            exchange.wait()
        return exchange

    def _fill_passing(
        self,
        buffer: Tensor,
        block: int,
        count: int,
        states: LayerQKV,
        seen: dict[int, PartialAttention],
    ) -> None:
        """Write the ``count`` most important KV pairs of a block to the first rows of a buffer."""
        rows = self._blocks[block]
        k_block, v_block = states.pair(rows)
        if count == len(rows):
            buffer[0, :, :, :count] = k_block
            buffer[1, :, :, :count] = v_block
            return
        lse = None
        if self._shares_lse:
            q_query = _rows(states.q, self._query)
            partial = self.attend(q_query, [(k_block, v_block)], states.scale, causal_last=False)
            seen[block] = partial
            _, lse = partial
        scores = self.rank(states, block, rows, lse)
        select_topk(scores, k_block, v_block, count, out=buffer, backend=self.config.backend)

    def rank(self, states: LayerQKV, block: int, rows: range, lse: Tensor | None) -> Tensor:
        """Score the keys of one of this host's blocks; higher is better.

        Args:
            block: its virtual host.
            rows: its rows on this host.
            lse: ``[1, Hq, n_q]``, of the query's scores over the block; None if the ranking does
                not need it, or has to compute it.

        Returns:
            ``[1, Hkv, l_b]``.
        """
        k_block, _ = states.pair(rows)
        of_other_heads = None
        if self.kv_copies > 1:
            of_other_heads = self._of_all_copies
        return importance_of(
            self.config.importance,
            _rows(states.q, self._query),
            k_block,
            states.scale,
            lse=lse,
            gather_group=of_other_heads,
            backend=self.config.backend,
        )

    def _of_all_copies(self, scores: Tensor) -> Tensor:
        """Gather what the processes with the same KV head found, ``[copies, *scores.shape]``."""
        rank = self.hosts.tensor_parallel_rank
        first = rank - rank % self.kv_copies
        return self.hosts.gather_from_members(scores)[first : first + self.kv_copies]

    def _passing_segments(self, block: int, sent: list[Pending | None]) -> list[Segment]:
        """Return the passing block: views of the KV pairs that all earlier virtual hosts sent."""
        segments = []
        for senders, exchange in zip(self._senders, sent, strict=True):
            # Host 0's first block waits for nothing, and host H-1's second one for the first
            # transfer only.
            if exchange is None or min(senders) >= block:
                continue
            received = exchange.wait()  # [H, 2, B, Hkv, most passed, D]
            for host, sender in enumerate(senders):
                if sender < block:
                    k, v = received[host]
                    # The rest of a shorter block's buffer is padding.
                    count = min(k.shape[2], len(self.layout.blocks[sender]))
                    segments.append((k[:, :, :count], v[:, :, :count]))
        return segments

    def _start_query(
        self,
        states: LayerQKV,
        anchor: Pending[Segment],
        seen: dict[int, PartialAttention],
        out: Tensor,
    ) -> Pending[Tensor]:
        """Start the query's attention to this host's tokens, merged over hosts.

        These are Eq. 5 and Appendix B.2.

        Args:
            anchor: the keys and values of the anchor.
            seen: the query's attention to blocks of this host, where ranking has computed it.
            out: ``[1, Hq, n_q, D]``.

        Returns:
            The completed part of ``out``, which arrives with all hosts' results.
        """
        q_query = _rows(states.q, self._query)
        scale = states.scale
        if self.separate_query:
            # Here the query only ranks KV pairs; it sees the whole context in a later forward pass.
            segments = [anchor.wait(), states.pair(self._query)]
            self.attend(q_query, segments, scale, causal_last=True, out=out)
            return Pending(lambda: out)
        # The rows to which ranking has not attended: a slice of the anchor, other blocks, and on
        # the host that owns it the query itself.
        owns_query = self.hosts.rank == 0
        unseen = [self._kept_anchor]
        for block, rows in self._blocks.items():
            if block not in seen:
                unseen.append(rows)
        if owns_query:
            unseen.append(self._query)
        segments = [states.pair(rows) for rows in unseen]
        rest = self.attend(q_query, segments, scale, causal_last=owns_query)
        partials = [*seen.values(), rest]
        merged = gather_and_merge(partials, self.hosts, self.config.backend, out=out)
        if not self.config.ablation.overlap:
            merged.wait()
        return merged
