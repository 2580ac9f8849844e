"""This module lets the demo pair's draft read a clip as it does in speculative decoding, and answer by itself."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
from exam import Candidate
from transformers import PreTrainedModel

from apbv import (
    Engine,
    HostGroup,
    ModelInputs,
    PrefillConfig,
    PrefillResult,
    SamplingConfig,
    SpeculativeConfig,
    prefill,
)
from apbv.demo import draft_path
from apbv.model.parts import ModelParts, inspect_model
from apbv.speculate.builders import draft_by_model
from apbv.speculate.draft import Draft, DraftTask
from apbv.speculate.strategies import keep_policy, make_observer


@dataclass(frozen=True)
class DemoPair:
    """The demo's target and draft on one host.

    Args:
        target: reads clips.
        draft: the draft model.
    """

    target: Candidate
    draft: PreTrainedModel

    @classmethod
    def load(cls) -> "DemoPair":
        """Load both in float32, as their accuracy was measured."""
        hosts = HostGroup.single()
        engine = Engine.from_pretrained("demo", hosts=hosts, dtype="float32")
        draft = Engine.from_pretrained(draft_path(), hosts=hosts, dtype="float32").model
        return cls(Candidate(engine.model, engine.processor, hosts), draft)

    @property
    def hosts(self) -> HostGroup:
        """The one host."""
        return self.target.hosts

    @cached_property
    def draft_parts(self) -> ModelParts:
        """The draft's parts."""
        return inspect_model(self.draft)

    def read(self, file: Path, question: str) -> ModelInputs:
        """Read the prompt of a question about all frames of a file."""
        return self.target.read(file, question)

    def prefill(
        self, inputs: ModelInputs, config: SpeculativeConfig, seed: int = 0
    ) -> tuple[PrefillResult, DraftTask]:
        """Prefill the target, observed as a way to draft wants it; return what the draft is built from, too.

        Args:
            seed: of random choices.
        """
        observer = make_observer(config, self.target.parts)
        state = prefill(
            self.target.parts,
            inputs,
            hosts=self.hosts,
            config=PrefillConfig(method="full"),
            observer=observer,
            encoded=self.target.encoded,
        )
        task = DraftTask(
            target=self.target.parts,
            draft=self.draft_parts,
            inputs=inputs,
            state=state,
            observer=observer,
            hosts=self.hosts,
            config=config,
            keep=keep_policy(config),
            sampling=SamplingConfig(seed=seed),
            vocab_size=min(self.target.parts.vocab_size, self.draft_parts.vocab_size),
            leave_last=True,  # so that the draft gives the answer's first token, too
        )
        return state, task

    def answer_by_draft(self, task: DraftTask, max_new_tokens: int) -> tuple[str, Draft]:
        """Let the draft answer greedily, unverified, from the visual tokens that it sees; return the text."""
        draft = draft_by_model(task)
        last = int(task.inputs.input_ids[0, -1])
        tokens = draft.drafter.propose([last], max_new_tokens).tokens
        ends = set(_as_list(self.target.model.generation_config.eos_token_id))
        stop = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
        return self.target.processor.tokenizer.decode(tokens[:stop], skip_special_tokens=True), draft


def _as_list(numbers: int | list[int]) -> list[int]:
    return numbers if isinstance(numbers, list) else [numbers]
