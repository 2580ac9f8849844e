"""Splits the linear attention of hybrid models over the hosts, exactly.

A step of a gated delta rule is affine in the state: S_t = A_t S_{t-1} + b_t. So is a run of tokens.
Every host computes the transition A and the bias b of each of its blocks, all hosts gather all of
them, and each applies those of the blocks before its own to the state that the anchor leaves, which
all have. In that state a block begins; then the rule runs as in one process. The convolution takes
a block's first inputs from the end of the block before.

Where each host computes a part of the anchor, the parts are runs like the blocks, in front of them.

An anchor's copy (APB) is a sequence of its own: it begins without a state, and its last state is
dropped.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..hosts import HostGroup, Pending
from ..layout import ContextLayout
from ..model.linear_attention import Convolution, LinearStates, Rule
from ..model.parts import ModelParts

# The rule is computed for at most this number of tokens at a time: of each it holds dozens of
# numbers per channel.
MOST_TOKENS = 4096


class QuestionAfterContext:
    """Computes the linear attention of a question in a pass of its own, on one host or on each.

    Args:
        states: those after the context, which become those after the question, and get those before
            it and before its last token.
    """

    def __init__(self, states: LinearStates):
        self._states = states
        self._inputs_before_last: dict[int, Tensor] = {}
        states.before_question = states.copy()
        states.before_last = LinearStates(states.places)

    def convolve(self, layer: int, mixed: Tensor, convolution: Convolution) -> Tensor:
        outs = []
        if mixed.shape[2] > 1:
            outs.append(self._states.convolve(layer, mixed[:, :, :-1], convolution))
        before_last = self._states.get_conv_state(layer, state_idx=0)
        assert before_last is not None, "the context was read"
        # Of a single token the states are changed in place.
        self._inputs_before_last[layer] = before_last.clone()
        outs.append(self._states.convolve(layer, mixed[:, :, -1:], convolution))
        return torch.cat(outs, dim=2)

    def attend(self, layer: int, inputs: tuple[Tensor, ...], rule: Rule) -> Tensor:
        outs = []
        if inputs[0].shape[1] > 1:
            first = tuple(tensor[:, :-1] for tensor in inputs)
            outs.append(self._states.attend(layer, first, rule))
        before_last = self._states.get_recurrent_state(layer, state_idx=0)
        assert before_last is not None, "the context was read"
        kept = self._states.before_last
        assert kept is not None, "it is filled here"
        kept.put(layer, self._inputs_before_last.pop(layer), before_last)
        last = tuple(tensor[:, -1:] for tensor in inputs)
        outs.append(self._states.attend(layer, last, rule))
        return torch.cat(outs, dim=1)


class SplitLinearAttention:
    """Computes the linear attention of a host's tokens in a prefill; collective.

    Legend: C channels and K inputs of a convolution; Hv heads with a state ``[Dk, Dv]`` each.

    Args:
        layout: the tokens that each host computes.
        hosts: the hosts that compute.
        states: gets the states after the last token, and before it and the question if every host
            that has them computes these.
        keeps_query: whether the states are those after the query; else they are those after the
            context: the query then only ranks KV pairs, and runs again after this pass.
        query_start: the number of tokens before the question.
    """

    def __init__(
        self,
        layout: ContextLayout,
        hosts: HostGroup,
        states: LinearStates,
        keeps_query: bool,
        query_start: int,
    ):
        self._hosts = hosts
        self._states = states
        self._keeps_query = keeps_query
        runs = runs_of_host(layout, hosts.rank)
        self._query_parts = query_parts(runs.query, layout, query_start)
        if keeps_query and runs.query:
            states.before_question = LinearStates(states.places)
            states.before_last = LinearStates(states.places)
        self._copy = runs.copy
        self._anchor = runs.anchor
        self._own = runs.own
        self._query = runs.query
        self._chains = runs.chains
        self._last_inputs: dict[int, list[Tensor]] = {}

    def convolve(self, layer: int, mixed: Tensor, convolution: Convolution) -> Tensor:
        """Convolve this host's tokens in one layer.

        Args:
            mixed: ``[1, C, S]``, the layer's inputs.
            convolution: the layer's, which depends on K inputs up to a token's.

        Returns:
            ``[1, C, S]``.
        """
        # The K inputs before every run of rows.
        width = convolution.width
        nothing = mixed.new_zeros(*mixed.shape[:2], width)
        runs = [(self._copy, nothing), (self._anchor, nothing)]
        before = _with_inputs(nothing, mixed, self._anchor)
        if self._own:
            ends = [_with_inputs(nothing, mixed, rows) for rows in self._own]
            ends_of_hosts = self._hosts.all_gather(torch.stack(ends)).wait()
        for chain in self._chains:
            if len(self._chains) > 1:  # neither the copy nor the prompt follows anything
                before = nothing
            for link in chain:
                if link.host == self._hosts.rank:
                    runs.append((self._own[link.number], before))
                end = ends_of_hosts[link.host, link.number]
                count = min(width, link.length)
                before = torch.cat([before, end[:, :, width - count :]], dim=2)[:, :, -width:]
        runs.append((self._query, before))

        out = torch.empty_like(mixed)
        for rows, earlier in runs:
            for part in _parts(rows):
                inputs = torch.cat([earlier, mixed[:, :, part.start : part.stop]], dim=2)
                out[:, :, part.start : part.stop] = convolution(inputs)[:, :, width:]
                earlier = inputs[:, :, -width:]
        # The last inputs before the question, before its last token, and behind it.
        behind_parts = [before] * 3
        if self._keeps_query and self._query:
            behind_parts = []
            for part in self._query_parts:
                before = _with_inputs(before, mixed, part)
                behind_parts.append(before)
        self._last_inputs[layer] = behind_parts
        return out

    def attend(self, layer: int, inputs: tuple[Tensor, ...], rule: Rule) -> Tensor:
        """Apply the rule to this host's tokens in one layer, and keep the last state.

        Args:
            inputs: q and k ``[1, S, Hk, Dk]``, v ``[1, S, Hv, Dv]``, g (log decay) and beta
                ``[1, S, Hv]``.
            rule: the layer's.

        Returns:
            ``[1, S, Hv, Dv]``.
        """
        k = inputs[1]
        v = inputs[2]
        key_dim = k.shape[3]
        batch, _, num_heads, value_dim = v.shape
        out = torch.empty_like(v)
        nothing = torch.zeros(
            batch, num_heads, key_dim, value_dim, dtype=torch.float32, device=v.device
        )
        run = partial(_run, inputs, rule, out)
        exchange = self._start_exchange(inputs, rule, nothing)
        # While the maps are exchanged:
        run(self._copy, nothing)
        state = run(self._anchor, nothing)
        if exchange is not None:
            maps = exchange.wait()  # [hosts, runs of a host, 1, Hv, Dk, Dv + Dk]
        for chain in self._chains:
            if len(self._chains) > 1:
                state = nothing
            for link in chain:
                if link.host == self._hosts.rank:
                    run(self._own[link.number], state)
                map_of_run = maps[link.host, link.number]
                bias, transition = map_of_run.split([value_dim, key_dim], dim=-1)
                state = transition @ state + bias
        if not self._keeps_query or not self._query:
            run(self._query, state)
            self._states.put(layer, self._last_inputs.pop(layer)[-1], state)
            return out
        kept = (self._states.before_question, self._states.before_last, self._states)
        last_inputs = self._last_inputs.pop(layer)
        for part, states, inputs_of_part in zip(self._query_parts, kept, last_inputs, strict=True):
            state = run(part, state)
            assert states is not None, "made with this object"
            states.put(layer, inputs_of_part, state)
        return out

    def _start_exchange(
        self, inputs: tuple[Tensor, ...], rule: Rule, nothing: Tensor
    ) -> Pending[Tensor] | None:
        """Send the maps of this host's own runs to all hosts.

        A map is ``[1, Hv, Dk, Dv + Dk]``: bias and transition. Both are final states: one with the
        values and no state, one without values that began as the identity.
        """
        if not self._own:
            return None
        q, k, v, *gates = inputs
        key_dim = k.shape[3]
        # The zeros, and the first state of every run, are freed as soon as they are copied: this
        # is where a hybrid's memory peaks.
        values = torch.cat([v, v.new_zeros(*v.shape[:3], key_dim)], dim=3)
        identity = torch.eye(key_dim, device=v.device).expand(*nothing.shape[:3], -1)
        maps = []
        for rows in self._own:
            maps.append(
                _run(
                    (q, k, values, *gates),
                    rule,
                    None,
                    rows,
                    torch.cat([nothing, identity], dim=3),
                )
            )
        return self._hosts.all_gather(torch.stack(maps))


class Link(NamedTuple):
    """A run of tokens that one host computes.

    Attributes:
        host: the host.
        number: which of its runs it is.
        length: its tokens.
    """

    host: int
    number: int
    length: int


class HostRuns(NamedTuple):
    """Where the parts of the prompt lie among a host's rows.

    Attributes:
        copy, anchor, query: runs that every host computes; they may be empty. The copy and the
            anchor begin without a state.
        own: the runs of which each host computes its own.
        chains: all hosts' own runs, as they follow one another. A single chain follows the anchor;
            of several each begins without a state.
    """

    copy: range
    anchor: range
    own: list[range]
    query: range
    chains: list[list[Link]]

    def begins_without_state(self, host: int, number: int) -> bool:
        """Return whether no token comes before one of a host's own runs."""
        if len(self.anchor) > 0:
            return False
        return any((chain[0].host, chain[0].number) == (host, number) for chain in self.chains)


