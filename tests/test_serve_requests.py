"""What a server makes of requests: text up to stop strings, what URLs may mean, and bad input of any kind."""

import asyncio
import base64
import http.server
import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from apbv import Engine, HostGroup, demo
from apbv.input.files import FileIdentity
from apbv.launch.serve import parse_arguments
from apbv.serve.app import build_app
from apbv.serve.media import FolderError, MediaError, MediaSettings, fetch, is_public, opened, private_file
from apbv.serve.metrics import Metrics
from apbv.serve.protocol import ApiError, ChatRequest
from apbv.serve.reading import Reader, RequestSettings
from apbv.serve.server import bind, listen
from apbv.serve.text import AnswerText
from apbv.serve.worker import Worker

from patience import HANGING, limit


def cut(text: str, stops: list[str]) -> str:
    """The definition: letter by letter, until a stop string is complete."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@settings(max_examples=400)
@given(
    text=st.text("aab🙂é", max_size=30),
    stops=st.lists(st.text("aab🙂é", min_size=1, max_size=4), max_size=4),
    widths=st.lists(st.integers(1, 7), min_size=1, max_size=9),
    missing=st.integers(0, 3),
)
def test_streamed_text_ends_at_a_stop_string_and_never_inside_a_character(text, stops, widths, missing):
    """Tokens are any pieces of UTF-8, as byte-level tokenizers have them; the last may be cut off."""
    data = text.encode()[: len(text.encode()) - missing]
    pieces, at = [], 0
    while at < len(data):
        width = widths[len(pieces) % len(widths)]
        pieces.append(data[at : at + width])
        at += width

    def decode(tokens):
        return b"".join(pieces[token] for token in tokens).decode(errors="replace")

    expected = cut(data.decode(errors="ignore"), stops)
    answer, said = AnswerText(decode, stops), []
    for count in range(1, len(pieces) + 1):
        said.append(answer.update(range(count)))
        assert expected.startswith("".join(said)), "what is sent cannot be taken back"
        if answer.stopped:
            break
    said.append(answer.finish(range(len(pieces))))
    assert "".join(said) == expected
    assert answer.stopped == (expected != data.decode(errors="ignore"))
    if not stops:  # nothing is held back that is a whole character
        assert "".join(said[:-1]) == expected or not text.isascii()


def test_streamed_text_is_that_of_the_tokenizer():
    tokenizer = Engine.from_pretrained("demo", hosts=HostGroup.single("cpu")).tokenizer
    text = "J 🙂 é X\n\n日本 end"
    tokens = tokenizer.encode(text)
    assert len(tokens) > len(text)
    answer = AnswerText(lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
    said = [answer.update(tokens[: count + 1]) for count in range(len(tokens))]
    assert "".join(said) == text and not any("\N{REPLACEMENT CHARACTER}" in piece for piece in said)


@pytest.fixture
def folder(tmp_path):
    allowed = tmp_path / "allowed"
    (allowed / "sub").mkdir(parents=True)
    (tmp_path / "secret").write_bytes(b"secret")
    (allowed / "file").write_bytes(b"file")
    (allowed / "sub" / "a %41").write_bytes(b"escaped")
    (allowed / "out").symlink_to(tmp_path / "secret")
    (allowed / "up").symlink_to(tmp_path)
    (allowed / "in").symlink_to(allowed / "file")
    (allowed / "loop").symlink_to(allowed / "loop")
    os.mkfifo(allowed / "pipe")
    return allowed


def read(url: str, media: MediaSettings) -> bytes:
    with opened(url, media) as found:
        return found.path.read_bytes()


def test_files_of_the_folder_and_no_others(folder):
    media = MediaSettings(folder=folder, max_bytes=100)
    for url in ("file", "sub/../file", "in", f"{folder}/file", f"file://{folder}/file", "file:file"):
        assert read(url, media) == b"file", url
    assert read("sub/a %41", media) == read("file:sub/a%20%2541", media) == b"escaped"
    outside = ("../secret", "sub/../../secret", "out", "up/secret", "up", f"{folder.parent}/secret", "/etc/passwd",
               "/nowhere", "file:///etc/passwd", "file:%2e%2e/secret", "..")  # fmt: skip
    for url in outside:
        with pytest.raises(MediaError, match="is not in the folder"):
            read(url, media)
    for url in ("", ".", "sub", "pipe", "nowhere", "file/x", "loop", "a\0b", "x" * 5000, "file:%ff", "file://host/file",
                "ftp://a/b", "gopher:a", "\ud800", "/etc/passwd\0"):  # fmt: skip
        with pytest.raises(MediaError):
            read(url, media)
        with pytest.raises(MediaError):
            read(url, MediaSettings())


@pytest.mark.parametrize("becomes", ["gone", "a file"])
def test_a_folder_that_was_removed_is_the_servers_failure(app, tmp_path, becomes):
    """Not the request's, and it does not end the server: the folder may be mounted again."""
    folder = tmp_path / "media"
    settings = RequestSettings(media=MediaSettings(folder=folder))
    content = [{"type": "image_url", "image_url": {"url": "picture.png"}}]
    request = ChatRequest.parse(asking(messages=[{"role": "user", "content": content}]))
    if becomes == "a file":
        folder.touch()
    with pytest.raises(FolderError, match="cannot read its folder of media files"):
        read("picture.png", settings.media)
    with ExitStack() as stack, pytest.raises(ApiError, match="cannot read its folder") as error:
        Reader(app.worker._engine, settings).read(request, stack)
    assert error.value.status == 503 and str(folder) not in str(error.value)


