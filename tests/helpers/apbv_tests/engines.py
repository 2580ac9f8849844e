"""Engines over tiny models, and the clips and questions that they are asked about."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from apbv import Engine, HostGroup, ReuseConfig, SpeculativeConfig
from apbv.speculate import STRATEGIES

from apbv_tests import families
from apbv_tests.configs import prefill_config

QUESTION = "What happens here?"


def write_clip(path: Path, frames: torch.Tensor) -> None:
    import av

    with av.open(str(path), "w") as container:
        # Without its assembly, with which x264 does not always write the same file of the same
        # frames.
        options = {"g": "8", "bf": "2", "x264-params": "asm=0"}
        stream = container.add_stream("libx264", rate=10, options=options)
        stream.height = frames.shape[2]
        stream.width = frames.shape[3]
        stream.pix_fmt = "yuv420p"
        for frame in frames.permute(0, 2, 3, 1).numpy():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def build_engine(
    hosts: HostGroup,
    family: str,
    kv: str = "gathered",
    speculate: SpeculativeConfig | None = None,
    draft_seed: int = 1,
    captioner=None,
    reuse: ReuseConfig | None = None,
    dtype: torch.dtype = torch.float64,
    layers: int | None = None,
    to_device: Callable = lambda model: model,
    **prefill,
) -> Engine:
    """An engine that has the target and the draft on the hosts that need them."""
    is_beside = speculate is not None and speculate.draft_host
    is_draft = is_beside and hosts.rank == hosts.size - 1
    needs_draft = (
        speculate
        and STRATEGIES[speculate.strategy].facts.needs_draft_model
        and (is_draft or not is_beside)
    )
    build = partial(families.build_model, family, dtype=dtype, layers=layers)
    model = None if is_draft else to_device(build())
    draft = to_device(build(seed=draft_seed)) if needs_draft else None
    processor = families.build_processor(family)
    config = prefill_config(kv=kv, **prefill)
    with_draft = {"speculate": speculate, "draft": draft, "captioner": captioner}
    return Engine(model, processor, hosts, config, reuse=reuse, **with_draft)


CAPTION = "a long caption of what may be seen, longer than the video itself " * 3
