"""Engines on pretended GPUs: loaded, shared out, saved, and asked by the server's worker."""

import asyncio
from pathlib import Path

import pytest
import torch

import apbv
from apbv import Engine, HostGroup, PrefillConfig
from apbv.serve.executor import Executor
from apbv.serve.job import Finished, Piece
from apbv.serve.ledger import Ledger, Limits
from apbv.serve.media import MediaSettings
from apbv.serve.metrics import Metrics
from apbv.serve.private_files import PrivateFiles
from apbv.serve.reading import Reader, RequestSettings
from apbv.serve.report import Reporter
from apbv.serve.requests import ChatRequest
from apbv.serve.worker import Worker

from engines import QUESTION
from patience import GROUP_TIMEOUT, HANGING
from pretend_gpu import rehearsal
from rehearsals import on_gpus, resizing_as_on_gpu

FAMILY, REQUEST = "qwen2_5_vl", {"num_frames": 8, "max_new_tokens": 5}


def loaded(path: Path, hosts: HostGroup, **prefill) -> Engine:
    return Engine.from_pretrained(path, hosts=hosts, dtype="float32", prefill=PrefillConfig(**prefill))


@pytest.fixture(scope="module")
def expected(checkpoints, clip) -> list[int]:
    with resizing_as_on_gpu():
        return (
            loaded(checkpoints(FAMILY), HostGroup.single("cpu"))
            .generate(QUESTION, video=clip, **REQUEST)
            .token_ids
        )


def test_a_host_computes_on_its_gpu_whichever_is_current_and_saves_its_kv(checkpoints, clip, tmp_path, expected):
    with resizing_as_on_gpu(), rehearsal() as gpu:
        engine = loaded(checkpoints(FAMILY), HostGroup.single("cuda:1"))
        assert torch.cuda.current_device() == 0 and engine.model.device == torch.device("cuda:1")
        engine.prefill(QUESTION, video=clip, num_frames=8).save(tmp_path / "kv")
        state = apbv.load(tmp_path / "kv", engine.model, hosts=engine.hosts)
        assert state.to_dynamic_cache().layers[0].keys.is_cuda
        assert engine.decode(state, max_new_tokens=5).token_ids == expected
        assert gpu.events.of("triton") and gpu.events.of("replay")


def test_a_model_whose_steps_cannot_be_recorded_goes_on_without(checkpoints, clip, expected):
    with resizing_as_on_gpu(), rehearsal() as gpu:
        engine = loaded(checkpoints(FAMILY), HostGroup.single("cuda:0"))
        layer = engine.model.model.language_model.layers[1]
        layer.register_forward_pre_hook(lambda _, inputs: inputs[0].sum().item() and None)
        with pytest.warns(UserWarning, match="goes on without CUDA graphs: GpuError: the host waits"):
            assert engine.generate(QUESTION, video=clip, **REQUEST).token_ids == expected
        assert gpu.faults and all("while" in fault for fault in gpu.faults)
        gpu.faults.clear()
        torch.cuda.empty_cache()  # the allocator is as it was
        with pytest.warns(UserWarning, match="decoding without CUDA graphs: GpuError"):
            assert engine.generate(QUESTION, video=clip, **REQUEST).token_ids == expected
        assert not gpu.faults  # it is not tried again


def shared_job(processes: HostGroup, size: int, path: Path, clip: Path) -> list[list[int]]:
    """An answer of hosts of so many processes, on the CPU and on GPUs."""
    with resizing_as_on_gpu():
        answers = [_ask_shared(processes.process_group, "cpu", size, path, clip)]
        with rehearsal() as gpu:
            gpus = on_gpus(processes)
            answers.append(_ask_shared(gpus.process_group, gpus.device, size, path, clip))
            assert gpu.events.of("collective")
    return answers


def _ask_shared(group, device, size: int, path: Path, clip: Path) -> list[int]:
    hosts = HostGroup.from_process_group(group, device, GROUP_TIMEOUT, tensor_parallel=size)
    engine = loaded(path, hosts, anchor_len=4, passing_len=4)
    return engine.generate(QUESTION, video=clip, **REQUEST).token_ids


def test_a_host_of_two_gpus_answers_alike(pool, checkpoints, clip):
    for on_cpu, on_gpu in pool.run(2, shared_job, 2, checkpoints(FAMILY), clip):
        assert on_gpu == on_cpu


def served(engine: Engine, clip: Path, questions: list[str]) -> list[str]:
    """The texts of answers to requests that wait together for the server's worker."""
    private_files = PrivateFiles()
    settings = RequestSettings(num_frames=8, max_new_tokens=5, media=MediaSettings(folder=clip.parent))
    limits = Limits(max_queue=len(questions), max_kv_bytes=2**30, token_bytes=2**10)
    reader, ledger = Reader(engine, settings, private_files), Ledger(Reporter(Metrics("demo")), limits)
    worker = Worker(Executor(engine, engine.hosts), reader, ledger)

    async def ask() -> list[str]:
        worker.start(on_stop=lambda: None, on_end=lambda: None)
        jobs = []
        for question in questions:
            parts = [{"type": "video_url", "video_url": {"url": clip.name}}, {"type": "text", "text": question}]
            request = ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": parts}]})
            jobs.append(worker.admit())
            worker.submit(jobs[-1], request)
        return [await asyncio.wait_for(_text_of(job), HANGING) for job in jobs]

    try:
        return asyncio.run(ask())
    finally:
        worker.stop()
        worker.join(HANGING)
        private_files.close()
        assert worker.failure is None


async def _text_of(job) -> str:
    text = ""
    while isinstance(event := await job.events.get(), Piece):
        text += event.text
    assert isinstance(event, Finished), event
    return text


@pytest.mark.thorough
def test_the_server_answers_several_requests(checkpoints, clip):
    path, questions = checkpoints("qwen3_vl"), [QUESTION, "And then?", QUESTION]
    with resizing_as_on_gpu():
        expected = served(loaded(path, HostGroup.single("cpu")), clip, questions)
        with rehearsal():
            assert served(loaded(path, HostGroup.single("cuda:0")), clip, questions) == expected
    assert expected[0] == expected[2] != expected[1]
