"""What a URL in a request may mean, and how much: of the folder, inline, or fetched; images, frames
and sound."""

import base64
import io
import os
import socket
import struct
import threading
from contextlib import ExitStack, closing
from dataclasses import replace
from types import SimpleNamespace

import pytest
from PIL import Image

from apbv import demo
from apbv.input.media.files import FileIdentity
from apbv.serve.api_error import ApiError
from apbv.serve.control.ready_request import ReadyRequest
from apbv.serve.media import files as serving_media
from apbv.serve.media.files import MediaError, PrivateFiles, fetch, is_public, open_media
from apbv.serve.protocols import request_reader
from apbv.serve.protocols.request_reader import Reader
from apbv.serve.protocols.requests import ChatRequest
from apbv.serve.settings import ServerSettings

from apbv_tests.configs import server_settings
from apbv_tests.patience import HANGING
from apbv_tests.servers import asking, data_url, part, text


@pytest.fixture
def folder(tmp_path):
    allowed = tmp_path / "allowed"
    (allowed / "sub").mkdir(parents=True)
    for path, data in {"../secret": b"secret", "file": b"file", "sub/a %41": b"escaped"}.items():
        (allowed / path).write_bytes(data)
    for name, target in {"out": "../secret", "up": "..", "in": "file", "loop": "loop"}.items():
        (allowed / name).symlink_to(target)
    os.mkfifo(allowed / "pipe")
    return allowed


def read(url: str, media: ServerSettings) -> bytes:
    with closing(PrivateFiles()) as private_files, open_media(url, media, private_files) as found:
        return found.path.read_bytes()


def ordered(app, *content: dict, num_frames: int | None = None, **limits) -> ReadyRequest:
    """What the app's engine would be told of a request."""
    messages = [{"role": "user", "content": [*content, text("x")]}]
    request = ChatRequest.parse(asking(messages=messages, num_frames=num_frames))
    with closing(PrivateFiles()) as private_files, ExitStack() as stack:
        return Reader(app.engine, server_settings(**limits), private_files, 4096).read(
            request, stack
        )


def test_files_of_the_folder_and_no_others(folder):
    media = server_settings(media_dir=folder, max_media_bytes=100)
    for url in (
        "file",
        "sub/../file",
        "in",
        f"{folder}/file",
        f"file://{folder}/file",
        "file:file",
    ):
        assert read(url, media) == b"file", url
    assert read("sub/a %41", media) == read("file:sub/a%20%2541", media) == b"escaped"
    outside = (
        "../secret",
        "sub/../../secret",
        "out",
        "up/secret",
        f"{folder.parent}/secret",
        "/nowhere",
    )
    for url in (*outside, "file:///etc/passwd", "file:%2e%2e/secret", ".."):
        with pytest.raises(MediaError, match="is not in the folder"):
            read(url, media)
    unreadable = (
        "",
        ".",
        "file/",
        "sub",
        "pipe",
        "nowhere",
        "loop",
        "a\0b",
        "x" * 5000,
        "file:%ff",
        "\ud800",
    )
    for url in (*unreadable, "file://host/file", "ftp://a/b"):
        for settings in (media, ServerSettings()):
            with pytest.raises(MediaError):
                read(url, settings)


def test_a_folder_that_was_removed_is_the_servers_failure(app, tmp_path):
    """Not the request's, and it does not end the server: the folder may be mounted again."""
    with pytest.raises(ApiError, match="its folder") as error:
        ordered(app, part("image", "picture.png"), media_dir=tmp_path / "media")
    assert error.value.status == 503 and str(tmp_path) not in str(error.value)


def test_inline_data_lies_in_a_private_file_and_then_nowhere():
    media = server_settings(max_media_bytes=100)
    url = "data:video/mp4;base64," + base64.b64encode(b"x" * 100).decode()
    with closing(PrivateFiles()) as private_files, open_media(url, media, private_files) as found:
        assert found.path.read_bytes() == b"x" * 100 and found.path.stat().st_mode & 0o777 == 0o600
    assert not found.path.exists()
    for data in (",x", ";base64", ";base64,!", ";base64,QQ", ";base64,é", ";base64," + "A" * 140):
        with pytest.raises(MediaError):
            read(f"data:{data}", media)


def test_equal_bytes_are_one_file_until_nobody_uses_it():
    with closing(PrivateFiles()) as files:
        with files.holding(b"y") as different, files.holding(b"x") as path:
            with files.holding(b"x") as again:
                assert again == path != different
                before = FileIdentity.of(path)
            assert path.read_bytes() == b"x"
        with files.holding(b"x") as path:
            assert FileIdentity.of(path) == before
        assert not any(path.parent.iterdir())
    assert not path.parent.exists()
    with pytest.raises(RuntimeError, match="has stopped"), files.holding(b"x"):
        pass


