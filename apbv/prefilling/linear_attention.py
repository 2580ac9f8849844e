"""Splits the linear attention of hybrid models over the hosts, exactly.

A step of a gated delta rule is affine in the state: S_t = A_t S_{t-1} + b_t. So is a run of tokens.
Every host computes the transition A and the bias b of each of its blocks, all hosts gather all of
them, and each applies those of the blocks before its own to the state that the anchor leaves, which
all have. In that state a block begins; then the rule runs as in one process. The convolution takes
a block's first inputs from the end of the block before.

An anchor's copy (APB) is a sequence of its own: it begins without a state, and its last state is
dropped.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..hosts import Exchange, HostGroup
from ..layout import ContextLayout
from ..model.linear_attention import Convolution, LinearStates, Rule
from ..model.parts import ModelParts

# The rule is computed for at most this number of tokens at a time: of each it holds dozens of
# numbers per channel.
MOST_TOKENS = 4096


class SplitLinearAttention:
    """Computes the linear attention of a host's tokens in a prefill; collective.

    Legend: C channels and K inputs of a convolution; Hv heads with a state ``[Dk, Dv]`` each.

    Args:
        layout: the tokens that each host computes.
        hosts: the hosts that compute.
        states: gets the states after the last token.
        keeps_query: whether the states are those after the query; else they are those after the
            context: the query then only ranks KV pairs, and runs again after this pass.
    """

    def __init__(
        self, layout: ContextLayout, hosts: HostGroup, states: LinearStates, keeps_query: bool
    ):
        self._layout = layout
        self._hosts = hosts
        self._states = states
        self._keeps_query = keeps_query
        *blocks, query = (
            layout.block_rows(hosts.rank) if layout.is_split else (range(layout.num_tokens),)
        )
        self._blocks = dict(zip(layout.virtual_hosts(hosts.rank), blocks, strict=True))
        self._query = query
        self._copy, self._anchor = range(0), range(layout.anchor_len)
        if layout.anchor_copy:
            self._copy, self._anchor = self._anchor, range(layout.anchor_len, layout.anchor_len)
        if hosts.size == 1:  # what comes before the query is one run
            self._blocks, self._anchor = {}, range(self._anchor.start, query.start)
        # Of every block, in order, its host and its number among that host's.
        owners = ((host, layout.virtual_hosts(host)) for host in range(hosts.size))
        places = {block: (host, number) for host, own in owners for number, block in enumerate(own)}
        self._places = (
            [places[block] for block in range(len(layout.blocks))] if self._blocks else []
        )
        self._last_inputs: dict[int, Tensor] = {}

    def convolve(self, layer: int, mixed: Tensor, width: int, function: Convolution) -> Tensor:
        nothing = mixed.new_zeros(*mixed.shape[:2], width)
        before = _with_inputs(nothing, mixed, self._anchor)
        begins = [(self._copy, nothing), (self._anchor, nothing)]
        if self._blocks:
            ends = [_with_inputs(nothing, mixed, rows) for rows in self._blocks.values()]
            everywhere = self._hosts.all_gather(torch.stack(ends)).wait()
            for block, (span, place) in enumerate(
                zip(self._layout.blocks, self._places, strict=True)
            ):
                if block in self._blocks:
                    begins.append((self._blocks[block], before))
                end = everywhere[place]
                count = min(width, len(span))
                before = torch.cat([before, end[:, :, width - count :]], dim=2)[:, :, -width:]
        begins.append((self._query, before))
        out = torch.empty_like(mixed)
        for rows, earlier in begins:
            for part in _parts(rows):
                inputs = torch.cat([earlier, mixed[:, :, part.start : part.stop]], dim=2)
                out[:, :, part.start : part.stop] = function(inputs)[:, :, width:]
                earlier = inputs[:, :, -width:]
        self._last_inputs[layer] = (
            _with_inputs(before, mixed, self._query) if self._keeps_query else before
        )
        return out

    def attend(self, layer: int, inputs: tuple[Tensor, ...], function: Rule) -> Tensor:
        k, v = inputs[1:3]
        shape = *v.shape[:1], v.shape[2], k.shape[3], v.shape[3]
        out = torch.empty_like(v)
        nothing = torch.zeros(shape, dtype=torch.float32, device=v.device)
        run = partial(_run, inputs, function, out)
        exchange = self._start_exchange(inputs, function, nothing)
        run(self._copy, nothing)
        state = run(self._anchor, nothing)  # while the maps are exchanged
        maps = None if exchange is None else exchange.wait()
        for block, place in enumerate(self._places):
            if block in self._blocks:
                run(self._blocks[block], state)
            bias, transition = maps[place].split([v.shape[3], k.shape[3]], dim=-1)
            state = transition @ state + bias
        after_query = run(self._query, state)
        last_state = after_query if self._keeps_query else state
        self._states.put(layer, self._last_inputs.pop(layer), last_state)
        return out

    def _start_exchange(
        self, inputs: tuple[Tensor, ...], function: Rule, nothing: Tensor
    ) -> Exchange | None:
        """Send the maps of this host's blocks to all hosts, ``[1, Hv, Dk, Dv + Dk]`` each: bias and
        transition.

        Both are final states: one with the values and no state, one without values that began as
        the identity.
        """
        if not self._blocks:
            return None
        q, k, v, *gates = inputs
        values = torch.cat([v, v.new_zeros(*v.shape[:3], k.shape[3])], dim=3)
        identity = torch.eye(k.shape[3], device=v.device).expand(*nothing.shape[:3], -1)
        maps = [
            _run(
                (q, k, values, *gates), function, None, rows, torch.cat([nothing, identity], dim=3)
            )
            for rows in self._blocks.values()
        ]
        return self._hosts.all_gather(torch.stack(maps))


def share_states(states: LinearStates, parts: ModelParts, hosts: HostGroup) -> None:
    """Send all hosts the states of a prompt that host 0 has computed alone; collective."""
    sizes = parts.sizes.linear
    empty = partial(torch.empty, device=parts.device)
    shape = 1, sizes.value_heads, sizes.key_dim, sizes.value_dim
    for index, layer in enumerate(states.layers if hosts.size > 1 else ()):
        if layer.has_previous_state[0]:
            inputs, state = states.tensors[index]
        else:
            inputs = empty(1, sizes.channels, sizes.kernel, dtype=parts.dtype)
            state = empty(shape)
        received = [hosts.broadcast(each, 0) for each in (inputs, state)]
        if not layer.has_previous_state[0]:
            states.put(index, *received)


def _run(
    inputs: Sequence[Tensor], function: Rule, out: Tensor | None, rows: range, state: Tensor
) -> Tensor:
    """Apply the rule to some rows, and write the output to these if it is wanted; return the state
    after them."""
    for part in _parts(rows):
        q, k, v, g, beta = (each[:, part.start : part.stop] for each in inputs)
        made, state = function(
            q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True
        )
        if out is not None:
            out[:, part.start : part.stop] = made
        del made  # before the next part is computed
    return state


def _parts(rows: range) -> list[range]:
    return [
        range(start, min(start + MOST_TOKENS, rows.stop))
        for start in range(rows.start, rows.stop, MOST_TOKENS)
    ]


def _with_inputs(before: Tensor, mixed: Tensor, rows: range) -> Tensor:
    """Return the last K inputs after some rows of ``mixed``, which follow the K inputs ``before``
    them."""
    width = before.shape[2]
    last = mixed[:, :, max(rows.start, rows.stop - width) : rows.stop]
    return torch.cat([before, last], dim=2)[:, :, -width:]
