"""Zigzag ring attention, which is exact and passes keys and values round a ring of hosts.

The prompt is cut into 2H chunks, and host h holds chunks h and 2H-1-h (zigzag), so that all hosts
have equally many (query, key) pairs to compute under the causal mask. Transfers overlap with
attention.
"""

import torch
from torch import Tensor

from ...config import METHOD_FACTS
from ...kernels.torch_attention import empty_output
from .base import PartialAttention, PrefillMethod
from .ring_library import Ring, usable_ring


class ZigzagRingMethod(PrefillMethod):
    """Ring attention in H steps.

    In step s a host uses the keys and values of the host s places before it.
    """

    name = "zigzag_ring"
    facts = METHOD_FACTS["zigzag_ring"]
    zigzag = True

    def prepare(self) -> None:
        layout = self.layout
        hosts = self.hosts
        # The lengths of every host's two chunks, in rows.
        self._chunk_lengths: list[list[int]] = []
        for host in range(hosts.size):
            self._chunk_lengths.append([len(block) for block in layout.blocks_of(host)])
        self._equal_chunks = len({len(block) for block in layout.blocks}) == 1

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int) -> Tensor:
        ring = self._library_for(q, k)
        if ring is not None:
            return self._by_ring_flash_attn(ring, q, k, v, scale)
        here = self.hosts.rank
        size = self.hosts.size
        kv = torch.stack([k, v])
        for step in range(size):
            owner = (here - step) % size
            is_last = step + 1 == size
            # Pass these keys and values on, and receive the next owner's.
            if not is_last:
                rows = sum(self._chunk_lengths[(owner - 1) % size])
                exchange = self.hosts.shift(kv, (*kv.shape[:3], rows, kv.shape[4]))
                if not self.config.ablation.overlap:
                    exchange.wait()
            partial = self._attend_to(owner, q, kv, scale)
            if step == 0:
                merged = partial
            else:
                merged = self._merge_two(merged, partial, q, is_last)
            if not is_last:
                kv = exchange.wait()
        out, _ = merged
        return out

    def _merge_two(
        self, merged: PartialAttention, partial: PartialAttention, q: Tensor, is_last: bool
    ) -> PartialAttention:
        """Merge one more partial result, in place if the dtypes allow.

        Intermediate results have the dtype of the lse, fp32; the last one has that of ``q``.
        """
        merged_out, merged_lse = merged
        dtype = q.dtype if is_last else merged_lse.dtype
        out = merged_out if merged_out.dtype == dtype else empty_output(q, dtype)
        return self.merge([merged, partial], out)

    def _attend_to(self, owner: int, q: Tensor, kv: Tensor, scale: float) -> PartialAttention:
        """Attend to a host's keys and values with those of this host's queries that see any.

        If only this host's late chunk sees any, the result is of these last queries alone.

        Args:
            owner: the host whose keys and values they are.
            q: ``[1, Hq, S, D]``, all of this host's queries.
            kv: ``[2, 1, Hkv, rows, D]``.
            scale: the factor of q·k.
        """
        here = self.hosts.rank
        if owner == here:
            # Together this host's chunks are one triangle: the late one sees all of the early one.
            return self.attend(q, [(kv[0], kv[1])], scale, causal_last=True)
        if owner < here:  # its early chunk lies before both of this host's, its late one after both
            kv = kv[:, :, :, : self._chunk_lengths[owner][0]]
        else:  # both of its chunks lie between this host's
            q = q[:, :, self._chunk_lengths[here][0] :]
        return self.attend(q, [(kv[0], kv[1])], scale, causal_last=False)

    def _library_for(self, q: Tensor, k: Tensor) -> Ring | None:
        """Return ring-flash-attn; None where it cannot be used.

        It takes chunks of equal length in half precision only.
        """
        is_half = q.dtype in (torch.float16, torch.bfloat16)
        if not self._equal_chunks or not q.is_cuda or not is_half:
            return None
        if self.hosts.process_group is None:
            return None
        return usable_ring(self.hosts, q.device, q.dtype, q.shape[3], q.shape[1] // k.shape[1])

    def _by_ring_flash_attn(
        self, ring: Ring, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> Tensor:
        """Call ring-flash-attn, which gives each host the same two chunks."""
        q = q.transpose(1, 2).contiguous()
        k = k.transpose(1, 2).contiguous()
        v = v.transpose(1, 2).contiguous()
        self.hosts.bytes_received += (self.hosts.size - 1) * (k.nbytes + v.nbytes)
        out = ring(q, k, v, softmax_scale=scale, causal=True, group=self.hosts.process_group)
        return out.transpose(1, 2)
