"""The server on pretended GPUs: one thread prefills while another decodes, and the answers are the
CPU's."""

import asyncio
import json
from pathlib import Path

import pytest

from apbv import Engine, HostGroup, PrefillConfig, ReduceConfig, SparseConfig, demo
from apbv.kv.remote import RemoteKV
from apbv.kv.ticket import Ticket

from apbv_tests.pretend_gpu import rehearsal, to_gpu
from apbv_tests.rehearsals import on_gpus, resizing_as_on_gpu
from apbv_tests.servers import InProcess, follow_server

FOLDER: Path = demo.video_path().parent
VIDEO = {"type": "video_url", "video_url": {"url": demo.video_path().name}}
QUESTIONS = {
    "name the letters in order": {"max_tokens": 8},
    "how many letters are shown": {"max_tokens": 5, "temperature": 0.9, "top_p": 0.8, "seed": 3},
    "which letter has the border: red": {
        "max_tokens": 12,
        "ignore_eos": True,
        "presence_penalty": 0.5,
    },
    "describe the clip shot by shot": {
        "max_tokens": 9,
        "n": 2,
        "temperature": 1.1,
        "seed": 7,
        "logprobs": True,
    },
}


def answers(engine: Engine, split_tokens: int) -> list | None:
    """What four clients get that ask at the same time, and one that wants the KV of a whole prompt;
    on host 0."""
    if not engine.hosts.is_leader:
        return follow_server(engine, FOLDER)
    app = InProcess(
        model=engine,
        hands_over=True,
        media_dir=FOLDER,
        max_model_len=512,
        split_tokens=split_tokens,
    )

    async def ask(text: str, **fields) -> dict:
        messages = [{"role": "user", "content": [VIDEO, {"type": "text", "text": text}]}]
        body = {
            "model": "demo",
            "messages": messages,
            "num_frames": 8,
            "return_token_ids": True,
            **fields,
        }
        reply = await app.client.post(
            "/v1/chat/completions", content=json.dumps(body), timeout=None
        )
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def ask_all() -> list:
        asked = [ask(text, **fields) for text, fields in QUESTIONS.items()]
        if engine.prefill_config.reduce is None:
            asked.append(ask("why", kv_transfer_params={"do_remote_decode": True}))
        replies = await asyncio.gather(*asked)
        for reply in replies[len(QUESTIONS) :]:
            await asyncio.to_thread(fetch, Ticket.from_params(reply["kv_transfer_params"]))
        return [[choice["token_ids"] for choice in reply["choices"]] for reply in replies]

    def fetch(ticket: Ticket) -> None:
        with RemoteKV(ticket) as remote:
            layers = [keys.isfinite().all() for keys, _ in remote.layers(range(ticket.num_tokens))]
            remote.confirm()
        assert len(layers) == engine.parts.num_layers and all(layers)

    try:
        return app.loop.run_until_complete(ask_all())
    finally:
        app.close()


def serve_job(
    hosts: HostGroup, prefill: PrefillConfig, shares_gpu: bool, split_tokens: int
) -> tuple:
    """What clients get of the CPU and of GPUs; and whether this host's batch was replayed."""
    with resizing_as_on_gpu():
        engine = Engine.from_pretrained("demo", hosts=hosts, prefill=prefill, dtype="float32")
        expected = answers(engine, split_tokens)
        with rehearsal() as gpu:
            there = on_gpus(hosts, shares_gpu)
            on_gpu = Engine(
                to_gpu(engine.model, gpu, there.device.index), engine.processor, there, prefill
            )
            on_gpu.warm_up(hosts.size)
            gpu.reset()
            found = answers(on_gpu, split_tokens)
            waits = [name for name, _ in gpu.events.waits if name == "synchronize"]
            return expected, found, bool(gpu.events.of("replay")), waits


SHORT = {"anchor_len": 4, "passing_len": 4}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("num_hosts", "prefill", "others"),
    [
        (1, {}, (False, 0)),
        (3, {"reduce": ReduceConfig(method="dycoke", ratio=0.5), **SHORT}, (False, 0)),
        (2, {"sparse": SparseConfig(method="spargeattn", block_size=32), **SHORT}, (True, 0)),
        (2, {}, (False, 512)),  # each prompt on its decode host
    ],
)
def test_a_server_answers_several_clients_as_on_a_cpu(pool, num_hosts, prefill, others):
    (expected, found, _, _), *_ = results = pool.run(
        num_hosts, serve_job, PrefillConfig(**prefill), *others
    )
    assert found == expected and len(expected[3]) == 2
    assert any(replays for *_, replays, _ in results) and not any(waits for *_, waits in results)
