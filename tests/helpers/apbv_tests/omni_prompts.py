"""Prompts with sound, as Qwen2.5-Omni's own processor makes them of whole files."""

from collections.abc import Sequence

import av
import numpy as np
import torch

from apbv_tests import families
from apbv_tests.audio_files import RATE
from apbv_tests.families import OMNI
from apbv_tests.video_files import decode_all

FPS = 25
FRAMES = 10
ASKED = "What is heard?"


def plain_samples(path: str, seconds: float | None = None) -> np.ndarray:
    """The samples as they are in the file, decoded by PyAV."""
    with av.open(path) as container:
        samples = np.concatenate([frame.to_ndarray()[0] for frame in container.decode(audio=0)])
    samples = samples.astype(np.float32) / (2**31 if samples.dtype == np.int32 else 2**15)
    return samples if seconds is None else samples[: round(seconds * RATE)]


def omni_batch(videos: Sequence[str] = (), sounds: Sequence[str] = (), heard: bool = True) -> dict:
    """What the model's own processor makes of whole videos, with or without their sound, and of
    sounds."""
    from transformers.video_utils import VideoMetadata

    processor = families.build_processor(OMNI)
    arguments = {}
    content = [{"type": "video"} for _ in videos] + [{"type": "audio"} for _ in sounds]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": ASKED}]}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    audio = []
    if videos:
        (path,) = videos
        frames = decode_all(path)
        chosen = np.linspace(0, len(frames) - 1, FRAMES).round().astype(int).tolist()
        arguments = {
            "videos": [torch.stack([torch.from_numpy(frames[i]).permute(2, 0, 1) for i in chosen])],
            "video_metadata": [
                VideoMetadata(total_num_frames=len(frames), fps=FPS, frames_indices=chosen)
            ],
            "do_sample_frames": False,
            "fps": FRAMES * FPS / len(frames),
        }
        if heard:
            audio = [plain_samples(path, len(frames) / FPS)]
            arguments |= {
                "load_audio_from_video": True,
                "audio_from_video_indices": [0] + [None] * len(sounds),
            }
    audio += [plain_samples(path) for path in sounds]
    if audio:
        # What is longer than the feature extractor's 8 seconds would be cut.
        longest = max(map(len, audio))
        arguments |= {"audio": audio, "audio_kwargs": {"max_length": max(longest, 8 * RATE)}}
    return dict(processor(text=[text], return_tensors="pt", **arguments))


@torch.no_grad()
def embedded(model, batch: dict) -> dict:
    """The embeddings and positions, as the model gives them to its decoder, of a video that is
    heard."""
    seen = {}

    def catch(module, args, kwargs):
        seen.update({name: kwargs[name] for name in ("inputs_embeds", "position_ids")})

    hook = model.get_decoder().register_forward_pre_hook(catch, with_kwargs=True)
    model(**batch, use_audio_in_video=True)
    hook.remove()
    return seen
