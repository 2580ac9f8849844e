"""This module lets vLLM continue from KV that apbv prefilled and saved, by a KV connector that only loads.

Start vLLM with

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "ApbvConnector", "kv_role": "kv_consumer",
        "kv_connector_module_path": "apbv.integrations.vllm"}'

and send with every request what :func:`request_params` returns. vLLM prefills requests without ``apbv_path``
itself.

A connector can refuse a request only by a load that fails. So a request that does not fit its KV waits for a load
like every other, the load fails at once, and under the policy ``fail``, which is required, vLLM ends this request
with finish reason ``error`` (HTTP 500) and continues with the others. The reason is in vLLM's log; no field of the
response could carry it.

The scheduler's half decides when a request arrives. The worker's half reads one layer of each waiting request
per engine step, so that requests that are being decoded wait for at most one layer.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig
from vllm.config import ModelConfig, VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.logger import init_logger
from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from ..kv.manifest import StorageError
from ..kv.reader import SavedKV
from ..model.digest import SAMPLED_PROJECTIONS, config_digest, weights_digest

_PROJECTION = re.compile(rf".*\.layers\.(?P<layer>\d+)\.(?P<name>{'|'.join(SAMPLED_PROJECTIONS)})\.weight")

logger = init_logger(f"vllm.{__name__}")  # vLLM shows only what is logged below its own name


def request_params(path: str | Path) -> dict[str, Any]:
    """Return the parameters by which a request names saved KV.

    Args:
        path: the folder.

    Returns:
        ``kv_transfer_params`` and ``cache_salt``, which are fields of an OpenAI request's body (``extra_body``).
        Offline the first goes into ``SamplingParams(extra_args={"kv_transfer_params": …})``, the second into the
        prompt. With a video or images also ``uuid``, their name: a field of the message's
        ``video_url`` or ``image_url`` part (of each image, with a suffix of its own); offline the prompt's
        ``multi_modal_uuids``. By it the client asserts that vLLM is shown what apbv was shown.

    Raises:
        StorageError: there is no usable KV in this folder.
    """
    path = Path(path).resolve()
    saved = SavedKV.open(path)
    params = {"kv_transfer_params": {"apbv_path": str(path)}, "cache_salt": _cache_salt(saved)}
    return params if saved.manifest.visual is None else {**params, "uuid": _visual_uuid(saved)}


def _cache_salt(saved: SavedKV) -> str:
    """Return what a request's ``cache_salt`` must contain.

    vLLM's prefix cache treats equal tokens under equal salts as equal KV. This KV is approximate and made for one
    question, so that every save has a salt of its own.
    """
    return f"apbv-{saved.manifest.generation}"


def _visual_uuid(saved: SavedKV) -> str:
    """Return the start of the identifiers of a request's video or images, whose token ids are all equal."""
    return saved.manifest.visual.sha256 or saved.manifest.generation


@dataclass(frozen=True)
class Load:
    """Everything that a worker needs to put a request's KV into its blocks.

    Attributes:
        path: the folder of the saved KV.
        generation: the save that the scheduler saw there.
        tokens: the tokens to load.
        slots: the place of each in the paged cache.
        is_refused: whether the request must fail instead.
    """

    path: str = ""
    generation: str = ""
    tokens: range = range(0)
    slots: tuple[int, ...] = ()
    is_refused: bool = False


@dataclass
class LoadMetadata(KVConnectorMetadata):
    """The loads that begin with this step, by request id."""

    loads: dict[str, Load] = field(default_factory=dict)


