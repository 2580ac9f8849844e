"""The draft, and the task from which a strategy builds it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from ...config import SamplingParams, SpeculativeConfig
from ...device.copies import numbers_in, to_device
from ...hosts import HostGroup, Pending
from ...hosts.row_exchange import move_rows
from ...input.prompts.audio_input import AudioInput
from ...input.prompts.model_inputs import ModelInputs
from ...input.prompts.visual import VisualInput
from ...model.attention import CausalAttention, apbv_attention
from ...model.forward import run_layers
from ...model.linear_attention import LinearStates
from ...model.next_token import NextTokenModel
from ...model.parts import ModelParts
from ...prefilling.encoding.audio import encode_audio
from ...prefilling.encoding.placeholder_exchange import PlaceholderRows
from ...prefilling.result import PrefillResult
from .drafters import Drafter, ModelDrafter, ReadPrompt


@torch.no_grad()
def prefill_draft(
    parts: ModelParts,
    inputs: ModelInputs,
    kept_visual: Tensor,
    hosts: HostGroup,
    rows: Tensor | None,
    decode_host: int = 0,
    leaves_last: bool = False,
) -> ReadPrompt | None:
    """Draft prefill on text, audio and some of the visual tokens, on one host; collective.

    Only the embeddings of kept visual tokens are sent, and all of the sound's: of that nothing is
    left out, as in HIPPO's experiments with a model that hears. Without frame parallelism nothing
    is sent.

    Args:
        parts: the draft.
        inputs: the target's prompt.
        kept_visual: the kept visual tokens, by their numbers among all visual tokens, ascending; on
            every host.
        rows: the draft's visual embeddings of this host's frames; None if no visual token is kept.
        decode_host: the host that drafts.
        leaves_last: whether the prompt's last token is not read.

    Returns:
        What that host has of the text, the sound and the kept visual tokens; None elsewhere.
    """
    is_visual = parts.is_visual(inputs.input_ids[0])
    text = (~is_visual).nonzero().flatten()
    if leaves_last:  # it is text
        text = text[:-1]
    visual = is_visual.nonzero().flatten()[kept_visual]
    tokens = torch.cat([text, visual]).sort().values

    merged = PlaceholderRows()
    if len(kept_visual):
        assert rows is not None and inputs.visual is not None, "a kept token has an embedding"
        visual_rows = _send_to_decode_host(rows, inputs.visual, kept_visual, hosts, decode_host)
        merged.streams = list(visual_rows.split(parts.hidden_size, dim=-1))
    if inputs.audio is not None:
        all_audio = torch.arange(inputs.num_audio_tokens)
        audio_rows = encode_audio(parts, inputs.audio)
        merged.audio = _send_to_decode_host(audio_rows, inputs.audio, all_audio, hosts, decode_host)
    if hosts.rank != decode_host:
        return None
    return run_prompt(parts, inputs.input_ids[:, tokens], inputs.position_ids[..., tokens], merged)


def _send_to_decode_host(
    rows: Tensor, media: VisualInput | AudioInput, kept: Tensor, hosts: HostGroup, decode_host: int
) -> Tensor:
    """Send the kept rows to the host that drafts; collective if the rows are shared out.

    Args:
        rows: of this host's share.
        kept: the numbers of the kept rows, ascending.

    Returns:
        The kept rows on that host; no rows elsewhere.
    """
    if not media.is_shared_out:  # every host has them all
        if hosts.rank != decode_host:
            return rows[:0]
        return rows[to_device(kept, rows.device)]
    rows_of_hosts = [numbers_in(piece) for piece in media.pieces]
    needed = [kept if host == decode_host else kept[:0] for host in range(hosts.size)]
    return move_rows(rows, rows_of_hosts, needed, hosts)


@torch.no_grad()
def run_prompt(
    parts: ModelParts,
    input_ids: Tensor,
    position_ids: Tensor,
    merged: PlaceholderRows | None = None,
) -> ReadPrompt:
    """Run a model over a prompt ``[1, n]``, and return its KV and states.

    Args:
        merged: the rows in place of visual and audio tokens; None for a text.
    """
    if merged is None:
        merged = PlaceholderRows()
    cache = DynamicCache()
    states = None
    if parts.sizes.linear is not None:
        states = LinearStates(parts.sizes.linear.layers)
    rows = merged.merge_into(parts, input_ids, position_ids)
    with (
        apbv_attention(parts.language_model),
        parts.rotary_of_prompt(int(position_ids.max()) + 1),
    ):
        run_layers(parts, rows, cache, CausalAttention(parts.backend), linear=states)
    return ReadPrompt(cache, states)


@dataclass(frozen=True)
class DraftTask:
    """Inputs from which a strategy builds a draft, including the prefilled prompt.

    Attributes:
        target, draft: the models; draft is None for strategies without one.
        inputs: the prompt with its pixels.
        state: the target's prefill; None on a draft host.
        scores: returns the scores from the target's prefill that the strategy needs, if any;
            collective.
        hosts: the hosts that compute: the target's hosts, or a draft host alone.
        decode_host: the one of them that drafts.
        config: the speculative configuration.
        keep: the policy that chooses the visual tokens which the draft sees; None if none can be
            chosen.
        sampling: how tokens are drawn.
        vocab_size: the target's; on a draft host the smaller of target and draft.
        awaited: on a draft host the message that arrives when the target knows the scores; None if
            none are needed.
        leave_last: whether the drafter must run the prompt's last token itself, to get its logits.
        drafts_tree: whether the drafter drafts trees.
        tokenize: turns text into token ids, without special tokens, for drafts that read other
            text.
        caption: a caption of what is to be seen, on the leader, if the strategy needs one.
        next_token: the checkpoint's multi-token prediction layer, if the strategy drafts with it.
    """

    target: ModelParts
    draft: ModelParts | None
    inputs: ModelInputs
    state: PrefillResult | None
    scores: Callable[[], Any] | None
    hosts: HostGroup
    config: SpeculativeConfig
    keep: str | None
    sampling: SamplingParams
    vocab_size: int
    leave_last: bool = False
    awaited: Pending | None = None
    drafts_tree: bool = False
    tokenize: Callable[[str], list[int]] | None = None
    caption: str | None = None
    decode_host: int = 0
    next_token: NextTokenModel | None = None

    @property
    def draft_parts(self) -> ModelParts:
        """The draft model, for strategies that need one."""
        assert self.draft is not None, "the strategy has a draft model"
        return self.draft

    @property
    def prefilled(self) -> PrefillResult:
        """The target's prefill, for strategies that draft with the target."""
        assert self.state is not None, "a draft host does not run the target"
        return self.state

    def read_scores(self) -> Any:
        """Return the scores from the target's prefill; collective."""
        assert self.scores is not None, "the strategy observes the prefill"
        return self.scores()

    @property
    def is_decode_host(self) -> bool:
        """Whether this host drafts."""
        return self.hosts.rank == self.decode_host

    @property
    def is_visual(self) -> Tensor:
        """The mask of the prompt's visual tokens, bool ``[n]``."""
        return self.target.is_visual(self.inputs.input_ids[0])

    @property
    def text_ids(self) -> Tensor:
        """The prompt's text tokens ``[t]``, without placeholders."""
        prompt = self.inputs.input_ids[0]
        return prompt[~self.target.is_placeholder(prompt)]

    @property
    def num_kept(self) -> int:
        """The number of visual tokens that a pruned draft sees."""
        num_visual = self.inputs.num_visual_tokens
        if self.config.keep_tokens is None:
            assert self.config.keep_ratio is not None, "one of both is set"
            count = round(self.config.keep_ratio * num_visual)
        else:
            num_text = self.inputs.num_tokens - num_visual
            count = self.config.keep_tokens - num_text
        return min(num_visual, max(1, count))

    def drafter(
        self, parts: ModelParts, prompt: ReadPrompt | None, next_position: int | None = None
    ) -> ModelDrafter | None:
        """Return a drafter that continues a prompt; None if this host has not read it.

        Args:
            next_position: rotary position after the whole prompt; the target's by default.
        """
        if prompt is None:
            return None
        position = self.inputs.next_position if next_position is None else next_position
        length = self.inputs.num_tokens
        if self.leave_last:
            position -= 1
            length -= 1
        return ModelDrafter(
            parts,
            prompt,
            position,
            length,
            self.sampling,
            self.vocab_size,
            self.drafts_tree,
            self.inputs.input_ids,
        )


