"""The app in this process, and what it is asked about."""

import http.server
import os
import threading
from pathlib import Path

import pytest
from PIL import Image

from apbv import demo
from apbv.input.video import probe, read_frames
from apbv.kv.offers import Offers
from apbv.serve.media import MediaSettings

from servers import InProcess, Site

os.environ["OTEL_BSP_SCHEDULE_DELAY"] = "100"  # of servers that the tests start


@pytest.fixture(scope="session")
def media(tmp_path_factory) -> Path:
    """The folder that servers may read."""
    folder = tmp_path_factory.mktemp("media")
    (folder / "clips").mkdir()
    clip, picture = demo.video_path().read_bytes(), folder / "picture.png"
    Image.fromarray(read_frames(probe(demo.video_path()), [3])[0]).save(picture)
    for name, data in {
        "clip.mp4": clip,
        "clips/a clip.mp4": clip,
        "broken.mp4": clip[:9000],
        "broken.png": picture.read_bytes()[:300],
    }.items():
        (folder / name).write_bytes(data)
    os.symlink("/etc/hostname", folder / "link.mp4")
    return folder


@pytest.fixture(scope="session")
def app(media):
    app = InProcess(MediaSettings(folder=media, max_bytes=2**19))
    yield app
    app.close()


@pytest.fixture(scope="session")
def handing_over(media):
    """A server whose KV nobody has to fetch in a hurry."""

    def offers(hosts, on_end) -> Offers:
        return Offers(hosts, host="127.0.0.1", seconds=3600.0, on_end=on_end)

    app = InProcess(MediaSettings(folder=media), offers=offers)
    with app.offers:
        yield app
    app.close()


@pytest.fixture
def site():
    """A server of media on this machine."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.paths, server.may_answer = [], threading.Event()
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server
    server.may_answer.set()
    server.shutdown()
    server.server_close()
