"""KV on disk: what was saved is what is loaded, on any number of hosts, or it is refused with the
reason."""

import copy
import itertools
import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from functools import reduce
from operator import getitem
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import apbv
from apbv import Engine, HostGroup, PrefillConfig, StorageError, demo
from apbv.kv.facts import KVFacts
from apbv.kv.storage import SavedKV
from apbv.model.digest import config_digest

from apbv_tests import families
from apbv_tests.pool import start
from apbv_tests.prompts import ATTENDING, batch_of, build, reset_rope
from apbv_tests.tampering import flip_bit, remove, truncate

QUESTION = "name the letters in order"
FRAMES = 40
STEPS = 4


def engine_on(hosts: HostGroup, **settings) -> Engine:
    return Engine.from_pretrained(
        "demo", hosts=hosts, dtype="float32", prefill=PrefillConfig(**settings)
    )


def save_job(hosts: HostGroup, path: Path, settings: dict) -> list[int]:
    """Save a prompt, and only then answer it."""
    engine = engine_on(hosts, **settings)
    state = engine.prefill(QUESTION, video=demo.video_path(), num_frames=FRAMES)
    state.save(path)
    return engine.decode(state, max_new_tokens=STEPS).token_ids


def load_job(hosts: HostGroup, path: Path, kv: str) -> tuple:
    engine = engine_on(hosts)
    state = apbv.load(path, engine.model, hosts=hosts, kv=kv)
    assert (state.method, state.exact, state.inputs.num_visual_tokens) == (
        "apbv",
        False,
        2 * FRAMES,
    )
    state.save(path.with_name("again"))
    first, again = (SavedKV.open(folder).manifest for folder in (path, path.with_name("again")))
    assert KVFacts.of(again) == KVFacts.of(first) and again.visual == first.visual
    cache = state.to_dynamic_cache()
    layers = cache and [(layer.keys, layer.values) for layer in cache.layers]
    answer = engine.decode(state, max_new_tokens=STEPS)
    assert answer.stats["passing_len"] == 8
    return answer.token_ids, layers, state.logits


@pytest.fixture(scope="module")
def saved_once(pool, tmp_path_factory) -> tuple[Path, list[int]]:
    """What two hosts have saved, and the answer to it."""
    path = tmp_path_factory.mktemp("saved") / "kv"
    return path, pool.run(2, save_job, path, {"kv": "sharded", "passing_len": 8})[0]


def test_any_number_of_hosts_reads_what_two_have_written(pool, saved_once, tmp_path):
    pool.run(2, save_job, tmp_path, {"kv": "gathered", "passing_len": 8})
    tokens = saved_once[1]
    for path, num_shards, hosts, kv in (
        (saved_once[0], 2, 3, "sharded"),
        (tmp_path, 1, 1, "gathered"),
    ):
        saved = SavedKV.open(path)
        assert len(saved.manifest.shards) == num_shards
        (_, layers, _), *others = results = pool.run(hosts, load_job, path, kv)
        logits = saved.prompt()["logits"]
        assert all(result[0] == tokens and torch.equal(result[2], logits) for result in results)
        assert all(result[1] is None for result in others)
        for index, (keys, values) in enumerate(layers):
            stored = saved.layer(index)
            assert torch.equal(keys[0], stored[0]) and torch.equal(values[0], stored[1])


def test_any_part_of_a_layer_can_be_read(saved_once):
    saved = SavedKV.open(saved_once[0])
    n = saved.manifest.num_tokens
    (keys, values) = saved.layer(1)
    assert keys.shape == (saved.manifest.num_kv_heads, n, saved.manifest.head_dim)
    assert torch.equal(saved.layer(1, range(17, 63), range(1, 2))[0], keys[1:, 17:63])
    parts = saved.layer(1, [range(70, n), range(0, 9), range(5, 5)])
    assert torch.equal(parts[1], torch.cat([values[:, 70:], values[:, :9]], dim=1))


@pytest.mark.shows("KV on disk")
@pytest.mark.parametrize("family", ATTENDING)
def test_every_family_goes_on_in_transformers_from_the_disk(family, tmp_path):
    """generate() from a saved prompt says what it says from the prompt itself; assisted decoding is
    refused."""
    model = build(family, torch.float32)
    batch = batch_of(family, 60 if family in families.TEXT_FAMILIES else None)
    hosts = HostGroup.single("cpu")
    settings = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False}
    expected = model.generate(**batch, **settings)
    reset_rope(model)
    apbv.prefill(model, batch, hosts=hosts).save(tmp_path)
    state = apbv.load(tmp_path, model, hosts=hosts)
    assert torch.equal(model.generate(**state.generate_inputs(), **settings), expected)
    for assistance in (
        {"assistant_model": build(family, torch.float32)},
        {"prompt_lookup_num_tokens": 2},
    ):
        with pytest.raises(ValueError, match="speculat"):
            model.generate(**state.generate_inputs(), **settings, **assistance)
    with pytest.raises(ValueError, match="one sequence"):
        model.generate(**state.generate_inputs(), **settings, num_beams=2)


