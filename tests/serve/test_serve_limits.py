"""What one client may cost the others: images, media that come slowly, hosts that work for long, log lines."""

import asyncio
import base64
import io
import logging
import socket
import struct
import threading
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest
from PIL import Image

from apbv import Engine, HostGroup, demo
from apbv.input.reading import PromptReader
from apbv.serve.log import OncePerPeriod
from apbv.serve.media import MediaSettings
from apbv.serve.private_files import PrivateFiles
from apbv.serve.protocol import ApiError
from apbv.serve.reading import Reader, RequestSettings
from apbv.serve.requests import ChatRequest

import families
from scripts import ROOT
from servers import TIMEOUT, InProcess, Site, asking, metric_in, part, serving, text


@pytest.mark.thorough
def test_a_request_that_one_host_works_on_for_long_ends_nobody(tmp_path):
    """Host 0 alone writes a caption while host 1 waits."""
    drafting = ["--speculate", "tabed", "--ensemble", "MTCP", "--captioner", "servers:slow_caption"]
    media = ["--media-dir", ROOT / "apbv" / "demo"]
    with serving(tmp_path / "out", "--model", "demo", "--timeout", TIMEOUT, *drafting, *media) as server:
        content = [part("video", "clip.mp4"), text("name the letters in order")]
        assert server.ask(content, max_tokens=2, extra_body={"num_frames": 8}).usage.completion_tokens == 2
        assert server.ask("x", max_tokens=1).usage.completion_tokens == 1 and server.health() == 200


def encoded(image: bytes) -> str:
    return "data:image/any;base64," + base64.b64encode(image).decode()


def canvas(width: int, height: int) -> bytes:
    """A GIF of a few bytes, whose one frame is much smaller than the canvas that is decoded."""
    file = io.BytesIO()
    Image.new("P", (1, 1)).save(file, "GIF")
    data = bytearray(file.getvalue())
    data[6:10] = struct.pack("<HH", width, height)
    return bytes(data)


