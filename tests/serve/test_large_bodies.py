"""Bodies are bounded by what they consist of before they are parsed; large ones that are needed are
read."""

import base64
import json
import random
from contextlib import closing

import pytest

from apbv.input.prompts.prompt_reader import PromptReader
from apbv.serve.api_error import ApiError
from apbv.serve.http.json_limits import JsonLimits
from apbv.serve.media.files import MediaError, decode_data_url
from apbv.serve.protocols.requests import ChatRequest, CompletionRequest

from apbv_tests.servers import InProcess, asking

LIMITS = JsonLimits(values=100, containers=20)
CHAT = "/v1/chat/completions"
RAW = "/v1/completions"
DETOKENIZE = "/detokenize"
MESSAGE = b'{"role": "user", "content": "x"}'


@pytest.fixture(scope="module")
def app():
    with closing(InProcess(max_body_bytes=2**23)) as app:
        yield app


def is_refused(text: bytes) -> bool:
    try:
        LIMITS.require(bytearray(text))
    except ApiError as error:
        assert (error.status, error.code) == (400, "body_too_large")
        return True
    return False


def values_and_containers(value) -> tuple[int, int]:
    """By definition; keys of objects are no values."""
    if isinstance(value, dict):
        return values_and_containers(list(value.values()))
    if not isinstance(value, list):
        return 1, 0
    inner = [values_and_containers(each) for each in value]
    return 1 + sum(values for values, _ in inner), 1 + sum(containers for _, containers in inner)


def drawn(draw: random.Random, depth: int = 0):
    if depth < 4 and draw.random() < 0.7:
        inner = [drawn(draw, depth + 1) for _ in range(draw.randrange(1, 5))]
        if draw.random() < 0.5:
            return inner
        return {f'{place}"\\': each for place, each in enumerate(inner)}
    return draw.choice(
        [1, -2.5, None, True, "", "a, b", '"[{', "\\", '\\"', "\\\\", "é" * 9, "[" * 50, "," * 300]
    )


@pytest.mark.parametrize("piece", [2, 3, 7, 2**20])
def test_what_is_counted_is_what_json_has(monkeypatch, piece):
    """Whatever strings contain, and wherever a piece that is looked at ends."""
    monkeypatch.setattr("apbv.serve.http.json_limits.PIECE_BYTES", piece)
    draw = random.Random(0)
    outcomes = set()
    for _ in range(300):
        value = [drawn(draw) for _ in range(draw.randrange(1, 9))]
        values, containers = values_and_containers(value)
        text = json.dumps(value, ensure_ascii=draw.random() < 0.5).encode()
        refused = is_refused(text)
        assert refused == (values > LIMITS.values or containers > LIMITS.containers), text
        outcomes.add(refused)
    assert outcomes == {True, False}


@pytest.mark.parametrize(
    "text", [b"", b'"', b'"\\', b"[" * 9 + b'"\\"', b'"' + b"\\" * 1001, b'{"a": "' + b"[" * 500]
)
def test_what_is_no_json_is_left_to_the_parser(text):
    assert not is_refused(text)


def nothing(*_):
    raise AssertionError("it was parsed")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RAW, b'{"prompt": [' + b"1," * 2**21 + b"1]}"),
        (RAW, b'{"prompt": [' + b"[1]," * 2**17 + b"[1]]}"),
        (DETOKENIZE, b'{"tokens": [' + b"1," * 2**21 + b"1]}"),
        (CHAT, b'{"messages": [' + (MESSAGE + b",") * 2**17 + MESSAGE + b"]}"),
        (CHAT, b'{"messages": [' + MESSAGE + b'], "x": ' + b'{"a": ' * 2**17 + b"1}"),
    ],
    ids=["token ids", "prompts", "tokens", "messages", "an unknown field"],
)
def test_what_is_too_much_is_refused_unparsed_and_its_memory_returned(app, path, body, monkeypatch):
    returned = []
    monkeypatch.setattr("apbv.serve.http.app.LARGE_BODY", 2**16)
    monkeypatch.setattr("apbv.serve.http.app.return_freed_memory", lambda: returned.append(1))
    for kind in (ChatRequest, CompletionRequest):
        monkeypatch.setattr(kind, "model_validate_json", nothing)
    reply = app.request("POST", path, content=body)
    assert reply.status_code == 400 and "than" in reply.json()["error"]["message"]
    assert reply.json()["error"]["code"] == "body_too_large" and returned == [1]


def test_more_token_ids_than_fit_are_not_laid_out(app, monkeypatch):
    monkeypatch.setattr(PromptReader, "render", nothing)
    ids = [1] * (app.reader.max_model_len + 1)
    reply = app.request("POST", RAW, content=json.dumps({"prompt": ids}))
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "context_length_exceeded"


def test_of_many_unknown_fields_no_warning_is_made(app, caplog):
    fields = {f"x{number}": 1 for number in range(1000)}
    reply = app.request("POST", CHAT, content=asking(**fields))
    assert reply.status_code == 400 and "unknown fields" in reply.json()["error"]["message"]
    assert "x1" not in caplog.text


def test_base64_is_decoded_in_pieces_as_in_one(monkeypatch):
    monkeypatch.setattr("apbv.serve.media.files.BASE64_PIECE", 8)
    for length in range(40):
        data = bytes(range(length))
        url = f"data:x/y;base64,{base64.b64encode(data).decode()}"
        assert decode_data_url(url, 100) == data
    for wrong in ("AAAAAA==AAAA", "AAAAAAA", "AAAA\nAAA", "AAAAAAAA=", "é" * 8):
        with pytest.raises(MediaError, match="not valid base64"):
            decode_data_url(f"data:x/y;base64,{wrong}", 100)
