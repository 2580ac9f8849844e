"""A server to talk to: launch/serve.py in processes of its own, or the app in this process."""

import asyncio
import base64
import json
import re
import socket
import threading
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from apbv import Engine, HostGroup
from apbv.kv.offers import Offers
from apbv.serve.control.executor import Executor, follow
from apbv.serve.control.job import Job
from apbv.serve.control.links import connect_to_hosts, connect_to_leader
from apbv.serve.control.scheduler import Limits, Scheduler
from apbv.serve.control.worker import Worker
from apbv.serve.http.app import build_app
from apbv.serve.media.files import PrivateFiles
from apbv.serve.metrics.prometheus import Metrics
from apbv.serve.protocols.request_reader import Reader
from apbv.serve.protocols.requests import GenerationRequest

from apbv_tests.configs import server_settings
from apbv_tests.patience import HANGING, limit, wait_for
from apbv_tests.scripts import ROOT, started_hosts

KEY = "a key"
# As routers ask for a prompt's KV.
HAND_OVER = {"do_remote_decode": True, "do_remote_prefill": False}
HAND_OVER |= dict.fromkeys(("remote_engine_id", "remote_block_ids"))
ENDLESS = {"max_tokens": 20000}  # which a model with random weights uses up, in minutes


class Server:
    """A running server and its client."""

    def __init__(self, processes: list, outputs: Path, key: str = ""):
        self.processes = processes
        self._outputs = outputs
        wait_for(
            lambda: (
                self._address() or any(process.exitcode is not None for process in self.processes)
            )
        )
        assert self._address(), self.errors()
        self.url = self._address()[0]
        self.root = self.url.removesuffix("/v1")
        self.client = openai.OpenAI(
            base_url=self.url, api_key=key or "none", max_retries=0, timeout=limit(600.0)
        )
        self.http = httpx.Client(timeout=HANGING)

    def _address(self) -> re.Match | None:
        return re.search(r"http://\S+(?=\n)", self.printed())

    def printed(self) -> str:
        path = self._outputs / "0.stdout"
        return path.read_text() if path.exists() else ""

    def errors(self) -> str:
        return "".join(path.read_text() for path in sorted(self._outputs.glob("*.stderr")))

    def ask(self, content, **options):
        messages = [{"role": "user", "content": content}]
        return self.client.chat.completions.create(model="demo", messages=messages, **options)

    def health(self) -> int | None:
        """Its status; None where nobody answers any more."""
        try:
            return self.http.get(f"{self.root}/health").status_code
        except httpx.TransportError:
            return None

    def metric(self, name: str, **labels: str) -> float:
        return metric_in(self.http.get(f"{self.root}/metrics").text, name, **labels)

    def wait_until(self, name: str, value: float, **labels: str) -> None:
        wait_for(lambda: self.metric(name, **labels) == value)


def metric_in(text: str, name: str, **labels: str) -> float:
    """The sample of /metrics with that name and those labels, whatever model it is about."""
    found = []
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name != name:
                continue
            others = {**sample.labels}
            others.pop("model_name")
            if others == labels:
                found.append(sample.value)
    (value,) = found
    return value


@contextmanager
def serving(outputs: Path, *options, hosts: int = 2, key: str = ""):
    outputs.mkdir()
    arguments = [str(option) for option in ("--port", 0, *options)]
    with started_hosts(ROOT / "launch" / "serve.py", arguments, hosts, outputs) as processes:
        yield Server(processes, outputs, key)


def part(kind: str, url: str | Path) -> dict:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": str(url)}}


def text(question: str) -> dict:
    return {"type": "text", "text": question}


def data_url(path: Path) -> str:
    return "data:application/octet-stream;base64," + base64.b64encode(path.read_bytes()).decode()


@contextmanager
def left_open(server: Server, body: dict):
    """A request whose client hangs up at the end of the block, without having read anything."""
    content = json.dumps(body).encode()
    headers = (
        f"Host: server\r\nAuthorization: Bearer {server.client.api_key}\r\nContent-Length: "
        f"{len(content)}"
    )
    head = f"POST /v1/chat/completions HTTP/1.1\r\n{headers}\r\n\r\n"
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port)) as client:
        client.sendall(head.encode() + content)
        yield


class Stream:
    """A streamed answer, read in a thread."""

    def __init__(self, server: Server, **options):
        self.pieces = 0
        self.error = None
        self._is_over = False
        self._thread = threading.Thread(target=self._read, args=(server, options))
        self._thread.start()

    def _read(self, server: Server, options: dict) -> None:
        try:
            with server.ask("x", stream=True, **options) as chunks:
                for _ in chunks:
                    self.pieces += 1
                    if self._is_over:
                        return
        except openai.APIError as error:
            self.error = error

    def leave(self) -> None:
        """Hang up, whatever is still to come."""
        self._is_over = True
        assert self.end() is None

    def end(self) -> openai.APIError | None:
        self._thread.join(HANGING)
        assert not self._thread.is_alive()
        return self.error


