"""What a terminal shows while something takes long; on a real one (a pseudo-terminal), with no
delay."""

import codecs
import fcntl
import json
import os
import re
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, redirect_stderr, suppress
from types import SimpleNamespace

import pytest

from apbv import Engine, HostGroup, PrefillConfig, VideoConfig, demo
from apbv.launch.answer import run
from apbv.launch.infer import parse_arguments
from apbv.launch.progress import ProgressBars

from apbv_tests.patience import wait_for

FRAMES = 8


@pytest.fixture
def terminal() -> Iterator[SimpleNamespace]:
    """A terminal of 100 columns, and all that was ever written to it."""
    screen, line = os.openpty()
    fcntl.ioctl(line, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    terminal = SimpleNamespace(file=os.fdopen(line, "w", buffering=1), written="")
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read() -> None:
        with suppress(OSError):  # its other end is closed
            while data := os.read(screen, 4096):
                terminal.written += decoder.decode(data)

    reader = threading.Thread(target=read)
    reader.start()
    yield terminal
    terminal.file.close()
    reader.join()
    os.close(screen)


@contextmanager
def progress_on(terminal, delay: float = 0.0) -> Iterator[ProgressBars]:
    with (
        redirect_stderr(terminal.file),
        closing(ProgressBars(sys.stderr.isatty(), delay, interval=0.0)) as progress,
    ):
        yield progress


def last_line(terminal) -> str:
    return terminal.written.replace("\r", "\n").splitlines()[-1].strip()


def test_frames_and_layers_are_counted_and_nothing_stays(terminal):
    config = PrefillConfig(video=VideoConfig(chunk_bytes=1))
    engine = Engine.from_pretrained(
        "demo", prefill=config, hosts=HostGroup.single("cpu"), dtype="float32"
    )
    with progress_on(terminal) as progress:
        progress.watch(engine)
        told = {"on_stage": progress.begin, "on_progress": progress.advance}
        asked = {"video": demo.video_path(), "num_frames": FRAMES, "max_new_tokens": 4}
        engine.generate("name the letters in order", **asked, **told)
    num_layers = engine.model.config.text_config.num_hidden_layers
    wait_for(
        lambda: f" {num_layers}/{num_layers} [" in terminal.written and not last_line(terminal)
    )
    stages = "reading the video", "encoding", "prefill"
    shown = {
        what: set(re.findall(rf"{what}: [^\r]*?(\d+/\d+) \[", terminal.written)) for what in stages
    }
    patches = FRAMES // 2
    assert f"{patches}/{FRAMES}" in shown["reading the video"]
    assert shown["encoding"] == {f"{done}/{patches}" for done in range(1, patches + 1)}
    assert shown["prefill"] == {f"{done}/{num_layers}" for done in range(1, num_layers + 1)}


def test_stages_run_beside_one_another_and_the_next_removes_them(terminal):
    with progress_on(terminal) as progress:
        for stage, done in (("decode_video", 1), ("encode", 1), ("decode_video", 3), ("encode", 2)):
            progress.begin(stage)
            progress.advance(stage, done, 3)
        wait_for(lambda: "encoding:  67%" in terminal.written)
        progress.begin("prefill")
        progress.advance("prefill", 1, 3)
        wait_for(lambda: "prefill:  33%" in terminal.written)
    wait_for(lambda: not last_line(terminal))


def test_what_is_over_sooner_is_not_shown(terminal):
    """The delay is longer than any test."""
    with progress_on(terminal, delay=1e6) as progress:
        progress.begin("prefill")
        progress.advance("prefill", 1, 3)
    print("end", file=terminal.file)
    wait_for(lambda: "end" in terminal.written)
    assert terminal.written.strip() == "end"


def answer(tmp_path) -> dict:
    """The script on one host; the JSON line that it writes."""
    path = tmp_path / "figures.jsonl"
    asked = ["--model", "demo", "--prompt", "name the letters in order", "--json", str(path)]
    run(parse_arguments(asked), HostGroup.single("cpu"), progress_delay=0.0)
    return json.loads(path.read_text().splitlines()[-1])


def test_the_script_shows_it_on_a_terminal_and_nowhere_else(terminal, tmp_path, capsys):
    with redirect_stderr(terminal.file):
        figures = answer(tmp_path)
    wait_for(lambda: "peak memory" in terminal.written)
    assert "prefill: " in terminal.written
    assert capsys.readouterr().out == figures["text"] + "\n"
    answer(tmp_path)
    printed = capsys.readouterr()
    assert printed.out == figures["text"] + "\n"
    assert all(line.startswith("  ") for line in printed.err.splitlines())
