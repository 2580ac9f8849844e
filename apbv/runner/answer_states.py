"""A hybrid's states of linear attention behind the tokens of an answer, which can go back.

KV of rejected tokens is cut off. A state cannot be cut: it has read them. So the states behind the
last token that certainly stays are kept, and what linear attention was given of the tokens since.
To go back, the rule is applied from those states to the tokens that stay. That reads no weights,
and is only done where tokens were rejected.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ..model.linear_attention import Convolution, LinearStates, Rule

# Of a layer: the last inputs of its convolution [1, C, K], and the rule's state [1, Hv, Dk, Dv].
LayerStates = tuple[Tensor, Tensor]
RuleInputs = tuple[Tensor, ...]  # q, k, v, g and beta, [1, S, …] each
# As many tokens take one step of the rule after the other: a sequence is padded to a chunk of 64.
_MOST_STEPS = 4


class _Layer:
    """The states of one layer, and what it was given since the settled ones.

    Attributes:
        settled: behind the last token that certainly stays.
        newest: behind the last token that was run.
        mixed: the inputs of the convolution since the settled states, ``[1, C, S]`` of each run.
        inputs: those of the rule since then, of each run.
        rule: the layer's; None before its first run.
    """

    def __init__(self, states: LayerStates):
        self.settled = states
        self.newest = states
        self.mixed: list[Tensor] = []
        self.inputs: list[RuleInputs] = []
        self.rule: Rule | None = None

    @property
    def _num_logged(self) -> int:
        """How many tokens were run since the settled states."""
        return sum(mixed.shape[2] for mixed in self.mixed)

    def cut(self, num_kept: int) -> None:
        """Go back to the states behind the first tokens since the settled ones."""
        if self._num_logged == num_kept:
            return
        # Of a run that failed a layer may have no inputs, or only those of its convolution.
        self.newest, self.mixed, self.inputs = self._behind(num_kept)

    def settle(self, count: int) -> None:
        """Settle the states behind the first tokens since the settled ones."""
        if self._num_logged == count:
            self.settled = self.newest
            self.mixed = []
            self.inputs = []
            return
        behind, _, _ = self._behind(count)
        self.mixed = [torch.cat(self.mixed, dim=2)[:, :, count:]]
        self.inputs = [tuple(states[:, count:] for states in _joined(self.inputs))]
        self.settled = behind

    def behind(self, count: int) -> LayerStates:
        """Return the states behind the first tokens since the settled ones."""
        states, _, _ = self._behind(count)
        return states

    def _behind(self, count: int) -> tuple[LayerStates, list[Tensor], list[RuleInputs]]:
        """Return the states behind the first tokens since the settled ones, and their inputs."""
        if count == 0:
            return self.settled, [], []
        mixed = torch.cat(self.mixed, dim=2)[:, :, :count]
        inputs = tuple(states[:, :count] for states in _joined(self.inputs))
        last_inputs, state = self.settled
        last_inputs = torch.cat([last_inputs, mixed], dim=2)[:, :, -last_inputs.shape[2] :]
        assert self.rule is not None, "tokens were run"
        _, state = self.rule(inputs, state, steps=count <= _MOST_STEPS)
        return (last_inputs, state), [mixed], [inputs]


def _joined(runs: Sequence[RuleInputs]) -> RuleInputs:
    """Join the inputs of runs that follow one another."""
    return tuple(torch.cat(parts, dim=1) for parts in zip(*runs, strict=True))


class AnswerStates:
    """States of all linear attention layers behind the tokens of one answer.

    Args:
        states: those behind the prompt, which stay as they are.

    Attributes:
        num_run: how many of the answer's tokens the model has run. Less: the last ones are taken
            back.
        num_certain: how many of them, the first, are never taken back.
        layers: the states by layer.
    """

    def __init__(self, states: LinearStates):
        self.layers = [_Layer(tensors) for tensors in states.tensors]
        self.num_run = 0
        self.num_certain = 0
        self._num_settled = 0

    def prepare(self) -> None:
        """Go back to the tokens that count, before more are run or the states are read."""
        assert self.num_run >= self._num_settled, "tokens that were certain are never taken back"
        num_settled = max(self._num_settled, min(self.num_certain, self.num_run))
        for layer in self.layers:
            layer.cut(self.num_run - self._num_settled)
            layer.settle(num_settled - self._num_settled)
        self._num_settled = num_settled

    def replace_prompts(self, states: LinearStates) -> None:
        """Change a prompt's states to those behind all tokens that were run since.

        These are its question, and none of them is certain yet. The former states are those before
        the question.
        """
        states.before_question = states.copy()
        before_last = [layer.behind(self.num_run - 1) for layer in self.layers]
        states.before_last = LinearStates(states.places, before_last)
        for index, layer in enumerate(self.layers):
            states.put(index, *layer.newest)

    def take_over(self, other: "AnswerStates") -> None:
        """Go on from another model's states behind the same tokens."""
        other.prepare()
        self.layers = [_Layer(layer.newest) for layer in other.layers]
        self.num_run = other.num_run
        self.num_certain = other.num_run
        self._num_settled = other.num_run