class InProcess:
    """The app before a real engine, on a loop of its own.

    Args:
        hands_over: whether KV is held for other servers, which have an hour to fetch it.
        model, max_model_len, max_running: what answers (an Engine, too), how much it may read and
            write, and how many at once.
        split_tokens: the fewest tokens of a prompt that all hosts prefill together.
        media: what files it may read.
    """

    def __init__(
        self,
        max_queue=4,
        hands_over=False,
        model="demo",
        max_model_len=48,
        max_running=None,
        split_tokens=0,
        **media,
    ):
        self.loop = asyncio.new_event_loop()
        if not isinstance(model, Engine):
            model = Engine.from_pretrained(model, hosts=HostGroup.single("cpu"), dtype="float32")
        self.engine = engine = model
        self.private_files = PrivateFiles()
        limited = {"num_frames": 8, "max_frames": 16, "max_body_bytes": 2**20}
        settings = server_settings(max_model_len=max_model_len, max_new_tokens=1, **limited | media)
        limited = {"max_queue": max_queue, "max_running": max_running, "split_tokens": split_tokens}
        limits = Limits(max_kv_bytes=2**30, token_bytes=2**10, **limited)
        self.reader = reader = Reader(engine, settings, self.private_files, limits.max_tokens)
        decode_hosts = engine.num_decode_hosts
        self.scheduler = scheduler = Scheduler(
            limits, Metrics("demo"), num_decode_hosts=max(decode_hosts, 1)
        )
        self.offers = offering(engine, on_end=scheduler.end_offer) if hands_over else None
        self._stack = ExitStack()
        links = connect_to_hosts(engine.hosts, self._stack) if decode_hosts > 1 else None
        executor = Executor(engine, engine.hosts, self.offers)
        self.worker = Worker(executor, scheduler, self.private_files, links)
        self.app = build_app(self.worker, scheduler, reader, settings)
        self.worker.start(on_stop=lambda: None, on_end=lambda: None)
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://server")

    def request(self, method: str, path: str, **options) -> httpx.Response:
        return self.loop.run_until_complete(
            asyncio.wait_for(self.client.request(method, path, **options), 30)
        )

    def submit(self, job: Job, request: GenerationRequest) -> None:
        """Read a request and put it into the queue, as the endpoints do in a thread."""
        self.worker.submit(job, partial(self.reader.read, request), request.hands_over)

    def close(self):
        if self.offers is not None:
            self.offers.close()
        self.worker.finish(10)
        self._stack.close()
        self.loop.run_until_complete(self.client.aclose())
        self.loop.close()
        self.private_files.close()


def offering(engine: Engine, **options) -> Offers:
    """Where this host offers KV, which others have an hour to fetch; collective."""
    return Offers(engine.hosts, seconds=3600.0, **options)


def follow_server(engine: Engine, media_dir: Path) -> None:
    """Do what host 0's app wants of the other hosts, until it ends."""
    with (
        closing(PrivateFiles()) as files,
        closing(offering(engine)) as offers,
        ExitStack() as stack,
    ):
        link = connect_to_leader(engine.hosts, stack) if engine.num_decode_hosts > 1 else None
        executor = Executor(engine, engine.hosts, offers)
        follow(executor, media_dir, files, threading.Event(), link)


def post(app: InProcess, path: str, headers: dict | None = None, **body) -> httpx.Response:
    """Post a JSON object."""
    return app.request("POST", path, content=json.dumps(body).encode(), headers=headers)


def chunks(reply: httpx.Response) -> list[dict]:
    """The events of a stream."""
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert reply.status_code == 200 and lines.pop() == "[DONE]", reply.text
    return [json.loads(line) for line in lines]


def choices_at(index: int, events: list[dict]) -> list[dict]:
    """What events of a stream say of one of its choices; each event is of one choice."""
    choices = [event["choices"][0] for event in events]
    return [choice for choice in choices if choice["index"] == index]


def token_ids_of(choices: list[dict]) -> list[int]:
    """All token ids that a stream gives a choice, of which some events have none."""
    token_ids = []
    for choice in choices:
        token_ids += choice.get("token_ids", [])
    return token_ids


def asking(**fields) -> bytes:
    return json.dumps(
        {"model": "demo", "messages": [{"role": "user", "content": "x"}], **fields}
    ).encode()