def test_only_listed_hosts_are_fetched_from(site, monkeypatch):
    port = site.server_address[1]
    here = site.url
    media = server_settings(
        media_hosts=frozenset({"127.0.0.1", "media.example"}),
        max_media_bytes=100,
        fetch_seconds=HANGING,
    )
    assert fetch(f"{here}/file", media) == b"xxx"
    assert fetch(f"{here}/to/{here}/file", media) == fetch(f"{here}/to//file", media) == b"xxx"
    refused = {
        "missing": "404",
        "large": "at most 100",
        "short": "middle",
        "to//" * 5 + "file": "redirects more",
    }
    for path, reason in refused.items():
        with pytest.raises(MediaError, match=reason):
            fetch(f"{here}/{path}", media)
    with pytest.raises(MediaError, match=r"more than 0\.3 s"):
        fetch(f"{here}/slow", replace(media, media=replace(media.media, fetch_seconds=0.3)))
    # To other hosts, as itself, by a redirect, or by a name that means this machine.
    resolve = socket.getaddrinfo
    inside = {"media.example": "127.0.0.1", "other.example": "127.0.0.1"}
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *a, **k: resolve(inside.get(host, host), *a, **k)
    )
    site.paths.clear()
    for url, reason in {
        f"http://localhost:{port}/file": "does not fetch from 'localhost'",
        f"http://127.0.0.1@other.example:{port}/file": "does not fetch from 'other.example'",
        f"http://media.example:{port}/file": "is not public",
        "http://127.0.0.1:99999/": "not a URL",
    }.items():
        with pytest.raises(MediaError, match=reason):
            read(url, media)
    assert not site.paths
    for target in (
        f"http://localhost:{port}/file",
        f"http://other.example:{port}/file",
        "file:///etc/passwd",
    ):
        with pytest.raises(MediaError, match=r"another host|does not fetch"):
            fetch(f"{here}/to/{target}", media)
    assert all(path.startswith("/to/") for path in site.paths)
    mixed = [*resolve("93.184.216.34", port, type=socket.SOCK_STREAM), *resolve("127.0.0.1", port)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: mixed)
    with pytest.raises(MediaError, match="is not public"):
        fetch(f"http://media.example:{port}/file", media)


def test_public_addresses():
    public = ["93.184.216.34", "2606:2800:220:1::1", "64:ff9b::5db8:d822"]
    others = (
        "127.0.0.1 10.1.2.3 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 ::1 fe80::1%eth0 "
        "::ffff:10.0.0.1"
    )
    others += " ::127.0.0.1 ::ffff:0:127.0.0.1 fec0::1 64:ff9b::7f00:1 2002:7f00:1::"
    assert [each for each in (*public, *others.split()) if is_public(each)] == public


def test_the_files_of_a_request_share_the_time_to_fetch_them(site, app, monkeypatch):
    """Each comes in time, but not all of them."""
    clock = SimpleNamespace(monotonic=lambda: 0.4 * HANGING * len(site.paths))
    for module in (serving_media, request_reader):
        monkeypatch.setattr(module, "time", clock)
    media = {"media_hosts": frozenset({"127.0.0.1"}), "fetch_seconds": HANGING}
    with pytest.raises(ApiError, match="fetching took more than"):
        ordered(app, *[part("image", f"{site.url}/file")] * 6, **media)
    assert len(site.paths) == 3


def test_what_another_protocol_says_is_not_passed_on():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        threading.Thread(
            target=lambda: server.accept()[0].sendall(b"SSH-2.0-a-secret\r\n"), daemon=True
        ).start()
        with pytest.raises(MediaError, match="BadStatusLine") as error:
            fetch(
                f"http://127.0.0.1:{port}/x", ServerSettings(media_hosts=frozenset({"127.0.0.1"}))
            )
    assert "secret" not in str(error.value)


# ---- images, and frames ----


def encoded(image: bytes) -> dict:
    return part("image", "data:image/any;base64," + base64.b64encode(image).decode())


def picture(width: int, height: int, format: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    Image.effect_noise((width, height), 50).save(file, format, **options)
    return file.getvalue()


def test_images_and_frames_are_counted_together_before_any_is_decoded(app):
    # A GIF of a few bytes, whose one frame is much smaller than the canvas that is decoded.
    file = io.BytesIO()
    Image.new("P", (1, 1)).save(file, "GIF")
    gif = file.getvalue()[:6] + struct.pack("<HH", 4000, 4000) + file.getvalue()[10:]
    images = [encoded(gif)] * 3
    most = 2 * 4000 * 4000 * 3 * 6
    refusal = f"the images take {3 * most // 2} bytes to decode, but at most {most} are allowed"
    with pytest.raises(ApiError, match=refusal) as error:
        ordered(app, *images, max_image_bytes=most)
    assert error.value.status == 400
    assert ordered(app, *images[:2], max_image_bytes=most).order.files == [None, None]
    clip = part("video", data_url(demo.video_path()))
    pixels = 2 * 8 * 56 * 56 * 3
    asked = clip, encoded(picture(60, 60)), clip
    for limits in ({"max_frames": 17}, {"max_decoded_bytes": pixels}):
        assert ordered(app, *asked, num_frames=8, **limits).order.files == [None] * 3
    for refusal, limits in {
        "have 17 frames, but at most 16 are allowed": {"max_frames": 16},
        f"the frames take {pixels} bytes to decode": {"max_decoded_bytes": pixels - 1},
    }.items():
        with pytest.raises(ApiError, match=refusal):
            ordered(app, *asked, num_frames=8, **limits)


def test_an_image_of_too_many_scans_is_refused(app):
    """A scan of a progressive JPEG takes a few bytes, and a pass over the image."""
    usual = picture(64, 64, "JPEG", progressive=True)
    assert 1 < usual.count(b"\xff\xda") < 20
    assert ordered(app, encoded(usual)).order.files == [None]
    with pytest.raises(ApiError, match="more than 100 scans"):
        ordered(app, encoded(usual[:-2] + b"\xff\xda\x00\x02" * 100 + usual[-2:]))
