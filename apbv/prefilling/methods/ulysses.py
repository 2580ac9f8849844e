"""DeepSpeed Ulysses, exact attention that splits the heads over the hosts."""

import torch
from torch import Tensor

from ...config import METHOD_FACTS
from ...layout import split_evenly
from .base import PrefillMethod


class UlyssesMethod(PrefillMethod):
    """DeepSpeed Ulysses: every host computes its share of the query heads over the whole prompt.

    One all-to-all turns a share of the tokens into a share of the heads, another one turns it back.
    Query heads are split as evenly as possible; if there are more hosts than heads, some hosts get
    none. A KV head goes to every host that has a query head of its group.
    """

    name = "ulysses"
    facts = METHOD_FACTS["ulysses"]

    def prepare(self) -> None:
        self._lengths = [len(block) for block in self.layout.blocks]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int) -> Tensor:
        batch, num_heads, rows, dim = q.shape
        group = num_heads // k.shape[1]
        query_heads = split_evenly(range(num_heads), self.hosts.size)
        kv_heads = [_groups(heads, group) for heads in query_heads]
        local_heads = query_heads[self.hosts.rank]
        num_heads_here = len(local_heads)
        num_kv_heads_here = len(kv_heads[self.hosts.rank])

        # Send every host its heads of this host's tokens; the received have this host's heads of
        # all tokens.
        outgoing = []
        for host_heads, host_kv_heads in zip(query_heads, kv_heads, strict=True):
            states = [_heads(q, host_heads), _heads(k, host_kv_heads), _heads(v, host_kv_heads)]
            outgoing.append(torch.cat(states, dim=1))
        num_received_heads = num_heads_here + 2 * num_kv_heads_here
        shapes = [(batch, num_received_heads, length, dim) for length in self._lengths]
        received = self.hosts.all_to_all(outgoing, shapes).wait()
        q_here, k_here, v_here = torch.cat(received, dim=2).split(
            [num_heads_here, num_kv_heads_here, num_kv_heads_here], dim=1
        )
        out = self._attend(q_here, k_here, v_here, local_heads, group, scale)

        # The way back: send every host its own tokens, of this host's heads.
        shapes = [(batch, rows, len(heads), dim) for heads in query_heads]
        outgoing = out.transpose(1, 2).split(self._lengths, dim=1)
        received = self.hosts.all_to_all(outgoing, shapes).wait()
        return torch.cat(received, dim=2).transpose(1, 2)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, heads: range, group: int, scale: float
    ) -> Tensor:
        """Attend with these query heads; ``k`` and ``v`` have the KV heads of their groups."""
        if not len(heads):
            return q
        if heads.start % group or len(heads) % group:
            # A group is shared with another host: give every query head its own KV head.
            first_kv_head = heads.start // group
            kv_head_of = [head // group - first_kv_head for head in heads]
            k = k[:, kv_head_of]
            v = v[:, kv_head_of]
        out, _ = self.attend(q, [(k, v)], scale, causal_last=True)
        return out


def _groups(heads: range, group: int) -> range:
    """Return the KV heads that a run of query heads attends to."""
    if not heads:
        return range(0)
    return range(heads.start // group, -(-heads.stop // group))


def _heads(states: Tensor, heads: range) -> Tensor:
    return states[:, heads.start : heads.stop]
