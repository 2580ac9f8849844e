"""Decides whether a request may use the KV that it names, without I/O if it has a ticket."""

from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import AutoConfig
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.v1.request import Request

from ...config.refusals import refuse
from ...errors import InvalidRequestError
from ...kv.facts import KVFacts, digest_of_positions, digest_of_tokens
from ...model.digest import config_digest, rows_of_checkpoint, weights_digest
from ...model.rotary import rope_by_length
from .sources import Load, Offered, Saved


class Admission:
    """Decides whether a request may use the KV that it names.

    Raises:
        InvalidRequestError: vLLM's model cannot be identified.
    """

    def __init__(self, vllm_config: VllmConfig):
        model_config = vllm_config.model_config
        self._model_config = model_config
        self._prefix_caching = vllm_config.cache_config.enable_prefix_caching

        # Identify the model.
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
        rows = _sampled_rows(model_config, vllm_config.load_config.download_dir)
        self._weights_sha256 = weights_digest(rows)

        # Gives the rotary positions if they depend on video and images; None: they are 0, 1, 2...
        self._model: PositionedModel | None = None
        if model_config.uses_mrope:
            self._model = without_weights(get_model_cls(model_config), model_config.hf_config)

    def admit(self, request: Request, source: Saved | Offered) -> Load:
        """Return which KV to load, and isolate the request in vLLM's prefix cache.

        Raises:
            InvalidRequestError: the request must not use this KV; the message says why.
        """
        facts = source.facts
        _require_plain(request)
        self._require_model(facts)

        # The prompt must begin with the KV's tokens, at the KV's positions.
        prompt = request.prompt_token_ids[: facts.num_tokens]
        is_long_enough = len(prompt) == facts.num_tokens
        if not is_long_enough or digest_of_tokens(prompt) != facts.tokens_sha256:
            raise InvalidRequestError(
                f"the prompt of {request.num_prompt_tokens} tokens does not start with the "
                f"{facts.num_tokens} of the KV: vLLM and the prefill instance render the request "
                "differently, or use another number or size of frames"
            )
        if isinstance(source, Saved):
            _require_visual(request, source)
        positions = self._positions(request, facts.num_tokens)
        if digest_of_positions(positions) != facts.positions_sha256:
            # vLLM and transformers give different positions to text after a video.
            raise InvalidRequestError(
                f"the KV was computed at other positions (positions={facts.position_rule!r}) than "
                "vLLM gives the request: prefill with positions='vllm'"
            )

        self._set_apart(request, source.salt)
        # vLLM computes the last token of every prompt itself, to get its logits.
        return Load(source, range(min(facts.num_tokens, request.num_prompt_tokens - 1)))

    def _require_model(self, facts: KVFacts) -> None:
        """Raise InvalidRequestError unless vLLM's model computed the KV, whose sizes are
        untrusted."""
        config = self._model_config
        if facts.config_sha256 != self._config_sha256:
            raise InvalidRequestError(
                f"the KV is of the model {facts.model}, whose config differs from that of "
                f"{config.model}"
            )
        if facts.weights_sha256 != self._weights_sha256:
            raise InvalidRequestError(f"the KV is of the model {facts.model}, whose weights differ")
        model_dtype = str(config.dtype).removeprefix("torch.")
        if facts.dtype != model_dtype:
            raise InvalidRequestError(
                f"the KV is {facts.dtype}, the model computes in {model_dtype}"
            )
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
        """Return vLLM's rotary positions of the prompt's first tokens, ``[3, n]`` or ``[n]``."""
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

        vLLM calls this connector before it looks up the request's blocks in its prefix cache.

        Raises:
            InvalidRequestError: this version of vLLM does not compute the hashes anew.
        """
        former_salt = request.cache_salt or ""
        if not self._prefix_caching or salt in former_salt:
            return
        former_hashes = list(request.block_hashes)
        request.cache_salt = f"{former_salt}/{salt}"
        request.block_hashes.clear()
        request.update_block_hashes()
        is_complete = len(request.block_hashes) == len(former_hashes)
        if not is_complete or set(request.block_hashes) & set(former_hashes):
            raise InvalidRequestError(
                "this version of vLLM cannot isolate a request's KV in its prefix cache: give the "
                f"request a cache_salt that contains {salt!r}, or start vLLM with "
                "--no-enable-prefix-caching"
            )


def _require_plain(request: Request) -> None:
    """Raise InvalidRequestError unless a request's answer follows from its prompt's token ids and
    KV."""
    if request.skip_reading_prefix_cache:
        raise InvalidRequestError(
            "prompt_logprobs and skip_reading_prefix_cache need a prefill, which is not loaded"
        )
    if request.lora_request is not None:
        raise InvalidRequestError("the KV was computed without the request's LoRA adapter")
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        raise InvalidRequestError("the request has embeddings instead of token ids")


def _require_visual(request: Request, saved: Saved) -> None:
    """Raise InvalidRequestError unless the client states that video and images are the same as the
    KV's.

    Token ids do not depend on a video's content.
    """
    for feature in request.mm_features:
        is_in_kv = feature.mm_position.offset < saved.facts.num_tokens
        if is_in_kv and not feature.identifier.startswith(saved.visual_uuid):
            raise InvalidRequestError(
                f"the request's {feature.modality} is {feature.identifier!r}, which may differ "
                f"from that of the KV: its uuid must be {saved.visual_uuid!r} (see "
                "apbv.integrations.vllm.request_params)"
            )


class PositionedModel(Protocol):
    """vLLM's model whose rotary positions depend on video and images."""

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list
    ) -> tuple[Tensor, int]:
        """Return the positions ``[3, n]`` of a prompt, and their distance to the tokens' number."""


def without_weights(model_class: type[torch.nn.Module], config) -> Any:
    """Make a vLLM model without weights, whose rotary positions depend on its config alone."""
    model = model_class.__new__(model_class)
    torch.nn.Module.__init__(model)
    model.config = config
    return model


def _sampled_rows(model_config: ModelConfig, download_dir: str | None) -> list[Tensor]:
    """Read the argument of :func:`apbv.model.digest.weights_digest` from the checkpoint.

    The scheduler, which needs it, has no model.

    Returns:
        The first rows, as :func:`apbv.model.digest.rows_of_checkpoint` reads them.

    Raises:
        InvalidRequestError: there are no such weights in safetensors files.
    """
    # Find the checkpoint.
    folder = Path(model_config.model)
    if not folder.is_dir():  # a hub id, which vLLM has downloaded by now
        downloaded = snapshot_download(
            model_config.model,
            revision=model_config.revision,
            cache_dir=download_dir,
            local_files_only=True,
            allow_patterns="*.safetensors",
        )
        folder = Path(downloaded)

    num_layers = model_config.hf_config.get_text_config().num_hidden_layers
    rows = rows_of_checkpoint(folder, num_layers, model_config.dtype)
    if not rows:
        raise InvalidRequestError(
            f"ApbvConnector found no decoder layers in {folder}/*.safetensors"
        )
    return rows
