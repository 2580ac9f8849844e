"""vLLM goes on from KV that apbv prefilled: real vLLM on a CPU against plain transformers.

    python tests/integrations/vllm_check.py [--folder FOLDER]

in an environment that has both apbv and vLLM (see test_vllm.py). Two hosts prefill and save, once exactly and
once compressed, and write down what transformers' own ``generate`` makes of the same KV; then vLLM loads it.
The models are the packaged demo model (a Qwen2.5-VL) with its clip, in which time outruns height and width, and
a small random Qwen2. Everything is in float32, where both sides choose the same tokens.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process, where its log can be read
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch

import apbv  # before transformers and vLLM: see apbv.torchvision_guard
from apbv import demo
from apbv.input.video import probe, read_frames, sample_uniform

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
import families
from patience import limit
from tampering import damaged, flip_bit, poison, remove, reweigh, truncate

NUM_FRAMES = 64
QUESTION, FOLLOW_UP = demo.EXAMPLE_QUESTIONS[1::-1]
NUM_NEW = 12
BLOCK = 32  # tokens of one of vLLM's blocks
EXACT = apbv.PrefillConfig(method="apbv", passing_len=4096)
COMPRESSED = apbv.PrefillConfig(method="apbv", passing_len=0, anchor_len=0)


def save_text_model(folder: Path) -> Path:
    families.HIDDEN = families.HEADS * 32  # the smallest heads that vLLM's CPU kernels take
    return families.save_checkpoint("qwen2", folder)


def prefill_all(folder: Path) -> None:
    """On every host: prefill and save each case; host 0 writes transformers' continuations beside them."""
    torch.set_num_threads(1)
    hosts = apbv.HostGroup.from_env()
    cases = {
        "video-exact": (demo.model_path(), EXACT, "vllm"),
        "video-compressed": (demo.model_path(), COMPRESSED, "vllm"),
        "video-transformers": (demo.model_path(), EXACT, "transformers"),
        "text-exact": (folder / "qwen2", EXACT, 4 * BLOCK + 7),
        "text-unaligned": (folder / "qwen2", COMPRESSED, 4 * BLOCK + 7),
        "text-aligned": (folder / "qwen2", COMPRESSED, 4 * BLOCK),
    }
    expected = {}
    for name, (model, config, how) in cases.items():
        engine = apbv.Engine.from_pretrained(model, prefill=config, hosts=hosts, dtype="float32")
        if name.startswith("video"):
            state = engine.prefill(QUESTION, video=demo.video_path(), num_frames=NUM_FRAMES, positions=how)
        else:
            state = apbv.prefill(engine.model, text_of(how), hosts=hosts, config=config)
        state.save(folder / name)
        inputs, cache = state.generate_inputs(), state.to_dynamic_cache()
        if cache is None:
            continue
        made = engine.model.generate(**inputs, max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None)
        more = engine.tokenizer.encode(FOLLOW_UP, add_special_tokens=False)
        expected[name] = {
            "method": state.method,
            "prompt": made[0, : state.num_tokens].tolist(),
            "tokens": made[0, state.num_tokens :].tolist(),
            "follow_up": more,
            "followed": continue_greedily(engine.model, cache, more, state.next_position),
        }
    if hosts.rank == 0:
        (folder / "expected.json").write_text(json.dumps(expected))
    hosts.close()


def text_of(num_tokens: int) -> apbv.ModelInputs:
    """Random bytes whose last 16 are the question."""
    tokens = torch.randint(256, (1, num_tokens), generator=torch.Generator().manual_seed(0))
    return apbv.ModelInputs(tokens, torch.arange(num_tokens)[None], 0, num_tokens - 16)


