"""Servers for the tests of serving."""

import http.server
import os
import signal
import threading
from pathlib import Path

import pytest
from PIL import Image

from apbv import Engine, HostGroup, demo
from apbv.input.video import probe, read_frames
from apbv.serve.media import MediaSettings

import families
from pool import exit_statuses
from servers import KEY, InProcess, Site, serving


@pytest.fixture(scope="module")
def media(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    (folder / "clips").mkdir()
    (folder / "clips" / "a clip.mp4").write_bytes(demo.video_path().read_bytes())
    Image.fromarray(read_frames(probe(demo.video_path()), [3])[0]).save(folder / "picture.png")
    (folder / "broken.mp4").write_bytes(demo.video_path().read_bytes()[:9000])
    (folder / "broken.png").write_bytes((folder / "picture.png").read_bytes()[:300])
    os.symlink("/etc/hostname", folder / "link.mp4")
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory, media):
    """The demo model on two hosts, with everything allowed that is safe to allow."""
    options = [
        "--model",
        "demo",
        "--media-dir",
        media,
        "--api-key",
        KEY,
        "--max-media-mib",
        0.5,
        "--max-body-mib",
        1,
    ]
    with serving(tmp_path_factory.mktemp("server") / "out", *options, key=KEY) as started:
        yield started
        os.kill(started.processes[1].pid, signal.SIGTERM)  # host 0 hears of it
        assert exit_statuses(started.processes) == [0, 0], started.errors()


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained("demo", hosts=HostGroup.single("cpu"), dtype="float32")


@pytest.fixture(scope="module")
def endless_model(tmp_path_factory) -> Path:
    return families.save_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("random") / "model")


@pytest.fixture
def site():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.paths, server.answers_late = [], threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.answers_late.set()
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    (folder / "clip.mp4").write_bytes(demo.video_path().read_bytes())
    app = InProcess(MediaSettings(folder=folder))
    yield app
    app.close()