def picture(width: int, height: int, format: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    Image.effect_noise((width, height), 50).save(file, format, **options)
    return file.getvalue()


def about(images: list[bytes], **fields) -> ChatRequest:
    content = [part("image", encoded(image)) for image in images] + [text("x")]
    return ChatRequest.parse(asking(messages=[{"role": "user", "content": content}], **fields))


def read(engine: Engine, request: ChatRequest, **limits):
    with PrivateFiles() as private_files, ExitStack() as stack:
        return Reader(engine, RequestSettings(**limits), private_files).read(request, stack)


def test_images_are_counted_together_before_any_is_decoded(app):
    images = [canvas(4000, 4000)] * 3
    assert sum(map(len, images)) < 1000
    most = 2 * 4000 * 4000 * 3
    refusal = f"the images take {3 * most // 2} bytes as RGB, but at most {most} are allowed"
    with pytest.raises(ApiError, match=refusal) as error:
        read(app.engine, about(images), max_image_bytes=most)
    assert error.value.status == 400
    assert read(app.engine, about(images[:2]), max_image_bytes=most).order.files == [None, None]
    damaged = about([picture(60, 60)[:2000]])
    assert read(app.engine, damaged).order.files == [None]
    reply = app.request("POST", "/v1/chat/completions", content=damaged.model_dump_json(exclude_none=True))
    assert reply.status_code == 400 and "cannot read the image the inline data" in reply.json()["error"]["message"]


def test_frames_of_all_videos_are_counted_with_the_images(app):
    clip = part("video", "data:video/mp4;base64," + base64.b64encode(demo.video_path().read_bytes()).decode())
    content = [clip, part("image", encoded(picture(60, 60))), clip, text("x")]
    request = ChatRequest.parse(asking(messages=[{"role": "user", "content": content}], num_frames=8))
    assert read(app.engine, request, max_frames=17).order.files == [None] * 3
    with pytest.raises(ApiError, match="have 17 frames, but at most 16 are allowed"):
        read(app.engine, request, max_frames=16)
    with pytest.raises(ApiError, match="at most 2 videos and images"):
        read(app.engine, request, max_frames=2)
    pixels = 2 * 8 * 56 * 56 * 3
    assert read(app.engine, request, max_decoded_bytes=pixels)
    with pytest.raises(ApiError, match=f"the frames take {pixels} bytes as RGB"):
        read(app.engine, request, max_decoded_bytes=pixels - 1)


@pytest.mark.parametrize("family", families.VIDEO_FAMILIES)
def test_a_prompt_is_as_long_without_pixels_as_with_them(family, monkeypatch):
    engine = Engine(families.build_model(family), families.build_processor(family), HostGroup.single("cpu"))
    pictures = [picture(60, 90), picture(200, 40)]
    limits = {"max_model_len": 4000, "max_new_tokens": 4000}  # as many as there is room for
    decoded = []
    convert = Image.Image.convert
    monkeypatch.setattr(Image.Image, "convert", lambda *args, **kw: decoded.append(1) or convert(*args, **kw))
    rooms = [read(engine, about(pictures), **limits).order.max_new_tokens]
    assert not decoded
    monkeypatch.setattr(PromptReader, "_needs_pixels", True)
    rooms.append(read(engine, about(pictures), **limits).order.max_new_tokens)
    assert rooms[0] == rooms[1] < 4000 and decoded


def test_an_image_of_too_many_scans_is_refused(app):
    """A scan of a progressive JPEG takes a few bytes, and a pass over the image."""
    usual = picture(64, 64, "JPEG", progressive=True)
    assert 1 < usual.count(b"\xff\xda") < 20
    assert read(app.engine, about([usual])).order.files == [None]
    with pytest.raises(ApiError, match="more than 100 scans"):
        read(app.engine, about([usual[:-2] + b"\xff\xda\x00\x02" * 100 + usual[-2:]]))


def media_url(site, path: str) -> str:
    return f"http://127.0.0.1:{site.server_address[1]}/{path}"


def test_the_files_of_a_request_share_the_time_to_fetch_them(site, app):
    """Each would come in time, but not all of them."""
    content = [part("image", media_url(site, "late"))] * 6
    request = ChatRequest.parse(asking(messages=[{"role": "user", "content": content}]))
    media = MediaSettings(hosts=frozenset({"127.0.0.1"}), fetch_seconds=2.5)
    with pytest.raises(ApiError, match=r"fetching took more than 2\.5 s"):
        read(app.engine, request, media=media)
    assert 1 <= len(site.paths) < 6


class Holding(Site):
    """A site that does not answer before it is told to."""

    def do_GET(self):
        self.server.released.wait(60)
        super().do_GET()


def test_a_request_does_not_wait_for_the_media_of_others(site):
    site.RequestHandlerClass, site.released = Holding, threading.Event()
    server = InProcess(MediaSettings(hosts=frozenset({"127.0.0.1"})), max_queue=8)
    slow = asking(messages=[{"role": "user", "content": [part("image", media_url(site, "file"))]}])
    post = server.client.post

    async def ask_beside() -> tuple[int, list[int]]:
        others = [asyncio.create_task(post("/v1/chat/completions", content=slow)) for _ in range(6)]
        while metric_in(server.worker.metrics.render().decode(), "apbv:num_requests_waiting") < 6:
            await asyncio.sleep(0.01)
        reply = await post("/v1/chat/completions", content=asking())
        assert not any(task.done() for task in others)
        site.released.set()
        return reply.status_code, [(await task).status_code for task in others]

    try:
        answered, refused = server.loop.run_until_complete(asyncio.wait_for(ask_beside(), 50))
        assert answered == 200 and refused == [400] * 6  # "xxx" is no image
    finally:
        site.released.set()
        server.close()


def said(address: str, data: bytes) -> bytes:
    parts = urlsplit(address)
    with socket.create_connection((parts.hostname, parts.port), 30) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(1000)


def test_bad_connections_do_not_flood_the_log(tmp_path):
    with serving(tmp_path / "out", "--model", "demo", hosts=1) as server:
        for _ in range(20):
            assert b" 400 " in said(server.root, b"no HTTP at all\r\n\r\n")
            upgrade = (
                b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: upgrade, close\r\nUpgrade: websocket\r\n\r\n"
            )
            assert b" 200 " in said(server.root, upgrade)
        assert server.health() == 200
        lines = server.errors().splitlines()
        assert len([line for line in lines if "Invalid HTTP request" in line]) == 1
        assert len([line for line in lines if "Unsupported upgrade request" in line]) == 1
        assert len(lines) < 10, lines


def test_what_was_left_out_of_the_log_is_counted():
    now, messages = 0.0, []
    logger = logging.Logger("a server's")
    logger.addFilter(OncePerPeriod(60.0, lambda: now))
    logger.addHandler(Collecting(messages))
    for second in range(150):
        now = float(second)
        logger.warning("bad request")
        if second < 2:
            logger.error("worse")
    more = "bad request (59 more like this since the last time)"
    assert messages == ["bad request", "worse", "worse", more, more]


class Collecting(logging.Handler):
    def __init__(self, messages: list[str]):
        super().__init__()
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(record.getMessage())
