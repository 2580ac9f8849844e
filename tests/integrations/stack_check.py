"""The whole stack: vllm-router in front, two prefill hosts behind it, vLLM decodes, OpenAI's client asks.

    python tests/integrations/stack_check.py [--folder FOLDER]

in an environment that has apbv, vLLM and vllm-router (see test_stack.py). All run with their default settings, but
for what a small CPU needs. What passes through the router is compared with what vLLM answers by itself.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from vllm_engine import check, guard_children  # isort: skip  (first, as it sets what vLLM reads)

import openai
from stack import Clock, Service, client_of, decoder, prefill_worker, router, running, video_part

from apbv import demo

import families
from patience import limit, wait_for

NUM_NEW = 12
NUM_REQUESTS, CONCURRENCY = 50, 8
FRAMES = 128  # all of the demo's clip, so that both sides see the same
OFFER_SECONDS = limit(20.0)
QUESTION, RIGHT_ANSWER = "name the letters in order", "X J P H E L"
ONE_VIDEO = ["--limit-mm-per-prompt", '{"video": 1, "image": 0}']
WAITING, FETCHED = "apbv:kv_offers_waiting", 'apbv:kv_transfers_total{how="fetched"}'
PROMPT = [(7 * i * i + 3 * i) % 251 for i in range(400)]  # of the text model, whose tokens are bytes

Ask = Callable[[Service], str | list[int]]


def asking_video(**options) -> Ask:
    """The text that a service answers to the question about the clip."""
    message = {"role": "user", "content": [video_part(demo.video_path()), {"type": "text", "text": QUESTION}]}

    def ask(service: Service) -> str:
        made = client_of(service).chat.completions.create(
            model="demo", messages=[message], temperature=0, max_tokens=NUM_NEW, **options
        )
        if not options.get("stream"):
            return made.choices[0].message.content
        return "".join(chunk.choices[0].delta.content or "" for chunk in made if chunk.choices)

    return ask


def asking_chat(text: str, model: str = "text") -> Ask:
    """The text that a service answers to a chat of several turns."""
    turns = [("user", "xyz"), ("assistant", "abc"), ("user", text)]
    messages = [{"role": role, "content": content} for role, content in turns]

    def ask(service: Service) -> str:
        made = client_of(service).chat.completions.create(
            model=model, messages=messages, temperature=0, max_completion_tokens=NUM_NEW
        )
        return made.choices[0].message.content

    return ask


def asking_completion(prompt: str | list[int], model: str = "text") -> Ask:
    """The tokens that a service puts behind a prompt."""

    def ask(service: Service) -> list[int]:
        made = client_of(service).completions.create(
            model=model,
            prompt=prompt,
            temperature=0,
            max_tokens=NUM_NEW,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        return made.choices[0].token_ids

    return ask


def error_of(ask: Ask, service: Service) -> str:
    """What the client is told instead of an answer."""
    try:
        return f"an answer: {ask(service)}"
    except openai.APIError as error:
        return f"{type(error).__name__}: {error}"


def check_equal(what: str, ask: Ask, through: Service, prefill: Service, alone: Service) -> None:
    """Through the router a request is answered as vLLM does it alone, from KV of the prefill hosts."""
    before = prefill.metric(FETCHED)
    check(f"{what}: as vLLM alone", ask(through), ask(alone))
    wait_for(lambda: prefill.metric(FETCHED) == before + 1, limit(30.0))
    check(f"{what}: vLLM has fetched the KV", prefill.metric(FETCHED), before + 1)


def check_nothing_left(what: str, prefill: Service) -> None:
    """No KV waits any more, at the latest when its time is over."""
    wait_for(lambda: not prefill.metric(WAITING), OFFER_SECONDS + limit(30.0))
    check(f"{what}: no KV is left", prefill.metric(WAITING), 0)


def check_load(asks: list[Ask], through: Service, alone: Service) -> None:
    """Many at a time get their own answers, from whichever decoder."""
    wanted = [ask(alone) for ask in asks]
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        found = list(pool.map(lambda i: asks[i % len(asks)](through), range(NUM_REQUESTS)))
    lost = [i for i, answer in enumerate(found) if answer != wanted[i % len(asks)]]
    check(f"{NUM_REQUESTS} requests, {CONCURRENCY} at a time: nothing is lost or exchanged", lost, [])


def check_leaving(through: Service, prefill: Service, decoders: list[Service]) -> None:
    """A client that leaves takes its KV along."""
    client = client_of(through)
    stream = client.completions.create(
        model="text", prompt=PROMPT, max_tokens=100, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()

    def num_running() -> float:
        return sum(vllm.metric("vllm:num_requests_running") for vllm in decoders)

    wait_for(lambda: not num_running(), limit(60.0))
    check("a client that leaves: vLLM ends the answer", num_running(), 0)
    check_nothing_left("a client that leaves", prefill)


def in_the_midst(ask: Ask, through: Service, prefill: Service, then: Callable[[], None]) -> str:
    """What becomes of a request when something happens while the prefill hosts have it; one is held meanwhile."""
    held, states = prefill.host(1), ("waiting", "running")
    with ThreadPoolExecutor(1) as pool:
        held.suspend()
        try:
            answer = pool.submit(error_of, ask, through)
            wait_for(lambda: any(prefill.metric(f"apbv:num_requests_{state}") for state in states), limit(60.0))
            then()
        finally:
            if held.is_running():
                held.resume()
        return answer.result()


def check_text(folder: Path) -> None:
    """A text model, uncompressed: the same tokens as vLLM's; then faults."""
    families.HIDDEN = families.HEADS * 32  # the smallest heads that vLLM's CPU kernels take
    model = families.save_checkpoint("qwen2", folder / "qwen2")
    exact = ["--method", "apbv", "--passing-len", 4096, "--kv-seconds", OFFER_SECONDS]
    prefill = prefill_worker("prefill-text", model, "text", folder, *exact)
    decoders = [decoder(f"vllm-text-{i}", model, "text", folder) for i in range(2)]
    vllm, _ = decoders
    with running([prefill, *decoders]):
        front = router("router-text", prefill, decoders, folder)
        with running([front]):
            check_equal("token ids", asking_completion(PROMPT), front, prefill, vllm)
            check_equal(
                "a prompt of text",
                asking_completion("the first shot has a red border; " * 6),
                front,
                prefill,
                vllm,
            )
            check_equal("a chat", asking_chat("def " * 30), front, prefill, vllm)
            asks = [asking_completion([*PROMPT[: 60 + 9 * i], i]) for i in range(10)]
            check_load(asks, front, vllm)
            check_leaving(front, prefill, decoders)
            refusal = error_of(asking_completion([9] * 700), front)
            check(f"a prompt that is too long: {refusal}", refusal, "maximum context length")
            wanted = asks[0](vllm)
            error = in_the_midst(asks[0], front, prefill, front.kill)
            check(f"a router that dies: {error}", error, "APIConnectionError")
            check_nothing_left("a router that dies", prefill)
            check("a router that dies: vLLM answers by itself", asks[0](vllm), wanted)


