"""What a server makes of requests: text up to stop strings, what URLs may mean, and bad input of any kind."""

import asyncio
import json
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from apbv import Engine, HostGroup, demo
from apbv.launch.serve import parse_arguments
from apbv.serve.media import MediaSettings
from apbv.serve.protocol import ApiError
from apbv.serve.reading import Reader, RequestSettings
from apbv.serve.requests import ChatRequest
from apbv.serve.server import bind, listen
from apbv.serve.text import AnswerText

from patience import HANGING
from servers import InProcess, asking


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


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_subnormal=False), st.text(max_size=9),
    st.just([]), st.just({}),
    st.sampled_from([-1, 0, 1, 2, 2**64, -(2**70), 1e308, "", "clip.mp4", "../x", "data:,", "\ud83d",
                     "<|video_pad|>", "<|im_end|>", "http://127.0.0.1/", [[[]]], {"type": "text"}, "x" * 2000]),
)  # fmt: skip


# Of objects that may have any.
FREE_KEYS = [
    "do_remote_decode",
    "do_remote_prefill",
    "apbv",
    "thinks",
    "tokenize",
    "add_generation_prompt",
]


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
    if kind == "object" and "properties" not in schema:
        return st.dictionaries(st.sampled_from(FREE_KEYS), JUNK, max_size=2)
    if kind == "object":
        properties = {name: from_schema(each, known) for name, each in schema.get("properties", {}).items()}
        wanted = {name: properties.pop(name) for name in schema.get("required", ())}
        return st.fixed_dictionaries(wanted, optional=properties)
    if kind == "array":
        return st.lists(from_schema(schema["items"], known), min_size=schema.get("minItems", 0), max_size=3)
    if schema.get("minimum") == 0 and "exclusiveMaximum" in schema:  # a token
        return st.integers(0, 400) | st.sampled_from([6, 10**6])
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    return {
        "string": st.sampled_from(["demo", "clip.mp4", "which letter", "a", "data:image/png;base64,QUJD"])
        | st.text(max_size=9),
        "integer": st.integers(low, high) | st.integers(1, 2),
        "number": st.floats(low, high, allow_nan=False, allow_subnormal=False),
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
    if "max_tokens" in known[schema["$ref"].rsplit("/", 1)[1]]["properties"]:
        request.setdefault("max_tokens", 1)
    for _ in range(draw(st.integers(0, 3))):
        path = draw(st.sampled_from(places(request)))
        request = changed(request, path, draw(st.sampled_from(["replace", "delete", "add"])), draw(JUNK))
    body = json.dumps(request).encode()
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(body)))
        body = body[:at] + draw(st.binary(max_size=4)) + body[at + draw(st.integers(0, 4)) :]
    return body


KINDS = {
    "/v1/chat/completions": "chat.completion",
    "/v1/completions": "text_completion",
    "/tokenize": None,
    "/detokenize": None,
}


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("path", KINDS)
def test_no_input_is_an_error_of_the_server(app, path, count):
    """Requests made from the app's own description of them."""
    document = app.request("GET", "/openapi.json").json()
    known = document["components"]["schemas"]
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    seen = {}

    @settings(max_examples=count, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(content=bodies(body, known))
    def check(content):
        reply = app.request("POST", path, content=content)
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
            assert reply.json().get("object") == KINDS[path]

    check()
    assert seen[200] > count / 100 and seen[400] > 0.3 * count, seen
    assert app.request("GET", "/health").status_code == 200


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

    with app.private_files.holding(b"") as path:
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
    reader = Reader(app.engine, limits, app.private_files)
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
