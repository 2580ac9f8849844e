"""What a prefill leaves behind: to decode from, to hand on, or to keep on disk."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ..config import KV_PLACEMENTS
from ..hosts import HostGroup
from ..input.model_inputs import ModelInputs, VisualInput
from ..kv.cache import ShardedCache
from ..kv.storage import (
    Manifest,
    ModelIdentity,
    SavedKV,
    Shard,
    StorageError,
    VisualIdentity,
    Writer,
    alone_in,
)
from ..layout import ContextLayout, plan_layout, split_evenly
from ..model.digest import config_digest
from ..model.parts import ModelParts, inspect_model
from ..stats import StageTimer


class HandoffCache(DynamicCache):
    """KV of the first tokens of a prompt, for transformers to go on from by one sequence.

    Its assisted decoding would run the whole prompt on top of what such a cache holds, and say wrong tokens.

    Args:
        num_tokens: so many will be put into it.
    """

    def __init__(self, num_tokens: int):
        super().__init__()
        self._num_tokens = num_tokens

    def activate_past_recording(self):
        # Assisted decoding asks for it first of all, plain decoding after it has run the rest of the prompt.
        if self.get_seq_length() <= self._num_tokens:
            raise ValueError(
                "assistant_model and prompt_lookup_num_tokens run the prompt again on top of its KV, which gives "
                "wrong tokens; for speculative decoding use Engine(speculate=…), or launch/infer.py --speculate"
            )
        super().activate_past_recording()

    def update(self, key_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if key_states.shape[0] != 1:
            raise ValueError(
                "the KV is of one sequence: num_beams and num_return_sequences must be 1; for another answer call "
                "generate() again, with new generate_inputs()"
            )
        return super().update(key_states, *args, **kwargs)


@dataclass
class PrefillResult:
    """A prompt whose KV is computed, ready to decode.

    Attributes:
        logits: ``[1, V]`` of the last prompt token, on every host.
        layout: which host computed and keeps what.
        method: the method that really ran (``"full"`` where the prompt or the group did not allow another).
        exact: whether the KV is that of full attention.
        inputs: the prompt.
        reused: what was kept from an earlier question: ``"embeddings"``, or ``"kv"`` where only the question was
            run; else None.
        timer: stage times so far; ``timer.summary()`` is collective.
    """

    logits: Tensor = field(repr=False)
    layout: ContextLayout
    method: str
    exact: bool
    inputs: ModelInputs = field(repr=False)
    timer: StageTimer = field(repr=False)
    _hosts: HostGroup = field(repr=False)
    _model: Callable[[], ModelIdentity] = field(repr=False)
    _shards: ShardedCache | None = field(repr=False)
    _gathered: DynamicCache | None = field(repr=False, default=None)
    _video_sha256: str | None = field(repr=False, default=None)  # of loaded KV, whose video is not at hand
    reused: str | None = None

    def __repr__(self) -> str:
        kv = "gathered" if self._shards is None else "sharded"
        reused = "" if self.reused is None else f", reused={self.reused!r}"
        what = f"{self.num_tokens} tokens, method={self.method!r}, exact={self.exact}, kv={kv!r}{reused}"
        return f"PrefillResult({what}, {self._hosts})"

    @property
    def num_tokens(self) -> int:
        """n, the tokens of the prompt."""
        return self.layout.num_tokens

    @property
    def next_position(self) -> int:
        """The rotary position of the first generated token: one past the last prompt token's."""
        return self.inputs.next_position

    @property
    def shards(self) -> ShardedCache | None:
        """This host's share of the KV; None once it was gathered on host 0."""
        return self._shards

    def to_dynamic_cache(self, host: int = 0) -> DynamicCache | None:
        """The whole KV as a plain transformers cache, in position order, on one host; collective.

        Args:
            host: who gets it. With ``kv="gathered"`` the KV is on host 0 already and no data travels.

        Returns:
            A DynamicCache of n tokens per layer, ``[1, Hkv, n, D]``, on ``host``; None on the others. It may
            share memory with this result; growing or cropping it leaves this result as it is. With tensor
            parallelism every member of the host gets that of its KV heads.

        Raises:
            ValueError: the KV was gathered on host 0 and another host is asked for.
        """
        cache = self._gathered
        if self._shards is not None:
            cache = self._shards.gather(self._hosts, host)
        elif host != 0:
            raise ValueError(f"the KV was gathered on host 0; prefill with kv='sharded' to get it on host {host}")
        return None if cache is None else first_tokens(cache, self.num_tokens, DynamicCache())

    def generate_inputs(self) -> dict[str, Any]:
        """Keyword arguments with which plain ``model.generate`` continues from this prefill, on host 0.

        The whole prompt, an all-ones mask, explicit positions, and a cache of all tokens but the last, which
        ``generate`` then runs itself. Collective where the KV is sharded. Empty on the other hosts. With tensor
        parallelism all members of host 0 have to call ``generate``, with the same settings.

        Not together with ``assistant_model`` or ``prompt_lookup_num_tokens``, which run the whole prompt again, on
        top of this KV, nor with several beams or returned sequences: the cache refuses them with a ValueError.
        ``generate`` grows the cache: ask for these arguments anew for every call. Who appends tokens to
        ``input_ids`` has to append to the mask and, one further each, to ``position_ids`` as well.
        """
        cache = self.to_dynamic_cache(host=0)
        if cache is None:
            return {}
        device = cache.layers[0].keys.device
        input_ids = self.inputs.input_ids.to(device)
        position_ids = self.inputs.position_ids.to(device)
        if position_ids.dim() == 3:
            # Row 0 holds plain text positions, from which transformers builds its masks.
            text_positions = torch.arange(self.num_tokens, device=device)[None, None]
            position_ids = torch.cat([text_positions, position_ids])
        num_handed = self.num_tokens - 1
        return {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            "position_ids": position_ids,
            "past_key_values": first_tokens(cache, num_handed, HandoffCache(num_handed)),
        }

    def save(self, path: str | Path) -> None:
        """Write the KV to a directory, for :func:`apbv.load` on any number of hosts; collective.

        Each host writes what it holds. What the directory held before stays until all of the new is there.

        Args:
            path: all hosts have to see the same directory.

        Raises:
            StorageError: it cannot be written, somebody else is saving there, or the hosts do not share it.
            HostError: another host failed.
        """
        path, hosts = Path(path), self._hosts
        with ExitStack() as stack:
            with hosts.local_stage("saving the KV"):
                if hosts.is_leader:
                    stack.enter_context(alone_in(path))
            (number,) = hosts.broadcast_ints([Writer.new_generation()] if hosts.is_leader else None, 1)
            writer = Writer(path, Writer.folder_name(number))
            try:
                with hosts.local_stage("saving the KV"):
                    shard = self._write_shard(writer)
                shards = hosts.gather_json(None if shard is None else asdict(shard))
                with hosts.local_stage("saving the KV"):
                    if hosts.is_leader:
                        writer.publish(self._manifest(writer, [Shard.of(each) for each in shards if each]))
            except BaseException:
                if hosts.is_leader:
                    writer.discard()
                raise

    def _write_shard(self, writer: Writer) -> Shard | None:
        """What this host holds; None where that is nothing."""
        hosts = self._hosts
        if self._shards is not None:
            cache, spans = self._shards, self.layout.cache_spans(hosts.rank)
        else:
            cache, spans = self.to_dynamic_cache(), (range(self.num_tokens),)
        if cache is None or not any(map(len, spans)):
            return None
        rows = sum(map(len, spans))
        layers = [(layer.keys[:, :, :rows], layer.values[:, :, :rows]) for layer in cache.layers]
        number = hosts.rank * hosts.tensor_parallel_size + hosts.tensor_parallel_rank
        num_kv_heads = layers[0][0].shape[1] * hosts.tensor_parallel_size
        return writer.write_shard(number, spans, _own_heads(num_kv_heads, hosts), layers)

    def _manifest(self, writer: Writer, shards: list[Shard]) -> Manifest:
        """By the leader, which has written a shard itself."""
        inputs, layout = self.inputs, self.layout
        layers = (self._shards or self._gathered).layers
        positions = inputs.position_ids[:, 0] if inputs.position_ids.dim() == 3 else inputs.position_ids[0]
        visual = inputs.visual
        return Manifest(
            generation=writer.generation,
            apbv_version=version("apbv"),
            model=self._model(),
            dtype=str(layers[0].keys.dtype).removeprefix("torch."),
            num_layers=len(layers),
            num_kv_heads=max(shard.kv_heads[1] for shard in shards),
            head_dim=layers[0].keys.shape[-1],
            num_tokens=self.num_tokens,
            token_ids=tuple(inputs.input_ids[0].tolist()),
            context_start=inputs.context_start,
            query_start=inputs.query_start,
            positions=inputs.position_rule,
            rope_delta=int(positions.max()) + 1 - self.num_tokens if positions.dim() == 2 else None,
            visual=visual
            and VisualIdentity(
                visual.kind,
                inputs.num_visual_tokens,
                visual.source.file.sha256() if visual.source else self._video_sha256,
            ),
            method=self.method,
            exact=self.exact,
            anchor_len=len(layout.anchor),
            passing_len=layout.passing_len,
            prompt=writer.write_prompt(self.logits, positions),
            shards=tuple(shards),
        )


