"""vLLM in this process, whose answers and log the checks look at. Import it before transformers and
vLLM."""

import logging
import os
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any
from uuid import uuid4

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The engine runs in this process, where its log can be read.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

import apbv  # before transformers and vLLM: see apbv.compat.torchvision_guard

NUM_NEW = 12
BLOCK = 32  # tokens of one of vLLM's blocks


class Server:
    """vLLM with one model; ``run`` answers requests in one batch, and ``said`` is what its log said
    meanwhile."""

    def __init__(self, model: Path, settings: dict[str, Any], policy: str = "fail", **options):
        from vllm import LLM
        from vllm.config import KVTransferConfig

        named = {
            "kv_connector": "ApbvConnector",
            "kv_connector_module_path": "apbv.integrations.vllm",
        }
        named |= {"kv_load_failure_policy": policy, "kv_connector_extra_config": settings}
        transfer = KVTransferConfig(kv_role="kv_consumer", **named)
        options = {"max_num_seqs": 8, "max_model_len": 512, **options}
        options |= {
            "dtype": "float32",
            "block_size": BLOCK,
            "enforce_eager": True,
            "kv_transfer_config": transfer,
        }
        self.llm = LLM(str(model), **options)
        self.engine = self.llm.llm_engine
        self._log = BufferingHandler(10**6)
        self.said = ""
        # Only now: vLLM sets its loggers up when it starts.
        logging.getLogger("vllm.apbv").addHandler(self._log)

    def run(self, *requests: dict, num_new: int = NUM_NEW) -> list[list[int] | str]:
        """Each request's tokens, or, where vLLM ended it with an error, what the log says."""
        prompts, params = zip(*(_split(request, num_new) for request in requests), strict=True)
        outputs = [
            output.outputs[0] for output in self.llm.generate(prompts, params, use_tqdm=False)
        ]
        self.said = self._take_log()
        return [list(o.token_ids) if o.finish_reason != "error" else self.said for o in outputs]

    def _take_log(self) -> str:
        """The connector's messages since they were last taken."""
        said = "\n".join(record.getMessage() for record in self._log.buffer)
        self._log.flush()
        return said

    def add(self, request: dict) -> str:
        """Begin a request, and return its id."""
        name = uuid4().hex
        self.engine.add_request(name, *_split(request, NUM_NEW))
        return name

    def finish(self) -> list[list[int] | str]:
        """Answer all that was added: as :meth:`run`, in the order in which they end."""
        ended = []
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    made = output.outputs[0]
                    ended.append(
                        list(made.token_ids) if made.finish_reason != "error" else self._take_log()
                    )
        return ended

    def num_used_blocks(self) -> int:
        """How many blocks belong to requests."""
        manager = self.engine.engine_core.engine_core.scheduler.kv_cache_manager
        return manager.block_pool.num_gpu_blocks - 1 - manager.block_pool.get_num_free_blocks()


def _split(request: dict, num_new: int):
    """A prompt and its sampling parameters."""
    from vllm import SamplingParams

    request = dict(request)
    transfer = request.pop("kv_transfer_params", None)
    extra = {"kv_transfer_params": transfer} if transfer else None
    return request, SamplingParams(
        temperature=0, max_tokens=num_new, ignore_eos=True, extra_args=extra
    )


def guard_children(folder: Path) -> None:
    """vLLM looks at models in processes of its own, in which no import of apbv makes torchvision
    usable."""
    guard = Path(apbv.__file__).parent / "compat" / "torchvision_guard.py"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(
        guard.read_text() + "\n\nensure_torchvision_imports()\n"
    )
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    )


def check(name: str, found, wanted) -> None:
    """``wanted`` are tokens, or what a refusal must say."""
    good = (
        wanted in found if isinstance(wanted, str) and isinstance(found, str) else found == wanted
    )
    print(
        f"ok: {name}" if good else f"FAILED: {name}\n  {found}\n  instead of {wanted}", flush=True
    )
    if not good:
        raise SystemExit(1)


def check_refusals(
    server: Server, refused: dict[str, tuple[dict, str]], plain: dict, answer: list[int]
) -> None:
    """Each request is refused for its reason, in a batch with a plain one, which is answered."""
    for what, (asked, reason) in refused.items():
        asked = {key: value for key, value in asked.items() if value is not None}
        refusal, other = server.run(asked, plain)
        check(f"{what}: the other request goes on", other, answer)
        check(f"{what}: refused: {refusal}", refusal, reason)
