"""Hundreds of requests of all kinds, with faults: nothing is left behind of them."""

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from apbv import demo

from apbv_tests.patience import HANGING, wait_for
from apbv_tests.pool import exit_statuses
from apbv_tests.servers import HAND_OVER, Server, data_url, left_open, part, serving, text

CLIENTS = 12
REQUESTS = 160
EARLY = 60
# Allocators keep the most that lay there at a time, which the first requests do not reach. KV that
# each left behind would be more.
MOST_GROWN_BYTES = 48 * 2**20
# Pools of threads grow up to their size as chance has it.
MOST_NEW_THREADS = 12


class Client:
    """Asks for one thing after the other, as its number says, and checks what may come of it."""

    def __init__(self, server: Server):
        self._server = server
        self._film = data_url(demo.video_path())
        self._damaged = self._film[: len("data:application/octet-stream;base64,") + 8000]
        usual = [self.chat, self.hand_over, self.leave, self.hang_up]
        self._kinds = usual * 5 + [self.film]

    def __call__(self, number: int) -> None:
        draw = random.Random(number)
        draw.choice(self._kinds)(draw)

    def _post(self, path: str, status: int, **body) -> dict:
        with httpx.Client(timeout=HANGING) as client:
            reply = client.post(f"{self._server.url}/{path}", json={"model": "demo", **body})
        assert reply.status_code == status, reply.text
        return reply.json()

    def _chat(self, content, status: int = 200, **body) -> dict:
        return self._post(
            "chat/completions", status, messages=[{"role": "user", "content": content}], **body
        )

    def chat(self, draw) -> None:
        body = {
            "max_tokens": draw.randint(1, 8),
            "ignore_eos": True,
            "temperature": draw.choice([0, 0.8]),
        }
        count = draw.choice([1, 1, 3])
        usage = self._chat("x " * draw.randint(1, 40), **body, n=count)["usage"]
        assert usage["completion_tokens"] == count * body["max_tokens"]
        assert "error" in self._chat("x", 400, **draw.choice([{"n": 129}, {"max_tokens": 10**6}]))

    def hand_over(self, draw) -> None:
        reply = self._chat("x " * draw.randint(1, 80), max_tokens=1, kv_transfer_params=HAND_OVER)
        assert reply["kv_transfer_params"]["do_remote_prefill"]

    def leave(self, draw) -> None:
        body = {
            "model": "demo",
            "prompt": "x",
            "max_tokens": 2000,
            "ignore_eos": True,
            "stream": True,
        }
        with httpx.stream(
            "POST", f"{self._server.url}/completions", json=body, timeout=HANGING
        ) as reply:
            lines = reply.iter_lines()
            for _ in range(draw.randint(1, 10)):
                next(lines)

    def hang_up(self, draw) -> None:
        body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 500}
        with left_open(
            self._server, {**body, "kv_transfer_params": draw.choice([None, HAND_OVER])}
        ):
            pass

    def film(self, draw) -> None:
        self._chat(
            [part("video", self._film), text("how many letters are shown")],
            max_tokens=3,
            num_frames=16,
        )
        self._chat([part("video", self._damaged), text("x")], 400, max_tokens=3)


def held_by(pid: int) -> tuple[int, int, int]:
    """A process's open files and sockets, its threads, and its memory in bytes."""
    process = Path(f"/proc/{pid}")
    pages = int((process / "statm").read_text().split()[1])
    files, threads = (len(os.listdir(process / name)) for name in ("fd", "task"))
    return files, threads, pages * os.sysconf("SC_PAGE_SIZE")


def when_idle(server: Server) -> list[tuple[int, int, int]]:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_bytes", "kv_offers_waiting")
    wait_for(lambda: not any(server.metric(f"apbv:{name}") for name in names))
    server.http.close()  # which is used again for the next figure
    server.http = httpx.Client(timeout=HANGING)
    return [held_by(process.pid) for process in server.processes]


@pytest.mark.thorough
def test_hundreds_of_requests_leave_nothing_behind(tmp_path):
    options = [
        "--model",
        "demo",
        "--max-model-len",
        4096,
        "--kv-transfer",
        "tcp",
        "--kv-seconds",
        1,
    ]
    with serving(tmp_path / "out", *options) as server:
        ask = Client(server)
        with ThreadPoolExecutor(CLIENTS) as clients:
            list(clients.map(ask, range(EARLY)))
            early = when_idle(server)
            list(clients.map(ask, range(EARLY, REQUESTS)))
        late = when_idle(server)
        for (files, threads, size), (files_later, threads_later, size_later) in zip(
            early, late, strict=True
        ):
            assert files_later <= files + 2, (early, late)
            assert threads_later <= threads + MOST_NEW_THREADS, (early, late)
            assert size_later <= size + MOST_GROWN_BYTES, (early, late)
        assert server.health() == 200 and server.ask("x", max_tokens=1).usage.completion_tokens == 1
        assert server.metric("apbv:request_success_total", finished_reason="error") == 0
        os.kill(server.processes[0].pid, signal.SIGTERM)
        assert exit_statuses(server.processes) == [0, 0], server.errors()
