"""What a strategy is given, a prefilled prompt, and what it makes of it, a draft."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..config import SamplingConfig, SpeculativeConfig
from ..hosts import HostGroup
from ..input.model_inputs import ModelInputs
from ..model.attention import LayerAttention, PrefillObserver
from ..model.parts import ModelParts
from ..prefilling.forward import PrefillResult
from .drafters import Drafter, ModelDrafter
from .tree import TreeDrafter


@dataclass(frozen=True)
class Prompt:
    """A prefilled prompt, and what a draft may be made of.

    Attributes:
        target, draft: the models; draft is None for strategies without one.
        inputs: the prompt with its pixels.
        state: what the target's prefill left; None on a draft host.
        observer: what watched the prefill, if the strategy asked for it.
        hosts: who computes: the target's hosts, or a draft host by itself.
        vocab_size: of the target; with a smaller draft of that, where it drafts on a host of its own.
        leave_last: the drafter is to run the prompt's last token itself, whose logits it then has.
        drafts_tree: its drafter fills trees.
        tokenize: text to token ids, without special tokens, for drafts that read other text than the prompt's.
        caption: what is to be seen, in words; on the leader, where the strategy asks for it.
    """

    target: ModelParts
    draft: ModelParts | None
    inputs: ModelInputs
    state: PrefillResult | None
    observer: PrefillObserver | None
    hosts: HostGroup
    config: SpeculativeConfig
    sampling: SamplingConfig
    vocab_size: int
    leave_last: bool = False
    drafts_tree: bool = False
    tokenize: Callable[[str], list[int]] | None = None
    caption: str | None = None

    @property
    def is_visual(self) -> Tensor:
        return self.target.is_visual(self.inputs.input_ids[0])

    @property
    def num_visual(self) -> int:
        return int(self.is_visual.sum())

    @property
    def num_kept(self) -> int:
        """How many visual tokens a pruned draft sees."""
        count, num_visual = self.config.keep_tokens, self.num_visual
        if count is None:
            wanted = round(self.config.keep_ratio * num_visual)
        else:
            wanted = count - (self.inputs.num_tokens - num_visual)
        return min(num_visual, max(1, wanted))

    def drafter(
        self, parts: ModelParts, cache, attention: LayerAttention | None = None, next_position: int | None = None
    ) -> Drafter | TreeDrafter | None:
        """A model that continues from a cache; None where there is no cache.

        Args:
            attention: see :class:`ModelDrafter`; for chains, and where ``leave_last`` is not asked for: a draft
                host has none of the target's KV.
            next_position: rotary position behind the prompt; the target's by default.
        """
        if cache is None:
            return None
        left = int(self.leave_last)
        if left:
            cache.crop(-left)
        position = self.inputs.next_position if next_position is None else next_position
        position, length = position - left, self.inputs.num_tokens - left
        if self.drafts_tree:
            return TreeDrafter(parts, cache, position, self.vocab_size)
        return ModelDrafter(parts, cache, position, length, self.sampling, self.vocab_size, attention)


@dataclass(frozen=True)
class Draft:
    """Who drafts, and from what.

    Attributes:
        drafter: on the leader; None on the others.
        num_visual: how many visual tokens it sees.
        kept: which, by their number among the visual tokens, where all layers and heads see the same.
        successor: of a provisional draft, which writes while the target still prefills.
        follows_target: its drafter is the target on less of the prompt, and may follow the target's KV of what is
            verified.
    """

    drafter: Drafter | TreeDrafter | None
    num_visual: int
    kept: Tensor | None = None
    successor: "Successor | None" = None
    follows_target: bool = False


@dataclass(frozen=True)
class Successor:
    """A draft that needs the target's scores.

    Attributes:
        is_due: whether they have come.
        wait: until they have.
        build: afterwards.
    """

    is_due: Callable[[], bool]
    wait: Callable[[], None]
    build: Callable[[], Draft]
