"""The processes of a whole stack, for the checks: prefill hosts, vLLM, a router, and who asks
them."""

import base64
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import openai
import psutil

from apbv_tests.patience import limit, wait_for

ROOT = Path(__file__).parents[2]


def documented(mark: str) -> list[str]:
    """The words of the command that docs/serving.md has under this mark."""
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    (code,) = re.findall(rf"^```bash {mark}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return shlex.split(code.replace("\\\n", " "))


def replaced(words: list[str], **values) -> list[str]:
    """A command with other values of its options."""
    words = list(words)
    for name, value in values.items():
        words[words.index(f"--{name}") + 1] = str(value)
    return words


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Service:
    """A process that speaks HTTP, and its log.

    Attributes:
        url: its address.
        log: the file that has what it printed.
    """

    def __init__(self, name: str, command: list, folder: Path, port: int, **environment: str):
        self.name = name
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / f"{name}.log"
        with open(self.log, "w") as file:
            run = {"stdout": file, "stderr": subprocess.STDOUT, "env": os.environ | environment}
            self._process = subprocess.Popen(
                [str(word) for word in command], start_new_session=True, **run
            )

    def wait_until_healthy(self) -> None:
        """Wait until it answers.

        Raises:
            AssertionError: it has ended instead, or says nothing.
        """

        def ready() -> bool:
            assert self.is_alive, f"{self.name} has ended:\n{self.said()[-4000:]}"
            return self.health() == 200

        wait_for(ready, limit(240.0))

    def health(self) -> int | None:
        """The status of its health; None where nobody answers."""
        try:
            return httpx.get(f"{self.url}/health", timeout=limit(10.0)).status_code
        except httpx.TransportError:
            return None

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels; names may end with labels that are wanted."""
        wanted, _, labels = name.partition("{")
        total = 0.0
        for line in httpx.get(f"{self.url}/metrics", timeout=limit(30.0)).text.splitlines():
            found = re.fullmatch(rf"{re.escape(wanted)}(\{{.*\}})? (\S+)", line)
            if found and labels.rstrip("}") in (found[1] or ""):
                total += float(found[2])
        return total

    def said(self) -> str:
        """What it printed so far."""
        return self.log.read_text(errors="replace")

    @property
    def is_alive(self) -> bool:
        """Whether its first process runs."""
        return self._process.poll() is None

    def processes(self) -> list[psutil.Process]:
        """Its processes, the first one first."""
        first = psutil.Process(self._process.pid)
        return [first, *first.children(recursive=True)]

    def host(self, rank: int) -> psutil.Process:
        """The process that torchrun started as this rank."""
        return next(each for each in self.processes() if each.environ().get("RANK") == str(rank))

    def kill(self) -> None:
        """End all its processes at once, as a machine that loses power."""
        self.stop(seconds=0)

    def stop(self, seconds: float = limit(30.0)) -> None:
        """End it, and whatever is left of it after so many seconds."""
        left = self.processes() if self.is_alive else []
        if left and seconds:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
        for each in left:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        self._process.wait(limit(60.0))


def prefill_worker(name: str, model: Path, served: str, folder: Path, *options) -> Service:
    """Two hosts that prefill, with ``launch/serve.py``."""
    port = free_port()
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        2,
    ]
    command = [
        *torchrun,
        ROOT / "launch" / "serve.py",
        "--model",
        model,
        "--served-model-name",
        served,
    ]
    command += ["--port", port, "--dtype", "float32", "--kv-transfer", "tcp", *options]
    return Service(name, command, folder, port)


def decoder(
    name: str, model: Path, served: str, folder: Path, *options, num_frames: int = 1
) -> Service:
    """vLLM as the documentation has it, and with what a small CPU needs; it decodes the workers'
    KV."""
    port = free_port()
    _, _, _, *words = replaced(documented("vllm"), port=port)
    media = json.loads(words[words.index("--media-io-kwargs") + 1])
    media["video"]["num_frames"] = num_frames
    words = replaced(words, **{"media-io-kwargs": json.dumps(media)})
    # The command vllm needs the distribution's name to be vllm, which that for CPUs is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *words]
    command += ["--served-model-name", served, "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", 512, "--max-num-seqs", 8, "--block-size", 32, *options]
    return Service(
        name, command, folder, port, VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_LOGGING_LEVEL="DEBUG"
    )


def router(name: str, prefill: Service, decoders: list[Service], folder: Path) -> Service:
    """vllm-router as the documentation has it, before these."""
    port = free_port()
    words = replaced(documented("router"), port=port, prefill=prefill.url)
    words = words[: words.index("--decode")]  # they stand at the end
    for each in decoders:
        words += ["--decode", each.url]
    words += ["--prometheus-port", free_port()]
    return Service(name, [Path(sys.executable).with_name(words[0]), *words[1:]], folder, port)


@contextmanager
def running(services: list[Service]) -> Iterator[None]:
    """Services until the end of the block, healthy at its beginning."""
    try:
        for service in services:
            service.wait_until_healthy()
        yield
    finally:
        for service in reversed(services):
            service.stop()


def client_of(service: Service) -> openai.OpenAI:
    """OpenAI's client of a service."""
    return openai.OpenAI(
        base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=limit(120.0)
    )


def video_part(path: Path) -> dict:
    """A video as part of a message."""
    data = base64.b64encode(path.read_bytes()).decode()
    return {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{data}"}}
