"""Who runs when: the queue's order, and the limits on KV, on answers and on the queue."""

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from apbv.config import SamplingParams
from apbv.decode.answer import begin_answer
from apbv.decode.batch import Batch
from apbv.kv.cache import GROWTH_ROWS
from apbv.request.request import RequestSettings
from apbv.serve.api_error import ApiError
from apbv.serve.control.job import Job
from apbv.serve.control.ready_request import ReadyRequest
from apbv.serve.control.scheduler import Limits, Scheduler
from apbv.serve.control.work_order import WorkOrder
from apbv.serve.metrics.prometheus import Metrics
from apbv.serve.protocols.request_reader import Reader
from apbv.serve.server import limits_of
from apbv.serve.settings import ServerSettings

from apbv_tests.patience import HANGING
from apbv_tests.servers import metric_in


def scheduler(max_tokens: int = 100, num_decode_hosts: int = 1, **limits) -> Scheduler:
    given = {"max_queue": 1000, "max_kv_bytes": 8 * max_tokens, "token_bytes": 8, **limits}
    return Scheduler(Limits(**given), Metrics("m"), num_decode_hosts=num_decode_hosts)


LOOP = asyncio.new_event_loop()


def new_job() -> Job:
    async def make() -> Job:
        return Job()

    return LOOP.run_until_complete(make())


def ready(
    scheduler: Scheduler, prompt: int, answer: int = 1, hands_over: bool = False, media=()
) -> Job:
    job = new_job()
    scheduler.admit(job)
    order = WorkOrder(
        question_fields={},
        files=[],
        settings=RequestSettings(sampling=SamplingParams(max_new_tokens=answer)),
        hands_over=hands_over,
    )
    job.read = ReadyRequest(order, prompt, [*media], "prompt")
    scheduler.make_ready(job)
    return job


def leave(scheduler: Scheduler, job: Job) -> None:
    scheduler.end(job, None, "cancelled")
    scheduler.release(job)


def figure(scheduler: Scheduler, name: str, **labels: str) -> float:
    return metric_in(scheduler.render_metrics().decode(), f"apbv:{name}", **labels)


def of_hosts(scheduler: Scheduler, name: str) -> list[float]:
    """A figure of each of three decode hosts."""
    return [figure(scheduler, f"host_{name}", host=host) for host in "012"]


def test_nothing_overtakes_what_does_not_fit_yet():
    books = scheduler(max_tokens=100)
    first = ready(books, 20, 50)
    large = ready(books, 20, 20)
    small = ready(books, 20, 5)
    assert books.take(0) is first
    assert books.take(0) is None  # the small one would fit
    leave(books, first)
    assert first.record.status == 499
    exact = ready(books, 20, 15)
    assert [books.take(0) for _ in range(3)] == [large, small, exact], "up to the last byte"
    assert figure(books, "kv_cache_bytes") == 8 * 100
    assert figure(books, "kv_cache_usage_perc") == 1


def test_a_decode_host_is_the_host_with_the_most_room_and_what_is_transferred_needs_room_on_all():
    books = scheduler(max_tokens=100, num_decode_hosts=3)
    jobs = []
    for tokens, decode_host in (
        (60, 2),
        (30, 1),
        (10, 0),
        (10, 0),
        (75, 0),
        (50, 1),
    ):  # of equal ones the last
        jobs.append(ready(books, tokens - 1))
        assert books.take(0) is jobs[-1] and jobs[-1].decode_host == decode_host
    assert of_hosts(books, "kv_cache_bytes") == [8 * 95, 8 * 80, 8 * 60]
    assert of_hosts(books, "answers") == [3, 2, 1]
    assert figure(books, "kv_cache_bytes") == 8 * 235
    assert figure(books, "kv_cache_usage_perc") == pytest.approx(235 / 300)
    waiting = ready(books, 40)
    assert books.take(0) is None
    leave(books, jobs[0])
    assert books.take(0) is waiting and waiting.decode_host == 2
    handed = ready(books, 10, hands_over=True)
    assert books.take(0) is None  # it would fit on host 0
    leave(books, jobs[4])
    assert books.take(0) is handed and handed.decode_host is None
    assert of_hosts(books, "kv_cache_bytes") == [8 * 30, 8 * 90, 8 * 51]


