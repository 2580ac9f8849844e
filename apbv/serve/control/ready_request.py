"""Requests that were read, and wait for the engine."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from ...decode.thoughts import ThoughtParser, ThoughtParsing
from ...input.prompts.tokenized_prompt import TokenizedPrompt
from ..formats.tool_calls import CallParsing, ToolCallParser
from ..media.files import Media
from .work_order import WorkOrder


@dataclass(frozen=True)
class ReadyRequest:
    """A request that is ready for the engine.

    Attributes:
        order: the request as it is sent to every host.
        num_tokens: the prompt's tokens.
        media: the order's files, on host 0.
        prompt_field: the field of the body that has the prompt.
        prompt: the prompt as read; the engine of host 0 need not read it again.
        calls: how calls of tools are found in its answers; None: they cannot call any.
        thoughts: how the thought is found with which an answer begins; None: it is not separated.
    """

    order: WorkOrder
    num_tokens: int
    media: list[Media]
    prompt_field: str
    prompt: TokenizedPrompt | None = None
    calls: CallParsing | None = None
    thoughts: ThoughtParsing | None = None

    def call_parser(self) -> ToolCallParser:
        """Return a parser for an answer that may call tools."""
        assert self.calls is not None, "the answer can call tools"
        return ToolCallParser(self.calls)

    def thought_parser(self) -> ThoughtParser:
        """Return a parser for an answer whose thought is separated."""
        assert self.thoughts is not None, "its thought is separated"
        return ThoughtParser(self.thoughts)

    @property
    def paths(self) -> AbstractContextManager[list[Path]]:
        """The order's files on host 0, which its job keeps open."""
        return nullcontext([file.path for file in self.media])

    @property
    def token_ids(self) -> list[int]:
        """The prompt's tokens."""
        assert self.prompt is not None, "host 0 has read the prompt"
        return self.prompt.batch["input_ids"][0].tolist()
