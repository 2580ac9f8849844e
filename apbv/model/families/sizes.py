"""The sizes of a decoder, as a Hugging Face config has them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedConfig

RULE_CHUNK = 64  # tokens for which transformers computes the rule of linear attention at once


@dataclass(frozen=True)
class LinearSizes:
    """The sizes of the linear attention layers of a hybrid's decoder (Gated DeltaNet).

    Attributes:
        layers: the numbers of the decoder's layers that have linear attention.
        key_heads, value_heads: the heads of q and k, and of v and the state.
        key_dim, value_dim: Dk and Dv, the widths of these.
        kernel: K, the inputs of the short convolution.
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def channels(self) -> int:
        """C, the channels of the convolution: all of q, k and v."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state(self) -> int:
        """Count the numbers in the state of a layer, all heads together."""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def block_map(self) -> int:
        """Count the numbers in a layer's map of a block: a bias, and a transition for each head.

        The bias is as large as the state.
        """
        return self.state + self.value_heads * self.key_dim**2

    @property
    def last_inputs(self) -> int:
        """Count the last inputs of a layer's convolution."""
        return self.channels * self.kernel

    def layer_bytes(self, itemsize: int) -> int:
        """Return the bytes of a layer's states.

        These are the rule's state in fp32, and the convolution's last inputs.

        Args:
            itemsize: bytes of a number of the model's dtype.
        """
        return 4 * self.state + self.last_inputs * itemsize

    @classmethod
    def from_config(cls, text: PreTrainedConfig) -> "LinearSizes | None":
        """Read the sizes from a text model's config; None if all of its layers have attention."""
        layer_types = getattr(text, "layer_types", None) or ()
        layers = []
        for index, layer_type in enumerate(layer_types):
            if layer_type == "linear_attention":
                layers.append(index)
        if not layers:
            return None
        return cls(
            layers=tuple(layers),
            key_heads=text.linear_num_key_heads,
            value_heads=text.linear_num_value_heads,
            key_dim=text.linear_key_head_dim,
            value_dim=text.linear_value_head_dim,
            kernel=text.linear_conv_kernel_dim,
        )


@dataclass(frozen=True)
class DecoderSizes:
    """The sizes of a decoder with grouped-query attention and a gated MLP, or experts.

    Attributes:
        intermediate: the width of the MLP; with experts the sum of the widths of all that compute
            one token.
        experts, chosen_experts: how many experts a layer has, and how many of them compute a token;
            0: none.
        dense_width: the width of the MLP in layers without experts; 0: there are none.
        expert_width: the width of each expert that a router chooses; 0: there are none.
        routed_width: the widths of those that it chooses for a token, together.
        shared_width: the width of the experts that compute every token, together; 0: there are
            none.
        linear: the sizes of the layers that have linear attention; None: all have attention.
        deepstack: L, the number of first layers after which visual features are added to the hidden
            states (Qwen3-VL).
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    deepstack: int = 0
    experts: int = 0
    chosen_experts: int = 0
    dense_width: int = 0
    expert_width: int = 0
    routed_width: int = 0
    shared_width: int = 0
    linear: LinearSizes | None = None

    @classmethod
    def from_config(cls, config: PreTrainedConfig, **others) -> "DecoderSizes":
        """Read the sizes from the config of a text model, or of a vision-language model around one.

        Args:
            others: a subclass's further fields.
        """
        text = config.get_text_config()

        # The MLP, or the experts.
        dense_width = _first_of(text, "intermediate_size")
        width = dense_width
        expert_width = 0
        routed_width = 0
        shared_width = 0
        num_active_experts = 0
        experts = _first_of(text, "num_experts", "n_routed_experts")
        if experts:
            expert_width = text.moe_intermediate_size
            routed_width = text.num_experts_per_tok * expert_width
            # Either several experts as wide as the others, or one of another width.
            num_shared = _first_of(text, "n_shared_experts")
            shared_width = num_shared * expert_width
            other_width = _first_of(text, "shared_expert_intermediate_size")
            if other_width:
                num_shared += 1
                shared_width += other_width
            num_active_experts = text.num_experts_per_tok + num_shared
            # Some layers may have an MLP all the same.
            has_dense_layers = (
                bool(_first_of(text, "mlp_only_layers", "first_k_dense_replace"))
                or _first_of(text, "decoder_sparse_step") > 1
            )
            if not has_dense_layers:
                dense_width = 0
            width = max(routed_width + shared_width, dense_width)

        # What older configs leave out.
        head_dim = getattr(text, "head_dim", None)
        if not head_dim:
            head_dim = text.hidden_size // text.num_attention_heads
        vision = getattr(config, "vision_config", None)
        deepstack_layers = getattr(vision, "deepstack_visual_indexes", None) or ()
        return cls(
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            intermediate=width,
            heads=text.num_attention_heads,
            kv_heads=text.num_key_value_heads,
            head_dim=head_dim,
            vocab=text.vocab_size,
            deepstack=len(deepstack_layers),
            experts=experts,
            chosen_experts=num_active_experts,
            dense_width=dense_width,
            expert_width=expert_width,
            routed_width=routed_width,
            shared_width=shared_width,
            linear=LinearSizes.from_config(text),
            **others,
        )

    def state_bytes(self, itemsize: int) -> int:
        """Return the bytes of all layers' states of linear attention behind a token; 0: no layer
        has any."""
        if self.linear is None:
            return 0
        return len(self.linear.layers) * self.linear.layer_bytes(itemsize)

    @property
    def kv_token(self) -> int:
        """Count the numbers of one token's K and V in all layers."""
        return 2 * self.kv_layers * self.kv_heads * self.head_dim

    @cached_property
    def attention_layers(self) -> tuple[int, ...]:
        """The numbers, among all of the decoder, of the layers that have attention, and thus KV."""
        linear_layers = () if self.linear is None else self.linear.layers
        return tuple(layer for layer in range(self.layers) if layer not in linear_layers)

    @property
    def kv_layers(self) -> int:
        """How many layers have attention, and thus KV."""
        return len(self.attention_layers)


def _first_of(config: PreTrainedConfig, *names: str) -> Any:
    """Return the first field of these that a config has and that is neither empty nor 0; else 0."""
    for name in names:
        value = getattr(config, name, None)
        if value:
            return value
    return 0