def check_video(folder: Path) -> None:
    """The demo's clip: uncompressed the same text as vLLM's, compressed the right one; then faults."""
    options = ["--frames", FRAMES, "--kv-seconds", OFFER_SECONDS]
    exact = prefill_worker(
        "prefill-exact", demo.model_path(), "demo", folder, *options, "--method", "apbv", "--passing-len", 4096
    )
    short = prefill_worker(
        "prefill-short", demo.model_path(), "demo", folder, *options, "--method", "apbv", "--passing-len", 32
    )
    vllm = decoder("vllm-demo", demo.model_path(), "demo", folder, *ONE_VIDEO, num_frames=FRAMES)
    with running([exact, short, vllm]):
        front = router("router-exact", exact, [vllm], folder)
        short_front = router("router-short", short, [vllm], folder)
        with running([front, short_front]):
            ask = asking_video()
            check_equal("a video", ask, front, exact, vllm)
            check_equal("a video, streamed", asking_video(stream=True), front, exact, vllm)
            check("a video, compressed: the right answer", ask(short_front), RIGHT_ANSWER)
            refusal = error_of(asking_video(extra_body={"num_frames": 64}), front)
            check(f"other frames: {refusal}", refusal, "InternalServerError")
            check("other frames: vLLM's log says why", "another number or size of frames" in vllm.said(), True)
            check_nothing_left("other frames", exact)
            check_dead_prefill(ask, front, exact)
            check_dead_decoder(ask, short_front, short, vllm)


def check_dead_prefill(ask: Ask, front: Service, prefill: Service) -> None:
    """A host that dies fails what runs, and all that comes."""
    error = in_the_midst(ask, front, prefill, prefill.host(1).kill)
    check(f"a prefill host that dies: {error}", error, "InternalServerError")
    error = error_of(ask, front)
    check(f"behind a dead prefill host: {error}", error, "InternalServerError")


def check_dead_decoder(ask: Ask, front: Service, prefill: Service, vllm: Service) -> None:
    """A decoder that dies gives errors; the KV that it was to fetch ends by its time."""
    error = in_the_midst(ask, front, prefill, vllm.kill)
    check(f"a decoder that dies: {error}", error, "InternalServerError")
    check_nothing_left("a decoder that dies", prefill)
    check("a decoder that dies: the prefill hosts go on", prefill.health(), 200)


PARTS = {"text": check_text, "video": check_video}


def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(exist_ok=True)
        guard_children(folder / "site")
        for part in options.part or PARTS:
            clock = Clock()
            PARTS[part](folder)
            print(f"{part}: {clock}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="where logs and models are written")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this")
    main(parser.parse_args())