def runs_of_host(layout: ContextLayout, host: int) -> HostRuns:
    """Cut a host's rows into the runs for which the rule is computed one after the other."""
    if not layout.is_split:
        return HostRuns(range(0), range(0), [], range(layout.num_tokens), [])
    *blocks, query = layout.block_rows(host)
    anchor = range(len(layout.anchor_part(host)))
    copy = range(0)
    if layout.num_hosts == 1:  # what comes before the query is one run
        if layout.anchor_copy:
            copy = anchor
        return HostRuns(copy, range(len(copy), query.start), [], query, [])
    if layout.splits_anchor:
        return HostRuns(copy, range(0), [anchor, *blocks], query, _chains(layout))
    if layout.anchor_copy:
        copy = anchor
        anchor = range(0)
    return HostRuns(copy, anchor, blocks, query, _chains(layout))


def query_parts(query: range, layout: ContextLayout, question_start: int) -> list[range]:
    """Cut the query's run: before the question, the question's other tokens, and its last.

    Only where one host computes all tokens, it begins before the question.
    """
    if not query:
        return [query]
    start = query.start if layout.is_split else min(question_start, query.stop - 1)
    return [
        range(query.start, start),
        range(start, query.stop - 1),
        range(query.stop - 1, query.stop),
    ]


