"""Sets up speculative decoding: loads models and selects the decoding loop."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .. import demo
from ..config import (
    KEEP_FACTS,
    DecodeConfig,
    PrefillConfig,
    SamplingParams,
    SpeculativeConfig,
)
from ..errors import InvalidConfigError, InvalidRequestError
from ..hosts import HostGroup
from ..input.prompts.model_inputs import ModelInputs
from ..model.loading.load import load_model, require_loadable
from ..model.loading.next_token import load_next_token_model, require_next_token_weights
from ..model.next_token import NextTokenModel
from ..model.parts import ModelParts, inspect_model
from ..prefilling.reduction.frames import require_whole_frames
from .loops.beside import DraftHost, ParallelSpeculation
from .loops.decode_loops import Autoregressive, Captioner, SequentialSpeculation
from .loops.link import Pair
from .strategies.table import (
    STRATEGIES,
    make_observer,
    reads,
    require_consistent,
    require_drafts_of,
    require_same_tokens,
)


class Models(NamedTuple):
    """This host's models.

    Attributes:
        target: the target; None on a draft host.
        draft: the draft model; None if no second model drafts on this host.
        next_token: the target's multi-token prediction layer; None if it does not draft.
    """

    target: ModelParts | None
    draft: ModelParts | None
    next_token: NextTokenModel | None = None

    @property
    def own_target(self) -> ModelParts:
        """The target, on a host that runs it."""
        assert self.target is not None, "this host runs the target"
        return self.target

    @property
    def own_draft(self) -> ModelParts:
        """The draft model, on a host that runs it."""
        assert self.draft is not None, "this host runs the draft model"
        return self.draft

    @property
    def reading(self) -> ModelParts:
        """The model that reads prompts on this host; both read them alike."""
        return self.own_draft if self.target is None else self.target


class Drafting:
    """Sets up one engine according to its speculative configuration.

    Args:
        config: the speculative configuration; None for decoding without a draft.
        hosts: all hosts, a draft host included.
        captioner: see :class:`apbv.Engine`.
    """

    def __init__(
        self, config: SpeculativeConfig | None, hosts: HostGroup, captioner: Captioner | None
    ):
        self._config = config
        self._hosts = hosts
        self._captioner = captioner
        self._has_draft_host = config is not None and config.draft_host

    @property
    def strategy(self) -> str | None:
        """The strategy's name; None: nothing is drafted."""
        return None if self._config is None else self._config.strategy

    @property
    def drafts_only(self) -> bool:
        """Whether this is the draft host, which does not run the target."""
        return self._has_draft_host and self._hosts.rank == self._hosts.size - 1

    def require_target(self, path: str | Path, config: PreTrainedConfig) -> None:
        """Reject a target without the weights that the strategy drafts with, before any are loaded.

        Args:
            path: the target's checkpoint.
            config: its config.

        Raises:
            UnsupportedModelError: it has none.
        """
        if self._config is not None and STRATEGIES[self._config.strategy].facts.reads_outputs:
            require_next_token_weights(path, config)

    def find_model(self, prefill: PrefillConfig, is_demo: bool) -> str | Path | None:
        """Find the draft model before anything is loaded; return None for strategies without one.

        Raises:
            InvalidConfigError: settings contradict one another, or the model is not named, does not
                exist, or is not supported.
        """
        if self._config is None:
            return None
        require_consistent(self._config, prefill, self._hosts, self._captioner is not None)
        if not STRATEGIES[self._config.strategy].facts.needs_draft_model:
            return None
        name = self._config.draft_model or ("demo" if is_demo else None)
        if name is None:
            raise InvalidConfigError(f"the strategy {self._config.strategy} needs a draft model")
        path = demo.draft_path() if name == "demo" else name
        described = require_loadable(path, self._hosts.device)
        require_drafts_of(self._config, described)
        return path

    def load_model(
        self, path: str | Path | None, dtype: str | torch.dtype, processor
    ) -> PreTrainedModel | None:
        """Load the draft model on every host that drafts; collective.

        Args:
            path: the path that :meth:`find_model` returned.
            processor: the target's processor.

        Raises:
            InvalidConfigError: the model cannot be loaded, or has other tokens than the target.
            HostError: another host failed to load it.
        """
        config = self._config
        if path is None or config is None:
            return None
        with self._hosts.local_stage(f"loading the draft model {config.draft_model or path}"):
            if self._has_draft_host and not self.drafts_only:
                return None
            draft, reader = load_model(path, dtype, self._hosts)
            if STRATEGIES[config.strategy].facts.reads_text_only:
                require_same_tokens(processor, reader)
            return draft

    def inspect_models(
        self,
        model: PreTrainedModel | None,
        draft: PreTrainedModel | None,
        prefill: PrefillConfig,
        decode: DecodeConfig | None,
    ) -> Models:
        """Return the parts of this host's models, and check that they fit the settings.

        Args:
            model: the target; None on a draft host.
            draft: the draft model; None if no second model drafts.

        Raises:
            InvalidConfigError: a model is not supported, or does not fit the settings.
        """
        config = self._config
        if config is not None:
            require_consistent(config, prefill, self._hosts, self._captioner is not None)
        if self.drafts_only and draft is None:
            raise InvalidConfigError("give the draft host a draft model")
        if not self.drafts_only and model is None:
            raise InvalidConfigError("give a model: only a draft host goes without one")
        models = Models(
            target=None if model is None else inspect_model(model, prefill.backend, decode),
            draft=None if draft is None else inspect_model(draft, prefill.backend, decode),
        )
        for parts in (models.target, models.draft):
            if parts is not None and config is not None:
                require_drafts_of(config, parts.model.config)
        if config is not None and STRATEGIES[config.strategy].facts.reads_outputs:
            return models._replace(next_token=load_next_token_model(models.own_target))
        # A draft host has to read requests itself.
        if config is None or config.draft_host:
            return models
        strategy = STRATEGIES[config.strategy].facts
        if strategy.needs_draft_model:
            if draft is None:
                raise InvalidConfigError(f"the strategy {config.strategy} needs a draft model")
            target_prompts = reads(models.own_target)
            draft_prompts = reads(models.own_draft)
            takes_text = strategy.reads_text_only and not models.own_draft.sees
            if target_prompts != draft_prompts and not takes_text:
                raise InvalidConfigError(
                    f"the draft cannot read the target's prompts: it reads {draft_prompts}, not "
                    f"{target_prompts}"
                )
        return models

    def observes_prefill(self, models: Models) -> bool:
        """Return whether the strategy observes the target's prefill of the whole prompt."""
        return self._config is not None and make_observer(self._config, models.reading) is not None

    def require_readable(self, inputs: ModelInputs) -> None:
        """Reject a prompt that the strategy cannot draft for.

        Raises:
            InvalidConfigError: the prompt is rejected; the message says why.
        """
        keep = None if self._config is None else self._config.keep_policy
        visual = inputs.visual
        if keep is not None and KEEP_FACTS[keep].needs_frames:
            if visual is not None and visual.kind == "image":
                raise InvalidRequestError(
                    f"keep={keep!r} selects frames, but the prompt has no video"
                )
            require_whole_frames(inputs, f"keep={keep!r}")

    def decode_loop(
        self, models: Models, tokenizer
    ) -> Autoregressive | SequentialSpeculation | ParallelSpeculation | DraftHost:
        """Return this host's decoding loop; collective."""
        config = self._config
        hosts = self._hosts
        if config is None:
            return Autoregressive(models.own_target, hosts)
        if not config.draft_host:
            tokenize = partial(tokenizer.encode, add_special_tokens=False)
            draft = models.draft if STRATEGIES[config.strategy].facts.needs_draft_model else None
            return SequentialSpeculation(
                models.own_target,
                draft,
                hosts,
                config,
                tokenize,
                self._captioner,
                models.next_token,
            )
        pair = Pair.of(hosts, config)
        way: ParallelSpeculation | DraftHost
        if pair.is_draft:
            way = DraftHost(models.own_draft, config, pair)
        else:
            way = ParallelSpeculation(models.own_target, config, pair)
        hosts.require_same(
            "the kind of prompts that the model reads", reads(models.reading).encode()
        )
        return way

    def agree(self, sampling: SamplingParams) -> SamplingParams:
        """Return host 0's default sampling parameters; collective with a draft host.

        The draft host's may differ.
        """
        if not self._has_draft_host:
            return sampling
        defaults = self._hosts.gather_json(asdict(sampling))[0]
        del defaults["logit_bias"]
        return SamplingParams(**defaults)
