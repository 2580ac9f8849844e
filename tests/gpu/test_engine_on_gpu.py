"""Engines on pretended GPUs: loaded, shared out, and saved."""

from pathlib import Path

import pytest
import torch

import apbv
from apbv import Engine, HostGroup

from apbv_tests.engines import QUESTION
from apbv_tests.pretend_gpu import rehearsal
from apbv_tests.rehearsals import resizing_as_on_gpu

FAMILY = "qwen2_5_vl"
REQUEST = {"num_frames": 4, "max_new_tokens": 4}


def loaded(path: Path, device: str) -> Engine:
    return Engine.from_pretrained(path, hosts=HostGroup.single(device), dtype="float32")


@pytest.fixture(scope="module")
def expected(checkpoints, clip) -> list[int]:
    with resizing_as_on_gpu():
        return (
            loaded(checkpoints(FAMILY), "cpu").generate(QUESTION, video=clip, **REQUEST).token_ids
        )


def test_a_host_computes_on_its_gpu_whichever_is_current_and_saves_its_kv(
    checkpoints, clip, tmp_path, expected
):
    with resizing_as_on_gpu(), rehearsal() as gpu:
        engine = loaded(checkpoints(FAMILY), "cuda:1")
        assert torch.cuda.current_device() == 0 and engine.model.device == torch.device("cuda:1")
        engine.prefill(QUESTION, video=clip, num_frames=4).save(tmp_path / "kv")
        state = apbv.load(tmp_path / "kv", engine.model, hosts=engine.hosts)
        assert state.to_dynamic_cache().layers[0].keys.is_cuda
        assert engine.decode(state, max_new_tokens=4).token_ids == expected
        assert gpu.events.of("triton") and gpu.events.of("replay")


@pytest.mark.thorough
def test_a_model_whose_steps_cannot_be_recorded_goes_on_without(checkpoints, clip, expected):
    with resizing_as_on_gpu(), rehearsal() as gpu:
        engine = loaded(checkpoints(FAMILY), "cuda:0")
        layer = engine.model.model.language_model.layers[1]
        layer.register_forward_pre_hook(lambda _, inputs: inputs[0].sum().item() and None)
        with pytest.warns(UserWarning, match="without CUDA graphs: GpuError: the host waits"):
            assert engine.generate(QUESTION, video=clip, **REQUEST).token_ids == expected
        assert gpu.faults and all("while" in fault for fault in gpu.faults)
        gpu.faults.clear()
        torch.cuda.empty_cache()  # the allocator is as it was
        with pytest.warns(UserWarning, match="decoding without CUDA graphs: GpuError"):
            assert engine.generate(QUESTION, video=clip, **REQUEST).token_ids == expected
        assert not gpu.faults  # it is not tried again