def load(
    path: str | Path,
    model: PreTrainedModel | None = None,
    *,
    hosts: HostGroup | None = None,
    kv: str = "gathered",
) -> PrefillResult:
    """What :meth:`PrefillResult.save` wrote, on as many hosts as there are now; collective.

    Args:
        path: the directory; every host that is to hold KV has to see it.
        model: who will read the KV; checked to be the one that wrote it. None: the caller knows.
        hosts: who takes part; ``HostGroup.from_env()`` by default.
        kv: where the KV goes: all of it to host 0, or its shares to every host, as in :class:`apbv.PrefillConfig`.

    Raises:
        StorageError: there is nothing, or it is incomplete, changed, or of another model; on every host.
        HostError: another host failed.
    """
    hosts = hosts or HostGroup.from_env()
    timer = StageTimer(hosts)
    with hosts.local_stage("loading the KV"), timer.stage("handoff"):
        if kv not in KV_PLACEMENTS:
            raise ValueError(f"kv must be one of {', '.join(KV_PLACEMENTS)}, not {kv!r}")
        saved = SavedKV.open(path)
        manifest = saved.manifest
        if model is not None:
            _require_written_by(inspect_model(model), saved)
        prompt = saved.prompt()
        inputs = _stored_inputs(manifest, prompt["position_ids"], hosts)
        query_start = min(manifest.query_start, manifest.num_tokens - 1)
        layout = plan_layout(
            num_hosts=hosts.size,
            num_tokens=manifest.num_tokens,
            context_start=manifest.context_start,
            query_start=query_start,
            # Star's on a single host is all of the context, which leaves nothing to share out.
            anchor_len=manifest.anchor_len if manifest.anchor_len < query_start else 0,
            passing_len=manifest.passing_len,
            zigzag=True,
        )
        shards = gathered = None
        if kv == "sharded":
            shards = ShardedCache.of_shares(
                _read_layers(saved, layout.cache_spans(hosts.rank), hosts), layout, hosts.rank
            )
        elif hosts.rank == 0:
            gathered = DynamicCache(_read_layers(saved, [range(manifest.num_tokens)], hosts))
    hosts.require_same("the saved KV", repr(manifest).encode())
    return PrefillResult(
        logits=prompt["logits"].to(hosts.device),
        layout=layout,
        method=manifest.method,
        exact=manifest.exact,
        inputs=inputs,
        timer=timer,
        _hosts=hosts,
        _model=lambda: manifest.model,
        _shards=shards,
        _gathered=gathered,
        _video_sha256=manifest.visual and manifest.visual.sha256,
    )


