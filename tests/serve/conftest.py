"""The app in this process, and what it is asked about."""

import http.server
import threading
from contextlib import closing
from pathlib import Path

import pytest
from PIL import Image

from apbv import demo
from apbv.input.video import probe, read_frames

from servers import InProcess, Site, in_thread


@pytest.fixture(scope="session")
def media(tmp_path_factory) -> Path:
    """The folder that servers may read."""
    folder = tmp_path_factory.mktemp("media")
    (folder / "clips").mkdir()
    clip, picture = demo.video_path().read_bytes(), folder / "picture.png"
    Image.fromarray(read_frames(probe(demo.video_path()), [3])[0]).save(picture)
    for name, data in {"clip.mp4": clip, "clips/a clip.mp4": clip, "broken.mp4": clip[:9000]}.items():
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
        server.paths, server.may_answer = [], threading.Event()
        server.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield server
        server.may_answer.set()
