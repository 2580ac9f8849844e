"""Decides whether a request may use the KV that it names, without I/O if it has a ticket."""

import re
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.v1.request import Request

from ...errors import InvalidRequestError
from ...kv.facts import KVFacts, digest_of_positions, digest_of_tokens
from ...model.digest import SAMPLED_PROJECTIONS, config_digest, weights_digest
from ...model.rotary import rope_by_length
from ...refusals import refuse
from .sources import Load, Offered, Saved

_PROJECTION = re.compile(
    rf".*\.layers\.(?P<layer>\d+)\.(?P<name>{'|'.join(SAMPLED_PROJECTIONS)})\.weight"
)


class Admission:
    """Decides whether a request may use the KV that it names.

    Raises:
        InvalidRequestError: vLLM's model cannot be identified.
    """

    def __init__(self, vllm_config: VllmConfig):
        self._model_config = model_config = vllm_config.model_config
        self._prefix_caching = vllm_config.cache_config.enable_prefix_caching
        if model_config.hf_overrides:
            raise InvalidRequestError(
                "ApbvConnector cannot identify a model changed by hf_overrides"
            )
        # vLLM edits its own copy of the configuration, so the digest needs the one that
        # transformers reads.
        config = AutoConfig.from_pretrained(
            model_config.hf_config_path or model_config.model,
            revision=model_config.revision,
            trust_remote_code=False,
        )
        refuse(offering="ApbvConnector", rope_by_length=rope_by_length(config.get_text_config()))
        self._config_sha256 = config_digest(config)
        self._weights_sha256 = weights_digest(
            _sampled_rows(model_config, vllm_config.load_config.download_dir)
        )
        self._model = None
        if model_config.uses_mrope:
            self._model = without_weights(get_model_cls(model_config), model_config.hf_config)

    def admit(self, request: Request, source: Saved | Offered) -> Load:
        """Return the part of some KV to load, and isolate the request in vLLM's prefix cache.

        Raises:
            InvalidRequestError: the request must not have this KV; the message says why.
        """
        facts = source.facts
        _require_plain(request)
        self._require_model(facts)
        prompt = request.prompt_token_ids[: facts.num_tokens]
        if len(prompt) < facts.num_tokens or digest_of_tokens(prompt) != facts.tokens_sha256:
            raise InvalidRequestError(
                f"the prompt of {request.num_prompt_tokens} tokens does not start with the "
                f"{facts.num_tokens} of the KV: vLLM and the prefill instance render the request "
                "differently, or use another number or size of frames"
            )
        if isinstance(source, Saved):
            _require_visual(request, source)
        positions = self._positions(request, facts.num_tokens)
        if digest_of_positions(positions) != facts.positions_sha256:
            # vLLM and transformers give them differently to text after a video.
            raise InvalidRequestError(
                f"the KV was computed at other positions (positions={facts.position_rule!r}) than "
                "vLLM gives the request: prefill with positions='vllm'"
            )
        self._set_apart(request, source.salt)
        # vLLM computes the last token of every prompt itself, to get its logits.
        return Load(source, range(min(facts.num_tokens, request.num_prompt_tokens - 1)))

    def _require_model(self, facts: KVFacts) -> None:
        """Raise ValueError unless vLLM's model computed the KV, whose sizes are untrusted."""
        config = self._model_config
        if facts.config_sha256 != self._config_sha256:
            raise InvalidRequestError(
                f"the KV is of the model {facts.model}, whose config differs from that of "
                f"{config.model}"
            )
        if facts.weights_sha256 != self._weights_sha256:
            raise InvalidRequestError(f"the KV is of the model {facts.model}, whose weights differ")
        own_dtype = str(config.dtype).removeprefix("torch.")
        if facts.dtype != own_dtype:
            raise InvalidRequestError(f"the KV is {facts.dtype}, the model computes in {own_dtype}")
        sizes = (
            config.get_total_num_hidden_layers(),
            config.get_total_num_kv_heads(),
            config.get_head_size(),
        )
        if (facts.num_layers, facts.num_kv_heads, facts.head_dim) != sizes:
            raise InvalidRequestError(
                "the KV differs from the model in layers, heads or dimensions"
            )

    def _positions(self, request: Request, num_tokens: int) -> Tensor:
        """Return the rotary positions that vLLM gives the prompt's first tokens, ``[3, n]`` or
        ``[n]``."""
        if self._model is None:
            return torch.arange(num_tokens)
        if any(feature.data is None for feature in request.mm_features):
            raise InvalidRequestError(
                "the positions of the request's video or images are not known to the scheduler"
            )
        positions, _ = self._model.get_mrope_input_positions(
            request.prompt_token_ids, request.mm_features
        )
        return positions[:, :num_tokens]

    def _set_apart(self, request: Request, salt: str) -> None:
        """Give the request's blocks hashes that are unique to requests with this KV.

        vLLM calls this connector before it looks anything up for the request.
        """
        if not self._prefix_caching or salt in (request.cache_salt or ""):
            return
        before = list(request.block_hashes)
        request.cache_salt = f"{request.cache_salt or ''}/{salt}"
        request.block_hashes.clear()
        request.update_block_hashes()
        if len(request.block_hashes) != len(before) or set(request.block_hashes) & set(before):
            raise InvalidRequestError(
                "this version of vLLM cannot isolate a request's KV in its prefix cache: give the "
                f"request a cache_salt that contains {salt!r}, or start vLLM with "
                "--no-enable-prefix-caching"
            )


