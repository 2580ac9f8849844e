"""This module identifies the model that prefilled a prompt, for KV on disk."""

from ..kv.manifest import ModelIdentity
from ..model.digest import config_digest
from ..model.parts import ModelParts


def identify(parts: ModelParts) -> ModelIdentity:
    """Identify a model by its configuration and weights, so that no other model reads its KV."""
    config = parts.model.config
    return ModelIdentity(
        name=str(config.name_or_path),
        revision=getattr(config, "_commit_hash", None),
        family=parts.family,
        config_sha256=config_digest(config),
        weights_sha256=parts.weights_digest(),
    )