def test_short_prompts_go_beside_long_ones_each_to_the_decode_host_with_the_fewest_to_prefill():
    """Those with files and those without do not count together."""
    books = scheduler(num_decode_hosts=2, split_tokens=8)
    shorts = [ready(books, 7) for _ in range(6)]
    long = ready(books, 8)
    handed = ready(books, 9, hands_over=True)
    pictured = ready(books, 7, media=["a picture"])
    taken = [books.take(0, is_short=True) for _ in range(5)]
    assert taken == [*shorts[:4], pictured]
    assert [job.decode_host for job in shorts[:4]] == [1, 0, 1, 0]
    assert books.take(0, is_short=True) is None
    assert [books.take(0) for _ in range(3)] == [long, handed, None]
    shorts[1].record.first_token = 1.0  # its decode host has prefilled it
    assert books.take(0, is_short=True) is shorts[4] and shorts[4].decode_host == 0
    leave(books, shorts[0])
    assert books.take(0, is_short=True) is shorts[5] and shorts[5].decode_host == 1


def test_no_short_prompt_overtakes_a_long_one_that_does_not_fit_yet(monkeypatch):
    monkeypatch.setattr("apbv.serve.control.scheduler.SECONDS_PER_TOKEN", 0.0)
    books = scheduler(max_tokens=100, split_tokens=8)
    first = ready(books, 60)
    early = ready(books, 5)
    second = ready(books, 70)
    late = ready(books, 5)
    assert books.take(0) is first and books.take(0, is_short=True) is early
    assert books.take(0) is None and books.take(0, is_short=True) is None
    leave(books, first)
    assert books.take(0, is_short=True) is late and books.take(0) is second


def test_the_number_of_answers_is_bounded_on_each_host():
    books = scheduler(num_decode_hosts=2, max_running=1)
    jobs = [ready(books, 5) for _ in range(3)]
    assert [books.take(0) for _ in jobs] == [*jobs[:2], None]
    assert [job.decode_host for job in jobs] == [1, 0, None]
    leave(books, jobs[1])
    assert books.take(0) is jobs[2] and jobs[2].decode_host == 0


def test_short_prompts_go_first_but_a_long_one_does_not_starve(monkeypatch):
    moments = iter([0.0, 9.0, 9.0, 9.99, *[10.0] * 4])
    monkeypatch.setattr(
        "apbv.serve.control.scheduler.time", SimpleNamespace(monotonic=lambda: next(moments))
    )
    books = scheduler(max_tokens=10**6)
    lengths = {"long": 10_000, "early": 10, "mid": 500, "late": 11}
    jobs = {name: ready(books, length) for name, length in lengths.items()}
    for name in ("early", "mid", "long", "late"):
        assert books.take(0) is jobs[name], name


def test_who_waits_for_room_goes_on_when_there_is_some():
    """Because somebody leaves, or because KV that was held for another server has ended."""
    books = scheduler(max_tokens=100)
    taken = []
    first, second, third = (ready(books, 90) for _ in range(3))
    assert books.take(0) is first

    def expire() -> None:
        books.hold_offer("a transfer", 8 * 90)
        leave(books, second)
        books.end_offer("a transfer", "expired", 8 * 90)

    for end in (lambda: leave(books, first), expire):
        thread = threading.Thread(
            target=lambda: taken.append(books.take(threading.TIMEOUT_MAX)), daemon=True
        )
        thread.start()
        end()
        thread.join(HANGING)
    assert taken == [second, third]


