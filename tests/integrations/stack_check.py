"""The whole stack: vllm-router in front, two prefill hosts behind it, vLLM decodes, OpenAI's client
asks.

    python tests/integrations/stack_check.py FOLDER [MODEL COUNT]

in an environment that has apbv, vLLM and vllm-router (see test_stack.py). All run with their
default settings, but for what a small CPU needs. What passes through the router is compared with
what vLLM answers by itself; with the folder of a pretrained text model, so many prompts of this
repository's pages, of 100 to 4,000 tokens.
"""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from vllm_engine import check, guard_children  # isort: skip  (first, as it sets what vLLM reads)

import openai
from stack import ROOT, Service, client_of, decoder, prefill_worker, router, running, video_part

from apbv import demo

# isort: split
from transformers import AutoTokenizer

from apbv_tests import families
from apbv_tests.patience import limit, wait_for

NUM_NEW = 12
CONCURRENCY = 8
FRAMES = 128  # all of the demo's clip, so that both sides see the same
OFFER_SECONDS = limit(20.0)
QUESTION = "name the letters in order"
RIGHT_ANSWER = "X J P H E L"
ONE_VIDEO = ["--limit-mm-per-prompt", '{"video": 1, "image": 0}']
WAITING = "apbv:kv_offers_waiting"
FETCHED = 'apbv:kv_transfers_total{how="fetched"}'
# Of the text model, whose tokens are bytes.
PROMPT = [(7 * i * i + 3 * i) % 251 for i in range(400)]

Ask = Callable[[Service], str | list[int]]


def asking_video(**options) -> Ask:
    """The text that a service answers to the question about the clip."""
    message = {
        "role": "user",
        "content": [video_part(demo.video_path()), {"type": "text", "text": QUESTION}],
    }

    def ask(service: Service) -> str:
        asked = {
            "model": "demo",
            "messages": [message],
            "temperature": 0,
            "max_tokens": NUM_NEW,
            **options,
        }
        made = client_of(service).chat.completions.create(**asked)
        if not options.get("stream"):
            return made.choices[0].message.content
        return "".join(chunk.choices[0].delta.content or "" for chunk in made if chunk.choices)

    return ask


def asking(**asked) -> Ask:
    """What a service of the text model puts behind a prompt, as tokens, or answers to a chat's
    messages."""
    extra = {"ignore_eos": True, "return_token_ids": True}
    options = {
        "model": "text",
        "temperature": 0,
        "max_tokens": NUM_NEW,
        "extra_body": extra,
        **asked,
    }

    def ask(service: Service) -> list[int]:
        client = client_of(service)
        return (
            (client.chat if "messages" in asked else client)
            .completions.create(**options)
            .choices[0]
            .token_ids
        )

    return ask


def error_of(ask: Ask, service: Service) -> str:
    """What the client is told instead of an answer."""
    try:
        return f"an answer: {ask(service)}"
    except openai.APIError as error:
        return f"{type(error).__name__}: {error}"


def check_equal(what: str, ask: Ask, through: Service, prefill: Service, alone: Service) -> None:
    """Through the router a request is answered as vLLM does it alone, from KV of the prefill
    hosts."""
    before = prefill.metric(FETCHED)
    check(f"{what}: as vLLM alone", ask(through), ask(alone))
    wait_for(lambda: prefill.metric(FETCHED) == before + 1, limit(30.0))
    check(f"{what}: vLLM has fetched the KV", prefill.metric(FETCHED), before + 1)


def check_nothing_left(what: str, prefill: Service) -> None:
    """No KV waits any more, at the latest when its time is over."""
    wait_for(lambda: not prefill.metric(WAITING), OFFER_SECONDS + limit(30.0))
    check(f"{what}: no KV is left", prefill.metric(WAITING), 0)