def identify(parts: ModelParts) -> ModelIdentity:
    """Which model this is, so that nobody reads another's KV."""
    config = parts.model.config
    return ModelIdentity(
        name=str(config.name_or_path),
        revision=getattr(config, "_commit_hash", None),
        family=parts.family,
        config_sha256=config_digest(config),
        weights_sha256=parts.weights_digest(),
    )


def _require_written_by(parts: ModelParts, saved: SavedKV) -> None:
    """Raises StorageError where another model wrote the KV, or in another precision."""
    writer, reader = saved.manifest.model, identify(parts)
    member, _ = parts.tensor_parallel
    for name, what in (
        ("family", "a model of another family"),
        ("config_sha256", "a model with another configuration"),
        ("weights_sha256", "a model with other weights"),
    ):
        if name == "weights_sha256" and member != 0:
            continue  # of the first KV head, which the first member has
        if getattr(writer, name) != getattr(reader, name):
            raise StorageError(
                f"the KV in {saved.path} was computed by {what}: {writer.name} ({writer.family}), "
                f"not {reader.name} ({reader.family})"
            )
    if saved.manifest.torch_dtype != parts.dtype:
        raise StorageError(f"the KV in {saved.path} is {saved.manifest.dtype}, the model {parts.dtype}")


def _stored_inputs(manifest: Manifest, position_ids: Tensor, hosts: HostGroup) -> ModelInputs:
    visual = None
    if manifest.visual is not None:
        rows = range(manifest.visual.num_tokens)
        nothing = range(rows.stop, rows.stop)
        pieces = (rows, *[nothing] * (hosts.size - 1))
        visual = VisualInput(manifest.visual.kind, pieces, None, 0, 0, False)
    return ModelInputs(
        input_ids=torch.tensor([manifest.token_ids]),
        position_ids=position_ids[:, None] if position_ids.dim() == 2 else position_ids[None],
        context_start=manifest.context_start,
        query_start=manifest.query_start,
        visual=visual,
        position_rule=manifest.positions,
    )


