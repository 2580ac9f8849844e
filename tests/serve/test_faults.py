"""What fails, ends or waits in a server in this process, and whom it does not concern."""

import asyncio
import gc
import threading
import weakref
from contextlib import closing, nullcontext
from copy import copy
from functools import partial

import pytest

from apbv import Engine, HostGroup, PrefillConfig, SpeculativeConfig, demo
from apbv.config import SamplingParams
from apbv.decode.batch import Batch
from apbv.errors import StorageError
from apbv.kv.offers import Offers
from apbv.request.request import RequestSettings
from apbv.runner import batch_steps
from apbv.serve.control.answer_stream import AnswerStream
from apbv.serve.control.decode_thread import DecodeThread
from apbv.serve.control.executor import Command, Executor, exchange_commands
from apbv.serve.control.job import Job
from apbv.serve.control.scheduler import Scheduler
from apbv.serve.control.work_order import WorkOrder
from apbv.serve.protocols.requests import ChatRequest
from apbv.serve.server import bind, listen

from apbv_tests.patience import HANGING, wait_for
from apbv_tests.servers import HAND_OVER, InProcess, asking, metric_in, part, post

STEPS = "apbv.runner.batch_steps"
NOTE = "apbv.serve.control.output.JobOutput._note"  # where a fault is planted
LEAVES = "its client leaves"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "x"}]


def ask(app: InProcess, **fields):
    return post(app, CHAT, messages=MESSAGES, max_tokens=3, ignore_eos=True, **fields)


def figure(app: InProcess, name: str) -> float:
    return metric_in(app.scheduler.render_metrics().decode(), f"apbv:{name}")


def out_of_memory(*_):
    raise RuntimeError("out of memory")


@pytest.mark.parametrize(
    ("owner", "name"), [(Batch, "join"), (Batch, "step"), (AnswerStream, "finish")]
)
def test_a_request_that_fails_is_told_so_and_the_next_is_answered(app, owner, name, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, out_of_memory)
        for _ in range(2):
            reply = ask(app)
            assert reply.status_code == 500 and "out of memory" in reply.json()["error"]["message"]
    assert ask(app).json()["usage"]["completion_tokens"] == 3
    wait_for(lambda: not figure(app, "num_requests_running") and not figure(app, "kv_cache_bytes"))


def test_if_a_step_fails_only_the_youngest_answer_does(app, monkeypatch):
    """Here those of two or more answers do, as if there was no memory for more than one."""
    forward = batch_steps.forward
    fields = {"ignore_eos": True, "return_token_ids": True}
    expected = post(app, CHAT, messages=MESSAGES, max_tokens=30, **fields).json()

    def run(parts, ids, *args, **kwargs):
        return out_of_memory() if len(ids) > 1 else forward(parts, ids, *args, **kwargs)

    async def ask_both() -> list:
        first = asyncio.create_task(app.client.post(CHAT, content=asking(max_tokens=30, **fields)))
        while not figure(app, "num_requests_running"):
            await asyncio.sleep(0.001)
        return await asyncio.gather(
            first, app.client.post(CHAT, content=asking(max_tokens=3, n=2, **fields))
        )

    monkeypatch.setattr(batch_steps, "forward", run)
    elder, younger = app.loop.run_until_complete(asyncio.wait_for(ask_both(), HANGING))
    assert elder.status_code == 200, elder.text
    assert elder.json()["choices"] == expected["choices"]
    assert younger.status_code == 500 and "out of memory" in younger.json()["error"]["message"]
    wait_for(lambda: not figure(app, "num_requests_running"))


@pytest.mark.parametrize(
    "fails", [None, LEAVES, f"{STEPS}.forward", f"{STEPS}.OwnKV.make_room", NOTE]
)
def test_kv_is_free_once_it_counts_as_free(app, fails, monkeypatch, request):
    """Nothing is left to Python's garbage collector, which comes when it likes."""
    kept = []
    left = []
    add = DecodeThread.add
    release = Scheduler.release

    def watch(decoding, output, order, begun):
        kept.extend(weakref.ref(layer) for layer in begun.state.kv.cache.layers)
        if fails == LEAVES:  # at this very moment
            (job,) = app.scheduler.running_jobs
            app.scheduler.cancel(job)
        add(decoding, output, order, begun)

    def count(scheduler, job):
        left.append(sum(ref() is not None for ref in kept))
        release(scheduler, job)

    monkeypatch.setattr(DecodeThread, "add", watch)
    monkeypatch.setattr(Scheduler, "release", count)
    if fails not in (None, LEAVES):
        monkeypatch.setattr(fails, out_of_memory)
    request.addfinalizer(gc.enable)
    gc.disable()

    async def ask_and_leave() -> None:
        asked = asyncio.create_task(
            app.client.post("/v1/chat/completions", content=asking(max_tokens=9))
        )
        while not left:
            await asyncio.sleep(0.01)
        asked.cancel()

    if fails == LEAVES:
        app.loop.run_until_complete(asyncio.wait_for(ask_and_leave(), HANGING))
    else:
        assert ask(app).status_code == (500 if fails else 200)
    wait_for(lambda: left)
    assert kept and left == [0]


def test_why_answers_are_single(app, monkeypatch):
    assert app.engine.batching_obstacle is None
    single = copy(app.engine)
    single.speculative_config = SpeculativeConfig(strategy="sd_tree", draft_model="demo")
    assert "a draft tree" in single.batching_obstacle
    single.prefill_config = PrefillConfig(kv="sharded")
    assert "all hosts" in single.batching_obstacle
    monkeypatch.setitem(
        app.engine.parts.language_model.config.rope_parameters, "rope_type", "dynamic"
    )
    assert "rotary frequencies" in app.engine.batching_obstacle


