"""This module computes how the question attends to visual tokens, wherever their keys lie.

Legend: Hq query and Hkv KV heads, G = Hq / Hkv, D head dimension, n_q tokens of the question, T tokens that this
host owns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor

from ..memory import MOST_SCORES
from ..moving import move_rows
from ..stages import Stage
from .choosing import lse_over_hosts


class WantedAttention(Protocol):
    """A WantedAttention is what a reducer wants to see of the question's attention in some layers of a stage.

    Attributes:
        layers: these layers, whose mean it is.
        num_lists: R, the lists of numbers that it makes.
    """

    layers: range

    @property
    def num_lists(self) -> int: ...

    def __call__(self, q: Tensor, keys: Tensor, scale: float) -> Tensor:
        """Compute it in one layer; collective among the hosts that compute.

        Args:
            q: the question's queries, ``[1, Hq, n_q, D]``.
            keys: of the tokens that this host owns, ``[1, Hkv, T, D]``.

        Returns:
            ``[R, visual tokens of this host]``, fp32, or fp64 where the model is.
        """


@dataclass(frozen=True)
class MixedAttention:
    """A MixedAttention mixes the attention of the question's tokens in a stage's last layer, mean over heads.

    The softmax is over all tokens that the question sees, on all hosts; the mean over the heads of this process.

    Attributes:
        stage: the stage.
        is_visual: which of its tokens are visual, bool ``[n_s]``.
        raters: ``[R, n_q]``, the weight of each of the question's tokens in each mixture.
    """

    stage: Stage
    is_visual: Tensor
    raters: Tensor

    @property
    def layers(self) -> range:
        """The last layer."""
        return self.stage.layers[-1:]

    @property
    def num_lists(self) -> int:
        """R, the mixtures."""
        return len(self.raters)

    def __call__(self, q: Tensor, keys: Tensor, scale: float) -> Tensor:
        stage, dtype, device = self.stage, torch.promote_types(q.dtype, torch.float32), q.device
        asked = self.raters.ne(0).any(dim=0).nonzero().flatten()  # only their queries are multiplied
        raters = self.raters[:, asked].to(device, dtype)
        owned, question = stage.owned[stage.hosts.rank], stage.query_start + asked
        visual = self.is_visual[owned].nonzero().flatten().to(device)
        num_kv_heads = keys.shape[1]
        groups = q[0, :, asked.to(device)].to(dtype).unflatten(0, (num_kv_heads, -1))  # [Hkv, G, asked, D]
        most = max(1, MOST_SCORES // max(1, groups.shape[1] * len(owned)))
        chunks = [slice(start, start + most) for start in range(0, len(asked), most)]

        def scores(head: int, rows: slice) -> Tensor:
            products = groups[head, :, rows] @ keys[0, head].to(dtype).T * scale
            behind = owned > question[rows, None]  # tokens behind the one that asks
            return products.masked_fill(behind.to(device), float("-inf"))

        # The scores of one KV head and of some tokens are in memory at a time, and are computed twice.
        lse = [[scores(head, rows).logsumexp(dim=-1) for rows in chunks] for head in range(num_kv_heads)]
        lse = torch.stack([torch.cat(of_head, dim=-1) for of_head in lse])
        lse = lse_over_hosts(lse, stage.layout, stage.hosts)
        result = raters.new_zeros(len(raters), len(visual))
        for head in range(num_kv_heads):
            for rows in chunks:
                attention = (scores(head, rows)[..., visual] - lse[head, :, rows, None]).exp()
                result += raters[:, rows] @ attention.sum(dim=0)
        return result / (num_kv_heads * groups.shape[1])


@dataclass(frozen=True)
class RelevanceSoFar:
    """A RelevanceSoFar is HIPPO's s_attn (Eq. 2), averaged over a stage's layers instead of all of the model's.

    Attributes:
        stage: the stage.
        is_visual: which of its tokens are visual, bool ``[n_s]``.
    """

    stage: Stage
    is_visual: Tensor
    num_lists = 1

    @property
    def layers(self) -> range:
        """All layers of the stage."""
        return self.stage.layers

    def __call__(self, q: Tensor, keys: Tensor, scale: float) -> Tensor:
        over_hosts = partial(lse_over_hosts, layout=self.stage.layout, hosts=self.stage.hosts)
        return visual_relevance(q, keys[:, :, self._visual_rows], scale, over_hosts)[None]

    @cached_property
    def _visual_rows(self) -> Tensor:
        """The places of visual tokens among those that this host owns, copied to the device once."""
        hosts = self.stage.hosts
        return self.is_visual[self.stage.owned[hosts.rank]].nonzero().flatten().to(hosts.device)


def visual_relevance(
    q: Tensor, visual_keys: Tensor, scale: float, over_hosts: Callable[[Tensor], Tensor]
) -> Tensor:
    """Compute one layer's s_attn (HIPPO, Eq. 2): softmax over visual keys only, mean over heads and text queries.

    Args:
        q: the question's queries, ``[1, Hq, n_q, D]``.
        visual_keys: of the visual tokens that this host owns, ``[1, Hkv, T, D]``.
        over_hosts: merges a log-sum-exp over this host's visual keys, ``[Hkv, G * n_q]``, into that over all
            hosts'.

    Returns:
        ``[T]``, fp32, or fp64 where the model is.
    """
    num_kv_heads, num_keys = visual_keys.shape[1:3]
    rows = q.reshape(num_kv_heads, -1, q.shape[3])  # [Hkv, G * n_q, D]
    chunks = rows.split(max(1, MOST_SCORES // max(1, num_kv_heads * num_keys)), dim=1)
    # The scores of some rows are in memory at a time; where these are not all, they are computed twice.
    held = scores_of_keys(rows, visual_keys, scale) if len(chunks) == 1 else None

    def scores(chunk: Tensor) -> Tensor:
        return scores_of_keys(chunk, visual_keys, scale) if held is None else held

    lse = over_hosts(torch.cat([scores(chunk).logsumexp(dim=-1) for chunk in chunks], dim=1))
    total = 0.0
    for chunk, of_chunk in zip(chunks, lse.split([chunk.shape[1] for chunk in chunks], dim=1), strict=True):
        total = total + (scores(chunk) - of_chunk[..., None]).exp().sum(dim=(0, 1))
    return total / (num_kv_heads * rows.shape[1])


def scores_of_keys(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return scaled q·k ``[Hkv, R, T]``, in fp32 or wider.

    Args:
        q: ``[Hkv, R, D]``, the R rows that ask each KV head; or ``[1, Hq, n_q, D]``, whose R = G * n_q.
        k: ``[1, Hkv, T, D]``.
    """
    scores = (q.reshape(k.shape[1], -1, q.shape[-1]) @ k[0].transpose(-1, -2)) * scale
    return scores if scores.dtype == torch.float64 else scores.float()


def question_states(stage: Stage, q: Tensor) -> Tensor:
    """Return the question's queries ``[1, Hq, n_q, D]`` on every host that computes; collective among these.

    Where the method splits the question over the hosts, too, each sends the others its share.

    Args:
        q: of this host's local tokens, ``[1, Hq, S, D]``.
    """
    hosts, question = stage.hosts, torch.arange(stage.question.start, stage.question.stop)
    held = [tokens[tokens >= stage.query_start] for tokens in stage.local]
    wanted = [question if len(tokens) else question[:0] for tokens in stage.local]
    rows = (stage.local[hosts.rank] >= stage.query_start).nonzero().flatten()
    mine = q[0, :, rows.to(q.device)].transpose(0, 1)
    return move_rows(mine, held, stage.owner, wanted, hosts).transpose(0, 1)[None]
