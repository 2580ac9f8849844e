"""Attention by definition, and with one mistake each, for tests of what notices them."""

import math

import torch

from apbv.kernels import reference


def by_definition(q, k, v, scale, causal):
    return reference.segmented_attention(q, [(k, v)], scale, causal)


def never_causal(q, k, v, scale, causal):
    return by_definition(q, k, v, scale, False)


def base_2(q, k, v, scale, causal):
    out, lse = by_definition(q, k, v, scale, causal)
    return out, lse / math.log(2)


def heads_of_other_groups(q, k, v, scale, causal):
    groups = q.shape[1] // k.shape[1]
    return by_definition(q, k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1), scale, causal)


def whole_buffer(q, k, v, scale, causal):
    """As if the rows of k and v were contiguous: reads what lies before and behind them."""
    return by_definition(q, _as_if_contiguous(k), _as_if_contiguous(v), scale, causal)


def _as_if_contiguous(states):
    strides = torch.empty_like(states).contiguous().stride()
    return torch.as_strided(states, states.shape, strides)


def last_key_unseen(q, k, v, scale, causal):
    seen = k.shape[2] // 64 * 64 or None
    return by_definition(q, k[:, :, :seen], v[:, :, :seen], scale, False)


def whole_lse(q, k, v, scale, causal):
    """With a dimension more, as some libraries return it."""
    out, lse = by_definition(q, k, v, scale, causal)
    return out, lse[..., None]


def raising(q, k, v, scale, causal):
    raise RuntimeError("no kernel image is available\nfor execution on the device")


WRONG = {
    never_causal: "its causal attention of 129 queries over 129 keys is wrong: it is off by",
    base_2: "is off by",
    heads_of_other_groups: "is off by",
    whole_buffer: "is off by nan",
    last_key_unseen: "is off by",
    whole_lse: "it returned",
    raising: "RuntimeError: no kernel image is available",
}