def _require_plain(request: Request) -> None:
    """Check that a request is one whose answer follows from its prompt's KV."""
    if request.skip_reading_prefix_cache:
        raise InvalidRequestError(
            "prompt_logprobs and skip_reading_prefix_cache need a prefill, which is not loaded"
        )
    if request.lora_request is not None:
        raise InvalidRequestError("the KV was computed without the request's LoRA adapter")
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        raise InvalidRequestError("the request has embeddings instead of token ids")


def _require_visual(request: Request, saved: Saved) -> None:
    """Check the video's identity as stated by the client, because token ids do not depend on a
    video's content."""
    for feature in request.mm_features:
        shown = feature.mm_position.offset < saved.facts.num_tokens
        if shown and not feature.identifier.startswith(saved.visual_uuid):
            raise InvalidRequestError(
                f"the request's {feature.modality} is {feature.identifier!r}, which may differ "
                f"from that of the KV: its uuid must be {saved.visual_uuid!r} (see "
                "apbv.integrations.vllm.request_params)"
            )


def without_weights(model_class: type[torch.nn.Module], config) -> torch.nn.Module:
    """Make a vLLM model without weights, whose rotary positions depend on its config alone."""
    model = model_class.__new__(model_class)
    torch.nn.Module.__init__(model)
    model.config = config
    return model


def _sampled_rows(model_config: ModelConfig, download_dir: str | None) -> list[Tensor]:
    """Read the argument of :func:`apbv.model.digest.weights_digest` from the checkpoint.

    A scheduler has no model.

    Raises:
        InvalidRequestError: there are no such weights in safetensors files.
    """
    folder = Path(model_config.model)
    if not folder.is_dir():  # a hub id, which vLLM has downloaded by now
        options = {
            "revision": model_config.revision,
            "cache_dir": download_dir,
            "local_files_only": True,
        }
        folder = Path(
            snapshot_download(model_config.model, allow_patterns="*.safetensors", **options)
        )
    rows = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a mapping)
                if (found := _PROJECTION.fullmatch(name)) and "vision" not in name:
                    row = tensors.get_slice(name)[:1].to(model_config.dtype)
                    rows[int(found["layer"]), SAMPLED_PROJECTIONS.index(found["name"])] = row
    if not rows:
        raise InvalidRequestError(
            f"ApbvConnector found no decoder layers in {folder}/*.safetensors"
        )
    return [rows[place] for place in sorted(rows)]
