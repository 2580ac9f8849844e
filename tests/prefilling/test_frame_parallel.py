"""Prefills in which every host encodes all frames (APB-V's Table 4, without V), against the shared
out ones and transformers."""

import re
from collections import Counter

import pytest
import torch

from apbv import (
    Engine,
    HostGroup,
    ModelInputs,
    ReduceConfig,
    ReuseConfig,
    VideoConfig,
    plan,
    prefill,
)
from apbv.errors import HostError, ModelOutputError
from apbv.input.prompts.pixels import VideoReader
from apbv.model.parts import inspect_model
from apbv.prefilling import forward
from apbv.prefilling.methods import METHODS

from apbv_tests import audio_files, families
from apbv_tests.configs import prefill_config, speculative_config
from apbv_tests.engines import QUESTION, build_engine
from apbv_tests.families import OMNI, VIDEO_FAMILIES
from apbv_tests.omni_prompts import omni_batch
from apbv_tests.oracle import as_double
from apbv_tests.pairs import each_choice
from apbv_tests.prompts import build, hugging_face_on, video_batch

FRAMES = 12
ONE_PATCH = VideoConfig(chunk_bytes=1)


def count_pixels(model, counts: Counter) -> None:
    """Let a model count what its towers are given: values of pixels, and of spectrograms."""
    for name in ("get_video_features", "get_image_features", "get_audio_features"):
        encode = getattr(model.model, name, None)
        if encode is not None:

            def counted(*args, encode=encode, name=name, **named):
                if args:  # else a model's own call, of one of them by another
                    counts[name] += args[0].numel()
                return encode(*args, **named)

            setattr(model.model, name, counted)


def encoding_job(hosts: HostGroup, family: str, batch: dict, settings: dict):
    """The last logits, what the towers were given, and the bytes received while they ran."""
    model = families.build_model(family, dtype=torch.float64)
    counts = Counter()
    exchange = forward.encode_and_exchange
    count_pixels(model, counts)

    def counted(*args, **named):
        before = hosts.bytes_received
        rows = exchange(*args, **named)
        counts["bytes"] += hosts.bytes_received - before
        return rows

    forward.encode_and_exchange = counted
    try:
        config = prefill_config(video=ONE_PATCH, **settings)
        state = prefill(model, dict(batch), hosts=hosts, config=config)
    finally:
        forward.encode_and_exchange = exchange
    return state.logits, counts


def compare(pool, num_hosts: int, family: str, batch: dict, settings: dict) -> torch.Tensor:
    """Check a prefill without frame parallelism against the default; return its logits."""
    (_, alone), *_ = pool.run(1, encoding_job, family, batch, settings)
    shared = pool.run(num_hosts, encoding_job, family, batch, settings)
    everywhere = pool.run(num_hosts, encoding_job, family, batch, settings | OFF)
    received = 0
    for (expected, by_share), (logits, counts) in zip(shared, everywhere, strict=True):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        received += by_share.pop("bytes")
        assert counts.pop("bytes") == 0
        assert counts == +Counter({name: alone[name] for name in alone if name != "bytes"})
        assert by_share.total() < counts.total(), "by default a host encodes a share"
    assert received > 0
    return everywhere[0][0]


OFF = {"frame_parallel": False}


@each_choice(
    family=VIDEO_FAMILIES,
    num_hosts=[2, 3],
    settings=[{"method": "zigzag_ring"}, {"method": "zigzag_ring", "kv": "sharded"}],
)
def test_every_host_encodes_all_frames_and_none_are_sent(pool, family, num_hosts, settings):
    """With the logits of transformers' own full attention."""
    batch = as_double(video_batch(family))
    logits = compare(pool, num_hosts, family, batch, settings)
    expected, _ = hugging_face_on(family, torch.float64, None)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@each_choice(
    method=[name for name, method in METHODS.items() if method.facts.splits],
    num_hosts=[2, 3],
    family=["qwen3_vl", "llava_onevision"],
)
def test_it_is_so_with_every_method(pool, method, num_hosts, family):
    compare(pool, num_hosts, family, as_double(video_batch(family)), {"method": method})


