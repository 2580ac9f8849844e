"""Checkpoints with a multi-token prediction layer of random weights, and its rule written plainly:
the oracle of ``mtp``."""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from apbv_tests import families
from apbv_tests.oracle import decoder_inputs

WEIGHTS = "model.safetensors"
# The only tokens whose logits are not close to 0, so that some drafted tokens are right.
LIKELY = range(40, 43)


def save_with_next_token(family: str, directory: Path, *, seed: int = 5, **sizes) -> Path:
    """A checkpoint of a family, with the layer's weights named as published."""
    path = families.save_checkpoint(family, directory, **sizes)
    model = families.build_model(family, **sizes)
    layer = family_layer(model)
    weights = load_file(path / WEIGHTS)
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    width = model.get_decoder().config.hidden_size
    of_layer = {name: drawn(*weight.shape) for name, weight in layer.state_dict().items()}
    norms = [1 + drawn(width) for _ in range(3)]
    projection = drawn(width, 2 * width)
    if family.startswith("glm"):
        number = len(model.get_decoder().layers)
        prefix = "model.language_model.layers" if family != "glm4" else "model.layers"
        names = ("enorm", "hnorm", "shared_head.norm")
        named = {
            f"{prefix}.{number}.{name}.weight": norm
            for name, norm in zip(names, norms, strict=True)
        }
        named[f"{prefix}.{number}.eh_proj.weight"] = projection
        vocabulary = model.get_output_embeddings().weight.shape[0]
        named[f"{prefix}.{number}.shared_head.head.weight"] = drawn(vocabulary, width)
        named |= {f"{prefix}.{number}.{name}": weight for name, weight in of_layer.items()}
    else:
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        named = {f"mtp.{name}.weight": norm for name, norm in zip(names, norms, strict=True)}
        named["mtp.fc.weight"] = projection
        for name, weight in of_layer.items():
            named |= stored(f"mtp.layers.0.{name}", weight)
    heads = [name for name in (*weights, *named) if name.endswith("head.weight")]
    for name in heads:
        head = weights.get(name, named.get(name))
        unlikely = torch.ones(len(head), dtype=torch.bool)
        unlikely[list(LIKELY)] = False
        head[unlikely] *= 0.01
    save_file({**weights, **named}, path / WEIGHTS, metadata={"format": "pt"})
    return path


def family_layer(model) -> nn.Module:
    """The last layer with attention of the model's decoder, which has experts if others have."""
    layers = reversed(model.get_decoder().layers)
    return next(layer for layer in layers if hasattr(layer, "self_attn"))


def stored(name: str, weight: Tensor) -> dict[str, Tensor]:
    """A weight as checkpoints have it: of experts each one's own."""
    if not name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
        return {name: weight}
    experts, _, kind = name.rpartition(".")
    separate = {}
    for number, of_expert in enumerate(weight):
        parts = {"down_proj": of_expert}
        if kind == "gate_up_proj":
            gate, up = of_expert.chunk(2)
            parts = {"gate_proj": gate, "up_proj": up}
        for part, of_part in parts.items():
            separate[f"{experts}.{number}.{part}.weight"] = of_part.contiguous()
    return separate


