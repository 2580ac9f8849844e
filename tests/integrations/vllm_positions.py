"""apbv's idea of the rotary positions that vLLM gives a prompt, against vLLM's own."""

from pathlib import Path
from types import SimpleNamespace

import torch
from vllm_engine import check

import apbv
from apbv import demo

from apbv_tests import families

QUESTION = demo.EXAMPLE_QUESTIONS[1]


def check_positions(folder: Path, expected: None) -> None:
    """apbv's idea of vLLM's positions against vLLM's own, for a long video, a short one, and two
    images."""
    from transformers.video_utils import VideoMetadata
    from vllm.model_executor.models.registry import ModelRegistry

    from apbv.integrations.vllm.admission import without_weights

    sources = {
        "long video": {"videos": [families.synthetic_video(24)]},
        "short video": {"videos": [families.synthetic_video(2)]},
        "images": {"images": [families.synthetic_image(), families.synthetic_image(168, 84)]},
    }
    for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        model = families.build_model(family)
        processor = families.build_processor(family)
        parts = apbv.model.parts.inspect_model(model)
        (architecture,) = model.config.architectures or [type(model).__name__]
        theirs = without_weights(ModelRegistry._try_load_model_cls(architecture), model.config)
        for name, source in sources.items():
            content = [{"type": kind[:-1]} for kind, items in source.items() for _ in items]
            turn = [{"role": "user", "content": [*content, {"type": "text", "text": QUESTION}]}]
            text = processor.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
            if "videos" in source:
                count = len(source["videos"][0])
                indices = list(range(0, 4 * count, 4))
                metadata = VideoMetadata(
                    total_num_frames=4 * count, fps=7.3, frames_indices=indices
                )
                source = source | {"video_metadata": [metadata], "do_sample_frames": False}
            batch = processor(text=[text], return_tensors="pt", **source)
            inputs = apbv.ModelInputs.from_processor(parts, batch, apbv.HostGroup.single("cpu"))
            features = features_of(batch, parts)
            wanted, _ = theirs.get_mrope_input_positions(inputs.input_ids[0].tolist(), features)
            moved = inputs.at_vllm_positions(parts).position_ids
            check(f"{family}, {name}: vLLM's positions", moved[:, 0].tolist(), wanted.tolist())
            same = torch.equal(moved, inputs.position_ids)
            is_same = name != "long video" or family == "qwen3_vl"
            check(f"{family}, {name}: transformers has the same", same, is_same)


def features_of(batch, parts) -> list:
    """What vLLM knows of a prompt's video or images."""
    kind = "video" if "video_grid_thw" in batch else "image"
    ids = batch["input_ids"][0].tolist()
    start = parts.model.config.vision_start_token_id
    starts = [i for i, token in enumerate(ids) if token == start]
    features = []
    for index, grid in enumerate(batch[f"{kind}_grid_thw"]):
        data = {f"{kind}_grid_thw": SimpleNamespace(data=grid)}
        if "second_per_grid_ts" in batch:
            data["second_per_grid_ts"] = SimpleNamespace(
                data=torch.as_tensor(batch["second_per_grid_ts"][index])
            )
        at = starts[index] + (parts.family.name != "qwen3_vl" or kind == "image")
        features.append(
            SimpleNamespace(modality=kind, data=data, mm_position=SimpleNamespace(offset=at))
        )
    return features