@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("qwen3_moe", "num_experts"),
        ("glm4v_moe", "n_routed_experts"),
        ("smollm3", "no_rope_layers"),
    ],
)
def test_what_a_layer_is_made_of_counts_in_a_models_digest(family, field):
    config = families.build_config(family)
    before = config_digest(config)
    text = config.get_text_config()
    setattr(text, field, [1, 1, 1] if field == "no_rope_layers" else getattr(text, field) + 1)
    assert config_digest(config) != before


# ---- what is refused ----


@pytest.fixture
def saved(saved_once, tmp_path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(saved_once[0], tmp_path / "copy"))


def change_manifest(path: Path, change) -> None:
    record = json.loads((path / "manifest.json").read_text())
    change(record)
    (path / "manifest.json").write_text(json.dumps(record))


def overlap(record: dict) -> None:
    """Let one host's tokens begin where the last one of another's lies: as many tokens, one
    twice."""
    run = record["shards"][1]["tokens"][0]
    run[:] = [number - 1 for number in run]


SPOILS = {
    "truncated": (truncate, "bytes instead of"),
    "changed": (flip_bit, "checksum"),
    "gone": (remove, "incomplete"),
    "tokens that are held twice": (
        lambda path: change_manifest(path, overlap),
        "every token exactly once",
    ),
    "other tokens": (
        lambda path: change_manifest(path, lambda r: r["token_ids"].reverse()),
        "every token",
    ),
    "newer format": (
        lambda path: change_manifest(path, lambda r: r.update(format_version=9)),
        "format 9",
    ),
    "no number": (
        lambda path: change_manifest(path, lambda r: r.update(num_tokens="12")),
        "not a manifest",
    ),
    "more heads than there are": (
        lambda path: change_manifest(path, lambda r: r.update(num_kv_heads=10**30)),
        "every token",
    ),
    "the folder above": (
        lambda path: change_manifest(path, lambda r: r.update(generation="..")),
        "not in its folder",
    ),
    "nothing": (lambda path: (path / "manifest.json").unlink(), "no saved KV"),
}


@pytest.mark.parametrize("spoil", SPOILS)
def test_what_was_spoilt_is_refused(saved, spoil):
    how, message = SPOILS[spoil]
    how(saved)
    with pytest.raises(StorageError, match=message):
        apbv.load(saved, hosts=HostGroup.single("cpu"))


def places_in(value, before: tuple = ()) -> Iterator[tuple]:
    """Where values lie in JSON, of long lists the first two."""
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value[:2])
        if isinstance(value, list)
        else ()
    )
    for name, each in inside:
        yield (*before, name)
        yield from places_in(each, (*before, name))


def test_a_manifest_that_was_made_up_is_refused_in_words_or_loaded(saved):
    """Whatever a value is replaced by, and before anything is allocated for it."""
    record = json.loads((saved / "manifest.json").read_text())
    for where in set(places_in(record)):
        for value in (None, -1, 2**31, 2**63, 2**200, 0.5, "x", "\ud800", [[1, 2]], {"a": 1}):

            def change(record, where=where, value=value):
                *path, name = where
                reduce(getitem, path, record)[name] = value

            (saved / "manifest.json").write_text(json.dumps(record))
            change_manifest(saved, change)
            with suppress(StorageError):
                apbv.load(saved, hosts=HostGroup.single("cpu"))


def test_what_is_replaced_while_it_is_loaded_is_loaded_anew(tmp_path):
    saved_state(1).save(tmp_path)
    read = SavedKV.layer
    left = [True]

    def replaced(saved, *args):
        if left:
            left.pop()
            saved_state(2).save(tmp_path)
        return read(saved, *args)

    with patch.object(SavedKV, "layer", replaced):
        assert apbv.load(tmp_path, hosts=HostGroup.single("cpu")).num_tokens == 42


