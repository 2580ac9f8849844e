"""This module makes decoders of some of another one's layers."""

import copy

from torch import nn


def some_layers(language_model: nn.Module, layers: range, with_norm: bool = True) -> nn.Module:
    """Return a decoder of some of another one's layers, which shares its weights.

    Args:
        layers: the layers, which keep their numbers.
        with_norm: whether the other one's last norm follows them, as it must behind its last layer.
    """
    part = copy.copy(language_model)
    part._modules = dict(language_model._modules)
    part.layers = nn.ModuleList(list(language_model.layers)[layers.start : layers.stop])
    if not with_norm:
        part.norm = nn.Identity()
    return part
