"""vLLM goes on from KV that hosts offer, by tickets: what is loaded, refused, aborted, and what
becomes of it."""

import copy
import os
import signal
from pathlib import Path
from threading import Condition, Thread

import torch
from offering import Tickets
from vllm_engine import BLOCK, Server, check, check_refusals

from apbv_tests.patience import limit, wait_for

SETTINGS = {"networks": ["127.0.0.0/8"], "timeout": limit(6.0)}


def check_tickets(server: Server, folder: Path, expected: dict) -> None:
    """Under the policy ``fail``, with vLLM's prefix cache on."""
    check_reused_buffers()
    tickets = Tickets(folder)

    def request(name: str, ticket: str = "", more: list[int] = ()) -> dict:
        prompt = [*expected[name]["prompt"], *more]
        return {"prompt_token_ids": prompt, "kv_transfer_params": tickets.take(ticket or name)}

    plain = {
        name: {"prompt_token_ids": expected[name]["prompt"]}
        for name in expected
        if name.startswith("text")
    }
    exact = expected["text-exact"]["tokens"]
    for name in plain:
        case = expected[name]
        (alone,) = server.run(plain[name])
        loaded = request(name)
        followed = request(name, more=case["follow_up"])
        found = server.run(loaded, followed, plain[name])
        wanted = [case["tokens"], case["followed"], alone]
        check(f"{name}: loaded by ticket, followed up, vLLM's own prompt", found, wanted)
        check(
            f"{name}: what was loaded is free",
            tickets.ended(loaded["kv_transfer_params"]),
            "fetched",
        )

    name = "text-sharded"
    used = request(name)
    server.run(used)
    # Of what vLLM keeps itself the last tokens are missing, since a block is not full.
    refused = {"a ticket for the second time": (used, "fetched"), **damaged_tickets(request, name)}
    refused["expired KV"] = (request(name, f"{name}, expired"), "has expired")
    dropped = {what: asked for what, (asked, _) in refused.items() if what.startswith("other")}
    check_refusals(server, refused, plain["text-exact"], exact)
    for what, asked in dropped.items():
        check(f"{what}: the KV is dropped", tickets.ended(asked["kv_transfer_params"]), "dropped")
    check_silence(server, tickets, request(name), request(name), plain["text-exact"], exact)


def damaged_tickets(request, name: str) -> dict[str, tuple[dict, str]]:
    """Requests whose tickets do not fit them, with what the log says."""

    def changed(**fields) -> dict:
        asked = copy.deepcopy(request(name))
        asked["kv_transfer_params"]["apbv"].update(fields)
        return asked

    other = request(name)
    other["prompt_token_ids"] = [*other["prompt_token_ids"][:-1], 7]
    digest = "0" * 64
    return {
        "other tokens": (other, "does not start with"),
        "more tokens than the prompt has": (changed(num_tokens=10**12), "does not start with"),
        "other positions": (changed(positions_sha256=digest), "other positions"),
        "other weights": (changed(weights_sha256=digest), "weights differ"),
        "other config": (changed(config_sha256=digest), "whose config differs"),
        "other dtype": (changed(dtype="bfloat16"), "the model computes in float32"),
        "other heads": (changed(num_kv_heads=1), "in layers, heads"),
        "a wrong secret": (changed(token=digest), "the token for transfer"),
        "an unknown transfer": (changed(transfer="0" * 32), "unknown KV transfer"),
        "a foreign host": (changed(sources=[["192.0.2.1", 80]]), "192.0.2.1 is in no network"),
        "a name for a host": (
            changed(sources=[["localhost", 80]]),
            "'localhost' instead of an IP address",
        ),
        "a missing host": (
            changed(sources=other["kv_transfer_params"]["apbv"]["sources"][:1]),
            "every token",
        ),
        "half a ticket": (
            {**other, "kv_transfer_params": {"apbv": {"version": 1}}},
            "missing or unknown fields",
        ),
    }


def check_silence(
    server: Server, tickets: Tickets, first: dict, second: dict, plain: dict, answer
) -> None:
    """A host that is silent delays nobody; what is aborted is dropped, before its load and in the
    midst of it."""
    _, silent = tickets.pids
    os.kill(silent, signal.SIGSTOP)
    try:
        server.add(first)
        server.add(plain)
        other, refusal = server.finish()
        check("a silent host: the other request is answered meanwhile", other, answer)
        check(f"a silent host: refused: {refusal}", refusal, "cannot be loaded")
        aborted = server.add(second)
        while not server.num_used_blocks():
            server.engine.step()
        server.engine.abort_request([aborted])
        check(
            "aborted in the midst of its load: vLLM keeps its blocks",
            server.num_used_blocks() > 0,
            True,
        )
        said = []

        def is_over() -> bool:
            answers = server.run(plain)
            said.append(server.said)
            return answers == [answer] and not server.num_used_blocks()

        wait_for(is_over, limit(60.0))
        check("aborted in the midst of its load: its blocks are free", server.num_used_blocks(), 0)
        check("aborted in the midst of its load: no error in the log", any(said), False)
    finally:
        os.kill(silent, signal.SIGCONT)
    check(
        "aborted in the midst of its load: dropped",
        tickets.ended(second["kv_transfer_params"]),
        "dropped",
    )
    early = {**first, "kv_transfer_params": tickets.take("text-sharded")}
    server.engine.abort_request([server.add(early)])
    check("aborted before its load: dropped", tickets.ended(early["kv_transfer_params"]), "dropped")


