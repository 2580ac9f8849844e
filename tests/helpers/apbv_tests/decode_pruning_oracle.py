"""Visual tokens left out of decoding steps, by DyCoke's definition in plain loops.

The layers are transformers' own, with a dense attention in fp64. Nothing here is shared with the
implementation.
"""

import math

import torch
from torch import Tensor

from apbv_tests.late_oracle import run_reduced


def similarity(one: list[float], other: list[float]) -> float:
    """The cosine of two lists of numbers."""
    product = sum(a * b for a, b in zip(one, other, strict=True))
    lengths = math.sqrt(sum(a * a for a in one)) * math.sqrt(sum(b * b for b in other))
    return product / lengths


@torch.no_grad()
def pruned_steps(
    family: str, batch: dict, share: float, layer: int, count: int, threshold: float = 0.9
) -> tuple[list[Tensor], list[bool]]:
    """Decode greedily, and leave out visual tokens in every step.

    Args:
        share: of the visual tokens that a step attends to.
        layer: how many layers attend to all tokens.
        threshold: the similarity of two steps' attention from which on the chosen tokens stay.

    Returns:
        The logits ``[1, V]`` before each token, and of every step whether it has chosen anew.
    """
    run = run_reduced(family, batch, "fastv", 1.0, [])  # no layer drops any
    decoder = run.model.get_decoder()
    ids = batch["input_ids"][0].tolist()
    config = run.model.config
    placeholders = {config.image_token_id, getattr(config, "video_token_id", None)}
    visual = [row for row, token_id in enumerate(ids) if token_id in placeholders]
    num_kept = max(1, round(share * len(visual)))
    logits = [run.logits]
    chose_anew = []
    attention_before: list[float] | None = None
    kept: list[int] = []
    while len(logits) < count:
        hidden = decoder.get_input_embeddings()(logits[-1].argmax(dim=-1, keepdim=True))
        position = torch.tensor([[run.next_position + len(logits) - 1]])
        for number, module in enumerate(decoder.layers):
            run.left_out = []
            if number >= layer:
                run.left_out = [row for row in visual if row not in kept]
            hidden = run.run_layer(module, hidden, position, run.cache)
            if number + 1 != layer:
                continue
            q, k, scale = run.states
            group = len(q) // len(k)
            attention = [0.0] * len(visual)
            for head in range(len(q)):
                of_head = (k[head // group] @ q[head, -1] * scale).softmax(dim=0)
                for place, row in enumerate(visual):
                    attention[place] += float(of_head[row]) / len(q)
            is_alike = (
                attention_before is not None
                and similarity(attention, attention_before) >= threshold
            )
            if not is_alike:
                order = sorted(range(len(visual)), key=lambda place: (-attention[place], place))
                kept = [visual[place] for place in order[:num_kept]]
            chose_anew.append(not is_alike)
            attention_before = attention
        logits.append(run.model.get_output_embeddings()(decoder.norm(hidden))[:, 0])
    return logits, chose_anew
