"""The addresses beside those for answers: tokens, ids of requests, and what operators and routers ask."""

import asyncio
import json

import pytest

from patience import HANGING
from servers import part, post, text

PROMPT = "name the letters in order"
CHAT = [{"role": "user", "content": "x"}]


def test_tokens_are_those_of_the_tokenizer(app):
    tokenizer = app.engine.tokenizer
    prompt_ids = tokenizer(PROMPT)["input_ids"]
    reply = post(app, "/tokenize", prompt=PROMPT, return_token_strs=True).json()
    assert reply == {
        "count": len(prompt_ids),
        "max_model_len": app.worker.max_model_len,
        "tokens": prompt_ids,
        "token_strs": tokenizer.convert_ids_to_tokens(prompt_ids),
    }
    assert post(app, "/detokenize", tokens=prompt_ids).json() == {"prompt": tokenizer.decode(prompt_ids)}
    chat = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [text("which letter"), text("is first")]},
        {"role": "assistant", "content": "J"},
        {"role": "user", "content": "and then?"},
    ]
    expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    got = post(app, "/tokenize", messages=chat).json()
    assert got["tokens"] == expected and got["token_strs"] is None
    asked = post(app, "/v1/chat/completions", messages=chat, return_token_ids=True, max_tokens=1).json()
    assert asked["prompt_token_ids"] == expected
    opened = tokenizer.apply_chat_template(chat[:3], continue_final_message=True, return_dict=False)
    fields = {"messages": chat[:3], "add_generation_prompt": False, "continue_final_message": True}
    assert post(app, "/tokenize", **fields).json()["tokens"] == opened
    assert post(app, "/v1/chat/completions", **fields, return_token_ids=True).json()["prompt_token_ids"] == opened


def test_tokens_of_a_chat_with_a_video_are_those_that_are_prefilled(app):
    """Text before and behind it, in an earlier turn; frames as asked for."""
    chat = [
        {"role": "user", "content": [text("which"), part("video", "clip.mp4"), text("letter")]},
        {"role": "assistant", "content": "J"},
        {"role": "user", "content": "and?"},
    ]
    tokens = {
        frames: post(app, "/tokenize", messages=chat, num_frames=frames).json()["tokens"] for frames in (2, 4)
    }
    pad = app.engine.parts.video_token_id
    assert 0 < tokens[2].count(pad) * 2 == tokens[4].count(pad)
    for frames, expected in tokens.items():
        reply = post(app, "/v1/chat/completions", messages=chat, num_frames=frames, return_token_ids=True).json()
        assert reply["prompt_token_ids"] == expected
        assert reply["usage"]["prompt_tokens"] == len(expected)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": CHAT}, "prompt"),
        ("/tokenize", {"prompt": [1]}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": [part("video", "missing.mp4")]}]},
         "messages.0.content.0.video_url"),
        ("/tokenize", {"messages": CHAT, "continue_final_message": True}, "messages"),
        ("/tokenize", {"messages": CHAT, "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"messages": CHAT, "chat_template_kwargs": {"tokenize": 1}}, "messages"),
        ("/tokenize", {"messages": CHAT, "chat_template_kwargs": {"continue_final_message": "x"}},
         "chat_template_kwargs"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_what_cannot_be_tokenized(app, path, fields, param):
    reply = post(app, path, **fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def test_a_requests_id_is_the_clients(app, caplog):
    with caplog.at_level("INFO", logger="apbv.serve"):
        reply = post(app, "/v1/completions", {"X-Request-Id": "from-a-router"}, prompt="x", max_tokens=1)
        assert (reply.json()["id"], reply.headers["x-request-id"]) == ("cmpl-from-a-router", "from-a-router")
        refused = post(app, "/v1/completions", {"X-Request-Id": "another"}, prompt="")
        assert (refused.status_code, refused.headers["x-request-id"]) == (400, "another")
    assert [record.getMessage().split()[0] for record in caplog.records] == ["cmpl-from-a-router", "cmpl-another"]
    for unfit in ("two words", "x" * 300, "é".encode("latin-1")):
        reply = post(app, "/v1/completions", {"X-Request-Id": unfit}, prompt="x", max_tokens=1)
        own = reply.headers["x-request-id"]
        assert len(own) == 32 and reply.json()["id"] == f"cmpl-{own}"
    assert app.request("GET", "/version", headers={"X-Request-Id": "v"}).headers["x-request-id"] == "v"


def test_a_job_knows_the_trace_that_its_client_began(app, monkeypatch):
    seen, admit = [], app.worker.admit
    monkeypatch.setattr(app.worker, "admit", lambda *args: seen.append(admit(*args)) or seen[-1])
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    post(app, "/v1/completions", {"traceparent": trace}, prompt="x", max_tokens=1)
    post(app, "/v1/completions", prompt="x", max_tokens=1)
    assert [job.traceparent for job in seen] == [trace, None]


def test_what_operators_and_routers_ask(app):
    (model,) = app.request("GET", "/v1/models").json()["data"]
    assert (model["id"], model["root"], model["parent"], model["object"]) == ("demo", "demo", None, "model")
    assert model["max_model_len"] == app.worker.max_model_len
    assert model["permission"][0]["object"] == "model_permission"
    assert app.request("GET", "/v1/models/demo").json()["id"] == "demo"
    assert app.request("GET", "/v1/models/other").status_code == 404
    assert app.request("POST", "/ping").status_code == app.request("GET", "/ping").status_code == 200
    assert app.request("GET", "/load").json() == {"server_load": 0}

    async def load_meanwhile() -> tuple[int, int]:
        body = {"prompt": "x", "max_tokens": 40, "ignore_eos": True}
        answers = [asyncio.create_task(app.client.post("/v1/completions", json=body)) for _ in range(3)]
        while not (load := (await app.client.get("/load")).json()["server_load"]):
            await asyncio.sleep(0.01)
        return load, [(await answer).status_code for answer in answers]

    load, statuses = app.loop.run_until_complete(asyncio.wait_for(load_meanwhile(), HANGING))
    assert 1 <= load <= 3 and statuses == [200] * 3
    assert app.request("GET", "/load").json() == {"server_load": 0}


def test_the_description_has_every_body(app):
    document = app.request("GET", "/openapi.json").json()
    bodies = {
        path: methods["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
        for path, methods in document["paths"].items()
        if "post" in methods
    }
    assert bodies == {
        "/v1/chat/completions": "ChatRequest",
        "/v1/completions": "CompletionRequest",
        "/tokenize": "TokenizeRequest",
        "/detokenize": "DetokenizeRequest",
    }
    schemas = document["components"]["schemas"]
    assert set(bodies.values()) <= schemas.keys()
    assert schemas["CompletionRequest"]["required"] == ["prompt"]
    named = set(json.dumps(document).split('"#/components/schemas/')[1:])
    assert {name.split('"')[0] for name in named} <= schemas.keys()
