"""The server on a pretended GPU: one thread prefills while another decodes, and the answers are the CPU's."""

import asyncio
import json

import pytest

from apbv import Engine, HostGroup, demo
from apbv.kv.remote import RemoteKV
from apbv.kv.ticket import Ticket

from pretend_gpu import rehearsal, to_gpu
from rehearsals import on_gpus, resizing_as_on_gpu
from servers import InProcess

VIDEO = {"type": "video_url", "video_url": {"url": demo.video_path().name}}
QUESTIONS = {
    "name the letters in order": {"max_tokens": 8},
    "how many letters are shown": {"max_tokens": 5, "temperature": 0.9, "top_p": 0.8, "seed": 3},
    "which letter has the border: red": {"max_tokens": 12, "ignore_eos": True, "presence_penalty": 0.5},
    "describe the clip shot by shot": {"max_tokens": 9, "n": 2, "temperature": 1.1, "seed": 7, "logprobs": True},
}


def answers(engine: Engine) -> list:
    """What four clients get that ask at the same time, and one that wants the KV of its prompt."""
    limits = {"media_dir": demo.video_path().parent, "max_model_len": 512}
    app = InProcess(model=engine, hands_over=True, **limits)

    async def ask(text: str, **fields) -> dict:
        messages = [{"role": "user", "content": [VIDEO, {"type": "text", "text": text}]}]
        body = {"model": "demo", "messages": messages, "num_frames": 8, "return_token_ids": True, **fields}
        reply = await app.client.post("/v1/chat/completions", content=json.dumps(body), timeout=None)
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def ask_all() -> list:
        asked = [ask(text, **fields) for text, fields in QUESTIONS.items()]
        *told, handed = await asyncio.gather(*asked, ask("why", kv_transfer_params={"do_remote_decode": True}))
        num_layers = await asyncio.to_thread(fetch, Ticket.from_params(handed["kv_transfer_params"]))
        return [num_layers, *([choice["token_ids"] for choice in each["choices"]] for each in [*told, handed])]

    def fetch(ticket: Ticket) -> int:
        with RemoteKV(ticket) as remote:
            found = [keys.isfinite().all() for keys, _ in remote.layers(range(ticket.num_tokens))]
            remote.confirm()
        return sum(map(int, found))

    try:
        return app.loop.run_until_complete(ask_all())
    finally:
        app.close()


@pytest.mark.thorough
def test_a_server_answers_several_clients_as_on_a_cpu():
    with resizing_as_on_gpu():
        engine = Engine.from_pretrained("demo", hosts=HostGroup.single("cpu"), dtype="float32")
        expected = answers(engine)
        with rehearsal() as gpu:
            on_gpu = Engine(to_gpu(engine.model, gpu), engine.processor, on_gpus(HostGroup.single("cpu")))
            on_gpu.warm_up(in_batch=True)
            gpu.reset()
            found = answers(on_gpu)
    assert found == expected and len(expected[4]) == 2 and expected[0] == on_gpu.parts.num_layers
    assert gpu.events.of("replay") and not [name for name, _ in gpu.events.waits if name == "synchronize"]
