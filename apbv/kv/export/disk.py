"""Saves a prefill's KV to a directory, for :func:`apbv.load` on any number of hosts."""

import secrets
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from ..facts import from_json
from ..storage import Manifest, Shard, StoredReduction, StoredVisual, Writer
from .prefilled import PrefilledKV, exported_share, facts_of, positions_of


def save(prefilled: PrefilledKV, path: str | Path) -> None:
    """Write the KV to a directory; collective; see :meth:`apbv.PrefillResult.save`."""
    path = Path(path)
    hosts = prefilled.kv.hosts
    chosen = secrets.token_hex(8).encode() if hosts.is_leader else b""
    generation = hosts.broadcast_bytes(chosen).decode()
    writer = Writer(path, generation)
    try:
        # Every process writes what it holds.
        with hosts.local_stage("saving the KV"):
            number = hosts.rank * hosts.tensor_parallel_size + hosts.tensor_parallel_rank
            shard = None
            share = exported_share(prefilled)
            if share is not None:
                shard = writer.write_shard(number, share.tokens, share.kv_heads, share.layers)
        gathered = hosts.gather_json(None if shard is None else asdict(shard))

        # The leader publishes all of it at once.
        with hosts.local_stage("saving the KV"):
            if hosts.is_leader:
                shards = tuple(
                    from_json(Shard, fields) for fields in gathered if fields is not None
                )
                writer.publish(_manifest(prefilled, writer, shards))
    except BaseException:
        if hosts.is_leader:
            writer.discard()
        raise


def _manifest(prefilled: PrefilledKV, writer: Writer, shards: tuple[Shard, ...]) -> Manifest:
    """Return the manifest of all hosts' files; on the leader, which always holds some KV."""
    inputs = prefilled.inputs
    layout = prefilled.layout
    visual = None
    if inputs.visual is not None:
        visual = StoredVisual(inputs.visual.kind, inputs.num_visual_tokens)
    reduction = None
    if prefilled.reduction is not None:
        reduction = StoredReduction(
            prefilled.reduction.method,
            float(prefilled.reduction.ratio),
            prefilled.reduction.num_before,
            tuple(prefilled.reduction.kept.tolist()),
        )
    tensors = {"logits": prefilled.logits, "position_ids": positions_of(prefilled)}
    if prefilled.kv.states is not None:
        tensors |= prefilled.kv.states.named
    return Manifest(
        **asdict(facts_of(prefilled)),
        generation=writer.generation,
        apbv_version=version("apbv"),
        token_ids=tuple(inputs.input_ids[0].tolist()),
        context_start=inputs.context_start,
        query_start=inputs.query_start,
        visual=visual,
        density=prefilled.density,
        reduction=reduction,
        anchor_len=len(layout.anchor),
        passing_len=layout.passing_len,
        prompt=writer.write_prompt(**tensors),
        shards=shards,
    )