def check_reused_buffers() -> None:
    """A layer that waits to be written is not overwritten by the next, for which the same memory is
    used."""
    from apbv.integrations.vllm.kv_loading import Fetch

    def layers():
        states = torch.empty(1, 3, 2)  # one head, whose transposed states are contiguous
        for number in range(8):
            yield states.fill_(number), states

    fetch = Fetch(Condition(), 8, layers)
    thread = Thread(target=fetch.run)
    thread.start()
    found = []
    while len(found) < 8:
        # As far ahead as it goes.
        wait_for(lambda: len(fetch.arrived) == 2 or not thread.is_alive())
        keys, _ = fetch.take()
        found.append(keys.unique().tolist())
    thread.join()
    check("layers that wait are not overwritten", found, [[float(number)] for number in range(8)])


def check_recompute(folder: Path, expected: dict) -> None:
    """Under ``recompute`` vLLM prefills itself what cannot be loaded, and its prefix cache stays
    clean."""
    # Room for one request and a half: one of two that grow is preempted.
    room = {"max_model_len": 9 * BLOCK, "num_gpu_blocks_override": 12}
    server = Server(folder / "qwen2", SETTINGS, "recompute", async_scheduling=True, **room)
    tickets = Tickets(folder)
    name = "text-sharded"
    prompt = expected[name]["prompt"]
    plain = {"prompt_token_ids": prompt}
    (alone,) = server.run(plain)

    def asking(name: str) -> dict:
        return {
            "prompt_token_ids": expected[name]["prompt"],
            "kv_transfer_params": tickets.take(name),
        }

    check("recompute: loaded by ticket", server.run(asking(name)), [expected[name]["tokens"]])
    damaged = damaged_tickets(asking, name)
    failing = {
        what: damaged[what][0] for what in ("a wrong secret", "a missing host", "half a ticket")
    }
    failing["expired KV"] = {**plain, "kv_transfer_params": tickets.take("text-exact, expired")}
    for what, asked in failing.items():
        asked["prompt_token_ids"] = prompt
        check(f"recompute, {what}: vLLM's own tokens", server.run(asked), [alone])
        check(f"recompute, {what}: the log says why: {server.said}", server.said != "", True)
        check(f"recompute, {what}: the prompt without KV", server.run(plain), [alone])
    exact = {"prompt_token_ids": expected["text-exact"]["prompt"]}
    wanted = server.run(exact, num_new=4 * BLOCK)
    both = [{**exact, "kv_transfer_params": tickets.take("text-exact")} for _ in range(2)]
    found = server.run(*both, num_new=4 * BLOCK)
    check("recompute, preempted: the same tokens", found, wanted * 2)
    check("recompute, preempted: the log says why", server.said, "preempted")

    for pid in tickets.pids:
        os.kill(pid, signal.SIGKILL)
    check("recompute, dead hosts: vLLM's own tokens", server.run(asking(name)), [alone])
    check("recompute, dead hosts: the log says why", server.said, "cannot be reached")


def check_video_tickets(server: Server, folder: Path, expected: dict, video: dict) -> None:
    """The demo's video, which needs no uuid: a ticket belongs to one request."""
    tickets = Tickets(folder)
    for name in ("video-exact", "video-compressed"):
        params = tickets.take(name)
        found = server.run({**video, "kv_transfer_params": params}, video)
        wanted = [expected[name]["tokens"], expected["video-exact"]["tokens"]]
        check(f"{name}: loaded by ticket by two processes, vLLM's own prefill", found, wanted)
        check(f"{name}: what was loaded is free", tickets.ended(params), "fetched")
    frames, metadata = video["multi_modal_data"]["video"]
    fewer = {
        "video": (frames[::2], {**metadata, "frames_indices": metadata["frames_indices"][::2]})
    }
    other = {**video, "kv_transfer_params": tickets.take("video-transformers")}
    short = {**video, "multi_modal_data": fewer, "kv_transfer_params": tickets.take(name)}
    refused = {
        "transformers' positions by ticket": (other, "prefill with positions='vllm'"),
        "fewer frames": (short, "another number or size of frames"),
    }
    check_refusals(server, refused, video, expected["video-exact"]["tokens"])
