"""Makes a slower model that computes the same.

Before every decoder layer come copies of it whose two output projections are zero. A copy reads and writes the KV
cache and does the work of a layer, but adds nothing to the hidden states, so logits are bit-equal to the
original's while the time per token grows with their number. Its input is that of the layer after it, and so are
its attention probabilities: means over layers, by which visual tokens are ranked, are the original's, too.
"""

import copy

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from transformers import PreTrainedModel


def scale_model(model: PreTrainedModel, times: int) -> PreTrainedModel:
    """Build a model with `times` as many decoder layers and the same outputs.

    Args:
        model: a Qwen2.5-VL model, which is left as it is.
        times: layers for each layer, at least 1.

    Raises:
        ValueError: `times` is less than 1.
    """
    if times < 1:
        raise ValueError(f"a model can be scaled by 1 or more, not by {times}")
    config = copy.deepcopy(model.config)
    config.text_config.num_hidden_layers *= times
    config.text_config.layer_types = None  # filled in again, for the new number of layers
    config = type(config).from_dict(config.to_dict())
    scaled = type(model)(config).to(model.device, model.dtype).eval()
    weights = {}
    for name, value in model.state_dict().items():
        prefix, found, rest = name.partition("language_model.layers.")
        if not found:
            weights[name] = value
            continue
        layer, _, parameter = rest.partition(".")
        silent = parameter in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
        for number in range(times):
            copied = torch.zeros_like(value) if silent and number < times - 1 else value
            weights[f"{prefix}{found}{int(layer) * times + number}.{parameter}"] = copied
    scaled.load_state_dict(weights)
    scaled.generation_config = model.generation_config
    return scaled
