"""vLLM goes on from KV that apbv prefilled: real vLLM on a CPU against plain transformers.

    python tests/integrations/vllm_check.py FOLDER

in an environment that has both apbv and vLLM (see test_vllm.py). Two hosts prefill and save, once
exactly and once compressed, and write down what transformers' own ``generate`` makes of the same
KV; then vLLM loads it. The models are the packaged demo model (a Qwen2.5-VL) with its clip, in
which time outruns height and width, and small random models of Qwen2, GLM-4 and Qwen3-MoE.
Everything is in float32, where both sides choose the same tokens.
"""

import dataclasses
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from vllm_engine import BLOCK, NUM_NEW, Server, check, check_refusals, guard_children  # isort: skip

import torch
from offering import STOP, TICKETS, offer_all
from vllm_positions import check_positions
from vllm_tickets import SETTINGS, check_recompute, check_tickets, check_video_tickets

import apbv
from apbv import demo
from apbv.input.media.video import probe, read_frames, sample_uniform

from apbv_tests import families
from apbv_tests.patience import limit, wait_for
from apbv_tests.tampering import damaged, flip_bit, poison, remove, reweigh, truncate

NUM_FRAMES = 64
QUESTION, FOLLOW_UP = demo.EXAMPLE_QUESTIONS[1::-1]
EXACT = apbv.PrefillConfig(method="apbv", passing_len=4096)
COMPRESSED = apbv.PrefillConfig(method="apbv", passing_len=0, anchor_len=0)
SHARDED = dataclasses.replace(COMPRESSED, kv="sharded")  # both hosts hold some
# Gate and up in one, and experts.
OTHER_MLPS = ("glm4", "qwen3_moe")
REDUCED = {"dycoke": dataclasses.replace(SHARDED, reduce=apbv.ReduceConfig(method="dycoke"))}


def prefill_all(folder: Path) -> None:
    """On every host: prefill, save and offer each case; host 0 writes transformers' continuations
    beside them."""
    torch.set_num_threads(1)
    hosts = apbv.HostGroup.from_env()
    cases = {
        "video-exact": (demo.model_path(), EXACT, "vllm"),
        "video-compressed": (demo.model_path(), SHARDED, "vllm"),
        "video-transformers": (demo.model_path(), EXACT, "transformers"),
        "text-exact": (folder / "qwen2", EXACT, 4 * BLOCK + 7),
        "text-unaligned": (folder / "qwen2", COMPRESSED, 4 * BLOCK + 7),
        "text-sharded": (folder / "qwen2", SHARDED, 4 * BLOCK + 7),
        "text-aligned": (folder / "qwen2", COMPRESSED, 4 * BLOCK),
        **{family: (folder / family, COMPRESSED, 4 * BLOCK + 7) for family in OTHER_MLPS},
        **{name: (demo.model_path(), config, "vllm") for name, config in REDUCED.items()},
    }
    expected = {}
    states = {}
    for name, (model, config, how) in cases.items():
        engine = apbv.Engine.from_pretrained(model, prefill=config, hosts=hosts, dtype="float32")
        if model == demo.model_path():
            state = engine.prefill(
                QUESTION, video=demo.video_path(), num_frames=NUM_FRAMES, positions=how
            )
        else:
            state = apbv.prefill(engine.model, text_of(how), hosts=hosts, config=config)
        state.save(folder / name)
        if name in REDUCED:
            continue
        states[name] = state
        inputs = state.generate_inputs()
        cache = state.to_dynamic_cache()
        if cache is None:
            continue
        made = engine.model.generate(
            **inputs, max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None
        )
        more = engine.tokenizer.encode(FOLLOW_UP, add_special_tokens=False)
        expected[name] = {
            "prompt": made[0, : state.num_tokens].tolist(),
            "tokens": made[0, state.num_tokens :].tolist(),
            "follow_up": more,
            "followed": continue_greedily(engine.model, cache, more, state.next_position),
        }
    if hosts.rank == 0:
        (folder / "expected.json").write_text(json.dumps(expected))
    offer_all(folder, states, hosts, os.getpid())
    hosts.close()


