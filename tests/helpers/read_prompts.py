"""Prompts as one host reads them, without an engine."""

from collections.abc import Sequence

from apbv import HostGroup, ModelInputs, PrefillConfig
from apbv.input.pixels import SourcePixels
from apbv.input.reading import PromptReader
from apbv.input.request import Question
from apbv.input.skeleton import SampledVideo
from apbv.input.video import VideoInfo, probe
from apbv.stats import StageTimer


def read_video(
    parts, processor, question: str, info: VideoInfo, frames: Sequence[int], hosts: HostGroup
) -> tuple[ModelInputs, SourcePixels]:
    """A question about some frames of a video."""
    reader = PromptReader(parts, processor, len(frames))
    rendered = reader.render(Question(question, video=info.path))
    return reader.read(rendered, [SampledVideo(info, tuple(frames))], hosts, StageTimer(hosts))


def read_question(
    parts, processor, question: Question, hosts: HostGroup, config: PrefillConfig | None = None
) -> tuple[ModelInputs, SourcePixels | None]:
    """Any question, with 8 frames of each video unless it says otherwise."""
    reader = PromptReader(parts, processor, 8, config)
    rendered = reader.render(question)
    videos = reader.sample([probe(path) for path in rendered.videos], question)
    return reader.read(rendered, videos, hosts, StageTimer(hosts))