class ApbvConnector(KVConnectorBase_V1):
    """A connector that loads KV written by :meth:`apbv.PrefillResult.save`, and saves nothing.

    ``kv_connector_extra_config`` may hold ``root``: a folder outside which no request may name KV.

    Raises:
        ValueError: with the engine's settings loaded KV would be wrong, or refused requests would be answered.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig):
        super().__init__(vllm_config, role, kv_cache_config)
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        if transfer.kv_role != "kv_consumer":
            raise ValueError(f"ApbvConnector only loads: kv_role must be kv_consumer, not {transfer.kv_role}")
        if transfer.kv_load_failure_policy != "fail":
            raise ValueError(
                "ApbvConnector needs kv_load_failure_policy fail: under "
                f"{transfer.kv_load_failure_policy} vLLM would answer a refused request from a prefill of its own"
            )
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ValueError("ApbvConnector needs a model whose layers all have full attention")
        if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
            raise ValueError("ApbvConnector does not support vLLM's context parallelism")
        if vllm_config.speculative_config is not None:
            raise ValueError("ApbvConnector does not support vLLM's speculative decoding: no draft's KV is saved")
        group = kv_cache_config.kv_cache_groups[0]
        self._block_size = group.kv_cache_spec.block_size
        if role is KVConnectorRole.SCHEDULER:
            self._admission = Admission(vllm_config)
            self._requests: dict[str, Load] = {}
            self._starting: dict[str, Load] = {}
        else:
            layers = vllm_config.compilation_config.static_forward_context
            self._layers = {extract_layer_index(name): layers[name] for name in group.layer_names}
            self._loading: dict[str, Iterator[int]] = {}
            self._results = KVConnectorTransferResults()

    # The scheduler's half.

    def on_new_request(self, request: Request) -> None:
        params = request.kv_transfer_params
        if not params or "apbv_path" not in params:
            return
        try:
            load = self._admission.check(request, params["apbv_path"])
        except Exception as error:  # whatever this request names, the engine must serve the others
            logger.error("request %s is refused: %s", request.request_id, _reason(error))
            load = Load(is_refused=True)
            # vLLM drops the loads of requests that skip its prefix cache, so that this one would run and not fail.
            request.skip_reading_prefix_cache = False
        self._requests[request.request_id] = load

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        load = self._requests.get(request.request_id)
        if load is None:
            return 0, False
        # A refused request announces all its tokens, so that vLLM starts the load whatever it has cached.
        stop = request.num_tokens if load.is_refused else load.tokens.stop
        count = max(0, stop - num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        load = self._requests.get(request.request_id)
        if load is None or num_external_tokens == 0:
            return
        if not load.is_refused:
            (block_ids,) = blocks.get_block_ids()
            tokens = range(load.tokens.stop - num_external_tokens, load.tokens.stop)
            size = self._block_size
            slots = tuple(block_ids[token // size] * size + token % size for token in tokens)
            load = Load(load.path, load.generation, tokens, slots)
        self._starting[request.request_id] = load

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> LoadMetadata:
        loads, self._starting = self._starting, {}
        return LoadMetadata(loads)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        self._requests.pop(request.request_id, None)
        return False, None

    # The worker's half.

    def start_load_kv(self, forward_context, **kwargs) -> None:
        for request_id, load in self._get_connector_metadata().loads.items():
            if load.is_refused:
                self._end(request_id, failed=True)
            else:
                self._loading[request_id] = self._load_layers(load)
        for request_id, layers in list(self._loading.items()):
            try:
                if next(layers, None) is None:
                    self._end(request_id)
            except Exception as error:  # only this request fails, not the engine
                logger.error("the KV of request %s cannot be loaded: %s", request_id, _reason(error))
                self._end(request_id, failed=True)

    def _end(self, request_id: str, failed: bool = False) -> None:
        self._loading.pop(request_id, None)
        self._results.finished_recving.add(request_id)
        if failed:
            self._results.failed_recving.add(request_id)

    def _load_layers(self, load: Load) -> Iterator[int]:
        """Put a request's KV into its blocks one layer at a time, and yield each layer's number."""
        saved = SavedKV.open(load.path)
        if saved.manifest.generation != load.generation:
            raise StorageError(f"{load.path} was replaced after the request began")
        slots = None
        for index, layer in self._layers.items():
            keys, values = (
                tensor.transpose(0, 1).contiguous().to(layer.kv_cache.device)  # [T, H, D]
                for tensor in saved.layer(index, load.tokens, self._own_heads(saved, layer))
            )
            if slots is None:
                slots = torch.tensor(load.slots, dtype=torch.int64, device=keys.device)
            layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)
            yield index

    @staticmethod
    def _own_heads(saved: SavedKV, layer) -> range:
        """Return this tensor-parallel worker's KV heads; several workers share one where there are too few."""
        rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        first = rank * saved.manifest.num_kv_heads // size
        return range(first, first + layer.num_kv_heads)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results, self._results = self._results, KVConnectorTransferResults()
        return results

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing, because a request does not run before all its layers are loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata, **kwargs) -> None:
        """Do nothing, because this connector saves nothing."""

    def wait_for_save(self) -> None:
        """Do nothing, because this connector saves nothing."""


