"""Prompts as one host reads them, without an engine."""

from apbv import HostGroup, ModelInputs, PrefillConfig
from apbv.input.media.video import probe
from apbv.input.prompts.pixels import SourcePixels
from apbv.input.prompts.prompt_reader import PromptReader
from apbv.request.request import Question
from apbv.stats import StageTimer


def read_question(
    parts, processor, question: Question, hosts: HostGroup, config: PrefillConfig | None = None
) -> tuple[ModelInputs, SourcePixels | None]:
    """Any question, with 8 frames of each video unless it says otherwise."""
    reader = PromptReader(parts, processor, 8, config)
    rendered = reader.render(question)
    videos = reader.sample([probe(path) for path in rendered.videos], question)
    return reader.read(rendered, videos, hosts, StageTimer(hosts))