def refuse(*_):
    raise StorageError("no room")


HOLD = "apbv.kv.offers.Offers.hold"
FAILING = [
    (HOLD, refuse, 0),
    (HOLD, refuse, 1),
    ("apbv.decode.answer.Answer.pick", out_of_memory, 0),
]


def hand_over_job(hosts: HostGroup) -> list[tuple[type, str, bool]]:
    """What hand-overs raise that fail on one of the hosts, and whether the hosts are in step
    afterwards."""
    engine = Engine.from_pretrained("demo", hosts=hosts, dtype="float32")
    told = []
    # Long enough for both hosts.
    content = [{"type": "video", "file": 0}, {"type": "text", "text": "x"}]
    asked = {"messages": [{"role": "user", "content": content}], "num_frames": 32}
    order = WorkOrder(
        question_fields=asked,
        files=["clip"],
        settings=RequestSettings(sampling=SamplingParams(max_new_tokens=1), positions="vllm"),
        hands_over=True,
    )
    with Offers(hosts) as offers:
        carried_out = Executor(engine, hosts, offers)
        for name, fails, where in FAILING:
            with (
                pytest.MonkeyPatch.context() as patch,
                pytest.raises((RuntimeError, ValueError)) as caught,
            ):
                if hosts.rank == where:
                    patch.setattr(name, fails)
                carried_out.carry_out(order, nullcontext([demo.video_path()]))
            in_step = carried_out.is_usable and not exchange_commands(hosts, Command.WAIT, False)[1]
            told.append((type(caught.value), str(caught.value), in_step))
    return told


def test_where_one_host_cannot_offer_kv_or_chooses_no_token_the_hosts_stay_in_step(pool):
    """It is no fault of the request."""
    first, second = pool.run(2, hand_over_job)
    for kind, message, in_step in (*first[:2], *second[:2]):
        assert kind is StorageError and in_step and message
    assert first[2] == (RuntimeError, "out of memory", True) and second[2][2]


def late(site, count: int) -> bytes:
    return asking(
        messages=[{"role": "user", "content": [part("image", f"{site.url}/late")] * count}]
    )


def test_a_request_does_not_wait_for_the_media_of_others(site):
    with closing(InProcess(media_hosts=frozenset({"127.0.0.1"}), max_queue=8)) as server:
        post = partial(server.client.post, "/v1/chat/completions")

        async def ask_beside() -> list[int]:
            others = [asyncio.create_task(post(content=late(site, 1))) for _ in range(6)]
            while figure(server, "num_requests_waiting") < 6:
                await asyncio.sleep(0.01)
            reply = await post(content=asking())
            assert not any(task.done() for task in others)
            site.may_answer.set()
            return [reply.status_code, *[(await task).status_code for task in others]]

        statuses = server.loop.run_until_complete(asyncio.wait_for(ask_beside(), HANGING))
        assert statuses == [200] + [400] * 6  # "xxx" is no image


def test_a_request_that_is_still_read_when_the_server_stops(site):
    """It hears so at once; what is being fetched for it does not stay, and nothing else is
    fetched."""
    app = InProcess(media_hosts=frozenset({"127.0.0.1"}))

    async def stop_meanwhile():
        job = Job()
        request = ChatRequest.parse(late(site, 3))
        app.worker.admit(job)
        reading = asyncio.get_running_loop().run_in_executor(None, app.submit, job, request)
        while not site.paths:
            await asyncio.sleep(0.01)
        app.scheduler.stop()
        event = await job.events.get()
        assert not reading.done()
        site.may_answer.set()
        await reading
        return job, event  # kept, so that nothing is tidied up by its going

    with app.private_files.holding(b"") as path:
        job, error = app.loop.run_until_complete(asyncio.wait_for(stop_meanwhile(), HANGING))
        assert (error.status, str(error)) == (503, "the server is stopping")
        assert list(path.parent.iterdir()) == [path] and site.paths == ["/late"] and job.has_ended
    app.close()


def test_a_client_that_leaves_while_its_request_is_read_is_told_nothing():
    async def leave() -> Job:
        job = Job()
        app.worker.admit(job)
        app.scheduler.cancel(job)
        app.submit(job, ChatRequest.parse(asking()))
        return job

    with closing(InProcess()) as app:
        job = app.loop.run_until_complete(leave())
        assert (job.record.status, job.record.outcome, job.events.qsize()) == (499, "cancelled", 0)


def test_a_server_that_stops_gives_offers_up_after_its_grace(media):
    """What runs is given the time, waits for its KV included; no time is given here."""
    with closing(InProcess(media_dir=media, hands_over=True)) as app:
        assert ask(app, kv_transfer_params=HAND_OVER).status_code == 200  # which nobody fetches
        app.scheduler.stop()
        assert app.worker.is_running and app.request("GET", "/health").status_code == 503
        threading.Thread(target=app.worker.finish, args=(0.0,)).start()
        wait_for(lambda: not app.worker.is_running)


def test_of_two_servers_that_want_one_port_the_second_says_so():
    """Both may bind it while neither listens: loading a model takes long."""
    with bind("127.0.0.1", 0) as first, bind(*first.getsockname()) as second:
        listen(first)
        for again in (lambda: listen(second), lambda: bind(*first.getsockname())):
            with pytest.raises(ValueError, match=r"cannot listen on 127\.0\.0\.1:"):
                again()
