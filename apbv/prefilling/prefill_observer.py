"""Observes the language model in a prefill: the question's attention, and hidden states."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..device.copies import numbers_in, to_device
from ..hosts import HostGroup
from ..layout import ContextLayout
from ..model.forward import LayerRows, LayerStep
from .methods import PrefillMethod


@dataclass
class SplitPrompt:
    """A prompt's tokens, numbered from 0 to n - 1, and the hosts that compute and keep them.

    Attributes:
        method: computes their attention.
        query_start: the first token of the question.
        is_visual: which tokens are visual, bool ``[n]``.
        layout: how the method splits them.
        hosts: the hosts that compute.
        num_tokens: n.
        local: the tokens that this host computes, in the order of its rows.
    """

    method: PrefillMethod
    query_start: int
    is_visual: Tensor
    layout: ContextLayout = field(init=False)
    hosts: HostGroup = field(init=False)
    num_tokens: int = field(init=False)
    local: Tensor = field(init=False)

    def __post_init__(self):
        self.layout = self.method.layout
        self.hosts = self.method.hosts
        self.num_tokens = self.layout.num_tokens
        self.local = numbers_in(*self.layout.local_spans(self.hosts.rank))

    @property
    def question(self) -> Tensor:
        """The tokens of the question."""
        return torch.arange(self.query_start, self.num_tokens)

    @cached_property
    def owned(self) -> list[Tensor]:
        """The tokens whose KV each host keeps, in cache order."""
        return [numbers_in(*self.layout.cache_spans(host)) for host in range(self.hosts.size)]

    @cached_property
    def visual_rows(self) -> Tensor:
        """The indices of visual tokens among those that this host keeps, on its device."""
        is_visual = self.is_visual[self.owned[self.hosts.rank]]
        return to_device(is_visual.nonzero().flatten(), self.hosts.device)

    def rows_of(self, tokens: Tensor) -> Tensor:
        """Return the indices of tokens among this host's local ones."""
        row_of_token = torch.zeros(self.num_tokens, dtype=torch.long)
        row_of_token[self.local] = torch.arange(len(self.local))
        return row_of_token[tokens]


class PrefillObserver:
    """Observer of one prompt's prefill; every host observes the tokens that it keeps.

    The base class observes nothing.

    Attributes:
        prompt: the prompt, from :meth:`begin` on.
        wants_attention: whether it gets queries and keys of every layer.
        hidden_layers: the decoder layers whose inputs it gets (0: the embeddings).
        wants_output: whether it gets the output of the last norm.
        wants_question: whether it needs the whole question on one host.
    """

    prompt: SplitPrompt
    wants_attention = False
    hidden_layers: Collection[int] = ()
    wants_output = False
    wants_question = True

    def begin(self, prompt: SplitPrompt) -> None:
        """Prepare for the prefill."""
        self.prompt = prompt

    def request_early(self, offer: Callable[[Tensor], bool]) -> None:
        """Ask for the scores as soon as they are known, if that is before the prefill ends.

        Called on every host before the prefill, or on none. By default they are not known earlier.

        Args:
            offer: takes the scores; returns false to be called again in the next layer.
        """

    def on_layer(self, q: Tensor, keys: Tensor, scale: float, rows: Tensor) -> None:
        """Observe a layer's queries and keys; collective among the hosts that compute.

        Args:
            q: the question's query states ``[1, Hq, n_q, D]``, post-RoPE.
            keys: ``[1, Hkv, S, D]``, among them the keys of the T tokens that this host keeps.
            rows: the indices of these T keys, ``[T]`` in cache order.
        """

    def on_hidden(
        self, layer: int, hidden: Tensor, question: Tensor | None, owned: Tensor | None
    ) -> None:
        """Observe the input ``[S, d]`` of one of :attr:`hidden_layers`, in the final pass.

        Args:
            question: the question's rows; None in a pass without it.
            owned: the rows of the tokens that this host keeps, in cache order; None in a pass
                without them.
        """

    def on_output(self, hidden: Tensor, question: Tensor | None, owned: Tensor | None) -> None:
        """Observe the output ``[S, d]`` of the last norm, of every pass; see :meth:`on_hidden`."""

    def on_nothing(self) -> None:
        """Take part in the other hosts' collectives, on a host that computes nothing."""

    def result(self) -> Any:
        """Return the observation, the same on every host; collective, after the prefill."""

    def gathered(self, local: Tensor | None, *lead: int) -> Tensor:
        """Return scores ``[*lead, visual tokens]`` in fp32 on the CPU of every host; collective.

        Args:
            local: ``[*lead, T]`` of the visual tokens that this host keeps; None if it has no
                scores.
        """
        prompt = self.prompt
        hosts = prompt.hosts
        # Of every host the visual tokens that it keeps, in cache order, by number among all visual
        # tokens.
        number_of_token = prompt.is_visual.long().cumsum(0) - 1
        numbers = []
        for tokens in prompt.owned:
            visual_tokens = tokens[prompt.is_visual[tokens]]
            numbers.append(number_of_token[visual_tokens])
        if local is None:
            local = torch.zeros(*lead, len(numbers[hosts.rank]), device=hosts.device)
        lengths = [len(of_host) for of_host in numbers]
        gathered = hosts.gather_rows(local.float(), lengths, dim=len(lead)).wait()
        in_prompt_order = torch.cat(numbers).argsort()
        return torch.cat(gathered, dim=-1).cpu()[..., in_prompt_order]

    def over_hosts(self, lse: Tensor) -> Tensor:
        """Merge log-sum-exps over each host's keys into one over all keys.

        Collective where a prompt is split.
        """
        if not self.prompt.layout.is_split:
            return lse
        return self.prompt.hosts.all_gather(lse).wait().logsumexp(dim=0)


class ObservedPass(LayerStep):
    """Shows an observer one forward pass.

    Args:
        has_context: whether the pass has the context's tokens. Without, it has only the question,
            and its attention gets the keys that this host keeps.
        has_question: whether the pass is the last one of the question's tokens.
    """

    def __init__(
        self,
        observer: PrefillObserver,
        prompt: SplitPrompt,
        has_context: bool = True,
        has_question: bool = True,
    ):
        self._observer = observer
        self._device = prompt.hosts.device
        # The rows of the question, and of the tokens whose KV this host keeps.
        self._question: Tensor | None = None
        self._owned: Tensor | None = None
        if has_context:
            owned = prompt.rows_of(prompt.owned[prompt.hosts.rank])
            self._owned = to_device(owned, self._device)
        if has_question:
            question = prompt.question
            rows = prompt.rows_of(question) if has_context else question - prompt.query_start
            self._question = to_device(rows, self._device)

    def before(self, layer: int, rows: LayerRows) -> None:
        if layer in self._observer.hidden_layers:
            self._observer.on_hidden(layer, rows.hidden[0], self._question, self._owned)

    def on_output(self, hidden: Tensor) -> None:
        if self._observer.wants_output:
            self._observer.on_output(hidden[0], self._question, self._owned)

    def on_attention(self, q: Tensor, k: Tensor, scale: float, layer: int) -> None:
        if self._question is None or not self._observer.wants_attention:
            return
        owned = self._owned
        if owned is None:
            owned = torch.arange(k.shape[2], device=self._device)
        self._observer.on_layer(q[:, :, self._question], k, scale, owned)