def test_inline_data_lies_in_a_private_file_and_then_nowhere():
    media = MediaSettings(max_bytes=100)
    url = "data:video/mp4;base64," + base64.b64encode(b"x" * 100).decode()
    with opened(url, media) as found:
        assert found.path.read_bytes() == b"x" * 100 and found.path.stat().st_mode & 0o777 == 0o600
    assert not found.path.exists()
    for data in (
        ",x",
        ";base64",
        ";base64,!",
        ";base64,QQ",
        ";base64,é",
        ";base64," + "A" * 140,
        ";base64," + "A" * 10**6,
    ):
        wrong = f"data:{data}"
        with pytest.raises(MediaError):
            read(wrong, media)


def test_equal_bytes_are_one_file_until_nobody_uses_it():
    data, other = b"x" * 100, b"y" * 100
    with private_file(other) as different, private_file(data) as path:
        with private_file(data) as again:
            assert again == path != different
            before = FileIdentity.of(path)
        assert path.read_bytes() == data and different.read_bytes() == other
    assert not path.exists()
    with private_file(data) as path:
        assert FileIdentity.of(path) == before

    def use(number: int) -> bool:
        with private_file(data) as path:
            return path.read_bytes() == data

    with ThreadPoolExecutor(8) as users:
        assert all(users.map(use, range(500)))
    assert not any(path.parent.iterdir())


class Site(http.server.BaseHTTPRequestHandler):
    """A server on this machine that must not be reached unless it is meant."""

    def do_GET(self):
        self.server.paths.append(self.path)
        kind, _, rest = self.path[1:].partition("/")
        if kind == "late":
            self.server.answers_late.wait(HANGING)
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


@pytest.fixture
def site():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.paths, server.answers_late = [], threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.answers_late.set()
    server.shutdown()
    server.server_close()


