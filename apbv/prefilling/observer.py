"""This module lets an observer watch the attention and the hidden states of a prefill."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

from torch import Tensor

from ..hosts import HostGroup
from ..input.model_inputs import ModelInputs
from ..layout import ContextLayout, offsets_within
from ..model.attention import LayerAttention
from ..model.parts import ModelParts
from .methods import PrefillMethod


class PrefillObserver(Protocol):
    """A PrefillObserver watches the prefill of a prompt, on every host that computes.

    Attributes:
        hidden_layers: the decoder layers whose inputs it is shown (0: the embeddings); possibly none.
        wants_passed: whether it is told which KV pairs are passed on.
    """

    hidden_layers: tuple[int, ...]
    wants_passed: bool

    def begin(self, inputs: ModelInputs, layout: ContextLayout, hosts: HostGroup) -> None:
        """Prepare for the prefill of a prompt in this layout."""

    def observe(self, q_query: Tensor, keys: Sequence[Tensor], scale: float) -> None:
        """Take one layer's query states of the question, and the keys of the tokens that this host owns.

        Args:
            q_query: ``[1, Hq, n_q, D]``, post-RoPE.
            keys: ``[1, Hkv, T_i, D]`` for each of the layout's ``cache_spans`` of this host.
        """

    def observe_hidden(self, layer: int, query: Tensor | None, owned: Sequence[Tensor] | None) -> None:
        """Take a layer's input hidden states, each in the forward pass that computes them for good.

        Args:
            query: those of the question, ``[n_q, d]``; None in a pass without it.
            owned: those of the tokens that this host owns, ``[T_i, d]`` for each of the layout's ``cache_spans``
                of this host; None in a pass without them.
        """

    def observe_nothing(self) -> None:
        """Take part in the other hosts' exchanges, on a host that computes nothing of the prompt."""

    def observe_passed(self, block: int, chosen: Tensor) -> None:
        """Take one layer's choice of a block's KV pairs to pass on; see ``PrefillMethod.on_passed``."""


class ObservedAttention:
    """An ObservedAttention shows an observer every layer's queries and keys before it computes the attention.

    Args:
        query_rows, owned_rows: rows of the query, and of this host's cache spans, among the local tokens.
    """

    def __init__(
        self,
        attention: LayerAttention,
        observer: PrefillObserver,
        query_rows: range,
        owned_rows: Sequence[range],
    ):
        self._attention, self._observer = attention, observer
        self._query_rows, self._owned_rows = query_rows, owned_rows

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int) -> Tensor:
        rows = self._query_rows
        keys = [k[:, :, owned.start : owned.stop] for owned in self._owned_rows]
        self._observer.observe(q[:, :, rows.start : rows.stop], keys, scale)
        return self._attention(q, k, v, scale, layer)


def hidden_hooks(
    parts: ModelParts, observer: PrefillObserver, query: range | None, owned: list[range] | None
) -> ExitStack:
    """Show the observer the inputs of its ``hidden_layers``, for as long as the returned stack is open."""
    hooks = ExitStack()
    for layer in observer.hidden_layers:

        def show(module, args, kwargs, layer=layer):
            hidden = (args[0] if args else kwargs["hidden_states"])[0]
            observer.observe_hidden(
                layer,
                None if query is None else hidden[query.start : query.stop],
                None if owned is None else [hidden[rows.start : rows.stop] for rows in owned],
            )

        hook = parts.language_model.layers[layer].register_forward_pre_hook(show, with_kwargs=True)
        hooks.callback(hook.remove)
    return hooks


class ObserverWatch:
    """An ObserverWatch lets an observer watch all layers of a prefill; see :class:`~apbv.prefilling.stages.Watch`.

    Args:
        observer: the observer; None: nobody watches.
        layout, host: the prompt's layout, and this host.
    """

    def __init__(
        self,
        observer: PrefillObserver | None,
        parts: ModelParts,
        inputs: ModelInputs,
        layout: ContextLayout,
        host: int,
    ):
        self._observer, self._parts = observer, parts
        self._question = range(inputs.query_start, inputs.num_tokens)
        self._local, self._owned = layout.local_spans(host), layout.cache_spans(host)

    @contextmanager
    def context_pass(self, attention: PrefillMethod) -> Iterator[LayerAttention]:
        """Watch the pass of the context, with which the question is computed, too, unless it has its own pass."""
        if self._observer is None:
            yield attention
            return
        query, *owned = offsets_within(self._local, [self._question, *self._owned])
        if attention.separate_query:
            query = None
        else:
            attention = ObservedAttention(attention, self._observer, query, owned)
        with hidden_hooks(self._parts, self._observer, query, owned):
            yield attention

    @contextmanager
    def query_pass(self, attention: LayerAttention) -> Iterator[LayerAttention]:
        """Watch the pass of the question alone."""
        if self._observer is None:
            yield attention
            return
        query, owned = range(len(self._question)), offsets_within(self._owned, self._owned)
        attention = ObservedAttention(attention, self._observer, query, owned)
        with hidden_hooks(self._parts, self._observer, query, None):
            yield attention

    def no_pass(self) -> None:
        """Let the observer take part in exchanges."""
        if self._observer is not None:
            self._observer.observe_nothing()
