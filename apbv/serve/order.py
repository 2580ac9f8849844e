"""Orders, which host 0 gives the other hosts, and how every host carries them out."""

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from typing import Any

from ..engine import Engine
from ..generated import GenerateResult
from ..hosts import HostGroup
from ..input.request import Question
from .media import find_in_folder
from .private_files import PrivateFiles

WAIT, ANSWER, LEAVE = range(3)  # host 0's commands


@dataclass(frozen=True)
class Order:
    """A request to the engine, the same on every host.

    Attributes:
        messages: the chat; content parts refer to files by number, ``{"type": "video", "file": 0}``.
        files: paths in the allowed folder, or None for files whose bytes are sent.
        num_frames, fps, max_new_tokens, temperature, top_p, seed: as of :meth:`apbv.Engine.generate`.
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
        """Encode the order for other hosts."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "Order":
        """Decode what :meth:`to_json` encoded."""
        return cls(**json.loads(data))

    def question(self, files: Sequence[Any]) -> Question:
        """Return the question as the engine takes it.

        Args:
            files: paths on this host, or whatever else stands for the order's files.
        """
        messages = [
            {
                "role": message["role"],
                "content": [
                    {"type": part["type"], part["type"]: files[part["file"]]} if "file" in part else part
                    for part in message["content"]
                ],
            }
            for message in self.messages
        ]
        return Question(messages=messages, num_frames=self.num_frames, fps=self.fps)


def answer(
    engine: Engine,
    hosts: HostGroup,
    order: Order,
    open_files: Callable[[ExitStack], list[Path]],
    stop: Callable[[Sequence[int]], bool],
) -> GenerateResult:
    """Let the engine answer; collective.

    Args:
        open_files: gives this host's paths of the order's files, which last as long as the stack.
        stop: see :meth:`apbv.Engine.generate`.
    """
    with ExitStack() as stack:
        with hosts.local_stage("opening the files"):
            paths = open_files(stack)
        question = order.question(paths)
        return engine.generate(
            messages=question.messages,
            num_frames=question.num_frames,
            fps=question.fps,
            max_new_tokens=order.max_new_tokens,
            temperature=order.temperature,
            top_p=order.top_p,
            seed=order.seed,
            stop=stop,
        )


def exchange_commands(hosts: HostGroup, command: int, wants_to_stop: bool) -> tuple[int, bool]:
    """Exchange host 0's command, and whether any host was asked to stop; collective.

    Every host sends something, so that each notices one that has ended.
    """
    messages = hosts.gather_floats([command, wants_to_stop])
    return int(messages[0][0]), any(stop for _, stop in messages)


def is_usable(engine: Engine, hosts: HostGroup) -> bool:
    """Return whether the hosts can go on after a request that failed."""
    return not (hosts.is_broken or engine.hosts.is_broken)


def follow(
    engine: Engine, hosts: HostGroup, folder: Path | None, private_files: PrivateFiles, wants_to_stop: Event
) -> None:
    """Carry out host 0's commands until it says to leave; every other host does.

    Args:
        folder: the folder that files are read from, as on host 0.
        private_files: where files go whose bytes are sent.
        wants_to_stop: set when this process was asked to end; host 0 decides.

    Raises:
        HostError: another host ended, or failed in an exchange.
    """
    while True:
        command, _ = exchange_commands(hosts, WAIT, wants_to_stop.is_set())
        if command == LEAVE:
            return
        if command == WAIT:
            continue
        order = Order.from_json(hosts.broadcast_bytes(None))
        sent = iter([hosts.broadcast_bytes(None) for file in order.files if file is None])

        def open_files(stack: ExitStack, order=order, sent=sent) -> list[Path]:
            return [
                stack.enter_context(private_files.holding(next(sent)))
                if file is None
                else find_in_folder(folder, file)
                for file in order.files
            ]

        try:
            answer(engine, hosts, order, open_files, stop=lambda _: False)
        except Exception:  # it is for host 0 to report
            if not is_usable(engine, hosts):
                raise