def text_of(num_tokens: int) -> apbv.ModelInputs:
    """Random bytes whose last 16 are the question."""
    tokens = torch.randint(256, (1, num_tokens), generator=torch.Generator().manual_seed(0))
    return apbv.ModelInputs(tokens, torch.arange(num_tokens)[None], 0, num_tokens - 16)


@torch.no_grad()
def continue_greedily(model, cache, tokens: list[int], position: int) -> list[int]:
    """What transformers answers to more text behind a cached prompt, whose next position is
    given."""
    made = []
    for _ in range(NUM_NEW):
        positions = torch.arange(position, position + len(tokens))[None]
        if model.config.model_type.endswith("vl"):
            positions = positions.expand(3, 1, -1)
        logits = model(
            input_ids=torch.tensor([tokens]), position_ids=positions, past_key_values=cache
        ).logits
        position += len(tokens)
        tokens = [int(logits[0, -1].argmax())]
        made += tokens
    return made


def check_text(folder: Path, expected: dict) -> None:
    from apbv.integrations.vllm import request_params

    server = Server(folder / "qwen2", {**SETTINGS, "root": str(folder)})

    def request(name: str, more: list[int] = (), **changes) -> dict:
        prompt = {"prompt_token_ids": [*expected[name]["prompt"], *more]}
        return prompt | request_params(folder / name) | changes

    plain = {
        name: {"prompt_token_ids": expected[name]["prompt"]}
        for name in expected
        if name.startswith("text")
    }
    exact = expected["text-exact"]["tokens"]
    check("vLLM alone agrees with transformers", server.run(plain["text-exact"]), [exact])
    for name in plain:
        case = expected[name]
        (alone,) = server.run(plain[name])
        found = server.run(
            request(name), request(name, case["follow_up"]), plain[name], request(name)
        )
        wanted = [case["tokens"], case["followed"], alone, case["tokens"]]
        check(f"{name}: loaded, followed up, vLLM's own prompt, loaded again", found, wanted)
        check(
            f"{name}: compressed KV gives other tokens",
            alone == case["tokens"],
            name == "text-exact",
        )

    name = "text-unaligned"
    other = [*expected[name]["prompt"][:-1], 7]
    poisoned = damaged(folder / name, folder / "poisoned", poison)
    changed = server.run(request(name, **request_params(poisoned))) != [expected[name]["tokens"]]
    check("poisoned KV changes the tokens", changed, True)
    refused = {
        "other tokens": (request(name, prompt_token_ids=other), "does not start with"),
        "no KV": (
            request(name, kv_transfer_params={"apbv_path": str(folder / "nowhere")}),
            "no saved KV",
        ),
        "another folder": (
            request(name, kv_transfer_params={"apbv_path": str(demo.model_path())}),
            "is outside",
        ),
        "no path": (request(name, kv_transfer_params={"apbv_path": 7}), "must be a string"),
        "another model": (request(name, **request_params(folder / "video-exact")), "config"),
    }
    for change, reason in {
        truncate: "bytes instead",
        flip_bit: "checksum is wrong",
        remove: "incomplete",
    }.items():
        path = damaged(folder / name, folder / change.__name__, change)
        refused[change.__doc__] = (
            request(name, kv_transfer_params={"apbv_path": str(path)}),
            reason,
        )
    path = damaged(folder / name, folder / "reweigh", reweigh)
    refused[reweigh.__doc__] = (request(name, **request_params(path)), "weights differ")
    check_refusals(server, refused, plain["text-exact"], exact)
    check_tickets(server, folder, expected)


def check_other_mlp(folder: Path, expected: dict, family: str) -> None:
    """A model is known by a sample of its weights, whose names differ."""
    from apbv.integrations.vllm import request_params

    server = Server(folder / family, {**SETTINGS, "root": str(folder)})
    case = expected[family]
    request = {"prompt_token_ids": case["prompt"]} | request_params(folder / family)
    check(f"{family}: loaded", server.run(request), [case["tokens"]])


