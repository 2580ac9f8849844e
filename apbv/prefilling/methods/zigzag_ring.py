"""This module defines zigzag ring attention, which is exact and passes keys and values round a ring of hosts.

The prompt is cut into 2H chunks, and host h holds chunks h and 2H-1-h (zigzag), so that all hosts have equally
many (query, key) pairs to compute under the causal mask. Transfers overlap with attention.
"""

import torch
from torch import Tensor

from ...config import PrefillConfig
from ...hosts import HostGroup
from ...layout import ContextLayout, shared_out_layout
from .base import PrefillMethod, State

try:  # an extra, for CUDA
    from ring_flash_attn import zigzag_ring_flash_attn_func as _ring_flash_attn
except ImportError:
    _ring_flash_attn = None


class ZigzagRingMethod(PrefillMethod):
    """Ring attention takes H steps: in step s a host uses the keys and values of the host s places before it."""

    name = "zigzag_ring"
    is_exact = True

    def __init__(self, layout: ContextLayout, hosts: HostGroup, config: PrefillConfig):
        super().__init__(layout, hosts, config)
        # The numbers of rows of every host's two chunks.
        self._cuts = [[len(layout.blocks[v]) for v in layout.virtual_hosts(host)] for host in range(hosts.size)]
        self._equal_chunks = len({len(block) for block in layout.blocks}) == 1

    @staticmethod
    def plan(
        num_hosts: int, num_tokens: int, context_start: int, query_start: int, config: PrefillConfig
    ) -> ContextLayout:
        return shared_out_layout(num_hosts, num_tokens, zigzag=True)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int) -> Tensor:
        if self._equal_chunks and q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and _ring_flash_attn:
            return self._by_ring_flash_attn(q, k, v, scale)
        here, size = self.hosts.rank, self.hosts.size
        held = torch.stack([k, v])
        early, late = (list[State]() for _ in range(2))  # partial results, of either chunk's rows
        q_early, q_late = q.split(self._cuts[here], dim=2)
        for step in range(size):
            owner = (here - step) % size
            if step + 1 < size:
                rows = sum(self._cuts[(owner - 1) % size])
                exchange = self.hosts.shift(held, (*held.shape[:3], rows, held.shape[4]))
                if not self.config.overlap:
                    exchange.wait()
            first, second = (tuple(chunk) for chunk in held.split(self._cuts[owner], dim=3))
            if owner == here:
                early.append(self.attend(q_early, [first], scale, causal_last=True))
                late.append(self.attend(q_late, [first, second], scale, causal_last=True))
            elif owner < here:  # its first chunk lies before both of this host's, its second after both
                out, lse = self.attend(q, [first], scale, causal_last=False)
                for states, partial in zip((early, late), _split_rows(out, lse, self._cuts[here]), strict=True):
                    states.append(partial)
            else:  # both of its chunks lie between this host's
                late.append(self.attend(q_late, [first, second], scale, causal_last=False))
            early, late = ([self.merge(states)] for states in (early, late))
            if step + 1 < size:
                held = exchange.wait()
        return torch.cat([early[0][0], late[0][0]], dim=2).to(q.dtype)

    def _by_ring_flash_attn(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Call ring-flash-attn, which places chunks alike, but takes chunks of equal length only."""
        q, k, v = (states.transpose(1, 2).contiguous() for states in (q, k, v))
        self.hosts.bytes_received += (self.hosts.size - 1) * (k.nbytes + v.nbytes)
        out = _ring_flash_attn(q, k, v, softmax_scale=scale, causal=True, group=self.hosts.process_group)
        return out.transpose(1, 2)


def _split_rows(out: Tensor, lse: Tensor, lengths: list[int]) -> list[State]:
    return list(zip(out.split(lengths, dim=2), lse.split(lengths, dim=2), strict=True))
