"""Configs from flat settings."""

from dataclasses import fields

from apbv import PrefillConfig
from apbv.config import AblationConfig
from apbv.serve.settings import MediaLimits, ServerSettings

ABLATION_NAMES = [field.name for field in fields(AblationConfig)]
MEDIA_NAMES = [field.name for field in fields(MediaLimits)]


def prefill_config(**settings) -> PrefillConfig:
    """A prefill config; the parts of the method that it is without stand beside other settings."""
    ablation = {name: settings.pop(name) for name in ABLATION_NAMES if name in settings}
    return PrefillConfig(ablation=AblationConfig(**ablation), **settings)


def server_settings(**settings) -> ServerSettings:
    """Server settings; the limits of media stand beside others."""
    limits = {name: settings.pop(name) for name in MEDIA_NAMES if name in settings}
    return ServerSettings(media=MediaLimits(**limits), **settings)