def test_only_listed_hosts_are_fetched_from(site, monkeypatch):
    port = site.server_address[1]
    media = MediaSettings(
        hosts=frozenset({"127.0.0.1", "media.example"}), max_bytes=100, fetch_seconds=limit(60.0)
    )
    here = f"http://127.0.0.1:{port}"
    assert fetch(f"{here}/file", media) == b"xxx"
    assert fetch(f"{here}/to/{here}/file", media) == fetch(f"{here}/to//file", media) == b"xxx"
    refused = {"missing": "404", "large": "at most 100", "short": "middle"}
    for path, reason in {**refused, "to//to//to//to//to//file": "redirects more"}.items():
        with pytest.raises(MediaError, match=reason):
            fetch(f"{here}/{path}", media)
    with pytest.raises(MediaError, match="more than 2 s"):
        fetch(f"{here}/slow", replace(media, fetch_seconds=2.0))
    # To other hosts, as itself, by a redirect, or by a name that means this machine.
    resolve = socket.getaddrinfo
    inside = {"media.example": "127.0.0.1", "other.example": "127.0.0.1"}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **k: resolve(inside.get(host, host), *a, **k))
    site.paths.clear()
    for url, reason in (
        (f"http://localhost:{port}/file", "does not fetch from 'localhost'"),
        (f"http://127.1:{port}/file", "does not fetch"),
        (f"http://2130706433:{port}/file", "does not fetch"),
        (f"http://[::1]:{port}/file", "does not fetch"),
        (f"http://127.0.0.1@other.example:{port}/file", "does not fetch from 'other.example'"),
        (f"http://media.example:{port}/file", "not a public one"),
        (f"HTTP://MEDIA.example.:{port}/file", "does not fetch"),
        ("http://127.0.0.1:99999/", "no URL"),
        ("http://", "does not fetch"),
        ("https://[", "no URL"),
    ):
        with pytest.raises(MediaError, match=reason):
            read(url, media)
    assert not site.paths
    for target in (f"http://localhost:{port}/file", f"http://other.example:{port}/file", "file:///etc/passwd"):
        with pytest.raises(MediaError, match=r"another host|does not fetch"):
            fetch(f"{here}/to/{target}", media)
    assert all(path.startswith("/to/") for path in site.paths)
    public = MediaSettings(hosts=frozenset({"media.example"}))
    with pytest.raises(MediaError, match="does not fetch"):
        fetch(f"{here}/file", public)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True), ("2606:2800:220:1::1", True), ("127.0.0.1", False), ("10.1.2.3", False),
        ("172.16.0.1", False), ("192.168.1.1", False), ("169.254.169.254", False), ("100.64.0.1", False),
        ("0.0.0.0", False), ("224.0.0.1", False), ("255.255.255.255", False), ("::1", False), ("::", False),
        ("fe80::1%eth0", False), ("fd00::1", False), ("::ffff:127.0.0.1", False), ("::ffff:10.0.0.1", False),
        ("::127.0.0.1", False), ("::ffff:0:127.0.0.1", False), ("fec0::1", False), ("64:ff9b:1::7f00:1", False),
        ("64:ff9b::7f00:1", False), ("2002:7f00:1::", False), ("64:ff9b::5db8:d822", True),
    ],
)  # fmt: skip
def test_public_addresses(address, public):
    assert is_public(address) == public


class InProcess:
    """The app before a real engine, on a loop of its own."""

    def __init__(self, media, max_queue: int = 4):
        self.loop = asyncio.new_event_loop()
        hosts = HostGroup.single("cpu")
        self.engine = engine = Engine.from_pretrained("demo", hosts=hosts, dtype="float32")
        limits = RequestSettings(max_model_len=48, max_new_tokens=1, num_frames=8, max_frames=16, media=media)
        reader = Reader(engine, limits)
        self.worker = Worker(engine, hosts, reader, Metrics(), max_queue)
        self.app = build_app(self.worker, "demo", reader.max_model_len, max_body_bytes=2**20)
        self.worker.start(on_stop=lambda: None, on_end=lambda: None)
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://server")

    def request(self, method: str, path: str, **options) -> httpx.Response:
        return self.loop.run_until_complete(asyncio.wait_for(self.client.request(method, path, **options), 30))

    def close(self):
        self.worker.stop()
        self.worker.join(10)
        self.loop.run_until_complete(self.client.aclose())
        self.loop.close()


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    (folder / "clip.mp4").write_bytes(demo.video_path().read_bytes())
    app = InProcess(MediaSettings(folder=folder))
    yield app
    app.close()


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9), st.just([]), st.just({}),
    st.sampled_from([-1, 0, 1, 2, 2**64, -(2**70), 1e308, "", "clip.mp4", "../x", "data:,", "\ud83d",
                     "<|video_pad|>", "<|im_end|>", "http://127.0.0.1/", [[[]]], {"type": "text"}, "x" * 2000]),
)  # fmt: skip


def from_schema(schema: dict, known: dict) -> st.SearchStrategy:
    """Values that a JSON schema, of those the app has, describes."""
    if "$ref" in schema:
        return from_schema(known[schema["$ref"].rsplit("/", 1)[1]], known)
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return st.one_of(*(from_schema(each, known) for each in schema[several]))
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind = schema["type"]
    if kind == "object":
        properties = {name: from_schema(each, known) for name, each in schema.get("properties", {}).items()}
        wanted = {name: properties.pop(name) for name in schema.get("required", ())}
        return st.fixed_dictionaries(wanted, optional=properties)
    if kind == "array":
        return st.lists(from_schema(schema["items"], known), min_size=schema.get("minItems", 0), max_size=3)
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    return {
        "string": st.sampled_from(["demo", "clip.mp4", "which letter", "a", "data:image/png;base64,QUJD"])
        | st.text(max_size=9),
        "integer": st.integers(low, high) | st.integers(1, 2),
        "number": st.floats(low, high, allow_nan=False),
        "boolean": st.booleans(),
        "null": st.none(),
    }[kind]


