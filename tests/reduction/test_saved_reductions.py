"""Reduced prompts on disk, whose layers may hold different numbers of tokens: loaded on any number of hosts."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import apbv
from apbv import Engine, HostGroup, PrefillConfig, ReduceConfig, SamplingConfig, StorageError, demo
from apbv.config import LATE_REDUCER_NAMES, SparseConfig
from apbv.decode.batch import Batch
from apbv.input.request import Question, Request
from apbv.kv.manifest import digest_of
from apbv.kv.offers import Offers
from apbv.kv.reader import SavedKV
from apbv.kv.remote import RemoteKV
from apbv.model.parts import inspect_model
from apbv.stats import StageTimer

from answers import plain_tokens
from patience import GROUP_TIMEOUT
from prompts import as_inputs, build, video_batch
from tampering import a_layer, truncate

FAMILY = "qwen2_5_vl"
GREEDY = SamplingConfig(max_new_tokens=6, ignore_eos=True)
# The ratio, and the anchor's tokens. Of the ratio 0.05 three visual tokens are left, and seven before them: fewer
# than the longer anchor has, and behind the shorter one too few to be split.
LENGTHS = {"pdrop": (0.05, 8), "uv_prune": (0.05, 21)}
PLACES = [(1, "gathered"), (2, "gathered"), (2, "sharded"), (3, "gathered"), (3, "sharded")]
NAMES = [*LATE_REDUCER_NAMES, "fastvid"]


def prefilled(hosts: HostGroup, name: str | None, kv: str = "gathered", dtype=torch.float64) -> apbv.PrefillResult:
    ratio, anchor_len = LENGTHS.get(name, (0.3, 21))
    reduce = None if name is None else ReduceConfig(method=name, ratio=ratio)
    if name in LATE_REDUCER_NAMES:
        reduce = replace(reduce, layer=2 if name == "uv_prune" else 1)
    inputs = as_inputs(FAMILY, video_batch(FAMILY), None, hosts, dtype)
    config = PrefillConfig(kv=kv, reduce=reduce, passing_len=4, anchor_len=anchor_len)
    return apbv.prefill(build(FAMILY, dtype), inputs, hosts=hosts, config=config)


def facts_of(state: apbv.PrefillResult) -> tuple:
    """All that is to be the same in a state that was saved and loaded, and on host 0 its KV."""
    cache = state.to_dynamic_cache()
    kv = cache and [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    tokens = plain_tokens(state, build(FAMILY, torch.float64), GREEDY)
    left = state.reduction.kept.tolist(), state.inputs.num_visual_tokens
    known = state.reduction.figures, left, state.exact, state.method, state.num_tokens, state.next_position
    return known, tokens, state.logits, kv


def save_job(hosts: HostGroup, path: Path, name: str, kv: str) -> tuple:
    state = prefilled(hosts, name, kv)
    facts = facts_of(state)
    state.save(path)  # without the answer that has just followed
    return facts


def load_job(hosts: HostGroup, path: Path, kv: str) -> tuple:
    state = apbv.load(path, build(FAMILY, torch.float64), hosts=hosts, kv=kv)
    assert state.kv.placement == kv
    again = path.with_name(f"again on {hosts.size}, {kv}")
    state.save(again)
    first, second = SavedKV.open(path).manifest, SavedKV.open(again).manifest
    assert (second.reduction, second.visual, second.model) == (first.reduction, first.visual, first.model)
    is_split = state.shards and [layout.is_split for layout in state.shards.layouts]
    return facts_of(state), facts_of(apbv.load(again, hosts=hosts, kv=kv)), is_split


def assert_same(found: tuple, expected: tuple) -> None:
    (known, tokens, logits, kv), (their_known, their_tokens, their_logits, their_kv) = found, expected
    assert known == their_known and tokens == their_tokens and torch.equal(logits, their_logits)
    assert (kv is None) == (their_kv is None)
    for states, their_states in zip(kv or (), their_kv or (), strict=True):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(states, their_states, strict=True))


@pytest.mark.parametrize("row", range(len(NAMES)), ids=NAMES)
def test_what_was_saved_is_loaded_bit_for_bit_and_says_what_is_left(pool, tmp_path, row):
    name, (num_hosts, kv), places = NAMES[row], PLACES[(row + 1) % 5], [PLACES[row % 5], PLACES[(row + 3) % 5]]
    expected, *_ = pool.run(num_hosts, save_job, tmp_path / "kv", name, kv)
    lengths = [keys.shape[2] for keys, _ in expected[3]]
    assert (len(set(lengths)) > 1) == (name in LATE_REDUCER_NAMES)
    saved = SavedKV.open(tmp_path / "kv")
    assert [saved.manifest.group_of(index).num_tokens for index in range(len(lengths))] == lengths
    for read in places:
        for host, loaded in enumerate(pool.run(read[0], load_job, tmp_path / "kv", read[1])):
            there = expected if host == 0 else (*expected[:3], None)
            assert_same(loaded[0], there)
            assert_same(loaded[1], there)
            if name == "pdrop" and read == (3, "sharded"):  # one host alone has no anchor
                assert loaded[2] == [True, True, False]


# ---- what is read in parts ----


@pytest.fixture(scope="module")
def saved_once(pool, tmp_path_factory) -> Path:
    """Three layers of different lengths, of which two hosts hold a share."""
    path = tmp_path_factory.mktemp("saved") / "kv"
    pool.run(2, save_job, path, "sparsevlm", "sharded")
    return path


def test_any_part_of_a_short_layer_can_be_read_and_no_more_than_it_holds(saved_once):
    saved = SavedKV.open(saved_once)
    assert len(saved.manifest.groups) == 3
    n, left = saved.manifest.num_tokens, saved.manifest.groups[2].num_tokens
    keys, values = saved.layer(2)
    assert keys.shape[1] == left < n and saved.layer(0)[0].shape[1] == n
    parts = saved.layer(2, [range(left - 3, left), range(0, 5)], range(1, 2))
    assert torch.equal(parts[0], torch.cat([keys[1:, -3:], keys[1:, :5]], dim=1))
    assert torch.equal(parts[1], torch.cat([values[1:, -3:], values[1:, :5]], dim=1))
    for tokens in (range(n), range(0, 8, 2), range(-1, 3), [range(3), range(left, left + 1)]):
        with pytest.raises(ValueError, match=f"is not within the {left} tokens of layer 2"):
            saved.layer(2, tokens)
    with pytest.raises(ValueError, match="KV heads"):
        saved.layer(2, kv_heads=range(saved.manifest.num_kv_heads + 1))
    for layer in (3, -1):
        with pytest.raises(IndexError, match=f"layer {layer} is not one of the KV's 3"):
            saved.layer(layer)


# ---- what follows loaded KV, and what is refused ----


def test_answers_to_what_was_loaded_are_decoded_in_a_batch_with_others(tmp_path):
    hosts, model = HostGroup.single("cpu"), build(FAMILY, torch.float64)
    states = []
    for name in ("pdrop", "hippo", "fastv"):
        state = prefilled(hosts, name)
        state.save(tmp_path / name)
        states.append(state if name == "fastv" else apbv.load(tmp_path / name, model, hosts=hosts))
    expected = [plain_tokens(state, model, GREEDY) for state in states]
    batch = Batch(inspect_model(model))
    members = [batch.join(state, Request(Question(), StageTimer(hosts), sampling=GREEDY)) for state in states]
    while len(batch):
        batch.step()
    assert [member.tokens for member in members] == expected


def test_how_sparse_attention_was_is_still_known(tmp_path):
    hosts, sparse = HostGroup.single("cpu"), SparseConfig(method="xattention", threshold=0.5)
    inputs = as_inputs(FAMILY, video_batch(FAMILY, 400), None, hosts)
    config = PrefillConfig(method="xattention", sparse=sparse, reduce=ReduceConfig(method="fastv", layer=1))
    state = apbv.prefill(build(FAMILY, torch.float32), inputs, hosts=hosts, config=config)
    state.save(tmp_path)
    assert 0 < apbv.load(tmp_path, hosts=hosts).density == state.density < 0.9


def refusal_job(hosts: HostGroup, path: Path, name: str, kv: str) -> None:
    state = apbv.load(path, hosts=hosts, kv=kv)
    with Offers(hosts) as offers:
        with pytest.raises(ValueError, match=f"a prompt that {name} has shortened cannot be handed over"):
            state.offer(offers)
        if name in LATE_REDUCER_NAMES:
            with pytest.raises(ValueError, match=f"{name} has dropped tokens inside the model"):
                state.generate_inputs()
    assert not hosts.is_broken
    hosts.barrier()


def test_loaded_kv_is_not_handed_to_who_needs_the_whole_prompt(pool, tmp_path):
    for name, kv in (("fastv", "sharded"), ("slowfast", "gathered")):
        pool.run(1, save_job, tmp_path / name, name, "gathered")
        pool.run(2, refusal_job, tmp_path / name, name, kv)


@pytest.mark.parametrize("name", ["uv_prune", "hippo"])
def test_a_ticket_that_names_the_folder_of_a_reduced_prompt_is_refused(tmp_path, name):
    hosts = HostGroup.single("cpu")
    prefilled(hosts, name, dtype=torch.float32).save(tmp_path / "reduced")
    with Offers(hosts, directory=tmp_path / "shared") as offers:
        ticket = prefilled(hosts, None, dtype=torch.float32).offer(offers)
        RemoteKV.open(ticket).close()
        with pytest.raises(StorageError, match=f"of a prompt that {name} has shortened"):
            RemoteKV.open(replace(ticket, path=str(tmp_path / "reduced"), exact=False))


# ---- what was spoilt ----


def sign(path: Path, change) -> None:
    """A manifest that somebody made up, with the right digest."""
    record = json.loads((path / "manifest.json").read_text())
    record.pop("sha256")
    change(record, *record["groups"])
    (path / "manifest.json").write_text(json.dumps({**record, "sha256": digest_of(record)}))


def lengthen_last(record, first, middle, last) -> None:
    """As many tokens as the layers before, in the shards, too."""
    last["num_tokens"] += 1
    last["shards"][0]["tokens"][-1][1] += 1


def without_layers(record, first, middle, last) -> None:
    """A group behind the last one, of which there is nothing to read."""
    shards = [{**shard, "files": []} for shard in last["shards"]]
    record["groups"].append({**last, "layers": [3, 3], "shards": shards})


LEFT, EVERY_LAYER, NO_MANIFEST = "that their reduction has left", "every layer", "not a manifest"
# Changes of the manifest, of whose record r the groups are a, b and c.
SIGNED = {
    "a token too few": (lambda r, a, b, c: c.update(num_tokens=c["num_tokens"] - 1), LEFT),
    "a token too many": (lengthen_last, LEFT),
    "a middle layer that is longer than its shards": (
        lambda r, a, b, c: b.update(num_tokens=b["num_tokens"] + 1),
        "every token exactly once",
    ),
    "a middle layer longer than the prompt": (lambda r, a, b, c: b.update(num_tokens=r["num_tokens"] + 1), LEFT),
    "first layers without some tokens": (lambda r, a, b, c: a.update(b | {"layers": [0, 1]}), LEFT),
    "more text left out than there is video": (
        lambda r, a, b, c: r.update(context_start=r["query_start"] - 1),
        LEFT,
    ),
    "a group too few": (lambda r, a, b, c: r.update(groups=[a, c]), EVERY_LAYER),
    "no groups": (lambda r, a, b, c: r.update(groups=[]), EVERY_LAYER),
    "groups in another order": (lambda r, a, b, c: r.update(groups=[b, a, c]), EVERY_LAYER),
    "a group of no layers": (without_layers, EVERY_LAYER),
    "more layers than there are": (lambda r, a, b, c: c.update(layers=[2, 10**30]), EVERY_LAYER),
    "layers that are no numbers": (lambda r, a, b, c: c.update(layers=[2.0, 3.0]), NO_MANIFEST),
    "no reduction": (lambda r, a, b, c: r.update(reduction=None), LEFT),
    "a reduction that is none": (lambda r, a, b, c: r.update(reduction={"method": "fastv"}), NO_MANIFEST),
    "tokens that are left twice": (
        lambda r, a, b, c: r["reduction"]["kept"].__setitem__(1, r["reduction"]["kept"][0]),
        LEFT,
    ),
    "more visual tokens than there were": (lambda r, a, b, c: r["reduction"].update(num_before=70), LEFT),
    "no video": (lambda r, a, b, c: r.update(visual=None), NO_MANIFEST),
    "groups in the first format": (lambda r, a, b, c: r.update(format_version=1), NO_MANIFEST),
}


def test_what_was_spoilt_is_refused(saved_once, tmp_path):
    spoils = {
        "truncated": (truncate, "bytes instead of"),
        "gone": (lambda path: a_layer(path).unlink(), "incomplete"),
        **{name: (partial(sign, change=change), message) for name, (change, message) in SIGNED.items()},
    }
    for number, (how, message) in enumerate(spoils.values()):
        saved = Path(shutil.copytree(saved_once, tmp_path / str(number)))
        how(saved)
        with pytest.raises(StorageError, match=message):
            apbv.load(saved, hosts=HostGroup.single("cpu"))


# ---- hosts of several processes


def shared_out_job(processes: HostGroup, path: Path, kv: str, writes: bool) -> tuple:
    """Hosts of two processes save, or load what others have saved."""
    hosts = HostGroup.from_process_group(processes.process_group, "cpu", GROUP_TIMEOUT, tensor_parallel=2)
    reduce = ReduceConfig(method="pdrop", ratio=0.3)
    config = PrefillConfig(kv=kv, reduce=reduce)
    engine = Engine.from_pretrained("demo", hosts=hosts, dtype="float32", prefill=config)
    if writes:
        state = engine.prefill("name the letters in order", video=demo.video_path(), num_frames=48)
        state.save(path)
    else:
        state = apbv.load(path, engine.model, hosts=hosts, kv=kv)
    cache = state.to_dynamic_cache()
    kv = cache and [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    return engine.decode(state, max_new_tokens=8).token_ids, state.reduction.figures, kv


@pytest.mark.thorough
def test_processes_that_share_a_model_save_and_load_their_heads_of_layers_of_different_lengths(pool, tmp_path):
    written = pool.run(4, shared_out_job, tmp_path, "sharded", True)
    assert len({keys.shape[2] for keys, _ in written[0][2]}) == 4
    saved = SavedKV.open(tmp_path)
    for other in ("gathered", "sharded"):
        for (tokens, figures, layers), expected in zip(
            pool.run(4, shared_out_job, tmp_path, other, False), written, strict=True
        ):
            assert (tokens, figures) == expected[:2]
            assert (layers is None) == (expected[2] is None)
            for states, their_states in zip(layers or (), expected[2] or (), strict=True):
                assert all(map(torch.equal, states, their_states))
    for index, (keys, _) in enumerate(written[0][2]):
        assert torch.equal(saved.layer(index, kv_heads=range(1))[0], keys[0])