def test_kv_that_waits_to_be_fetched_counts_until_it_has_ended():
    books = scheduler(max_tokens=100)
    handed = ready(books, 80, 20, hands_over=True)
    # Its answer is decoded elsewhere.
    assert books.take(0) is handed and figure(books, "kv_cache_bytes") == 8 * 80
    next_one = ready(books, 20, 10)
    books.hold_offer("a transfer", 8 * 80)
    leave(books, handed)
    assert books.take(0) is None
    assert figure(books, "kv_offers_waiting") == 1
    books.end_offer("a transfer", "expired", 8 * 80)
    assert books.take(0) is next_one and figure(books, "kv_offers_waiting") == 0
    books.end_offer("another", "fetched", 800)  # before it is counted
    books.hold_offer("another", 800)
    assert figure(books, "kv_offers_waiting") == 0
    assert figure(books, "kv_cache_bytes") == 8 * (20 + 10)


def test_answers_and_the_queue_are_bounded_by_number_but_not_what_is_handed_over():
    books = scheduler(max_running=1)
    first = ready(books, 5)
    handed = ready(books, 5, hands_over=True)
    second = ready(books, 5)
    assert [books.take(0) for _ in range(3)] == [first, handed, None]
    leave(books, handed)
    assert books.take(0) is None
    leave(books, first)
    assert books.take(0) is second
    books = scheduler(max_queue=2)
    for _ in range(3):  # nothing runs: one of them will at once
        books.admit(new_job())
    with pytest.raises(ApiError) as caught:
        books.admit(new_job())
    assert caught.value.status == 429


def test_after_it_was_stopped_nothing_is_taken_and_what_runs_or_may_be_fetched_goes_on():
    books = scheduler()
    running = ready(books, 5)
    waiting = ready(books, 5)
    assert books.take(0) is running
    for transfer in ("a transfer", "another"):
        books.hold_offer(transfer, 800)
    books.stop()
    assert waiting.record.status == 503 and not books.has_stopped
    late = new_job()
    books.admit(late)
    with pytest.raises(ApiError, match="stopping"):
        books.make_ready(late)
    assert books.take(0) is None
    leave(books, running)
    books.end_offer("a transfer", "fetched", 800)
    assert not books.has_stopped
    books.cut_short()
    assert books.has_stopped


def test_what_counts_is_what_buffers_take(app):
    engine = app.engine
    limits = limits_of(engine, ServerSettings(max_kv_bytes=2**30))
    order = WorkOrder(
        question_fields={"prompt": "x"},
        files=[],
        settings=RequestSettings(sampling=SamplingParams(max_new_tokens=300, ignore_eos=True)),
    )
    state = engine.prefill("x" * 40)
    taken = []
    batch = Batch(engine.parts)
    member = batch.join(begin_answer(engine.parts, state, order.request(engine.hosts, [])))
    while len(batch):
        if member.kv is not None:  # from the first step on
            taken.append(sum(k.nbytes + v.nbytes for k, v in member.kv.buffers))
        batch.step()
    assert (
        (state.num_tokens + 300) * limits.token_bytes
        < max(taken)
        <= limits.bytes_of(order, state.num_tokens)
    )
    assert limits.bytes_of(order, limits.max_tokens - 300) <= limits.max_kv_bytes


def test_the_least_that_a_server_may_hold(app):
    """The KV of the longest prompt and answer; what could never run is refused by its length."""
    least = (100 + GROWTH_ROWS) * limits_of(
        app.engine, ServerSettings(max_kv_bytes=2**30)
    ).token_bytes
    given = ServerSettings(max_kv_bytes=least, max_model_len=100)
    limits = limits_of(app.engine, given)
    assert limits.max_tokens == 100
    with pytest.raises(ValueError, match=r"--max-kv-mib"):
        limits_of(app.engine, replace(given, max_kv_bytes=least - 1))
    longer = replace(given, max_model_len=200)
    assert Reader(app.engine, longer, app.private_files, limits.max_tokens).max_model_len == 100