@torch.no_grad()
def continue_greedily(model, cache, tokens: list[int], position: int) -> list[int]:
    """What transformers answers to more text behind a cached prompt, whose next position is given."""
    made = []
    for _ in range(NUM_NEW):
        positions = torch.arange(position, position + len(tokens))[None]
        if model.config.model_type.endswith("vl"):
            positions = positions.expand(3, 1, -1)
        logits = model(input_ids=torch.tensor([tokens]), position_ids=positions, past_key_values=cache).logits
        position += len(tokens)
        tokens = [int(logits[0, -1].argmax())]
        made += tokens
    return made


class Log(logging.Handler):
    """The connector's messages since they were last taken."""

    def __init__(self):
        from apbv.integrations.vllm import logger

        super().__init__()
        self._messages = []
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(record.getMessage())

    def take(self) -> str:
        messages, self._messages = "\n".join(self._messages), []
        return messages


class Server:
    """vLLM with one model; ``run`` answers requests in one batch."""

    def __init__(self, model: Path, root: Path, **options):
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = KVTransferConfig(
            kv_connector="ApbvConnector",
            kv_connector_module_path="apbv.integrations.vllm",
            kv_role="kv_consumer",
            kv_connector_extra_config={"root": str(root)},
        )
        self.llm = LLM(
            str(model),
            dtype="float32",
            block_size=BLOCK,
            max_model_len=512,
            max_num_seqs=8,
            enforce_eager=True,
            enable_prefix_caching=True,
            kv_transfer_config=transfer,
            **options,
        )
        self.log = Log()  # only now: vLLM sets its loggers up again when it starts

    def run(self, *requests: dict) -> list[list[int] | str]:
        """Each request's tokens, or, where vLLM ended it with an error, what the log says."""
        from vllm import SamplingParams

        prompts, params = [], []
        for request in requests:
            request = dict(request)
            transfer = request.pop("kv_transfer_params", None)
            extra = {"kv_transfer_params": transfer} if transfer else None
            params.append(SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, extra_args=extra))
            prompts.append(request)
        outputs = [output.outputs[0] for output in self.llm.generate(prompts, params, use_tqdm=False)]
        log = self.log.take()
        return [list(o.token_ids) if o.finish_reason != "error" else log for o in outputs]


def guard_children(folder: Path) -> None:
    """vLLM looks at models in processes of its own, in which no import of apbv makes torchvision usable."""
    guard = Path(apbv.__file__).with_name("torchvision_guard.py")
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(guard.read_text() + "\n\nensure_torchvision_imports()\n")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def check(name: str, found, wanted) -> None:
    """``wanted`` are tokens, or what a refusal must say."""
    good = wanted in found if isinstance(wanted, str) and isinstance(found, str) else found == wanted
    print(
        f"{'ok' if good else 'FAILED'}: {name}" + ("" if good else f"\n  {found}\n  instead of {wanted}"),
        flush=True,
    )
    if not good:
        raise SystemExit(1)


