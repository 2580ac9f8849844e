"""Answers that other hosts than host 0 decode: those of the library; who leaves, and what a failure
there ends."""

import asyncio
import json
import os
import signal
import time
import weakref
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from apbv import Engine, HostGroup, ReuseConfig, SamplingParams, demo
from apbv.decode.batch import Batch
from apbv.input.prompts.pixels import VideoReader
from apbv.prefilling import language_model
from apbv.request.request import Question, Request
from apbv.serve.control.decode_thread import DecodeThread
from apbv.serve.control.executor import Executor
from apbv.serve.control.links import RemoteOutput
from apbv.serve.control.local_prefill import LocalPrefillPool
from apbv.serve.control.output import JobOutput
from apbv.serve.server import limits_of
from apbv.serve.settings import ServerSettings
from apbv.speculate.loops.decode_loop import PrefilledRequest
from apbv.speculate.loops.speculative_batch import SpeculativeBatch
from apbv.stats import StageTimer

from apbv_tests.configs import speculative_config
from apbv_tests.fresh_hosts import Store, run_fresh
from apbv_tests.patience import HANGING, wait_for
from apbv_tests.servers import InProcess, asking, chunks, data_url, follow_server, part, post
from apbv_tests.video_files import packets_of

FOLDER: Path = demo.video_path().parent
CHAT = "/v1/chat/completions"
TOKENS = 12
LONG = 8000
SCHEMA = {"type": "object", "properties": {"letter": {"enum": ["X", "J"]}}, "required": ["letter"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "told", "schema": SCHEMA}}
# What is asked of one video, sampled from the model where a seed is given, and up to a string.
ASKED = [
    ("name the letters in order", {}),
    (
        "describe the clip shot by shot",
        {"temperature": 1.4, "seed": 3, "n": 2, "logprobs": True, "top_logprobs": 2},
    ),
    (
        "describe the clip shot by shot",
        {"temperature": 0.9, "seed": 5, "presence_penalty": 0.5, "stop": [" "]},
    ),
]


def asking_for(question: str, url: str = demo.video_path().name, **fields) -> dict:
    content = [part("video", url), {"type": "text", "text": question}]
    fields = {"max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True, **fields}
    return {"messages": [{"role": "user", "content": content}], "num_frames": 16, **fields}


def library(
    engine: Engine, question: str, seed: int = 0, n: int = 1, stop=(), **fields
) -> list[tuple]:
    """The text, tokens and log probabilities of the answers; collective."""
    fields.pop("logprobs", None)
    logprobs = fields.pop("top_logprobs", None)
    given = []
    for own in range(seed, seed + n):
        sampling = SamplingParams(
            seed=own, max_new_tokens=TOKENS, ignore_eos=True, logprobs=logprobs, **fields
        )
        content = [
            {"type": "video", "video": demo.video_path()},
            {"type": "text", "text": question},
        ]
        told = engine.generate(
            messages=[{"role": "user", "content": content}], num_frames=16, sampling=sampling
        )
        ends = [told.text.index(string) for string in stop]
        text = told.text[: min(ends, default=None)]
        given.append((text, told.token_ids, [each.logprob for each in told.logprobs]))
    return given


def of_choice(choice: dict) -> tuple:
    content = (choice["logprobs"] or {"content": []})["content"]
    return choice["message"]["content"], choice["token_ids"], [each["logprob"] for each in content]


def app_or_follower(engine: Engine, split_tokens: int = 0) -> InProcess | None:
    """Host 0's app; None on the other hosts, when they have done what it wanted."""
    if engine.hosts.is_leader:
        limits = {"max_model_len": 2**14, "split_tokens": split_tokens}
        return InProcess(model=engine, hands_over=True, media_dir=FOLDER, **limits)
    follow_server(engine, FOLDER)
    return None


def drafted_job(hosts: HostGroup) -> tuple | None:
    """The library's answer, and those of several decode hosts by drafts of their own; which host
    had them."""
    speculate = speculative_config(
        strategy="hippo", prune="kv", num_draft_tokens=3, keep_losing_draft=True
    )
    engine = Engine.from_pretrained("demo", hosts=hosts, dtype="float32", speculate=speculate)
    (expected,) = library(engine, ASKED[0][0])
    decode_hosts = []
    noted = []
    join = SpeculativeBatch.join
    note = JobOutput.note_draft

    def watch(batch, answer, draft):
        decode_hosts.append(draft.drafter is not None)
        return join(batch, answer, draft)

    def watch_notes(output, metrics):
        noted.append(metrics["num_accepted"])
        note(output, metrics)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpeculativeBatch, "join", watch)
        patch.setattr(JobOutput, "note_draft", watch_notes)
        app = app_or_follower(engine)
        if app is None:
            return decode_hosts

        async def ask() -> list:
            asked = (
                app.client.post(CHAT, json=asking_for(ASKED[0][0]), timeout=None) for _ in range(4)
            )
            replies = await asyncio.gather(*asked)
            assert all(reply.status_code == 200 for reply in replies), [
                reply.text for reply in replies
            ]
            return [of_choice(reply.json()["choices"][0]) for reply in replies]

        with closing(app):
            found = app.loop.run_until_complete(asyncio.wait_for(ask(), HANGING))
            return decode_hosts, expected, found, noted


