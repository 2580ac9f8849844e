"""Reduced prompts on disk, whose layers may hold different numbers of tokens: loaded on any number of hosts."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

import apbv
from apbv import HostGroup, PrefillConfig, ReduceConfig, SamplingConfig, StorageError
from apbv.config import LATE_REDUCER_NAMES
from apbv.kv.manifest import digest_of
from apbv.kv.reader import SavedKV

from answers import plain_tokens
from prompts import as_inputs, build, kv_of, video_batch
from tampering import a_layer, truncate

FAMILY = "qwen2_5_vl"
GREEDY = SamplingConfig(max_new_tokens=6, ignore_eos=True)
# The ratio, and the anchor's tokens. Of the ratio 0.05 three visual tokens are left, and seven before them: fewer
# than the longer anchor has, and behind the shorter one too few to be split.
LENGTHS = {"pdrop": (0.05, 8), "uv_prune": (0.05, 21)}


def prefilled(hosts: HostGroup, name: str, kv: str) -> apbv.PrefillResult:
    ratio, anchor_len = LENGTHS.get(name, (0.3, 21))
    layer = (2 if name == "uv_prune" else 1) if name in LATE_REDUCER_NAMES else None
    reduce = ReduceConfig(method=name, ratio=ratio, layer=layer)
    inputs = as_inputs(FAMILY, video_batch(FAMILY), None, hosts, torch.float64)
    config = PrefillConfig(kv=kv, reduce=reduce, passing_len=4, anchor_len=anchor_len)
    return apbv.prefill(build(FAMILY, torch.float64), inputs, hosts=hosts, config=config)


def facts_of(state: apbv.PrefillResult) -> tuple:
    """All that is to be the same in a state that was saved and loaded, and on host 0 its KV."""
    kv = kv_of(state.to_dynamic_cache())
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
    return facts_of(state), facts_of(apbv.load(again, hosts=hosts, kv=kv))


def assert_same(found: tuple, expected: tuple) -> None:
    (known, tokens, logits, kv), (their_known, their_tokens, their_logits, their_kv) = found, expected
    assert known == their_known and tokens == their_tokens and torch.equal(logits, their_logits)
    assert (kv is None) == (their_kv is None)
    for states, their_states in zip(kv or (), their_kv or (), strict=True):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(states, their_states, strict=True))


@pytest.mark.parametrize(
    ("name", "num_hosts", "kv", "places"),
    [
        ("pdrop", 2, "sharded", [(1, "gathered"), (3, "sharded")]),
        ("uv_prune", 3, "gathered", [(2, "sharded")]),
        ("fastvid", 2, "gathered", [(2, "gathered")]),
    ],
)
def test_what_was_saved_is_loaded_bit_for_bit_and_says_what_is_left(pool, tmp_path, name, num_hosts, kv, places):
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


LEFT, EVERY_LAYER, NO_MANIFEST = "that their reduction has left", "every layer", "not a manifest"
# Changes of the manifest, of whose record r the groups are a, b and c.
SIGNED = [
    (lambda r, a, b, c: c.update(num_tokens=c["num_tokens"] - 1), LEFT),
    (lengthen_last, LEFT),
    (lambda r, a, b, c: b.update(num_tokens=b["num_tokens"] + 1), "every token exactly once"),
    (lambda r, a, b, c: a.update(b | {"layers": [0, 1]}), LEFT),
    (lambda r, a, b, c: r.update(context_start=r["query_start"] - 1), LEFT),
    (lambda r, a, b, c: r.update(groups=[b, a, c]), EVERY_LAYER),
    (lambda r, a, b, c: c.update(layers=[2.0, 3.0]), NO_MANIFEST),
    (lambda r, a, b, c: r.update(reduction={"method": "fastv"}), NO_MANIFEST),
    (lambda r, a, b, c: r["reduction"]["kept"].__setitem__(1, r["reduction"]["kept"][0]), LEFT),
    (lambda r, a, b, c: r.update(visual=None), NO_MANIFEST),
]


def test_what_was_spoilt_is_refused(pool, tmp_path):
    """Of three layers of different lengths, of which two hosts hold a share."""
    pool.run(2, save_job, tmp_path / "kv", "sparsevlm", "sharded")
    spoils = [(truncate, "bytes instead of"), (lambda path: a_layer(path).unlink(), "incomplete")]
    spoils += [(partial(sign, change=change), message) for change, message in SIGNED]
    for number, (how, message) in enumerate(spoils):
        saved = Path(shutil.copytree(tmp_path / "kv", tmp_path / str(number)))
        how(saved)
        with pytest.raises(StorageError, match=message):
            apbv.load(saved, hosts=HostGroup.single("cpu"))
