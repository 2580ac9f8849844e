"""Zigzag ring attention, which is exact and passes keys and values round a ring of hosts.

The prompt is cut into 2H chunks, and host h holds chunks h and 2H-1-h (zigzag), so that all hosts
have equally many (query, key) pairs to compute under the causal mask. Transfers overlap with
attention.
"""

import torch
from torch import Tensor

from ...kernels.torch_attention import empty_output
from .base import PartialAttention, PrefillMethod
from .ring_library import Ring, usable_ring


class ZigzagRingMethod(PrefillMethod):
    """Ring attention in H steps.

    In step s a host uses the keys and values of the host s places before it.
    """

    name = "zigzag_ring"
    is_exact = True
    zigzag = True

    def prepare(self) -> None:
        layout = self.layout
        hosts = self.hosts
        # The numbers of rows of every host's two chunks.
        self._cuts: list[list[int]] = []
        for host in range(hosts.size):
            self._cuts.append([len(block) for block in layout.blocks_of(host)])
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
            if step + 1 < size:
                rows = sum(self._cuts[(owner - 1) % size])
                exchange = self.hosts.shift(kv, (*kv.shape[:3], rows, kv.shape[4]))
                if not self.config.overlap:
                    exchange.wait()
            partial = self._attend_to(owner, q, kv, scale)
            if step == 0:
                merged = partial
            else:
                # What is merged again and again is kept in fp32, where it lies; the result is in
                # q's dtype.
                dtype = q.dtype if step + 1 == size else merged[1].dtype
                out = merged[0] if merged[0].dtype == dtype else empty_output(q, dtype)
                merged = self.merge([merged, partial], out)
            if step + 1 < size:
                kv = exchange.wait()
        return merged[0]

    def _attend_to(self, owner: int, q: Tensor, kv: Tensor, scale: float) -> PartialAttention:
        """Attend to a host's keys and values, with this host's queries that see any.

        Where only its late chunk does, the result is one of the last queries.

        Args:
            kv: ``[2, 1, Hkv, rows, D]``.
        """
        here = self.hosts.rank
        if owner == here:
            # Together this host's chunks are one triangle: the late one sees all of the early one.
            return self.attend(q, [(kv[0], kv[1])], scale, causal_last=True)
        if owner < here:  # its early chunk lies before both of this host's, its late one after both
            kv = kv[:, :, :, : self._cuts[owner][0]]
        else:  # both of its chunks lie between this host's
            q = q[:, :, self._cuts[here][0] :]
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
        """Call ring-flash-attn, which places chunks alike."""
        q = q.transpose(1, 2).contiguous()
        k = k.transpose(1, 2).contiguous()
        v = v.transpose(1, 2).contiguous()
        self.hosts.bytes_received += (self.hosts.size - 1) * (k.nbytes + v.nbytes)
        out = ring(q, k, v, softmax_scale=scale, causal=True, group=self.hosts.process_group)
        return out.transpose(1, 2)
