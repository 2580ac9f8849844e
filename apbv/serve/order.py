"""What host 0 tells the other hosts, and what every host does about it."""

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from typing import Any

from ..decode.decoder import Stop
from ..engine import Engine, GenerateResult
from ..hosts import HostGroup
from .media import find_in_folder, private_file

WAIT, ANSWER, LEAVE = range(3)


@dataclass(frozen=True)
class Order:
    """A request to the engine, the same on every host.

    Attributes:
        messages: the chat; parts refer to files by number, ``{"type": "video", "file": 0}``.
        files: paths in the allowed folder, or None for files whose bytes are sent.
    """

    messages: list[dict[str, Any]]
    files: list[str | None]
    num_frames: int
    fps: float | None
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "Order":
        return cls(**json.loads(data))

    def chat(self, files: Sequence[Any]) -> list[dict[str, Any]]:
        """The messages as the engine takes them, with paths of this host, or whatever stands for the files."""
        return [
            {
                "role": message["role"],
                "content": [
                    {"type": part["type"], part["type"]: files[part["file"]]} if "file" in part else part
                    for part in message["content"]
                ],
            }
            for message in self.messages
        ]


def answer(
    engine: Engine, hosts: HostGroup, order: Order, open_files: Callable[[ExitStack], list[Path]], stop: Stop
) -> GenerateResult:
    """Let the engine answer; collective.

    Args:
        open_files: gives this host's paths of the order's files, which last as long as the stack.
    """
    with ExitStack() as stack:
        with hosts.local_stage("opening the files"):
            paths = open_files(stack)
        return engine.generate(
            messages=order.chat(paths),
            num_frames=order.num_frames,
            fps=order.fps,
            max_new_tokens=order.max_new_tokens,
            temperature=order.temperature,
            top_p=order.top_p,
            seed=order.seed,
            stop=stop,
        )


def exchange(hosts: HostGroup, command: int, wants_to_stop: bool) -> tuple[int, bool]:
    """Hear host 0's command, and whether any host was asked to stop; collective.

    Every host sends something, so that each notices one that has ended.
    """
    said = hosts.gather_floats([command, wants_to_stop])
    return int(said[0][0]), any(stop for _, stop in said)


def is_usable(engine: Engine, hosts: HostGroup) -> bool:
    """Whether the hosts can go on after a request that failed."""
    return not (hosts.is_broken or engine.hosts.is_broken)


def follow(engine: Engine, hosts: HostGroup, folder: Path | None, wants_to_stop: Event) -> None:
    """What every host but host 0 does until it is told to leave.

    Args:
        folder: what files are read from, as on host 0.
        wants_to_stop: set when this process was asked to end; host 0 decides.

    Raises:
        HostError: another host ended, or failed in an exchange.
    """
    while True:
        command, _ = exchange(hosts, WAIT, wants_to_stop.is_set())
        if command == LEAVE:
            return
        if command == WAIT:
            continue
        order = Order.from_json(hosts.broadcast_bytes(None))
        sent = iter([hosts.broadcast_bytes(None) for file in order.files if file is None])

        def open_files(stack: ExitStack, order=order, sent=sent) -> list[Path]:
            return [
                stack.enter_context(private_file(next(sent))) if file is None else find_in_folder(folder, file)
                for file in order.files
            ]

        try:
            answer(engine, hosts, order, open_files, stop=lambda _: False)
        except Exception:  # it is for host 0 to report
            if not is_usable(engine, hosts):
                raise
