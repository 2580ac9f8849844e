"""What lies between the prefill's end and vLLM's first token, step by step, in the stack of
``stack_check.py``.

    python tests/integrations/stack_times.py [--tokens 512 8192] [--rounds 10]

One request at a time; it prints medians in milliseconds. All clocks are one machine's. The first
row is the demo model with its clip, whose frames vLLM reads for their number and size; the others
are prompts of token ids of a small text model.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from vllm_engine import guard_children  # isort: skip  (first, as it sets what vLLM reads)

from stack import Service, client_of, decoder, prefill_worker, router, running, video_part

from apbv import demo

from apbv_tests import families
from apbv_tests.patience import limit, wait_for

FRAMES = 128
STEPS = {
    "reply": "from KV being offered to vLLM's scheduler: the reply, the router, and vLLM's reading "
    "of the prompt",
    "check": "whether the KV fits the request",
    "wait": "until the request has blocks and its fetch begins",
    "first": "connections, and the first layer",
    "others": "the other layers",
    "write": "until the last is in vLLM's cache",
    "step": "vLLM's step, and the token's way to the client",
    "all": "in all",
}
_NAMED = re.compile(r"named its KV at ([\d.]+), checked in ([\d.]+) s")
_FETCHED = re.compile(
    r"fetch began at ([\d.]+); first layer ([\d.]+), all ([\d.]+), in place ([\d.]+) s"
)


def split(identity: str, prefill: Service, vllm: Service, came: float) -> dict[str, float]:
    """The steps of one request, in seconds.

    Args:
        identity: the router's number of the request, in both servers' logs.
        came: when the client had the first token, in seconds since the epoch.
    """

    def line(service: Service, wanted: str) -> str:
        lines = [
            each for each in service.said().splitlines() if identity in each and wanted in each
        ]
        return lines[0] if lines else ""

    wait_for(lambda: line(prefill, '"transfer"') and line(vllm, "fetch began"), limit(30.0))
    ended = json.loads(line(prefill, '"transfer"'))
    moment = datetime.fromisoformat(ended["time"].replace("Z", "+00:00")).timestamp()
    offered = moment - (ended["total_seconds"] - ended["time_to_first_token_seconds"])
    named, checked = map(float, _NAMED.search(line(vllm, "named its KV")).groups())
    began, first, last, placed = map(float, _FETCHED.search(line(vllm, "fetch began")).groups())
    return {
        "reply": named - offered,
        "check": checked,
        "wait": began - named - checked,
        "first": first,
        "others": last - first,
        "write": placed - last,
        "step": came - began - placed,
        "all": came - offered,
    }


def measured(
    through: Service, prefill: Service, vllm: Service, rounds: int, asks
) -> dict[str, float]:
    """Medians over some requests, of which the first two are not counted."""
    found = []
    for number in range(rounds + 2):
        stream = asks(client_of(through), number)
        chunk = next(iter(stream))
        came = time.time()
        for _ in stream:
            pass
        found.append(split(re.search(r"[0-9a-f]{32}", chunk.id)[0], prefill, vllm, came))
    return {step: median(each[step] for each in found[2:]) for step in STEPS}


def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        guard_children(folder / "site")
        rows = {}
        data = ["--log-format", "json", "--method", "apbv"]
        one_video = ["--limit-mm-per-prompt", '{"video": 1, "image": 0}']
        clip = prefill_worker("clip", demo.model_path(), "demo", folder, *data, "--frames", FRAMES)
        vllm = decoder(
            "vllm-clip", demo.model_path(), "demo", folder, *one_video, num_frames=FRAMES
        )
        content = [
            video_part(demo.video_path()),
            {"type": "text", "text": "name the letters in order"},
        ]

        def ask_video(client, number: int):
            messages = [{"role": "user", "content": content}]
            return client.chat.completions.create(
                model="demo", messages=messages, temperature=0, stream=True
            )

        with running([clip, vllm]), running([front := router("router-clip", clip, [vllm], folder)]):
            rows["the demo's clip"] = measured(front, clip, vllm, options.rounds, ask_video)

        families.HIDDEN = families.HEADS * 32
        model = families.save_checkpoint("qwen2", folder / "qwen2", layers=8)
        longest = max(options.tokens) + 64
        text = prefill_worker("text", model, "text", folder, *data)
        room = ["--max-model-len", longest, "--max-num-batched-tokens", longest]
        vllm = decoder("vllm-text", model, "text", folder, *room)
        with running([text, vllm]), running([front := router("router-text", text, [vllm], folder)]):
            for num_tokens in options.tokens:

                def ask(client, number: int, num_tokens: int = num_tokens):
                    prompt = [number, *((7 * i * i) % 251 for i in range(num_tokens - 1))]
                    # Every token gives a chunk.
                    extra = {"ignore_eos": True, "return_token_ids": True}
                    return client.completions.create(
                        model="text",
                        prompt=prompt,
                        temperature=0,
                        max_tokens=4,
                        stream=True,
                        extra_body=extra,
                    )

                rows[f"{num_tokens} tokens"] = measured(front, text, vllm, options.rounds, ask)
    for step, meaning in STEPS.items():
        print(f"{step:8}{meaning}")
    print("| prompt | " + " | ".join(STEPS) + " |")
    print("|---|" + "---|" * len(STEPS))
    for name, times in rows.items():
        print(
            f"| {name} | "
            + " | ".join(f"{1000 * seconds:.1f}" for seconds in times.values())
            + " |"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[512, 8192], help="lengths of prompts of text"
    )
    parser.add_argument("--rounds", type=int, default=10, help="requests of each")
    main(parser.parse_args())
