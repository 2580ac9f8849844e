"""Engines over tiny models, and the clips and questions that they are asked about."""

from pathlib import Path

import torch

from apbv import Engine, HostGroup, PrefillConfig, SpeculativeConfig
from apbv.speculate import STRATEGIES

import families

QUESTION = "What happens here?"


def write_clip(path: Path, frames: torch.Tensor) -> None:
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=10, options={"g": "8", "bf": "2"})
        stream.height, stream.width, stream.pix_fmt = frames.shape[2], frames.shape[3], "yuv420p"
        for frame in frames.permute(0, 2, 3, 1).numpy():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def build_engine(
    hosts: HostGroup, family: str, kv: str, speculate: SpeculativeConfig | None, draft_seed: int, captioner=None
):
    model = families.build_model(family, dtype=torch.float64)
    draft = None
    if speculate and STRATEGIES[speculate.strategy].needs_draft_model:
        draft = families.build_model(family, dtype=torch.float64, seed=draft_seed)
    processor = families.build_processor(family)
    prefill = PrefillConfig(kv=kv)
    return Engine(model, processor, hosts, prefill, speculate=speculate, draft=draft, captioner=captioner)


CAPTION = "a long caption of what may be seen, longer than the video itself " * 3