def check_text(folder: Path, expected: dict) -> None:
    from apbv.integrations.vllm import request_params

    server = Server(folder / "qwen2", folder)

    def request(name: str, more: list[int] = (), **changes) -> dict:
        prompt = {"prompt_token_ids": [*expected[name]["prompt"], *more]}
        return prompt | request_params(folder / name) | changes

    plain = {name: {"prompt_token_ids": expected[name]["prompt"]} for name in expected if name.startswith("text")}
    exact = expected["text-exact"]["tokens"]
    check("vLLM alone agrees with transformers", server.run(plain["text-exact"]), [exact])
    for name in plain:
        case = expected[name]
        (alone,) = server.run(plain[name])
        found = server.run(request(name), request(name, case["follow_up"]), plain[name], request(name))
        check(
            f"{name}, {len(case['prompt'])} tokens: loaded, followed up, vLLM's own prompt, loaded again",
            found,
            [case["tokens"], case["followed"], alone, case["tokens"]],
        )
        check(
            f"{name}: compressed KV gives other tokens than vLLM's prefill",
            alone == case["tokens"],
            name == "text-exact",
        )

    name = "text-unaligned"
    other = [*expected[name]["prompt"][:-1], 7]
    poisoned = damaged(folder / name, folder / "poisoned", poison)
    check(
        "poisoned KV changes the tokens",
        server.run(request(name, **request_params(poisoned)))[0] == expected[name]["tokens"],
        False,
    )
    refused = {
        "no salt": (request(name, cache_salt=None), "it needs a cache_salt"),
        "another KV's salt": (
            request(name, cache_salt=request("text-exact")["cache_salt"]),
            "it needs a cache_salt",
        ),
        "other tokens": (request(name, prompt_token_ids=other), "differ from token 134"),
        "shorter prompt": (request(name, prompt_token_ids=other[:50]), "differ from token 50"),
        "no KV": (request(name, kv_transfer_params={"apbv_path": str(folder / "nowhere")}), "no saved KV"),
        "another folder": (request(name, kv_transfer_params={"apbv_path": str(demo.model_path())}), "is outside"),
        "no path": (request(name, kv_transfer_params={"apbv_path": 7}), "must be a string"),
        "another model": (request(name, **request_params(folder / "video-exact")), "config"),
    }
    for change, reason in (
        (truncate, "bytes instead of"),
        (flip_bit, "checksum is wrong"),
        (remove, "incomplete"),
    ):
        path = damaged(folder / name, folder / change.__name__, change)
        refused[change.__doc__] = (request(name, kv_transfer_params={"apbv_path": str(path)}), reason)
    path = damaged(folder / name, folder / "reweigh", reweigh)
    refused[reweigh.__doc__] = (request(name, **request_params(path)), "other weights")
    check_refusals(server, refused, plain["text-exact"], exact)


def check_refusals(server: Server, refused: dict[str, tuple[dict, str]], plain: dict, answer: list[int]) -> None:
    """Each request is refused for its reason, in a batch with a plain one, which is answered."""
    for what, (asked, reason) in refused.items():
        asked = {key: value for key, value in asked.items() if value is not None}
        before = time.perf_counter()
        refusal, other = server.run(asked, plain)
        check(f"{what}: the other request goes on", other, answer)
        check(f"{what}: refused after {time.perf_counter() - before:.1f} s: {refusal}", refusal, reason)


def check_positions(folder: Path, expected: None) -> None:
    """apbv's idea of vLLM's positions against vLLM's own, for a long video, a short one, and two images."""
    from transformers.video_utils import VideoMetadata
    from vllm.model_executor.models.registry import ModelRegistry

    from apbv.integrations.vllm import without_weights

    sources = {
        "long video": {"videos": [families.synthetic_video(24)]},
        "short video": {"videos": [families.synthetic_video(2)]},
        "images": {"images": [families.synthetic_image(), families.synthetic_image(168, 84)]},
    }
    for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        model, processor = families.build_model(family), families.build_processor(family)
        parts = apbv.model.parts.inspect_model(model)
        (architecture,) = model.config.architectures or [type(model).__name__]
        theirs = without_weights(ModelRegistry._try_load_model_cls(architecture), model.config)
        for name, source in sources.items():
            content = [{"type": kind[:-1]} for kind, items in source.items() for _ in items]
            turn = [{"role": "user", "content": [*content, {"type": "text", "text": QUESTION}]}]
            text = processor.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
            if "videos" in source:
                count = len(source["videos"][0])
                metadata = VideoMetadata(
                    total_num_frames=4 * count, fps=7.3, frames_indices=list(range(0, 4 * count, 4))
                )
                source = source | {"video_metadata": [metadata], "do_sample_frames": False}
            batch = processor(text=[text], return_tensors="pt", **source)
            inputs = apbv.ModelInputs.from_processor(parts, batch, apbv.HostGroup.single("cpu"))
            features = features_of(batch, parts)
            wanted, _ = theirs.get_mrope_input_positions(inputs.input_ids[0].tolist(), features)
            moved = inputs.at_vllm_positions(parts).position_ids
            check(f"{family}, {name}: vLLM's positions", moved[:, 0].tolist(), wanted.tolist())
            same = torch.equal(moved, inputs.position_ids)
            check(
                f"{family}, {name}: transformers has the same", same, name != "long video" or family == "qwen3_vl"
            )