def test_every_decode_host_drafts_for_its_answers(pool):
    (decode_hosts, expected, found, noted), *others = pool.run(2, drafted_job)
    joined = [decode_hosts, *others]
    assert sum(map(len, joined)) == 4 and any(others) and all(map(all, joined))
    assert [each[:2] for each in found] == [expected[:2]] * 4
    assert len(noted) == 4 and min(noted) > 0


def answers_job(hosts: HostGroup) -> tuple | None:
    """The library's answers, on host 0 also those of every decode host, whole and streamed, and who
    answered.

    Where KV is left when a request's counts as free, that is told instead.
    """
    engine = Engine.from_pretrained("demo", hosts=hosts, dtype="float32")
    expected = [library(engine, question, **fields) for question, fields in ASKED]
    joined = []
    kept = []
    add = DecodeThread.add
    release = RemoteOutput.release

    def watch(decoding, output, order, begun):
        joined.append(order.decode_host)
        kept.extend(weakref.ref(layer) for layer in begun.state.kv.cache.layers)
        add(decoding, output, order, begun)

    def count(output):
        joined.extend("kept" for ref in kept if ref() is not None)
        release(output)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodeThread, "add", watch)
        patch.setattr(RemoteOutput, "release", count)
        app = app_or_follower(engine)
        found = []
        wanted = [0]
        if app is None:
            return joined
        # All decode hosts but one seem to be full.
        patch.setattr(app.scheduler, "kv_bytes_on", lambda decode_host: decode_host != wanted[0])
        with closing(app):
            for wanted[0] in range(hosts.size):
                whole = [
                    post(app, CHAT, **asking_for(question, **fields)).json()
                    for question, fields in ASKED
                ]
                streamed = chunks(post(app, CHAT, **asking_for(ASKED[0][0], stream=True)))
                text = "".join(
                    event["choices"][0]["delta"].get("content") or "" for event in streamed
                )
                by_schema = post(
                    app, CHAT, **asking_for(ASKED[0][0], ignore_eos=False, response_format=FORMAT)
                ).json()
                answers = [[*map(of_choice, each["choices"])] for each in (*whole, by_schema)]
                found.append((answers[:-1], text, len(streamed), answers[-1][0][0]))
            wait_for(lambda: app.scheduler.num_running == 0)
            wanted[0] = 1
            told = []
            add_tokens = JobOutput.add_tokens

            def watch(output, choice, num_tokens, piece):
                told.append(num_tokens)
                return add_tokens(output, choice, num_tokens, piece)

            patch.setattr(JobOutput, "add_tokens", watch)
            app.loop.run_until_complete(asyncio.wait_for(leave(app), HANGING))
            wait_for(lambda: app.scheduler.num_running == 0)
            return joined, expected, found, told


async def leave(app: InProcess) -> None:
    """Ask for a long answer, and leave after its first tokens."""
    request = asyncio.create_task(
        app.client.post(CHAT, content=asking(max_tokens=LONG, ignore_eos=True))
    )
    while not any(job.record.completion_tokens > 3 for job in app.scheduler.running_jobs):
        await asyncio.sleep(0.01)
    request.cancel()


def test_every_decode_host_answers_as_the_library_does_until_the_client_leaves(pool):
    (joined, expected, found, told), *others = pool.run(2, answers_job)
    assert [set(each) for each in (joined, *others)] == [{0}, {1}]
    assert 3 < max(told) < LONG
    for whole, text, num_events, by_schema in found:
        assert text == expected[0][0][0] and num_events > TOKENS
        assert by_schema == found[0][-1] and json.loads(by_schema)["letter"] in "XJ"
        for answers, of_library in zip(whole, expected, strict=True):
            for (said, tokens, logprobs), (own, own_tokens, own_logprobs) in zip(
                answers, of_library, strict=True
            ):
                assert said == own and tokens == own_tokens[: len(tokens)]
                assert logprobs == pytest.approx(own_logprobs, abs=1e-4)


