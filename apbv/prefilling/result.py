"""Result of a prefill, which can be decoded, passed to transformers, saved or exported."""

import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ..decode.answer import Answer
from ..decode.runner import Decoder
from ..device_copy import to_device
from ..hosts import HostGroup
from ..input.model_inputs import ModelInputs
from ..input.request import Request
from ..kv.cache import first_tokens
from ..kv.facts import KVFacts, ModelIdentity, digest_of_positions, digest_of_tokens, from_json
from ..kv.offers import Offers
from ..kv.placement import PlacedKV
from ..kv.sending import Share
from ..kv.storage import Manifest, Shard, StoredReduction, StoredVisual, Writer
from ..kv.ticket import Ticket, new_token, new_transfer
from ..layout import ContextLayout, split_evenly
from ..model.digest import config_digest
from ..model.parts import ModelParts
from ..refusals import refuse
from ..stats import StageTimer
from ..versions import CACHE_ARGUMENT
from .reduction.choosing import Reduction


class HandoffCache(DynamicCache):
    """A prompt's KV for transformers' ``generate``, which rejects unsupported options.

    Assisted decoding would run the whole prompt again on top of this KV, and return wrong tokens.

    Args:
        num_tokens: the number of tokens whose KV will be put into the cache.
    """

    def __init__(self, num_tokens: int):
        super().__init__()
        self._num_tokens = num_tokens

    def activate_past_recording(self):
        # Assisted decoding calls this first, plain decoding after it has run the rest of the
        # prompt.
        if self.get_seq_length() <= self._num_tokens:
            raise ValueError(
                "assistant_model and prompt_lookup_num_tokens run the prompt again on top of its "
                "KV, which gives wrong tokens; for speculative decoding use Engine(speculate=…), "
                "or launch/infer.py --speculate"
            )
        super().activate_past_recording()

    def update(self, key_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if key_states.shape[0] != 1:
            raise ValueError(
                "the KV is of one sequence: num_beams and num_return_sequences must be 1; for "
                "another answer call generate() again, with new generate_inputs()"
            )
        return super().update(key_states, *args, **kwargs)


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
        warning: what is known to cost accuracy with the prefill's lengths; None: nothing, or KV
            that was loaded.
        reused: cache that was hit: ``"embeddings"``, or ``"kv"`` if only the question was run; else
            None.
        timer: stage times so far; ``timer.summary()`` is collective.
        kv: the KV, gathered on one host (host 0 by default) or sharded.
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
    reused: str | None = None
    reduction: Reduction | None = field(repr=False, default=None)
    density: float | None = None
    warning: str | None = None

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
            ValueError: the KV was gathered on host 0 and ``host`` is another one.
        """
        cache = self.kv.to_dynamic_cache(host)
        states = self.kv.states
        if cache is None or states is None:
            return cache
        return states.among(cache)

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
            ValueError: the model is a hybrid, whose states cannot take the last token back.
        """
        refuse(handing_over="generate_inputs()", hybrid=self._hybrid)
        cache = self.to_dynamic_cache(host=0)
        if cache is None:
            return {}
        device = cache.layers[0].keys.device
        input_ids = to_device(self.inputs.input_ids, device)
        position_ids = to_device(self.inputs.position_ids, device)
        if position_ids.dim() == 3:
            # Row 0 holds plain text positions, from which transformers builds its masks.
            text_positions = torch.arange(self.num_tokens, device=device)[None, None]
            position_ids = torch.cat([text_positions, position_ids])
        num_handed = self.num_tokens - 1
        return {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            "position_ids": position_ids,
            CACHE_ARGUMENT: first_tokens(cache, num_handed, HandoffCache(num_handed)),
        }

    def begin_answer(self, parts: ModelParts, request: Request) -> Answer:
        """Begin an answer to this prompt, without tokens."""
        return Answer(
            decoder=Decoder(parts, self.kv, self.inputs.next_position),
            logits=self.logits[0],
            prompt_len=self.num_tokens,
            sampling=request.sampling,
            eos_token_ids=parts.eos_token_ids,
            on_token=request.on_token,
            on_first_token=self.timer.mark_first_token,
            stop=request.stop,
            prompt_ids=self.inputs.input_ids[0],
            logprobs=request.logprobs,
            grammar=None if request.grammar is None else request.grammar.copy(),
            ready=self.timer.prefilled.event,
        )

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
        path = Path(path)
        hosts = self.kv.hosts
        generation = secrets.token_hex(8).encode() if hosts.is_leader else b""
        generation = hosts.broadcast_bytes(generation).decode()
        writer = Writer(path, generation)
        try:
            with hosts.local_stage("saving the KV"):
                number = hosts.rank * hosts.tensor_parallel_size + hosts.tensor_parallel_rank
                shard = None
                share = self.kv.local_kv()
                if share is not None:
                    tokens, layers = share
                    shard = writer.write_shard(number, tokens, self._local_heads(), layers)
            gathered = hosts.gather_json(None if shard is None else asdict(shard))
            with hosts.local_stage("saving the KV"):
                if hosts.is_leader:
                    shards = tuple(
                        from_json(Shard, fields) for fields in gathered if fields is not None
                    )
                    writer.publish(self._manifest(writer, shards))
        except BaseException:
            if hosts.is_leader:
                writer.discard()
            raise

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
            ValueError: visual tokens were pruned from the prompt, or the model is a hybrid.
            StorageError: the server is shutting down.
            HostError: another host failed.
        """
        hosts = self.kv.hosts
        refuse(
            handing_over="offer()",
            reduction=None if self.reduction is None else self.reduction.method,
            hybrid=self._hybrid,
        )
        names = f"{new_transfer()} {new_token()}".encode() if hosts.is_leader else None
        transfer, token = hosts.broadcast_bytes(names).decode().split()
        try:
            with hosts.local_stage("offering the KV"):
                share = self.kv.local_kv()
                if share is not None:
                    tokens, layers = share
                    offers.hold(transfer, token, Share(tokens, self._local_heads(), layers))
                facts = asdict(self._facts()) if hosts.is_leader else {}
            addresses = hosts.gather_json(None if share is None else offers.address)
            if not hosts.is_leader:
                return None
            sources = []
            for address in addresses:
                if address is not None:
                    host, port = address
                    sources.append((host, port))
            ticket = Ticket(transfer=transfer, token=token, sources=tuple(sources), **facts)
            offers.publish(ticket)
            return ticket
        except BaseException:
            offers.drop(transfer)
            raise

    @property
    def _hybrid(self) -> str | None:
        """A hybrid model's name in a refusal; None for other models."""
        return None if self.kv.states is None else "hybrid"

    def _facts(self) -> KVFacts:
        """Describe the KV, on the leader."""
        layers = self.kv.cache.layers
        return KVFacts(
            **asdict(self.model()),
            num_tokens=self.num_tokens,
            tokens_sha256=digest_of_tokens(self.inputs.input_ids[0]),
            positions_sha256=digest_of_positions(self._positions()),
            position_rule=self.inputs.position_rule,
            dtype=str(layers[0].keys.dtype).removeprefix("torch."),
            num_layers=len(layers),
            num_kv_heads=layers[0].keys.shape[1] * self.kv.hosts.tensor_parallel_size,
            head_dim=layers[0].keys.shape[-1],
            method=self.method,
            exact=self.exact,
        )

    def _positions(self) -> Tensor:
        """Return the rotary positions to compare: ``[3, n]`` for M-RoPE models, else ``[n]``."""
        position_ids = self.inputs.position_ids
        return position_ids[:, 0] if position_ids.dim() == 3 else position_ids[0]

    def _local_heads(self) -> range:
        """Return this process's KV heads."""
        hosts = self.kv.hosts
        num_local_heads = self.kv.cache.layers[0].keys.shape[1]
        return own_heads(num_local_heads * hosts.tensor_parallel_size, hosts)

    def _manifest(self, writer: Writer, shards: tuple[Shard, ...]) -> Manifest:
        """Return the manifest of all hosts' files; on the leader, which always holds some KV."""
        inputs = self.inputs
        layout = self.layout
        visual = None
        if inputs.visual is not None:
            visual = StoredVisual(inputs.visual.kind, inputs.num_visual_tokens)
        reduction = None
        if self.reduction is not None:
            reduction = StoredReduction(
                self.reduction.method,
                float(self.reduction.ratio),
                self.reduction.num_before,
                tuple(self.reduction.kept.tolist()),
            )
        tensors = {"logits": self.logits, "position_ids": self._positions()}
        if self.kv.states is not None:
            tensors |= self.kv.states.named
        return Manifest(
            **asdict(self._facts()),
            generation=writer.generation,
            apbv_version=version("apbv"),
            token_ids=tuple(inputs.input_ids[0].tolist()),
            context_start=inputs.context_start,
            query_start=inputs.query_start,
            visual=visual,
            density=self.density,
            reduction=reduction,
            anchor_len=len(layout.anchor),
            passing_len=layout.passing_len,
            prompt=writer.write_prompt(**tensors),
            shards=shards,
        )


def own_heads(num_kv_heads: int, hosts: HostGroup) -> range:
    """Return the range of the whole model's KV heads that this process has."""
    return split_evenly(range(num_kv_heads), hosts.tensor_parallel_size)[hosts.tensor_parallel_rank]


def identify(parts: ModelParts) -> ModelIdentity:
    """Identify a model by its configuration and weights, so that no other model reads its KV."""
    config = parts.model.config
    return ModelIdentity(
        model=str(config.name_or_path),
        revision=getattr(config, "_commit_hash", None),
        family=parts.family,
        config_sha256=config_digest(config),
        weights_sha256=parts.weights_digest(),
    )
