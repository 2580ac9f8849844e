"""Reads from a model's config how large it is, before any weights are loaded."""

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from .parts import VIDEO_FAMILIES
from .tensor_parallel import plan_of


@dataclass(frozen=True)
class DecoderSizes:
    """The sizes of a decoder with grouped-query attention and a gated MLP."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @classmethod
    def from_config(cls, config: PreTrainedConfig, **others) -> "DecoderSizes":
        """Read the sizes from a transformers config of Llama, Qwen2, Qwen3 or a vision-language model around one.

        Args:
            others: a subclass's further fields.
        """
        text = config.get_text_config()
        return cls(
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            intermediate=text.intermediate_size,
            heads=text.num_attention_heads,
            kv_heads=text.num_key_value_heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
            vocab=text.vocab_size,
            **others,
        )

    @property
    def kv_row(self) -> int:
        """Count the numbers of one token's K and V in one layer."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def kv_token(self) -> int:
        """Count the numbers of one token's K and V in all layers."""
        return self.layers * self.kv_row


def num_weights(config: PreTrainedConfig, tensor_parallel: int = 1) -> int:
    """Count the weights of a whole model on one of the T processes of a host, its vision tower included.

    It builds the model without storage, which takes about a second for one of 7B.
    """
    auto = AutoModelForImageTextToText if config.model_type in VIDEO_FAMILIES else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    # Of several modules with the same weight, such as an embedding and a head that are tied, one counts.
    modules = {id(weight): name for name, module in model.named_modules() for weight in module.parameters(False)}
    shared_out = tuple(plan_of(model))
    count = 0
    for weight in model.parameters():
        is_shared_out = weight.ndim == 2 and _matches(modules[id(weight)], shared_out)
        count += -(-weight.numel() // tensor_parallel) if is_shared_out else weight.numel()
    return count


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a module's name is one of a sharding plan, in which ``*`` stands for a layer's number."""
    generic = ".".join("*" if part.isdigit() else part for part in name.split("."))
    return name in patterns or generic in patterns
