"""Attention of the question to visual tokens, whose keys may be on any host.

Legend: Hq query and Hkv KV heads, G = Hq / Hkv, D head dimension, n_q tokens of the question, T tokens that this
host keeps.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ...input.model_inputs import ModelInputs
from ...model.parts import ModelParts, some_layers
from ...transfer import to_device
from ..stages import HiddenRows, Stage, Watcher

# Scores of the question's attention in memory at a time, in fp32.
MOST_SCORES = 2**26


class VisualWatcher(Watcher):
    """Scores visual tokens. Every host scores those that it keeps, and only scores are sent."""

    def gathered(self, local: Tensor | None, *lead: int) -> Tensor:
        """Return ``[*lead, visual tokens]`` in fp32 on the CPU of every host; collective.

        Args:
            local: ``[*lead, T]`` of the visual tokens that this host keeps; None if it has no scores.
        """
        numbers, hosts = self.stage.is_visual.long().cumsum(0) - 1, self.stage.hosts
        owned = [numbers[tokens] for tokens in self.stage.owned_visual]  # by number among the visual tokens
        if local is None:
            local = torch.zeros(*lead, len(owned[hosts.rank]), device=hosts.device)
        gathered = hosts.gather_rows(local.float(), [*map(len, owned)], dim=len(lead)).wait()
        return torch.cat(gathered, dim=-1).cpu()[..., torch.cat(owned).argsort()]

    def request_early(self, offer: Callable[[Tensor], bool]) -> None:
        """Ask for the scores as soon as they are known, if that is before the prefill ends; here it is not.

        Called on every host before the prefill, or on none.

        Args:
            offer: takes the scores; returns false to be called again in the next layer.
        """

    def over_hosts(self, lse: Tensor) -> Tensor:
        """Merge a log-sum-exp over each host's keys into that over all; collective where a prompt is split."""
        return self.stage.hosts.all_gather(lse).wait().logsumexp(dim=0) if self.stage.layout.is_split else lse


