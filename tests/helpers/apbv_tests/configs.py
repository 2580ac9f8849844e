"""Configs from flat settings."""

from dataclasses import fields

from apbv import PrefillConfig
from apbv.config import AblationConfig

ABLATION_NAMES = [field.name for field in fields(AblationConfig)]


def prefill_config(**settings) -> PrefillConfig:
    """A prefill config; the parts of the method that it is without stand beside other settings."""
    ablation = {name: settings.pop(name) for name in ABLATION_NAMES if name in settings}
    return PrefillConfig(ablation=AblationConfig(**ablation), **settings)