def short_job(hosts: HostGroup, damaged: str) -> tuple | None:
    """The library's answer, and those of decode hosts that prefilled alone, with drafts: two
    prompts each.

    The first is about a damaged video. The others' files are sent, too.
    """
    speculate = speculative_config(
        strategy="hippo", prune="kv", num_draft_tokens=3, keep_losing_draft=True
    )
    engine = Engine.from_pretrained("demo", hosts=hosts, dtype="float32", speculate=speculate)
    (expected,) = library(engine, ASKED[0][0])
    begun = []
    begin = Engine.begin

    def watch(engine: Engine, request: Request) -> PrefilledRequest:
        begun.append((engine.hosts.size, engine.hosts.bytes_received))
        return begin(engine, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "begin", watch)
        app = app_or_follower(engine, split_tokens=2**20)
        if app is None:
            return begun
        limits = app.scheduler.limits

        async def ask() -> list:
            # No request begins before all wait: until then there is room for none.
            patch.setattr(app.scheduler, "limits", replace(limits, max_kv_bytes=0))
            asked = []
            for url in (damaged, *[data_url(demo.video_path())] * 3):
                body = asking_for(ASKED[0][0], url=url)
                asked.append(asyncio.create_task(app.client.post(CHAT, json=body, timeout=None)))
                while app.scheduler.num_ready < len(asked):
                    await asyncio.sleep(0.01)
            patch.setattr(app.scheduler, "limits", limits)
            refused, *replies = [reply.json() for reply in await asyncio.gather(*asked)]
            return refused["error"], [of_choice(reply["choices"][0]) for reply in replies]

        with closing(app):
            return begun, expected, *app.loop.run_until_complete(asyncio.wait_for(ask(), HANGING))


def test_decode_hosts_prefill_short_prompts_alone(pool, tmp_path):
    data = bytearray(demo.video_path().read_bytes())
    for pos, size, *_ in packets_of(demo.video_path())[-20:]:
        data[pos + 5 : pos + size] = bytes(size - 5)
    (tmp_path / "damaged.mp4").write_bytes(data)
    (begun, expected, refusal, found), other = pool.run(
        2, short_job, data_url(tmp_path / "damaged.mp4")
    )
    assert found == [expected] * 3
    assert refusal["type"] == "invalid_request_error" and refusal["param"] == "messages"
    assert "cannot be decoded" in refusal["message"] and "apbv-" not in refusal["message"]
    assert begun == other == [(1, 0)] * 2


def held_up_job(hosts: HostGroup, folder: Path) -> tuple | None:
    """Answers of both decode hosts to texts, while both prefill a long prompt, and one decodes a
    video.

    With them what they were before, who prefilled, and what the other two were answered in the end.
    """
    engine = Engine.from_pretrained("demo", hosts=hosts, dtype="float32")
    may_go_on = folder / "go on"
    begun = []
    begin = Engine.begin
    run = language_model.run_language_model
    read = VideoReader.read

    def hold(name: str) -> None:
        (folder / f"{name}{hosts.rank}").touch()
        wait_for(may_go_on.exists)

    def watch(engine: Engine, request: Request) -> PrefilledRequest:
        begun.append(engine.hosts.size)
        return begin(engine, request)

    def run_later(prompt, *args):
        if prompt.hosts.size > 1:
            hold("prefilling")
        return run(prompt, *args)

    def read_later(*args):
        hold("decoding")
        return read(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "begin", watch)
        patch.setattr("apbv.prefilling.forward.run_language_model", run_later)
        patch.setattr(VideoReader, "read", read_later)
        app = app_or_follower(engine, split_tokens=2**10)
        if app is None:
            return begun

        async def ask() -> tuple:
            async def answer(body: dict) -> str:
                reply = await app.client.post(
                    CHAT, json={"max_tokens": 3, "ignore_eos": True, **body}, timeout=None
                )
                assert reply.status_code == 200, reply.text
                return reply.json()["choices"][0]["message"]["content"]

            def text(content: str) -> dict:
                return {"messages": [{"role": "user", "content": content}]}

            before = await answer(text("hi"))
            long = asyncio.create_task(answer(text("y" * 2**11)))
            while not {"prefilling0", "prefilling1"} <= set(os.listdir(folder)):
                await asyncio.sleep(0.01)
            video = asyncio.create_task(answer(asking_for(ASKED[0][0])))
            while "decoding0" not in os.listdir(folder):  # the other host has the long prompt's KV
                await asyncio.sleep(0.01)
            beside = await asyncio.gather(*(answer(text("hi")) for _ in range(4)))
            healthy = (await app.client.get("/health")).status_code
            are_done = [long.done(), video.done()]
            may_go_on.touch()
            return before, beside, are_done, healthy, await long, await video

        with closing(app):
            try:
                return begun, *app.loop.run_until_complete(asyncio.wait_for(ask(), HANGING))
            finally:
                may_go_on.touch()


