"""What fails in the middle of decoding, and whom it does not concern."""

import gc
import weakref

import pytest

from apbv import Engine, HostGroup, demo
from apbv.decode.batch import Batch
from apbv.kv.manifest import StorageError
from apbv.kv.offers import Offers
from apbv.serve.decoding import Decoding
from apbv.serve.executor import WAIT, Executor, exchange_commands, why_one_at_a_time
from apbv.serve.ledger import Ledger
from apbv.serve.order import Order
from apbv.serve.telling import Telling

from patience import wait_for
from servers import InProcess, metric_in, post

TELLING = "apbv.serve.telling.Telling._note"  # called for every token


def ask(app: InProcess):
    messages = [{"role": "user", "content": "x"}]
    return post(app, "/v1/chat/completions", model="demo", messages=messages, max_tokens=3, ignore_eos=True)


def is_idle(app: InProcess) -> bool:
    figures = app.request("GET", "/metrics").text
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_bytes")
    return not any(metric_in(figures, f"apbv:{name}") for name in names)


def out_of_memory(*_):
    raise RuntimeError("out of memory")


@pytest.mark.parametrize(
    "where",
    [(Batch, "join"), (Batch, "step"), (Telling, "finish")],
    ids=lambda where: f"{where[0].__name__}-{where[1]}",
)
def test_a_request_that_fails_is_told_so_and_the_next_is_answered(app, where, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(*where, out_of_memory)
        for _ in range(2):
            reply = ask(app)
            assert reply.status_code == 500 and "out of memory" in reply.json()["error"]["message"]
    assert ask(app).json()["usage"]["completion_tokens"] == 3
    wait_for(lambda: is_idle(app))


@pytest.mark.parametrize(
    "fails",
    [None, "apbv.decode.batch_steps.forward", "apbv.decode.batch_steps.OwnKV.make_room", TELLING],
)
def test_kv_is_free_once_it_counts_as_free(app, fails, monkeypatch):
    """Nothing is left to Python's garbage collector, which comes when it likes."""
    kept, left, add, release = [], [], Decoding.add, Ledger.release

    def watch(decoding, prefilled):
        kept.extend(weakref.ref(layer) for layer in prefilled.state.kv.cache.layers)
        add(decoding, prefilled)

    def count(ledger, job):
        left.append(sum(ref() is not None for ref in kept))
        release(ledger, job)

    monkeypatch.setattr(Decoding, "add", watch)
    monkeypatch.setattr(Ledger, "release", count)
    if fails is not None:
        monkeypatch.setattr(fails, out_of_memory)
    gc.disable()
    try:
        assert ask(app).status_code == (200 if fails is None else 500)
    finally:
        gc.enable()
    wait_for(lambda: left)
    assert kept and left == [0]


def test_answers_are_single_where_a_model_runs_one_sequence_at_a_time(app, monkeypatch):
    assert why_one_at_a_time(app.engine) is None
    monkeypatch.setitem(app.engine.parts.language_model.config.rope_parameters, "rope_type", "dynamic")
    assert "rotary frequencies" in why_one_at_a_time(app.engine)


def hand_over_job(hosts: HostGroup, name: str, fails, where: int) -> tuple[type, str, bool]:
    """What a hand-over raises that fails on one of the hosts, and whether the hosts are in step afterwards."""
    engine = Engine.from_pretrained("demo", hosts=hosts, dtype="float32")
    content = [{"type": "video", "file": 0}, {"type": "text", "text": "x"}]
    order = Order([{"role": "user", "content": content}], ["clip"], 64, None, 1, 0.0, 1.0, 0, hands_over=True)
    with Offers(hosts) as offers, pytest.MonkeyPatch.context() as patch:
        carried_out = Executor(engine, hosts, offers)
        if hosts.rank == where:
            patch.setattr(name, fails)
        with pytest.raises((RuntimeError, ValueError)) as caught:
            carried_out.hand_over(order, lambda _: [demo.video_path()], lambda _: False)
        in_step = carried_out.is_usable and exchange_commands(hosts, WAIT, False) == (WAIT, False)
        return type(caught.value), str(caught.value), in_step


def refuse(*_):
    raise StorageError("no room")


@pytest.mark.parametrize("where", [0, 1])
def test_kv_that_one_host_cannot_offer_is_no_fault_of_the_request(pool, where):
    for kind, message, in_step in pool.run(2, hand_over_job, "apbv.kv.offers.Offers.hold", refuse, where):
        assert (
            kind is RuntimeError and "the KV cannot be offered: " in message and "no room" in message and in_step
        )


def test_hosts_stay_in_step_where_no_first_token_is_chosen(pool):
    (kind, message, in_step), other = pool.run(2, hand_over_job, "apbv.serve.executor.sample", out_of_memory, 0)
    assert kind is RuntimeError and message == "out of memory" and in_step and other[2]