class Admission:
    """The decision whether a request may have the KV that it names."""

    def __init__(self, vllm_config: VllmConfig):
        self.model_config = model_config = vllm_config.model_config
        self.prefix_caching = vllm_config.cache_config.enable_prefix_caching
        root = vllm_config.kv_transfer_config.get_from_extra_config("root", None)
        self.root = None if root is None else Path(root).resolve()
        if model_config.hf_overrides:
            raise ValueError("ApbvConnector cannot identify a model that was changed by hf_overrides")
        # vLLM edits its own copy of the configuration, so the digest needs the one that transformers reads.
        config = AutoConfig.from_pretrained(
            model_config.hf_config_path or model_config.model, revision=model_config.revision
        )
        self.config_sha256 = config_digest(config)
        self.weights_sha256 = weights_digest(_sampled_rows(model_config, vllm_config.load_config.download_dir))
        self.model = None
        if model_config.uses_mrope:
            self.model = without_weights(get_model_cls(model_config), model_config.hf_config)

    def check(self, request: Request, path: Any) -> Load:
        """Return what to load for this request.

        Raises:
            ValueError: the request must not have this KV; the message says why.
        """
        if not isinstance(path, str):
            raise ValueError(f"apbv_path must be a string, not {path!r}")
        if self.root is not None and not (self.root / path).resolve().is_relative_to(self.root):
            raise ValueError(f"apbv_path {path} is outside {self.root}")
        saved = SavedKV.open(path if self.root is None else self.root / path)
        self._check_cache(request, saved)
        self._check_model(request, saved)
        self._check_prompt(request, saved)
        self._check_visual(request, saved)
        self._check_positions(request, saved)
        # vLLM computes the last token of every prompt itself, to get its logits.
        stop = min(saved.manifest.num_tokens, request.num_prompt_tokens - 1)
        return Load(str(saved.path), saved.manifest.generation, range(stop))

    def _check_cache(self, request: Request, saved: SavedKV) -> None:
        if self.prefix_caching and _cache_salt(saved) not in (request.cache_salt or ""):
            raise ValueError(
                "vLLM's prefix cache would give this request's approximate KV to other requests: it needs a "
                f"cache_salt that contains {_cache_salt(saved)!r} (see apbv.integrations.vllm.request_params), "
                f"or the engine --no-enable-prefix-caching; its cache_salt is {request.cache_salt!r}"
            )
        if request.skip_reading_prefix_cache:
            raise ValueError("prompt_logprobs and skip_reading_prefix_cache need a prefill, which is not loaded")

    def _check_model(self, request: Request, saved: SavedKV) -> None:
        manifest = saved.manifest
        if manifest.model.config_sha256 != self.config_sha256:
            raise ValueError(
                f"the KV is of the model {manifest.model.name} ({manifest.model.family}), whose config "
                f"differs from that of {self.model_config.model}"
            )
        if manifest.model.weights_sha256 != self.weights_sha256:
            raise ValueError(f"the KV is of the model {manifest.model.name}, which has other weights")
        dtype = str(self.model_config.dtype).removeprefix("torch.")
        if manifest.dtype != dtype:
            raise ValueError(f"the KV is {manifest.dtype}, the model computes in {dtype}")
        if request.lora_request is not None:
            raise ValueError("the KV was computed without the request's LoRA adapter")

    def _check_prompt(self, request: Request, saved: SavedKV) -> None:
        token_ids, n = request.prompt_token_ids, saved.manifest.num_tokens
        if token_ids is None or request.prompt_embeds is not None:
            raise ValueError("the request has embeddings instead of token ids")
        if list(token_ids[:n]) != list(saved.manifest.token_ids):
            differing = next(
                (i for i, (a, b) in enumerate(zip(token_ids, saved.manifest.token_ids, strict=False)) if a != b),
                len(token_ids),
            )
            raise ValueError(
                f"the prompt of {len(token_ids)} tokens does not begin with the {n} of the KV: "
                f"they differ from token {differing} on"
            )

    def _check_visual(self, request: Request, saved: SavedKV) -> None:
        """Check the video's identity as the client states it, because token ids do not tell what a video shows."""
        n = saved.manifest.num_tokens
        shown = [feature for feature in request.mm_features if feature.mm_position.offset < n]
        for feature in shown:
            if not feature.identifier.startswith(_visual_uuid(saved)):
                raise ValueError(
                    f"the request's {feature.modality} is {feature.identifier!r}, which may not be that of the "
                    f"KV: its uuid must be {_visual_uuid(saved)!r} (see apbv.integrations.vllm.request_params)"
                )

    def _check_positions(self, request: Request, saved: SavedKV) -> None:
        """Check rotary positions, which vLLM and transformers give differently to text after a video."""
        n = saved.manifest.num_tokens
        if self.model is None:
            positions = torch.arange(n)
        else:
            if any(feature.data is None for feature in request.mm_features):
                raise ValueError("the positions of the request's video or images are not known to the scheduler")
            positions, _ = self.model.get_mrope_input_positions(request.prompt_token_ids, request.mm_features)
            positions = positions[:, :n]
        theirs = saved.prompt()["position_ids"]
        if theirs.shape != positions.shape or not bool((theirs == positions).all()):
            raise ValueError(
                f"the KV was computed at other positions (positions={saved.manifest.positions!r}) than vLLM gives "
                "the request: prefill with positions='vllm'"
            )


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else repr(error)