class PlainNextToken:
    """Drafts by running the layer over the whole prompt and answer for every token.

    Args:
        path: a checkpoint of :func:`save_with_next_token`.
        model: the model that was loaded from it.
        inputs: the processor's, of a prompt.
    """

    def __init__(self, path: Path, model, inputs: dict):
        weights = load_file(Path(path) / WEIGHTS)
        decoder = model.get_decoder()
        self._is_glm = not any(name.startswith("mtp.") for name in weights)
        prefix = rf".*layers\.{len(decoder.layers)}\." if self._is_glm else r"mtp\."
        self._weights = {}
        for name, weight in weights.items():
            if re.match(prefix, name):
                self._weights[re.sub(prefix, "", name, count=1)] = weight
        self._model = model
        self._decoder = decoder
        with torch.no_grad():
            self._given = decoder_inputs(model, inputs)
        sample = family_layer(model)
        index = [*decoder.layers].index(sample)
        self._layer = type(sample)(decoder.config, index).eval()
        own = self._of_layer()
        with torch.no_grad():
            for name, weight in self._layer.state_dict().items():
                weight.copy_(own[name])

    def _of_layer(self) -> dict[str, Tensor]:
        own = {}
        for name, weight in self._weights.items():
            own[name.removeprefix("layers.0.")] = weight
        experts = sum(name.endswith(".gate_proj.weight") and ".experts." in name for name in own)
        if experts:
            root = "mlp.experts"
            gates = [
                torch.cat([own[f"{root}.{e}.gate_proj.weight"], own[f"{root}.{e}.up_proj.weight"]])
                for e in range(experts)
            ]
            own[f"{root}.gate_up_proj"] = torch.stack(gates)
            own[f"{root}.down_proj"] = torch.stack(
                [own[f"{root}.{e}.down_proj.weight"] for e in range(experts)]
            )
        return own

    def _norm(self, name: str, rows: Tensor) -> Tensor:
        norm = type(self._decoder.norm)(rows.shape[-1], eps=self._decoder.config.rms_norm_eps)
        norm.weight.copy_(self._weights[name])
        return norm(rows)

    def _target(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """The embeddings, rotary positions and last hidden states of the prompt and the tokens."""
        given = dict(self._given)
        answer = torch.tensor([list(tokens)], dtype=torch.long)
        embed = self._model.get_input_embeddings()
        if given.get("inputs_embeds") is None:
            given["inputs_embeds"] = embed(given.pop("input_ids"))
        embeddings = torch.cat([given["inputs_embeds"], embed(answer)], dim=1)
        positions = given.get("position_ids")
        if positions is None:
            positions = torch.arange(given["inputs_embeds"].shape[1])[None]
        later = positions[..., -1:] + torch.arange(1, len(tokens) + 1)
        positions = torch.cat([positions, later], dim=-1)
        if given.get("visual_pos_masks") is not None:
            shown = torch.zeros_like(answer, dtype=torch.bool)
            given["visual_pos_masks"] = torch.cat([given["visual_pos_masks"], shown], dim=1)
        hidden = self._decoder(
            **{
                **given,
                "input_ids": None,
                "inputs_embeds": embeddings,
                "position_ids": positions,
                "attention_mask": None,
                "use_cache": False,
            }
        ).last_hidden_state
        if positions.dim() == 3 and len(positions) == 4:  # the first row is for masks
            positions = positions[1:]
        return embeddings, positions, hidden

    @torch.no_grad()
    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """The drafted tokens after an answer's tokens, the most likely ones."""
        embeddings, positions, hidden = self._target(tokens)
        # Behind token i: the embedding of token i + 1 and the hidden state of token i.
        e_rows = embeddings[:, 1:]
        h_rows = hidden[:, :-1]
        positions = positions[..., :-1]
        if self._is_glm:
            e_rows = e_rows.clone()
            e_rows[:, 0] = 0
        drafted = []
        for _ in range(count):
            fed, logits = self._step(e_rows, h_rows, positions)
            token = int(logits.argmax())
            drafted.append(token)
            embedding = self._model.get_input_embeddings()(torch.tensor([[token]]))
            e_rows = torch.cat([e_rows, embedding], dim=1)
            h_rows = torch.cat([h_rows, fed[:, -1:]], dim=1)
            positions = torch.cat([positions, positions[..., -1:] + 1], dim=-1)
        return drafted

    @torch.no_grad()
    def values_of_prompt(self) -> Tensor:
        """The layer's values ``[n - 1, Hkv * D]`` of the prompt but its last token."""
        embeddings, _, hidden = self._target([])
        e_rows = embeddings[:, 1:].clone()
        if self._is_glm:
            e_rows[:, 0] = 0
        rows = self._layer.input_layernorm(self._joined(e_rows, hidden[:, :-1]))
        return self._layer.self_attn.v_proj(rows)[0]

    def _joined(self, e_rows: Tensor, h_rows: Tensor) -> Tensor:
        names = ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "fc.weight")
        if self._is_glm:
            names = ("enorm.weight", "hnorm.weight", "eh_proj.weight")
        e_norm, h_norm, projection = names
        joined = torch.cat([self._norm(e_norm, e_rows), self._norm(h_norm, h_rows)], dim=-1)
        return joined @ self._weights[projection].T

    def _step(self, e_rows: Tensor, h_rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What is fed to the next step, and the last token's logits."""
        rows = self._joined(e_rows, h_rows)
        out = self._layer(
            rows,
            attention_mask=None,
            position_embeddings=self._decoder.rotary_emb(rows, positions),
            position_ids=None,
        )
        if self._is_glm:
            normed = self._norm("shared_head.norm.weight", out[0, -1])
            return out, normed @ self._weights["shared_head.head.weight"].T
        out = self._norm("norm.weight", out)
        return out, self._model.get_output_embeddings()(out[0, -1])