def places(value, path=()) -> list[tuple]:
    """The path of everything in a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in inside for place in places(each, (*path, key)))]


def changed(value, path: tuple, how: str, junk):
    """The value with what is at a path replaced, deleted or, in an object, joined by something new."""
    if not path:
        return {**value, "surprise": junk} if how == "add" and isinstance(value, dict) else junk
    copied = value.copy()
    if len(path) == 1 and how == "delete":
        del copied[path[0]]
    else:
        copied[path[0]] = changed(value[path[0]], path[1:], how, junk)
    return copied


@st.composite
def bodies(draw, schema: dict, known: dict) -> bytes:
    """Requests that fit the schema, most of them with something wrong, and a few that are no JSON."""
    request = draw(from_schema(schema, known))
    if draw(st.booleans()):
        request["model"] = "demo"
    request.setdefault("max_tokens", 1)
    for _ in range(draw(st.integers(0, 3))):
        path = draw(st.sampled_from(places(request)))
        request = changed(request, path, draw(st.sampled_from(["replace", "delete", "add"])), draw(JUNK))
    body = json.dumps(request).encode()
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(body)))
        body = body[:at] + draw(st.binary(max_size=4)) + body[at + draw(st.integers(0, 4)) :]
    return body


def test_no_input_is_an_error_of_the_server(app):
    """1,000 requests made from the app's own description of them."""
    document = app.request("GET", "/openapi.json").json()
    known = document["components"]["schemas"]
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]
    seen = {}

    @settings(max_examples=1000, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(content=bodies(body, known))
    def check(content):
        reply = app.request("POST", "/v1/chat/completions", content=content)
        seen[reply.status_code] = seen.get(reply.status_code, 0) + 1
        assert reply.status_code in (200, 400, 404), (content, reply.text)
        if reply.status_code != 200:
            error = reply.json()["error"]
            assert (
                error["message"] and error["type"] == "invalid_request_error" and {"param", "code"} <= error.keys()
            )
        elif reply.headers["content-type"].startswith("text/event-stream"):
            assert reply.text.endswith("data: [DONE]\n\n") and '"error"' not in reply.text
        else:
            assert reply.json()["object"] == "chat.completion"

    check()
    assert seen[200] > 10 and seen[400] > 300, seen
    assert app.request("GET", "/health").status_code == 200


def asking(**fields) -> bytes:
    return json.dumps({"model": "demo", "messages": [{"role": "user", "content": "x"}], **fields}).encode()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"[]", None),
        (b"\xff", None),
        (b"[" * 100_000, None),
        (b'{"model": NaN}', "model"),
        (asking(messages=[{"role": "tool", "content": "x"}]), "messages.0.role"),
        (asking(messages=[{"role": "user", "content": [{"type": "text"}]}]), "messages.0.content.0.text"),
        (asking(messages=[{"role": "user", "content": "x", "tool_calls": [1]}]), "messages.0.tool_calls"),
        (asking(seed=1.5), "seed"),
        (asking(fps=1e308), "fps"),
        (asking(fps=0), "fps"),
        (asking(top_k=5), "top_k"),
        (asking(stop=""), "stop"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_error_names_the_field(app, body, param):
    reply = app.request("POST", "/v1/chat/completions", content=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [1] * 1000},
        {"messages": [{"role": "user", "content": [1] * 1000}]},
        {"stop": [1] * 1000},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_of_many_errors_few_are_looked_for(fields):
    with pytest.raises(ApiError) as error:
        ChatRequest.parse(asking(**fields))
    assert error.value.__cause__.error_count() <= 2


def test_fields_without_effect_are_ignored(app):
    neutral = {
        "n": 1,
        "tools": [],
        "logprobs": False,
        "response_format": {"type": "text"},
        "presence_penalty": 0.0,
    }
    body = asking(messages=[{"role": "user", "content": "x", "name": None}], user="somebody", **neutral)
    reply = app.request("POST", "/v1/chat/completions", content=body)
    assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 1


def test_a_request_that_is_still_read_when_the_server_stops(site):
    """It hears so at once; what is being fetched for it does not stay, and nothing else is fetched."""
    app = InProcess(MediaSettings(hosts=frozenset({"127.0.0.1"})))
    url = f"http://127.0.0.1:{site.server_address[1]}/late"
    content = [{"type": "image_url", "image_url": {"url": url}}] * 3
    request = ChatRequest.parse(asking(messages=[{"role": "user", "content": content}]))

    async def stop_meanwhile():
        job = app.worker.admit()
        reading = asyncio.get_running_loop().run_in_executor(None, app.worker.submit, job, request)
        while not site.paths:
            await asyncio.sleep(0.01)
        app.worker.stop()
        event = await job.events.get()
        assert not reading.done()
        site.answers_late.set()
        await reading
        return job, event  # kept, so that nothing is tidied up by its going

    with private_file(b"") as path:
        job, error = app.loop.run_until_complete(asyncio.wait_for(stop_meanwhile(), HANGING))
        assert (error.status, str(error)) == (503, "the server is stopping")
        assert list(path.parent.iterdir()) == [path] and site.paths == ["/late"] and job.has_ended
    app.close()


def test_of_two_servers_that_want_one_port_the_second_says_so():
    """Both may bind it while neither listens: loading a model takes long."""
    first = bind("127.0.0.1", 0)
    second = bind(*first.getsockname())
    with first, second:
        listen(first)
        with pytest.raises(ValueError, match=r"cannot listen on 127\.0\.0\.1:"):
            listen(second)


def test_an_empty_key_is_no_key(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--model", "demo", "--api-key", ""])
    assert "--api-key is empty" in capsys.readouterr().err


def test_a_video_too_large_to_decode_is_refused(app):
    limits = RequestSettings(
        max_decoded_bytes=8 * 56 * 56 * 3 - 1, num_frames=8, media=MediaSettings(folder=demo.video_path().parent)
    )
    reader = Reader(app.worker._engine, limits)
    content = [{"type": "video_url", "video_url": {"url": "clip.mp4"}}, {"type": "text", "text": "x"}]
    asked = {"model": "demo", "messages": [{"role": "user", "content": content}]}
    with ExitStack() as stack:
        with pytest.raises(ApiError, match="fewer frames"):
            reader.read(ChatRequest(**asked), stack)
        assert reader.read(ChatRequest(**asked, num_frames=7), stack).order.num_frames == 7


def image_part(**fields) -> dict:
    return {"type": "image_url", "image_url": {"url": "clip.png", **fields}}


@pytest.mark.parametrize("detail", ["auto", "low", "high", None])
def test_the_detail_of_an_image_is_taken_and_changes_nothing(app, detail):
    content = [image_part(detail=detail), {"type": "text", "text": "x"}]
    reply = app.request(
        "POST", "/v1/chat/completions", content=asking(messages=[{"role": "user", "content": content}])
    )
    assert reply.status_code == 400 and "clip.png" in reply.json()["error"]["message"], "that file is looked for"
    content = [image_part(detail="best"), {"type": "text", "text": "x"}]
    reply = app.request(
        "POST", "/v1/chat/completions", content=asking(messages=[{"role": "user", "content": content}])
    )
    assert reply.json()["error"]["param"] == "messages.0.content.0.image_url.detail"


def test_each_request_is_one_line_of_the_log_without_what_was_asked(app, caplog):
    secret = "how many letters are shown"
    with caplog.at_level("INFO", logger="apbv.serve"):
        reply = app.request(
            "POST", "/v1/chat/completions", content=asking(messages=[{"role": "user", "content": secret}])
        )
        content = [image_part(), {"type": "text", "text": secret}]
        app.request(
            "POST", "/v1/chat/completions", content=asking(messages=[{"role": "user", "content": content}])
        )
    answered, refused = (record.getMessage() for record in caplog.records)
    usage = reply.json()["usage"]
    assert answered.startswith(
        f"{reply.json()['id']} 200 length, {usage['prompt_tokens']} + 1 tokens, first token "
    )
    assert refused.split(" ", 1)[1].startswith("400 invalid, total ")
    assert not any(word in line for line in (answered, refused) for word in ("letters", "clip.png"))