def without_weights(model_class: type[torch.nn.Module], config) -> torch.nn.Module:
    """Make a vLLM model without weights, whose rotary positions depend on its config alone."""
    model = model_class.__new__(model_class)
    torch.nn.Module.__init__(model)
    model.config = config
    return model


def _sampled_rows(model_config: ModelConfig, download_dir: str | None) -> list[Tensor]:
    """Read the argument of :func:`apbv.model.digest.weights_digest` from the checkpoint; a scheduler has no model.

    Raises:
        ValueError: there are no such weights in safetensors files.
    """
    folder = Path(model_config.model)
    if not folder.is_dir():  # a hub id, which vLLM has downloaded by now
        options = {"revision": model_config.revision, "cache_dir": download_dir, "local_files_only": True}
        folder = Path(snapshot_download(model_config.model, allow_patterns="*.safetensors", **options))
    rows = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a mapping)
                if (found := _PROJECTION.fullmatch(name)) and "vision" not in name:
                    row = tensors.get_slice(name)[:1].to(model_config.dtype)
                    rows[int(found["layer"]), SAMPLED_PROJECTIONS.index(found["name"])] = row
    if not rows:
        raise ValueError(f"ApbvConnector found no decoder layers in {folder}/*.safetensors")
    return [rows[place] for place in sorted(rows)]