@pytest.mark.parametrize("num_hosts", [2, 3])
def test_sound_is_encoded_by_every_host_too(pool, tmp_path, num_hosts):
    path = audio_files.write(
        tmp_path / "a.mkv", [(0, 4)], "flac", audio_files.RATE, video=(0, 4), size=(56, 84), fps=4
    )
    compare(pool, num_hosts, OMNI, as_double(omni_batch([path])), {"anchor_len": 24})


@each_choice(method=["fastvid", "slowfast", "dycoke"], num_hosts=[2, 3, 2])
def test_every_host_prunes_by_itself(pool, method, num_hosts):
    """And keeps what hosts keep that choose together."""
    settings = {"reduce": ReduceConfig(method=method, ratio=0.4), "anchor_len": 4}
    compare(pool, num_hosts, "qwen3_vl", as_double(video_batch("qwen3_vl")), settings)


# ---- files ----


def read_job(hosts: HostGroup, family: str, clip: str, reuse: str | None, settings: dict):
    """Answers to two questions, and the frames that this host has decoded for each."""
    read = VideoReader.read
    decoded = []
    found = []

    def recorded(self, chunks, *args):
        decoded.append(sum(map(len, chunks)))
        return read(self, chunks, *args)

    VideoReader.read = recorded
    try:
        kept = None if reuse is None else ReuseConfig(mode=reuse)
        engine = build_engine(hosts, family, reuse=kept, video=ONE_PATCH, **settings)
        for question in (QUESTION, "And then?"):
            decoded.clear()
            answer = engine.generate(question, video=clip, num_frames=FRAMES, max_new_tokens=4)
            found.append((answer.token_ids, sum(decoded), answer.stats["reused"]))
    finally:
        VideoReader.read = read
    return found


@each_choice(reuse=[None, "exact", "kv"], family=["qwen2_5_vl", "internvl"], num_hosts=[2, 3])
def test_every_host_reads_all_frames_once(pool, clip, reuse, family, num_hosts):
    """Also where further questions reuse what each host has encoded."""
    ((_, whole, _), _), *_ = pool.run(1, read_job, family, str(clip), None, {})
    shared = pool.run(num_hosts, read_job, family, str(clip), reuse, {})
    for found, expected in zip(
        pool.run(num_hosts, read_job, family, str(clip), reuse, OFF), shared, strict=True
    ):
        assert [tokens for tokens, *_ in found] == [tokens for tokens, *_ in expected]
        assert [how for *_, how in found] == [how for *_, how in expected]
        first, further = (num_patches for _, num_patches, _ in found)
        assert first == whole and further == (0 if reuse else whole)
        assert expected[0][1] < whole


DRAFTS = [
    {"strategy": "hippo", "keep_ratio": 0.4},
    {"strategy": "specvlm", "prune": "kv", "keep_ratio": 0.4},
    {"strategy": "tabed", "ensemble": "MTP"},
    {"strategy": "parallelvlm", "keep_ratio": 0.4},
    {"strategy": "hippo", "keep_ratio": 0.4, "draft_host": True},
    {"strategy": "std", "keep_ratio": 0.4},
]


def draft_job(hosts: HostGroup, clip: str, speculate: dict, settings: dict):
    """An answer, and the draft's figures."""
    config = speculative_config(keep_losing_draft=True, num_draft_tokens=3, **speculate)
    engine = build_engine(hosts, "qwen2_5_vl", speculate=config, draft_seed=0, **settings)
    answer = engine.generate(QUESTION, video=clip, num_frames=FRAMES, max_new_tokens=12)
    if config.draft_host:  # which drafts more or less while the others verify
        return answer.token_ids, []
    figures = answer.stats["speculation"]
    names = ("num_drafted", "num_accepted", "num_visual_tokens_drafted_from")
    return answer.token_ids, [figures[name] for name in names]


