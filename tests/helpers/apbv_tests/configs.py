"""Configs from flat settings."""

from dataclasses import fields

from apbv import PrefillConfig, SpeculativeConfig
from apbv.config import (
    AblationConfig,
    HippoConfig,
    LayerSkipConfig,
    SpeculativeAblationConfig,
    TabedConfig,
    UVPruneConfig,
)
from apbv.serve.settings import MediaLimits, ServerSettings

ABLATION_NAMES = [field.name for field in fields(AblationConfig)]
DRAFT_ABLATION_NAMES = [field.name for field in fields(SpeculativeAblationConfig)]
# By a flat name: the group of a strategy's or a keep policy's setting, its class, and the setting.
DRAFT_GROUPS = {
    "hippo_terms": ("hippo", HippoConfig, "terms"),
    "uv_layer": ("uv_prune", UVPruneConfig, "layer"),
    "layer_ratio": ("layerskip", LayerSkipConfig, "layer_ratio"),
    "ensemble": ("tabed", TabedConfig, "ensemble"),
}
MEDIA_NAMES = [field.name for field in fields(MediaLimits)]


def prefill_config(**settings) -> PrefillConfig:
    """A prefill config; the parts of the method that it is without stand beside other settings."""
    ablation = {name: settings.pop(name) for name in ABLATION_NAMES if name in settings}
    return PrefillConfig(ablation=AblationConfig(**ablation), **settings)


def speculative_config(**settings) -> SpeculativeConfig:
    """A speculative config; settings of one strategy or policy, and what is switched off, stand
    beside others."""
    ablation = {name: settings.pop(name) for name in DRAFT_ABLATION_NAMES if name in settings}
    for flat, (group, kind, name) in DRAFT_GROUPS.items():
        if flat in settings:
            settings[group] = kind(**{name: settings.pop(flat)})
    return SpeculativeConfig(ablation=SpeculativeAblationConfig(**ablation), **settings)


def server_settings(**settings) -> ServerSettings:
    """Server settings; the limits of media stand beside others."""
    limits = {name: settings.pop(name) for name in MEDIA_NAMES if name in settings}
    return ServerSettings(media=MediaLimits(**limits), **settings)
