"""The modules of transformers' decoders, by their common names."""

from torch import nn


def decoder_layers(decoder: nn.Module) -> nn.ModuleList:
    """Return a decoder's layers."""
    layers = decoder.get_submodule("layers")
    assert isinstance(layers, nn.ModuleList)  # of every decoder of transformers
    return layers
