"""Whether hosts compute parts of the anchor, and exchange its keys and values, or all of it.

The authors of APB-V have every host compute the whole anchor: l_a rows on each of H hosts, which
attend to nothing but the anchor, so that all hosts compute the same numbers. At 8 hosts that is an
eighth of a host's rows, at 64 hosts half of them. In parts, a host computes l_a / H rows, and every
layer exchanges their keys and values. Both are exact.
"""

from dataclasses import replace
from typing import NamedTuple

import torch

from ...config import MethodFacts, PrefillConfig
from ...layout import ContextLayout
from ...model.families import DecoderSizes


class _Machine(NamedTuple):
    """A slow link and a fast processor of its kind, with which the exchange pays least.

    Attributes:
        flops: FLOP per second of large matrix products.
        bandwidth: bytes per second that a host receives.
        latency: seconds of one more exchange in a layer, and of what is launched for it.
    """

    flops: float
    bandwidth: float
    latency: float


# Of GPUs: an H200's bf16 products, a link of 200 Gb/s, and six launches by the CPU, which took 77
# us each there (docs/results-prefill.md). Of CPUs: some cores, a link of 10 Gb/s, gloo's latency.
_MACHINES = {"cuda": _Machine(5e14, 2e10, 5e-4), "cpu": _Machine(2e11, 1e9, 1e-3)}


def share_anchor(
    layout: ContextLayout,
    facts: MethodFacts,
    config: PrefillConfig,
    sizes: DecoderSizes,
    device: torch.device,
    itemsize: int,
) -> ContextLayout:
    """Return a layout in which hosts compute parts of the anchor, if that is asked for or faster.

    All hosts decide alike.

    Args:
        layout: that of a method, in which every host computes the whole anchor.
        facts: those of the method.
        config: ``ablation.split_anchor`` forces either.
        sizes: the model's.
        device: on which it computes.
        itemsize: bytes per number.
    """
    if not layout.is_split or layout.num_hosts == 1 or layout.anchor_len == 0:
        return layout
    is_split = config.ablation.split_anchor
    if is_split is None:
        is_split = facts.shares_anchor and saves_by_splitting(layout, sizes, device, itemsize)
    return replace(layout, splits_anchor=is_split)


def saves_by_splitting(
    layout: ContextLayout, sizes: DecoderSizes, device: torch.device, itemsize: int
) -> bool:
    """Return whether a host saves more time in a layer than one more exchange takes.

    What it saves are the products of the anchor's rows with the weights; their attention is little
    beside these. What the exchange takes is not counted as hidden behind the blocks' attention,
    though most of it is.
    """
    machine = _MACHINES.get(device.type, _MACHINES["cuda"])
    attention_width = 2 * (sizes.heads + sizes.kv_heads) * sizes.head_dim
    weights_of_layer = sizes.hidden * (attention_width + 3 * sizes.intermediate)
    parts = replace(layout, splits_anchor=True)
    num_saved = layout.anchor_len - parts.longest_anchor_part
    saved_seconds = 2 * num_saved * weights_of_layer / machine.flops
    exchanged_bytes = 2 * num_saved * sizes.kv_heads * sizes.head_dim * itemsize
    return saved_seconds > machine.latency + exchanged_bytes / machine.bandwidth