def test_another_model_is_refused(saved):
    single = HostGroup.single("cpu")
    model = engine_on(single).model
    apbv.load(saved, model, hosts=single)
    others = [
        (build("llama", torch.float32), "another family"),
        (copy.deepcopy(model).bfloat16(), "float32"),
    ]
    others += [(build("qwen2_5_vl", torch.float32), "another configuration")]
    with torch.no_grad():
        model.get_decoder().layers[3].mlp.up_proj.weight[0, 0] += 0.5
    for other, message in [*others, (model, "other weights")]:
        with pytest.raises(StorageError, match=message):
            apbv.load(saved, other, hosts=single)


def unshared_job(hosts: HostGroup, folders: list[list[Path]], saved: list[Path]) -> list[str]:
    """Each host writes to a directory of its own, and then reads from one."""
    engine = engine_on(hosts, kv="sharded")
    said = []
    state = engine.prefill(QUESTION, video=demo.video_path(), num_frames=FRAMES)
    for paths in folders:
        with pytest.raises((StorageError, apbv.HostError)) as error:
            state.save(paths[hosts.rank])
        said.append(str(error.value))
    with pytest.raises((StorageError, apbv.HostError)) as error:
        apbv.load(saved[hosts.rank], hosts=hosts, kv="sharded")
    assert not hosts.is_broken
    return [*said, str(error.value)]


def test_hosts_that_do_not_share_the_directory_are_told(pool, saved, saved_once, tmp_path):
    truncate(saved)
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "host 1").mkdir()
    folders = [[tmp_path / first, tmp_path / "host 1"] for first in ("host 0", "file")]
    for unshared, unusable, spoilt in pool.run(2, unshared_job, folders, [saved_once[0], saved]):
        assert "share the directory" in unshared and "cannot write" in unusable
        assert "bytes instead of" in spoilt
    assert not list((tmp_path / "host 0").glob("kv-*"))  # nothing is left behind


# ---- crashes ----


def saved_state(number: int):
    batch = {"input_ids": torch.full((1, 40 + number), number)}
    return apbv.prefill(
        families.build_model("llama", layers=1), batch, hosts=HostGroup.single("cpu")
    )


def save_until(path: Path, steps: int) -> None:
    """Save the second state, and be killed at the so-manieth step that reaches the disk."""
    left = itertools.count(1)

    def counted(step):
        return lambda *args: (
            os.kill(os.getpid(), signal.SIGKILL) if next(left) == steps else step(*args)
        )

    with (
        patch.object(os, "fsync", counted(os.fsync)),
        patch.object(os, "replace", counted(os.replace)),
    ):
        saved_state(2).save(path)


def test_a_crash_leaves_the_old_state_or_the_new_one(tmp_path):
    """Killed at any step: what is there can be read in full, and saving goes on."""
    saved_state(1).save(tmp_path)
    seen = []
    was_killed = True
    steps = 0
    while was_killed:
        steps += 1
        process = start(save_until, tmp_path, steps)
        process.join()
        was_killed = process.exitcode == -signal.SIGKILL
        state = apbv.load(tmp_path, hosts=HostGroup.single("cpu"))
        (number,) = set(state.inputs.input_ids[0].tolist())
        assert state.to_dynamic_cache().layers[0].keys.shape[2] == state.num_tokens == 40 + number
        seen.append(number)
    assert seen == sorted(seen) and {1, 2} == set(seen) and len(seen) > 4
    assert len(list(tmp_path.glob("kv-*"))) == 1  # and what the crashes left is gone


# ---- hosts of several processes ----


def shared_out_job(processes: HostGroup, path: Path, kv: str, writes: bool) -> list[int]:
    """Hosts of two processes save, or load what others have saved."""
    hosts = HostGroup.from_process_group(processes.process_group, "cpu", 60.0, tensor_parallel=2)
    engine = engine_on(hosts, kv=kv, passing_len=8)
    if writes:
        state = engine.prefill(QUESTION, video=demo.video_path(), num_frames=FRAMES)
        state.save(path)
    else:
        state = apbv.load(path, engine.model, hosts=hosts, kv=kv)
    return engine.decode(state, max_new_tokens=STEPS).token_ids


@pytest.mark.thorough
def test_processes_that_share_a_model_save_and_load_their_heads(pool, saved_once, tmp_path):
    path, whole = saved_once
    tokens, *others = pool.run(4, shared_out_job, tmp_path / "a", "sharded", True)
    assert tokens == whole and others == [tokens] * 3
    saved = SavedKV.open(tmp_path / "a")
    assert [shard.kv_heads for shard in saved.manifest.shards] == [(0, 1), (1, 2)] * 2
    for index in range(saved.manifest.num_layers):
        torch.testing.assert_close(saved.layer(index)[0], SavedKV.open(path).layer(index)[0])
    assert pool.run(4, shared_out_job, path, "sharded", False) == [tokens] * 4
