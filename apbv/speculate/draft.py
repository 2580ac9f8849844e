"""This module defines what a strategy builds a draft from, and the draft itself."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..config import SamplingConfig, SpeculativeConfig
from ..hosts import HostGroup
from ..input.model_inputs import ModelInputs
from ..model.attention import ChosenKV
from ..model.parts import ModelParts
from ..prefilling.observer import PrefillObserver
from ..prefilling.result import PrefillResult
from .drafters import Drafter, ModelDrafter
from .tree_drafter import TreeDrafter


@dataclass(frozen=True)
class DraftTask:
    """A DraftTask holds a prefilled prompt and all else that a strategy builds a draft from.

    Attributes:
        target, draft: the models; draft is None for strategies without one.
        inputs: the prompt with its pixels.
        state: the target's prefill; None on a draft host.
        observer: the observer of the prefill, if the strategy needs one.
        hosts: the hosts that compute: the target's hosts, or a draft host alone.
        config: the speculative configuration.
        keep: the policy that chooses the visual tokens which the draft sees; None where none can be chosen.
        sampling: how tokens are drawn.
        vocab_size: the target's; on a draft host the smaller one of target and draft.
        leave_last: whether the drafter has to run the prompt's last token itself, to get its logits.
        drafts_tree: whether the drafter drafts trees.
        tokenize: turns text into token ids, without special tokens, for drafts that read other text.
        caption: a caption of what is to be seen, on the leader, if the strategy needs one.
    """

    target: ModelParts
    draft: ModelParts | None
    inputs: ModelInputs
    state: PrefillResult | None
    observer: PrefillObserver | None
    hosts: HostGroup
    config: SpeculativeConfig
    keep: str | None
    sampling: SamplingConfig
    vocab_size: int
    leave_last: bool = False
    drafts_tree: bool = False
    tokenize: Callable[[str], list[int]] | None = None
    caption: str | None = None

    @property
    def is_visual(self) -> Tensor:
        """The mask of the prompt's visual tokens, bool ``[n]``."""
        return self.target.is_visual(self.inputs.input_ids[0])

    @property
    def text_ids(self) -> Tensor:
        """The prompt's tokens of text ``[t]``, without those that stand for what is seen or heard."""
        prompt = self.inputs.input_ids[0]
        return prompt[~self.target.is_placeholder(prompt)]

    @property
    def num_visual(self) -> int:
        """The number of visual tokens in the prompt."""
        return int(self.is_visual.sum())

    @property
    def num_kept(self) -> int:
        """The number of visual tokens that a pruned draft sees."""
        count, num_visual = self.config.keep_tokens, self.num_visual
        if count is None:
            wanted = round(self.config.keep_ratio * num_visual)
        else:
            wanted = count - (self.inputs.num_tokens - num_visual)
        return min(num_visual, max(1, wanted))

    def drafter(
        self, parts: ModelParts, cache, prompt_kv: ChosenKV | None = None, next_position: int | None = None
    ) -> Drafter | TreeDrafter | None:
        """Return a drafter that continues from a cache; None where there is no cache.

        Args:
            prompt_kv: see :class:`ModelDrafter`; for chains only, and without ``leave_last``: a draft host has
                none of the target's KV.
            next_position: rotary position after the prompt; the target's by default.
        """
        if cache is None:
            return None
        num_left_out = int(self.leave_last)
        if num_left_out:
            cache.crop(-num_left_out)
        position = self.inputs.next_position if next_position is None else next_position
        position, length = position - num_left_out, self.inputs.num_tokens - num_left_out
        if self.drafts_tree:
            return TreeDrafter(parts, cache, position, self.vocab_size)
        return ModelDrafter(parts, cache, position, length, self.sampling, self.vocab_size, prompt_kv)


@dataclass(frozen=True)
class Draft:
    """A Draft is a drafter that has read the prompt, and what it saw of it.

    Attributes:
        drafter: the drafter on the leader; None on the other hosts.
        num_visual: how many visual tokens it sees.
        kept: which ones, by their numbers among the visual tokens, where all layers and heads see the same.
        successor: replaces a provisional draft, which drafts while the target still prefills.
        takes_target_kv: whether the drafter is the target on less of the prompt, so that the target's KV of
            verified tokens may replace its own.
    """

    drafter: Drafter | TreeDrafter | None
    num_visual: int
    kept: Tensor | None = None
    successor: "Successor | None" = None
    takes_target_kv: bool = False


@dataclass(frozen=True)
class Successor:
    """A Successor builds the final draft when the scores of the target's prefill have arrived.

    Attributes:
        is_due: returns whether the scores have arrived.
        wait: waits until they have.
        build: builds the final draft, afterwards.
    """

    is_due: Callable[[], bool]
    wait: Callable[[], None]
    build: Callable[[], Draft]