def _chains(layout: ContextLayout) -> list[list[Link]]:
    """Return the runs of which each host computes its own, as they follow one another.

    The prompt's are the blocks, and before them the parts of the anchor where it is split. The
    parts of a copy come first, as a chain of their own.
    """
    parts = []
    num_parts = 0  # of the anchor, on each host
    if layout.splits_anchor:
        num_parts = 1
        for host in range(layout.num_hosts):
            parts.append(Link(host, 0, len(layout.anchor_part(host))))
    link_of_block = {}
    for host in range(layout.num_hosts):
        for number, block in enumerate(layout.virtual_hosts(host), start=num_parts):
            link_of_block[block] = Link(host, number, len(layout.blocks[block]))
    blocks = [link_of_block[block] for block in range(len(layout.blocks))]
    if layout.anchor_copy and parts:
        return [parts, blocks]
    return [parts + blocks]


def share_states(states: LinearStates, parts: ModelParts, hosts: HostGroup) -> None:
    """Send all hosts the states of a prompt that host 0 has computed alone; collective."""
    if hosts.size == 1:
        return
    if states.before_question is None:  # on the hosts that compute nothing
        states.before_question = LinearStates(states.places)
    if states.before_last is None:
        states.before_last = LinearStates(states.places)
    for each in (states, states.before_question, states.before_last):
        _share(each, parts, hosts)


def _share(states: LinearStates, parts: ModelParts, hosts: HostGroup) -> None:
    sizes = parts.sizes.linear
    assert sizes is not None  # the model is a hybrid
    for index, layer in enumerate(states.linear_layers):
        has_states = layer.has_previous_state[0]
        if has_states:
            inputs, state = states.tensors[index]
        else:
            inputs = torch.empty(
                1, sizes.channels, sizes.kernel, dtype=parts.dtype, device=parts.device
            )
            state = torch.empty(
                1, sizes.value_heads, sizes.key_dim, sizes.value_dim, device=parts.device
            )
        inputs = hosts.broadcast(inputs, 0)
        state = hosts.broadcast(state, 0)
        if not has_states:
            states.put(index, inputs, state)


def _run(
    inputs: Sequence[Tensor], rule: Rule, out: Tensor | None, rows: range, state: Tensor
) -> Tensor:
    """Apply the rule to some rows; return the state after them.

    Args:
        out: gets the output of these rows; None drops it.
        state: the state before them.
    """
    for part in _parts(rows):
        inputs_of_part = [states[:, part.start : part.stop] for states in inputs]
        # A chunk of one token would be padded to its full length.
        output, state = rule(inputs_of_part, state, steps=len(part) == 1)
        if out is not None:
            out[:, part.start : part.stop] = output
        del output  # before the next part is computed
    return state


def _parts(rows: range) -> list[range]:
    """Cut rows into runs of at most :data:`MOST_TOKENS`."""
    return [
        range(start, min(start + MOST_TOKENS, rows.stop))
        for start in range(rows.start, rows.stop, MOST_TOKENS)
    ]


def _with_inputs(before: Tensor, mixed: Tensor, rows: range) -> Tensor:
    """Return the last K inputs of rows of ``mixed``, and of the K inputs ``before`` them."""
    width = before.shape[2]
    last = mixed[:, :, max(rows.start, rows.stop - width) : rows.stop]
    return torch.cat([before, last], dim=2)[:, :, -width:]