class Successor(NamedTuple):
    """What replaces a provisional draft, which drafts until the target's scores arrive.

    Attributes:
        awaited: the message that arrives with the scores.
        build: builds the draft that replaces it.
    """

    awaited: Pending
    build: "Callable[[], Draft]"


@dataclass(frozen=True)
class Draft:
    """Drafter that has read the prompt, and the visual tokens that it saw.

    Attributes:
        drafter: the drafter on the host that drafts; None on the others.
        num_visual: how many visual tokens it sees.
        kept: which ones, by their numbers among the visual tokens, where all layers and heads see
            the same.
        successor: replaces a provisional draft; None: this one is not provisional.
    """

    drafter: Drafter | None
    num_visual: int
    kept: Tensor | None = None
    successor: Successor | None = None

    @property
    def own_drafter(self) -> Drafter:
        """The drafter, on the host that drafts."""
        assert self.drafter is not None, "another host drafts"
        return self.drafter

    @property
    def model_drafter(self) -> ModelDrafter:
        """The drafter, on the host that drafts, of a strategy whose draft is a model."""
        assert isinstance(self.drafter, ModelDrafter), "a model drafts on this host"
        return self.drafter

    def runs(self, parts: ModelParts) -> bool:
        """Return whether the drafter on this host runs this very model, the target.

        It then sees less of the prompt, and the target's KV of verified tokens replaces its own
        (STD).
        """
        return isinstance(self.drafter, ModelDrafter) and self.drafter.parts is parts
