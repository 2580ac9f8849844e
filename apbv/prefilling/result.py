"""Result of a prefill, which can be decoded, passed to transformers, saved or exported."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import DynamicCache

from ..input.prompts.model_inputs import ModelInputs
from ..kv.export import disk, huggingface, network
from ..kv.facts import ModelIdentity
from ..kv.offers import Offers
from ..kv.placement import PlacedKV
from ..kv.ticket import Ticket
from ..layout import ContextLayout
from ..runner.dynamic_pruning import DecodePruning
from ..stats import StageTimer
from .reduction.choosing import Reduction


@dataclass
class PrefillResult:
    """Prefilled prompt, ready to decode.

    Attributes:
        logits: ``[1, V]`` of the last prompt token, on every host.
        layout: which host computed and keeps which tokens.
        method: the method that actually ran (``"full"`` if the prompt or the group did not allow
            another).
        exact: whether the KV is that of full attention over the whole prompt.
        inputs: the prompt, without pixels.
        reduction: which visual tokens were pruned; None if none was.
        density: fraction of the causal scores that was computed, of those from which blocks were
            selected (see :class:`apbv.SparseConfig`), on all hosts together; None if attention is
            dense.
        decode_pruning: how decoding steps leave out visual tokens; None: none are, or the KV was
            loaded.
        warning: what is known to cost accuracy with the prefill's lengths; None: nothing, or KV
            that was loaded.
        reused: cache that was hit: ``"embeddings"``, or ``"kv"`` if only the question was run; else
            None.
        timer: stage times so far; ``timer.summary()`` is collective.
        kv: the KV, gathered on one host (host 0 by default) or sharded.
        num_kv_heads: of the whole model.
        model: returns the identity of the model that prefilled, for saved KV; called on demand,
            because it reads weights.
    """

    logits: Tensor = field(repr=False)
    layout: ContextLayout
    method: str
    exact: bool
    inputs: ModelInputs = field(repr=False)
    timer: StageTimer = field(repr=False)
    kv: PlacedKV = field(repr=False)
    model: Callable[[], ModelIdentity] = field(repr=False)
    num_kv_heads: int = field(repr=False)
    reused: str | None = None
    reduction: Reduction | None = field(repr=False, default=None)
    density: float | None = None
    warning: str | None = None
    decode_pruning: DecodePruning | None = None

    @property
    def num_tokens(self) -> int:
        """n, the tokens of the prompt."""
        return self.layout.num_tokens

    @property
    def next_position(self) -> int:
        """The rotary position of the first generated token: one past the last prompt token's."""
        return self.inputs.next_position

    def to_dynamic_cache(self, host: int = 0) -> DynamicCache | None:
        """The whole KV as a plain transformers cache, in position order, on one host; collective.

        A hybrid's has copies of the states of linear attention between the layers of KV.

        Args:
            host: the host that gets it. With ``kv="gathered"`` the KV is on host 0 already and no
                data travels.

        Returns:
            A DynamicCache of n tokens per layer, ``[1, Hkv, n, D]``, on ``host``; None on the
            others. It may share memory with this result; growing or cropping it leaves this result
            as it is. With tensor parallelism every TP rank gets that of its KV heads.

        Raises:
            InvalidRequestError: the KV was gathered on host 0 and ``host`` is another one.
        """
        return huggingface.to_dynamic_cache(self, host)

    def generate_inputs(self) -> dict[str, Any]:
        """Return arguments with which ``model.generate`` continues from this prefill, on host 0.

        They are the whole prompt, an all-ones mask, explicit positions, and a cache of all tokens
        but the last, which ``generate`` then runs itself. Collective where the KV is sharded. Empty
        on the other hosts. With tensor parallelism all TP ranks of host 0 must call ``generate``,
        with the same settings.

        The cache rejects with a ValueError ``assistant_model`` and ``prompt_lookup_num_tokens``,
        which run the whole prompt again on top of this KV, several beams, and several returned
        sequences. ``generate`` grows the cache: ask for these arguments anew for every call. If you
        append tokens to ``input_ids``, append to the mask and, one position further for each, to
        ``position_ids`` as well.

        Raises:
            InvalidRequestError: the model is a hybrid, whose states cannot take the last token
                back.
        """
        return huggingface.generate_inputs(self)

    def save(self, path: str | Path) -> None:
        """Write the KV to a directory, for :func:`apbv.load` on any number of hosts; collective.

        Each host writes the KV that it holds. The directory's earlier content stays until all of
        the new is there.

        Args:
            path: the directory; all hosts have to see the same one.

        Raises:
            StorageError: a file cannot be written, or the hosts do not share the directory.
            HostError: another host failed.
        """
        disk.save(self, path)

    def offer(self, offers: Offers) -> Ticket | None:
        """Export the KV to a consumer elsewhere, such as vLLM with apbv's connector; collective.

        A consumer renders the prompt itself, with all its visual tokens: a pruned prompt is
        rejected.

        The KV stays in the memory of the processes that hold it until the offer ends, even if this
        result is dropped, and a consumer fetches it from there.

        Args:
            offers: this process's offers.

        Returns:
            On the leader the ticket with which a consumer fetches it (``ticket.to_params()`` are
            the ``kv_transfer_params`` of a request to vLLM); None on the other processes.

        Raises:
            InvalidRequestError: visual tokens were pruned from the prompt, or the model is a
                hybrid.
            StorageError: the server is shutting down.
            HostError: another host failed.
        """
        return network.offer(self, offers)