def features_of(batch, parts) -> list:
    """What vLLM knows of a prompt's video or images."""
    kind = "video" if "video_grid_thw" in batch else "image"
    starts = [
        i for i, t in enumerate(batch["input_ids"][0].tolist()) if t == parts.model.config.vision_start_token_id
    ]
    features = []
    for index, grid in enumerate(batch[f"{kind}_grid_thw"]):
        data = {f"{kind}_grid_thw": SimpleNamespace(data=grid)}
        if "second_per_grid_ts" in batch:
            data["second_per_grid_ts"] = SimpleNamespace(data=torch.as_tensor(batch["second_per_grid_ts"][index]))
        at = starts[index] + (parts.family != "qwen3_vl" or kind == "image")
        features.append(SimpleNamespace(modality=kind, data=data, mm_position=SimpleNamespace(offset=at)))
    return features


def check_video(folder: Path, expected: dict) -> None:
    """By two tensor-parallel workers, each with one of the two KV heads."""
    from apbv.integrations.vllm import request_params

    server = Server(
        demo.model_path(), folder, limit_mm_per_prompt={"video": 1, "image": 0}, tensor_parallel_size=2
    )
    processor = server.llm.get_tokenizer()
    turn = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": QUESTION}]}]
    text = processor.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    info = probe(demo.video_path())
    frames = sample_uniform(info, NUM_FRAMES)
    metadata = {
        "fps": info.fps,
        "duration": info.duration,
        "total_num_frames": info.num_frames,
        "frames_indices": list(frames),
        "video_backend": "pyav",
        "do_sample_frames": False,
    }
    video = {"prompt": text, "multi_modal_data": {"video": (read_frames(info, frames), metadata)}}

    def request(name: str, more: str = "", **changes) -> dict:
        params = request_params(folder / name)
        named = {"multi_modal_uuids": {"video": [params.pop("uuid")]}}
        return video | {"prompt": text + more} | params | named | changes

    for name in ("video-exact", "video-compressed"):
        case = expected[name]
        found = server.run(request(name), request(name, FOLLOW_UP), video)
        exact = expected["video-exact"]["tokens"]
        check(f"{name}: loaded, followed up, vLLM's own prefill", found, [case["tokens"], case["followed"], exact])
    refused = {
        "transformers' positions": (request("video-transformers"), "prefill with positions='vllm'"),
        "a video without its uuid": (request(name, multi_modal_uuids=None), "may not be that of the KV"),
        "another uuid": (request(name, multi_modal_uuids={"video": ["other"]}), "may not be that of the KV"),
    }
    check_refusals(server, refused, video, exact)


PARTS = {
    "prefill": lambda folder, expected: prefill_all(folder),
    "positions": check_positions,
    "text": check_text,
    "video": check_video,
}


def run_part(part: str, folder: Path, hosts: int = 1) -> None:
    """In processes of its own, as torchrun starts them; a process has one vLLM at most."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(hosts)]
    command = [sys.executable, *(torchrun if hosts > 1 else []), __file__, "--part", part, "--folder", str(folder)]
    begin = time.perf_counter()
    subprocess.run(command, check=True, timeout=limit(600.0))
    print(f"{part}: {time.perf_counter() - begin:.1f} s", flush=True)


def main(options: argparse.Namespace) -> None:
    if options.part is not None:
        written = options.folder / "expected.json"
        PARTS[options.part](options.folder, json.loads(written.read_text()) if written.exists() else None)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(exist_ok=True)
        guard_children(folder / "site")
        if not (folder / "expected.json").exists():
            save_text_model(folder / "qwen2")
            run_part("prefill", folder, hosts=2)
        for part in ("positions", "text", "video"):
            run_part(part, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="where the KV is written, or lies already")
    parser.add_argument("--part", choices=PARTS, help="only this")
    main(parser.parse_args())
