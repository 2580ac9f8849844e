"""This module computes how the question attends to visual tokens in one layer, wherever their keys lie.

Legend: Hq query and Hkv KV heads, G = Hq / Hkv, D head dimension, n_q tokens of the question, T tokens that this
host owns.
"""

import torch
from torch import Tensor

from ..moving import move_rows
from ..stages import Stage

_MOST_SCORES = 2**26  # that are in memory at a time


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


def visual_attention(
    stage: Stage, q: Tensor, keys: Tensor, scale: float, raters: Tensor, is_visual: Tensor
) -> Tensor:
    """Compute mixtures of the question's attention to this host's visual tokens, mean over this process's heads.

    The softmax is over all tokens that the question sees, on all hosts. Collective among those that compute.

    Args:
        q: the question's queries, ``[1, Hq, n_q, D]``.
        keys: of the tokens that this host owns, ``[1, Hkv, T, D]``.
        raters: ``[R, n_q]``, the mixtures.
        is_visual: which of these tokens are visual, bool ``[T]``.

    Returns:
        ``[R, visual tokens of this host]``, fp32, or fp64 where the model is.
    """
    dtype, device = torch.promote_types(q.dtype, torch.float32), q.device
    asked = raters.ne(0).any(dim=0).nonzero().flatten()  # only their queries are multiplied
    raters = raters[:, asked].to(device, dtype)
    owned, question = stage.owned[stage.hosts.rank], stage.query_start + asked
    visual = is_visual.nonzero().flatten().to(device)
    num_kv_heads = keys.shape[1]
    groups = q[0, :, asked.to(device)].to(dtype).unflatten(0, (num_kv_heads, -1))  # [Hkv, G, asked, D]
    most = max(1, _MOST_SCORES // max(1, groups.shape[1] * len(owned)))
    chunks = [slice(start, start + most) for start in range(0, len(asked), most)]

    def scores(head: int, rows: slice) -> Tensor:
        products = groups[head, :, rows] @ keys[0, head].to(dtype).T * scale
        behind = owned > question[rows, None]  # tokens behind the one that asks
        return products.masked_fill(behind.to(device), float("-inf"))

    # The scores of one KV head and of some tokens are in memory at a time, and are computed twice.
    lse = [[scores(head, rows).logsumexp(dim=-1) for rows in chunks] for head in range(num_kv_heads)]
    lse = torch.stack([torch.cat(of_head, dim=-1) for of_head in lse])
    if stage.layout.is_split:
        lse = stage.hosts.all_gather(lse).wait().logsumexp(dim=0)
    result = raters.new_zeros(len(raters), len(visual))
    for head in range(num_kv_heads):
        for rows in chunks:
            attention = (scores(head, rows)[..., visual] - lse[head, :, rows, None]).exp()
            result += raters[:, rows] @ attention.sum(dim=0)
    return result / (num_kv_heads * groups.shape[1])