def _read_layers(saved: SavedKV, spans: Sequence[range], hosts: HostGroup) -> list[tuple[Tensor, Tensor]]:
    """Keys and values ``[1, Hkv, T, D]`` of some tokens, of every layer and this process's heads."""
    if saved.manifest.num_kv_heads % hosts.tensor_parallel_size:
        raise StorageError(
            f"the KV in {saved.path} has {saved.manifest.num_kv_heads} KV heads, which "
            f"{hosts.tensor_parallel_size} processes cannot share evenly"
        )
    heads = _own_heads(saved.manifest.num_kv_heads, hosts)
    return [
        tuple(states[None].to(hosts.device) for states in saved.layer(index, spans, heads))
        for index in range(saved.manifest.num_layers)
    ]


def _own_heads(num_kv_heads: int, hosts: HostGroup) -> range:
    """Which of the whole model's KV heads this process has."""
    return split_evenly(range(num_kv_heads), hosts.tensor_parallel_size)[hosts.tensor_parallel_rank]


def first_tokens(cache: DynamicCache, num_tokens: int, view: DynamicCache) -> DynamicCache:
    """The first tokens of a cache in a cache of its own, until now empty, that shares its memory."""
    for index, layer in enumerate(cache.layers):
        empty = layer.keys[:, :, :0]
        view.update(empty, empty, index)
        view.layers[index].keys = layer.keys[:, :, :num_tokens]
        view.layers[index].values = layer.values[:, :, :num_tokens]
    return view