def test_texts_wait_neither_for_a_long_prompt_nor_for_files(pool, tmp_path):
    (begun, before, beside, are_done, healthy, long, video), other = pool.run(
        2, held_up_job, tmp_path
    )
    assert beside == [before] * 4 and are_done == [False] * 2 and healthy == 200 and long and video
    assert begun.count(2) == other.count(2) == 1 and len(begun + other) == 2 + 6
    assert min(begun.count(1), other.count(1)) > 1


def test_a_thread_rests_after_a_short_prompt_until_the_long_one_ends(monkeypatch):
    monkeypatch.setattr("apbv.serve.control.local_prefill.REST", 1e12)
    monkeypatch.setattr("apbv.serve.control.local_prefill.LONG_REST", 1e9)
    hosts = HostGroup.single("cpu")
    begun = []
    request = Request(Question(), StageTimer(hosts))
    engine = SimpleNamespace(
        can_work_alone=True, prefilling_in_threads=ExitStack, hosts=hosts, begin=begun.append
    )
    engine.alone = lambda: engine
    decoding = SimpleNamespace(add=lambda *_: None)
    with LocalPrefillPool(engine, decoding) as alone:
        with alone.giving_way():
            for paths in ([], [], [Path("a file")], [Path("a file")]):
                alone.prefill(
                    SimpleNamespace(files=paths, request=lambda *_: request),
                    None,
                    nullcontext(paths),
                )
            wait_for(lambda: len(begun) == 2)
            time.sleep(0.2)  # the others would begin at once
            assert len(begun) == 2
        wait_for(lambda: len(begun) == 4)


def split_job(hosts: HostGroup) -> list[int]:
    """From how many tokens on a server splits prompts, with settings under which a host can work
    alone or not."""
    configs = {}, {"reuse": ReuseConfig(mode="exact")}
    engines = [
        Engine.from_pretrained("demo", hosts=hosts, dtype="float32", **config) for config in configs
    ]
    return [
        limits_of(engine, ServerSettings(max_kv_bytes=2**30)).split_tokens for engine in engines
    ]


def test_a_decode_host_does_nothing_alone_that_needs_the_other_hosts(pool):
    assert pool.run(2, split_job) == [[512, 0]] * 2


def failing_job(hosts: HostGroup, dies: bool) -> tuple[list, str] | None:
    """What two clients get, each of one host, when the second host's decoding thread ends, or its
    process."""
    engine = Engine.from_pretrained("demo", hosts=hosts, dtype="float32")
    if not hosts.is_leader:
        step = Batch.step
        counted = iter(range(5))

        def fail(batch):
            if next(counted, None) is None:
                if dies:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise SystemExit("out of order")
            return step(batch)

        Batch.step = fail
    app = app_or_follower(engine)

    async def ask() -> list:
        body = asking(max_tokens=2**13, ignore_eos=True)
        both = [app.client.post(CHAT, content=body, timeout=None) for _ in range(2)]
        replies = await asyncio.gather(*both)
        return [(reply.status_code, reply.json()["error"]["message"]) for reply in replies]

    try:
        return app.loop.run_until_complete(asyncio.wait_for(ask(), HANGING)), str(
            app.worker.failure
        )
    finally:
        app.close()


@pytest.mark.parametrize("dies", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_a_host_that_fails_ends_the_server_and_every_request(tmp_path, dies):
    first, second = run_fresh(Store(tmp_path), 2, failing_job, dies)
    replies, reason = first.result
    assert replies == [(503, "a host has failed")] * 2
    own_reason = "host 1 failed in decoding: SystemExit: out of order"
    assert reason == own_reason or (dies and "another host ended" in reason)
    assert second.exit_status


def lost_job(hosts: HostGroup) -> tuple[int, str] | None:
    """What a client gets whose prompt is prefilled, but lost by its decode host."""
    engine = Engine.from_pretrained("demo", hosts=hosts, dtype="float32")
    carry_out = Executor.carry_out

    def lose(*args):
        carry_out(*args)
        raise OSError("lost")

    if not hosts.is_leader:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Executor, "carry_out", lose)
            return follow_server(engine, FOLDER)
    with closing(InProcess(model=engine, hands_over=True)) as app:
        reply = app.request("POST", CHAT, content=asking(), timeout=None)
        wait_for(lambda: app.scheduler.num_running == 0)
        return reply.status_code, reply.json()["error"]["message"]


def test_a_prompt_that_its_decode_host_has_lost_fails(pool):
    """The hosts are in step afterwards."""
    for _ in range(2):
        status, message = pool.run(2, lost_job)[0]
        assert status == 500 and message.startswith("OSError: lost (request chatcmpl-")