@pytest.mark.parametrize("speculate", DRAFTS, ids=str)
def test_drafts_see_what_they_see_by_default(pool, clip, speculate):
    expected = pool.run(3, draft_job, str(clip), speculate, {})
    assert pool.run(3, draft_job, str(clip), speculate, OFF) == expected


# ---- hosts that fail, and requests that end ----


def ending_job(hosts: HostGroup, clip: str, how: str):
    """How a request ends in the middle of its frames, and what is answered then."""
    model = families.build_model("qwen2_5_vl", dtype=torch.float64)
    processor = families.build_processor("qwen2_5_vl")
    engine = Engine(model, processor, hosts, prefill_config(video=ONE_PATCH, **OFF))
    encode = model.model.get_video_features
    calls = []
    asked = []

    def fails_once(*args, **named):
        calls.append(1)
        if how == "fails" and len(calls) == 2 and hosts.rank == hosts.size - 1:
            raise ValueError("the tower is broken")
        return encode(*args, **named)

    def stop(tokens) -> bool:
        asked.append(1)
        return how == "cancelled" and len(calls) == 2

    model.model.get_video_features = fails_once
    given = {"video": clip, "num_frames": FRAMES, "max_new_tokens": 2}
    with pytest.raises((ValueError, HostError, ModelOutputError)) as raised:
        engine.generate(QUESTION, stop=stop if how != "fails without asking" else None, **given)
    failure = f"{raised.typename}: {raised.value}"
    num_calls = len(calls)
    return failure, num_calls, engine.generate(QUESTION, **given).token_ids


def test_a_failure_or_an_end_is_one_on_every_host(pool, clip):
    quoting, own = pool.run(2, ending_job, str(clip), "fails")
    assert own[0] == "ValueError: the tower is broken" and own[1] == 2
    assert re.fullmatch(r"HostError: host 1 failed in encode: .*the tower is broken", quoting[0])
    assert quoting[1] == FRAMES // 2, "hosts do not wait for one another"
    cancelled = pool.run(2, ending_job, str(clip), "cancelled")
    assert all(failure.startswith("RequestCancelled") for failure, *_ in cancelled)
    assert [num_calls for _, num_calls, _ in cancelled] == [2, 2]
    assert len({str(tokens) for *_, tokens in [quoting, own, *cancelled]}) == 1


def mismatch_job(hosts: HostGroup, of_inputs: bool, of_prefill: bool) -> str:
    parts = inspect_model(build("qwen2_5_vl", torch.float32))
    batch = video_batch("qwen2_5_vl")
    inputs = ModelInputs.from_processor(parts, batch, hosts, frame_parallel=of_inputs)
    config = prefill_config(frame_parallel=of_prefill)
    try:
        prefill(parts, inputs, hosts=hosts, config=config)
    except ValueError as error:
        return str(error)
    return ""


def test_inputs_are_made_for_the_way_in_which_they_are_encoded(pool):
    for choice in (True, False):
        for refusal in pool.run(2, mismatch_job, not choice, choice):
            assert f"frame_parallel={choice}" in refusal
        assert pool.run(2, mismatch_job, choice, choice) == ["", ""]
        assert pool.run(1, mismatch_job, choice, not choice) == [""]


# ---- memory ----


def test_a_plan_counts_all_embeddings_and_the_chunks_of_all_frames():
    def encoding(num_hosts: int, **settings) -> list[dict[str, int]]:
        config = prefill_config(video=VideoConfig(chunk_bytes=2**40), **settings)
        planned = plan("demo", num_frames=512, hosts=num_hosts, prefill=config)
        return [host.stages["encoding"] for host in planned.hosts]

    (alone,) = encoding(1)
    assert encoding(1, **OFF) == [alone]
    for shared, everywhere in zip(encoding(4), encoding(4, **OFF), strict=True):
        # All of them, and a copy of those of its own tokens.
        difference = everywhere["embeddings"] - shared["embeddings"]
        assert difference == alone["embeddings"]
        assert shared["a video chunk"] < everywhere["a video chunk"] == alone["a video chunk"]
