"""The modules of transformers' decoders, by their common names."""

from torch import nn


def decoder_layers(decoder: nn.Module) -> nn.ModuleList:
    """Return a decoder's layers."""
    layers = decoder.get_submodule("layers")
    assert isinstance(layers, nn.ModuleList)  # of every decoder of transformers
    return layers


def final_norm(decoder: nn.Module) -> nn.Module:
    """Return the norm behind a decoder's last layer."""
    return decoder.get_submodule("norm")


def rotary_embedding(decoder: nn.Module) -> nn.Module:
    """Return the module that turns positions into cosines and sines."""
    return decoder.get_submodule("rotary_emb")