def check_video(folder: Path, expected: dict) -> None:
    """By two tensor-parallel workers, each with one of the two KV heads."""
    from apbv.integrations.vllm import request_params

    settings = {**SETTINGS, "root": str(folder)}
    options = {"limit_mm_per_prompt": {"video": 1, "image": 0}, "tensor_parallel_size": 2}
    server = Server(demo.model_path(), settings, **options)
    processor = server.llm.get_tokenizer()
    turn = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": QUESTION}]}]
    text = processor.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    info = probe(demo.video_path())
    frames = sample_uniform(info, NUM_FRAMES)
    metadata = {"fps": info.fps, "duration": info.duration, "total_num_frames": info.num_frames}
    metadata |= {"frames_indices": list(frames), "video_backend": "pyav", "do_sample_frames": False}
    video = {"prompt": text, "multi_modal_data": {"video": (read_frames(info, frames), metadata)}}

    def request(name: str, more: str = "", **changes) -> dict:
        params = request_params(folder / name)
        named = {"multi_modal_uuids": {"video": [params.pop("uuid")]}}
        return video | {"prompt": text + more} | params | named | changes

    for name in ("video-exact", "video-compressed"):
        case = expected[name]
        found = server.run(request(name), request(name, FOLLOW_UP), video)
        exact = expected["video-exact"]["tokens"]
        check(
            f"{name}: loaded, followed up, vLLM's own prefill",
            found,
            [case["tokens"], case["followed"], exact],
        )
    refused = {
        "transformers' positions": (request("video-transformers"), "prefill with positions='vllm'"),
        "a video without its uuid": (request(name, multi_modal_uuids=None), "its uuid must be"),
        "another uuid": (request(name, multi_modal_uuids={"video": ["other"]}), "its uuid must be"),
    }
    for reducer in REDUCED:
        there = {"apbv_path": str(folder / reducer)}
        refused[f"what {reducer} left"] = (
            request(name, kv_transfer_params=there),
            f"{reducer} pruned",
        )
    check_refusals(server, refused, video, exact)
    check_video_tickets(server, folder, expected, video)


PARTS = {
    "prefill": lambda folder, expected: prefill_all(folder),
    "positions": check_positions,
    "text": check_text,
    **{family: partial(check_other_mlp, family=family) for family in OTHER_MLPS},
    "video": check_video,
    "recompute": check_recompute,  # at last, as it ends the hosts
}


def started(part: str, folder: Path, hosts: int = 1) -> subprocess.Popen:
    """A part in processes of its own, as torchrun starts them; a process has one vLLM at most."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(hosts)]
    command = [sys.executable, *(torchrun if hosts > 1 else []), __file__, str(folder), part]
    return subprocess.Popen(command)


def main(folder: Path, part: str | None = None) -> None:
    """Everything in an empty folder, or only a part, beside hosts that offer KV there."""
    if part is not None:
        written = folder / "expected.json"
        PARTS[part](folder, json.loads(written.read_text()) if written.exists() else None)
        return
    folder.mkdir(exist_ok=True)
    guard_children(folder / "site")
    families.HEAD_DIM = 32  # the smallest heads that vLLM's CPU kernels take
    families.HIDDEN = families.HEADS * families.HEAD_DIM
    for family in ("qwen2", *OTHER_MLPS):
        families.save_checkpoint(family, folder / family)
    hosts = started("prefill", folder, hosts=2)
    try:
        wait_for(lambda: (folder / TICKETS).exists() or hosts.poll() is not None, limit(600.0))
        for part in [name for name in PARTS if name != "prefill"]:
            if status := started(part, folder).wait(limit(600.0)):
                raise SystemExit(status)
    finally:
        (folder / STOP).touch()
        hosts.wait(limit(120.0))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