class Relevance(VisualWatcher):
    """HIPPO's s_attn (Eq. 2), which SpecVLM uses, too: the question's attention to visual tokens alone.

    It is a softmax over all visual keys, averaged over a stage's layers, heads and the question's tokens.
    """

    def begin(self, stage: Stage) -> None:
        super().begin(stage)
        self.layers, self._total = stage.layers, None

    def on_layer(self, q: Tensor, keys: Tensor, scale: float, rows: Tensor) -> None:
        keys = keys[:, :, rows[self.stage.visual_rows]]
        num_kv_heads, num_keys = keys.shape[1:3]
        asking = q.reshape(num_kv_heads, -1, q.shape[3])  # [Hkv, G * n_q, D]
        chunks = asking.split(max(1, MOST_SCORES // max(1, num_kv_heads * num_keys)), dim=1)
        # The scores of some rows are in memory at a time; where these are not all, they are computed twice.
        held = scores_of_keys(asking, keys, scale) if len(chunks) == 1 else None

        def scores(chunk: Tensor) -> Tensor:
            return scores_of_keys(chunk, keys, scale) if held is None else held

        lse = self.over_hosts(torch.cat([scores(chunk).logsumexp(dim=-1) for chunk in chunks], dim=1))
        total = 0.0
        for chunk, of_chunk in zip(chunks, lse.split([chunk.shape[1] for chunk in chunks], dim=1), strict=True):
            total = total + (scores(chunk) - of_chunk[..., None]).exp().sum(dim=(0, 1))
        relevance = total / (num_kv_heads * asking.shape[1])
        self._total = relevance if self._total is None else self._total + relevance

    def result(self) -> Tensor:
        """Return scores ``[visual tokens]``."""
        local = None if self._total is None else (self._total / len(self.layers)).float()
        return self.stage.hosts.mean_over_members(self.gathered(local))


class QuestionAttention(VisualWatcher):
    """The attention of mixtures of the question's tokens in a stage's last layer, mean over heads.

    The softmax is over all tokens that the question sees, on all hosts; the mean over the heads of this process.

    Args:
        raters: ``[R, n_q]``, the weight of each of the question's tokens in each mixture.
    """

    def __init__(self, raters: Tensor):
        self._raters = raters

    def begin(self, stage: Stage) -> None:
        super().begin(stage)
        self.layers, self._found = stage.layers[-1:], None

    def on_layer(self, q: Tensor, keys: Tensor, scale: float, rows: Tensor) -> None:
        stage, keys = self.stage, keys[:, :, rows]
        dtype, device, visual = torch.promote_types(q.dtype, torch.float32), q.device, stage.visual_rows
        asked = self._raters.ne(0).any(dim=0).nonzero().flatten()  # only their queries are multiplied
        raters = self._raters[:, asked].to(device, dtype)
        owned, question = stage.owned[stage.hosts.rank], stage.query_start + asked
        num_kv_heads = keys.shape[1]
        groups = q[0, :, to_device(asked, device)].to(dtype).unflatten(0, (num_kv_heads, -1))  # [Hkv, G, asked, D]
        most = max(1, MOST_SCORES // max(1, groups.shape[1] * len(owned)))
        chunks = [slice(start, start + most) for start in range(0, len(asked), most)]

        def scores(head: int, chunk: slice) -> Tensor:
            products = groups[head, :, chunk] @ keys[0, head].to(dtype).T * scale
            behind = owned > question[chunk, None]  # tokens after the one that asks
            return products.masked_fill(to_device(behind, device), float("-inf"))

        # The scores of one KV head and of some tokens are in memory at a time, and are computed twice.
        lse = [[scores(head, chunk).logsumexp(dim=-1) for chunk in chunks] for head in range(num_kv_heads)]
        lse = self.over_hosts(torch.stack([torch.cat(of_head, dim=-1) for of_head in lse]))
        found = raters.new_zeros(len(raters), len(visual))
        for head in range(num_kv_heads):
            for chunk in chunks:
                attention = (scores(head, chunk)[..., visual] - lse[head, :, chunk, None]).exp()
                found += raters[:, chunk] @ attention.sum(dim=0)
        self._found = found / (num_kv_heads * groups.shape[1])

    def result(self) -> Tensor:
        """Return the attention to each visual token, ``[R, visual tokens]``."""
        return self.stage.hosts.mean_over_members(self.gathered(self._found, len(self._raters)))


class _ReadyToAttend(Exception):
    """Ends a pass where a layer has its queries and keys: these, and the scale."""


def attention_ahead(
    stage: Stage, rows: HiddenRows, parts: ModelParts, inputs: ModelInputs, raters: Tensor
) -> Tensor:
    """Return the result of :class:`QuestionAttention` for the layer after a stage; collective.

    Of that layer only queries and keys are computed.

    Args:
        rows: what came out of the stage.
        raters: as there.
    """

    def leave(q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int) -> Tensor:
        raise _ReadyToAttend(q, k, scale)

    watcher, owned, question = QuestionAttention(raters), stage.owned[stage.hosts.rank], stage.question
    watcher.begin(stage)
    asking = stage.question_rows(rows, parts)
    if len(owned):
        context = owned[owned < stage.query_start]
        tokens = torch.cat([context, torch.arange(question.start, question.stop)])
        hidden = torch.cat([stage.states_of(context, rows, parts), asking])[None]
        positions = inputs.position_ids[..., tokens if stage.tokens is None else stage.tokens[tokens]]
        ahead = range(stage.layers.stop, stage.layers.stop + 1)
        decoder = some_layers(parts.language_model, ahead, with_norm=False)
        try:
            decoder(
                inputs_embeds=hidden, position_ids=to_device(positions, parts.device), use_cache=False, apbv=leave
            )
        except _ReadyToAttend as ready:
            q, k, scale = ready.args
        places = torch.searchsorted(tokens, owned)
        watcher.on_layer(q[:, :, len(context) :], k, scale, to_device(places, k.device))
    return watcher.result()


def scores_of_keys(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return scaled q·k ``[Hkv, R, T]``, in fp32 or wider.

    Args:
        q: ``[Hkv, R, D]``, the R rows that ask each KV head; or ``[1, Hq, n_q, D]``, whose R = G * n_q.
        k: ``[1, Hkv, T, D]``.
    """
    scores = (q.reshape(k.shape[1], -1, q.shape[-1]) @ k[0].transpose(-1, -2)) * scale
    return scores if scores.dtype == torch.float64 else scores.float()