class RunStates:
    """Computes the linear attention of new tokens of several answers in one forward pass.

    It is a :class:`~apbv.model.linear_attention.LinearAttention`. Rows of answers follow one
    another. What is shorter than the longest answer's is padded: a row with g and beta of 0 leaves
    the rule's state as it is.

    Args:
        answers: the states, which are prepared.
        counts: how many tokens of each answer there are.
    """

    def __init__(self, answers: Sequence[AnswerStates], counts: Sequence[int]):
        self._answers = answers
        self._counts = counts

    def convolve(self, layer: int, mixed: Tensor, convolution: Convolution) -> Tensor:
        """Convolve the inputs ``[1, C, S]`` of a layer."""
        layers = [answer.layers[layer] for answer in self._answers]
        pieces = mixed.split(list(self._counts), dim=2)
        before = torch.cat([states.newest[0] for states in layers])  # [R, C, K]
        most = max(self._counts)
        new = torch.cat([functional.pad(piece, (0, most - piece.shape[2])) for piece in pieces])
        out = convolution(torch.cat([before, new], dim=2))[:, :, -most:]

        # Keep the last inputs.
        for states, piece in zip(layers, pieces, strict=True):
            last_inputs, state = states.newest
            width = last_inputs.shape[2]
            last_inputs = torch.cat([last_inputs, piece], dim=2)[:, :, -width:]
            states.newest = (last_inputs, state)
            states.mixed.append(piece)
        return self._unpadded(out, dim=2)

    def attend(self, layer: int, inputs: RuleInputs, rule: Rule) -> Tensor:
        """Apply the rule to the rows ``[1, S, …]`` of a layer."""
        layers = [answer.layers[layer] for answer in self._answers]
        most = max(self._counts)
        before = torch.cat([states.newest[1] for states in layers])  # [R, Hv, Dk, Dv]
        pieces = [states.split(list(self._counts), dim=1) for states in inputs]
        padded = [torch.cat([_pad_rows(piece, most) for piece in of_input]) for of_input in pieces]
        out, after = rule(padded, before, steps=most <= _MOST_STEPS)

        # Keep the states.
        for row, states in enumerate(layers):
            last_inputs, _ = states.newest
            states.newest = (last_inputs, after[row : row + 1])
            states.inputs.append(tuple(of_input[row] for of_input in pieces))
            states.rule = rule
        return self._unpadded(out, dim=1)

    def _unpadded(self, out: Tensor, dim: int) -> Tensor:
        """Join what was computed of the answers' tokens, which are along a dimension."""
        pieces = []
        for row, count in enumerate(self._counts):
            pieces.append(out[row : row + 1].narrow(dim, 0, count))
        return torch.cat(pieces, dim=dim)


def _pad_rows(states: Tensor, length: int) -> Tensor:
    """Pad ``[1, S, …]`` with zeros to a number of rows."""
    num_missing = length - states.shape[1]
    if num_missing == 0:
        return states
    return torch.cat([states, states.new_zeros(1, num_missing, *states.shape[2:])], dim=1)