def in_the_midst(ask: Ask, through: Service, prefill: Service, then: Callable[[], None]) -> str:
    """What becomes of a request when something happens while the prefill hosts have it; one is held
    meanwhile."""
    held = prefill.host(1)
    states = ("waiting", "running")
    with ThreadPoolExecutor(1) as pool:
        held.suspend()
        try:
            answer = pool.submit(error_of, ask, through)
            wait_for(
                lambda: any(prefill.metric(f"apbv:num_requests_{state}") for state in states),
                limit(60.0),
            )
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
            check_equal("token ids", asking(prompt=PROMPT), front, prefill, vllm)
            check_equal(
                "a prompt of text", asking(prompt="a red border; " * 9), front, prefill, vllm
            )
            turns = [{"role": "user", "content": "xyz"}, {"role": "assistant", "content": "abc"}]
            chat = asking(messages=[*turns, {"role": "user", "content": "def " * 30}])
            check_equal("a chat", chat, front, prefill, vllm)
            asks = [asking(prompt=[*PROMPT[: 60 + 9 * i], i]) for i in range(10)]
            wanted = [ask(vllm) for ask in asks]
            with ThreadPoolExecutor(CONCURRENCY) as pool:
                found = list(pool.map(lambda ask: ask(front), asks * 5))
            check(
                f"{CONCURRENCY} requests at a time: nothing is lost or exchanged", found, wanted * 5
            )
            leaving = {"max_tokens": 100, "stream": True, "extra_body": {"ignore_eos": True}}
            stream = client_of(front).completions.create(model="text", prompt=PROMPT, **leaving)
            next(iter(stream))
            stream.close()
            wait_for(
                lambda: not any(each.metric("vllm:num_requests_running") for each in decoders),
                limit(60.0),
            )
            check_nothing_left("a client that leaves", prefill)
            refusal = error_of(asking(prompt=[9] * 700), front)
            check(f"a prompt that is too long: {refusal}", refusal, "maximum context length")
            error = in_the_midst(asks[0], front, prefill, front.kill)
            check(f"a router that dies: {error}", error, "APIConnectionError")
            check_nothing_left("a router that dies", prefill)
            check("a router that dies: vLLM answers by itself", asks[0](vllm), wanted[0])


def check_video(folder: Path) -> None:
    """The demo's clip: uncompressed the same text as vLLM's, compressed the right one; then
    faults."""
    model = demo.model_path()
    options = [
        "--frames",
        FRAMES,
        "--kv-seconds",
        OFFER_SECONDS,
        "--method",
        "apbv",
        "--passing-len",
    ]
    exact, short = (
        prefill_worker(f"prefill-{n}", model, "demo", folder, *options, n) for n in (4096, 32)
    )
    vllm = decoder("vllm-demo", model, "demo", folder, *ONE_VIDEO, num_frames=FRAMES)
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
            check(
                "other frames: vLLM's log says why",
                "another number or size of frames" in vllm.said(),
                True,
            )
            check_nothing_left("other frames", exact)
            for error in (
                in_the_midst(ask, front, exact, exact.host(1).kill),
                error_of(ask, front),
            ):
                check(f"a prefill host that dies: {error}", error, "InternalServerError")
            error = in_the_midst(ask, short_front, short, vllm.kill)
            check(f"a decoder that dies: {error}", error, "InternalServerError")
            check_nothing_left("a decoder that dies", short)
            check("a decoder that dies: the prefill hosts go on", short.health(), 200)


def check_pretrained(folder: Path, model: Path, count: int) -> None:
    """A pretrained model, uncompressed: the same greedy tokens as vLLM's, behind prompts of many
    lengths."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    pages = "\n".join(page.read_text() for page in sorted(ROOT.glob("docs/*.md")))
    tokens = tokenizer(pages, add_special_tokens=False, verbose=False).input_ids
    exact = ["--method", "apbv", "--passing-len", 4096, "--kv-seconds", OFFER_SECONDS]
    prefill = prefill_worker("prefill-pretrained", model, "text", folder, *exact)
    vllm = decoder("vllm-pretrained", model, "text", folder, "--max-model-len", 4096)
    with running([prefill, vllm]):
        front = router("router-pretrained", prefill, [vllm], folder)
        with running([front]):
            for index in range(count):
                length = round(100 * 40 ** (index / count))
                ask = asking(prompt=tokens[997 * index :][:length])
                check_equal(f"{length} tokens", ask, front, prefill, vllm)


if __name__ == "__main__":
    target = Path(sys.argv[1])  # for logs and models
    target.mkdir(exist_ok=True)
    guard_children(target / "site")
    if len(sys.argv) > 2:
        check_pretrained(target, Path(sys.argv[2]), int(sys.argv[3]))
    else:
        check_text(target)
        check_video(target)
