"""The app in this process, and what it is asked about."""

import http.server
import threading
import time
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from PIL import Image

from apbv import demo
from apbv.input.media.video import probe, read_frames

from apbv_tests.patience import HANGING
from apbv_tests.servers import InProcess


@contextmanager
def in_thread(server: http.server.ThreadingHTTPServer):
    """It answers until the end of the block."""
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class Site(http.server.BaseHTTPRequestHandler):
    """A server on this machine that must not be reached unless it is meant."""

    def do_GET(self):
        self.server.paths.append(self.path)
        kind, _, rest = self.path[1:].partition("/")
        if kind == "late":
            self.server.may_answer.wait(HANGING)
        if kind == "to":
            self.send_response(302)
            self.send_header("Location", rest)
            self.end_headers()
            return
        self.send_response(404 if kind == "missing" else 200)
        if kind == "short":
            self.send_header("Content-Length", "50")
        self.end_headers()
        for _ in range(600 if kind == "slow" else 1):
            try:
                self.wfile.write(b"x" * (1000 if kind == "large" else 3))
                self.wfile.flush()
            except OSError:
                return
            time.sleep(0.1 if kind == "slow" else 0)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="session")
def media(tmp_path_factory) -> Path:
    """The folder that servers may read."""
    folder = tmp_path_factory.mktemp("media")
    (folder / "clips").mkdir()
    clip = demo.video_path().read_bytes()
    picture = folder / "picture.png"
    Image.fromarray(read_frames(probe(demo.video_path()), [3])[0]).save(picture)
    for name, data in {
        "clip.mp4": clip,
        "clips/a clip.mp4": clip,
        "broken.mp4": clip[:9000],
    }.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture(scope="session")
def app(media):
    with closing(InProcess(media_dir=media, max_media_bytes=2**19)) as app:
        yield app


@pytest.fixture(scope="session")
def handing_over(media):
    """A server whose KV nobody has to fetch in a hurry."""
    with closing(InProcess(media_dir=media, hands_over=True)) as app:
        yield app


@pytest.fixture
def site():
    """A server of media on this machine."""
    with in_thread(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)) as server:
        server.paths = []
        server.may_answer = threading.Event()
        server.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield server
        server.may_answer.set()
