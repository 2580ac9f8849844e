"""Quantized checkpoints: the answers of transformers on several hosts, and refused if they cannot run."""

import json
import shutil
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file

import apbv
from apbv import Engine, HostGroup, PrefillConfig, SpeculativeConfig, plan
from apbv.model import row_chunks
from apbv.model.loading import load_model
from apbv.model.parts import inspect_model
from apbv.model.row_chunks import rows_in_chunks

from fresh_hosts import described
from prompts import relative_error, text_batch, video_batch
from quantized import FORMATS, save_quantized

BATCHES = {"llama": text_batch(50), "qwen2_5_vl": video_batch("qwen2_5_vl", 9)}


def each_format(*others) -> list:
    """Parametrize by a format, and with it others; of two formats the kernels are compiled at first."""
    return [
        pytest.param(name, *others[row % len(others)], marks=[pytest.mark.thorough] * (name in ("gptq", "awq")))
        for row, name in enumerate(FORMATS)
    ]


# A format whose packages every test environment has.
PLAIN = "fp8"


@pytest.fixture(scope="module")
def quantized(checkpoints, tmp_path_factory):
    """A function from a family and a format to a checkpoint, made when first asked for."""
    folder = tmp_path_factory.mktemp("quantized")

    def get(family: str, name: str):
        path = folder / f"{family}-{name}"
        return path if path.exists() else save_quantized(family, checkpoints(family), path, name)

    return get


def tokens_job(hosts: HostGroup, family: str, path: str, saved: str) -> tuple:
    engine = Engine.from_pretrained(path, hosts=hosts)
    before = engine.parts.weights_digest()
    config = PrefillConfig(passing_len=10_000, anchor_len=8, query_len=8)
    state = apbv.prefill(engine.model, BATCHES[family], hosts=hosts, config=config)
    state.save(saved)
    again = apbv.load(saved, engine.model, hosts=hosts)
    cache, dtype = state.to_dynamic_cache(), inspect_model(engine.model).dtype
    keys = None if cache is None else cache.layers[0].keys.dtype
    tokens = [engine.decode(each, max_new_tokens=6).token_ids for each in (state, again)]
    assert engine.parts.weights_digest() == before  # though bitsandbytes packs weights anew when it is first run
    return tokens, dtype, keys


@pytest.mark.parametrize(("name", "family"), each_format(("llama",), ("qwen2_5_vl",)))
def test_tokens_are_those_of_transformers(pool, quantized, family, name, tmp_path):
    path, batch = quantized(family, name), BATCHES[family]
    model, _ = load_model(path, "auto", HostGroup.single("cpu"))
    auto = transformers.AutoModelForCausalLM if family == "llama" else transformers.AutoModelForImageTextToText
    reference = auto.from_pretrained(path).eval()
    expected = reference.generate(**batch, max_new_tokens=6, do_sample=False)[0, batch["input_ids"].shape[1] :]
    for tokens, dtype, keys in pool.run(2, tokens_job, family, str(path), str(tmp_path / "kv")):
        assert tokens == [expected.tolist()] * 2
        assert dtype == reference.get_input_embeddings().weight.dtype and keys in (dtype, None)
    loaded = sum(weight.nbytes for weight in model.parameters())
    file = sum(weight.nbytes for weight in load_file(path / "model.safetensors").values())
    is_dense = name.startswith(("compressed", "fp8"))
    planned = plan(path, **({"tokens": 99} if family == "llama" else {"num_frames": 4})).weights
    assert 0.97 < planned / (loaded if is_dense else file) < 1.1


@torch.no_grad()
@pytest.mark.parametrize("name", each_format(()))
def test_fused_kernels_and_chunks_of_rows_compute_the_same(quantized, name):
    model, _ = load_model(quantized("llama", name), "auto", HostGroup.single("cpu"))
    parts, decoder = inspect_model(model, "triton"), model.get_decoder()
    fused = [type(each).__name__ for each in parts.language_model.modules() if hasattr(each, "is_fused")]
    assert fused.count("LlamaMLP") == parts.num_layers
    inputs = {"input_ids": text_batch(600)["input_ids"], "use_cache": False}
    expected = decoder(**inputs).last_hidden_state
    # What bitsandbytes keeps of an input's large values depends on all its rows.
    close = {"bitsandbytes-int8": 0.2, "bitsandbytes-nf4": 0.01}.get(name, 1e-4)
    tiny = mock.patch.dict(row_chunks.CHUNK_BYTES, {"cpu": 1})
    with tiny, rows_in_chunks(inspect_model(model, "torch"), 600):
        assert relative_error(decoder(**inputs).last_hidden_state, expected) < close
    # Where inputs are rounded to integers, an MLP's last bit may decide which.
    rounds = name in ("torchao-int8-dynamic", "bitsandbytes-int8") or name.startswith("compressed")
    found = parts.language_model(**inputs).last_hidden_state
    assert relative_error(found, expected) < (0.2 if rounds else 0.01)


@pytest.mark.parametrize("name", ["torchao-int8", "compressed-tensors-int8", "fp8"])
def test_a_draft_may_be_quantized(quantized, checkpoints, name):
    """Its tokens are those of its own target, and change no answer of another one."""
    draft = quantized("llama", name)
    config = SpeculativeConfig(strategy="vanilla", draft_model=str(draft), num_draft_tokens=3)
    question = {"prompt": "What?", "max_new_tokens": 8}
    for target in (draft, checkpoints("llama")):
        answer = Engine.from_pretrained(target, speculate=config).generate(**question)
        assert answer.token_ids == Engine.from_pretrained(target).generate(**question).token_ids
        counts = answer.stats["speculation"]
        assert counts["num_accepted"] == counts["num_drafted"] or target != draft


def refused_job(processes: HostGroup, path: str, tensor_parallel: int, **settings) -> str:
    hosts = HostGroup.from_process_group(processes._groups.data, "cpu", 60, tensor_parallel=tensor_parallel)
    return described(lambda: Engine.from_pretrained(path, hosts=hosts, **settings))


def test_what_cannot_run_is_refused_before_weights_are_loaded(pool, quantized, checkpoints, tmp_path):
    path = str(quantized("llama", PLAIN))
    for failure in pool.run(2, refused_job, path, 2):
        assert (
            failure == "ValueError: quantized weights are not split across the processes of a host: use more hosts"
        )
    assert "are not split" in described(lambda: plan(path, tokens=9, tensor_parallel=2))
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "would round quantized weights again" in described(
        lambda: Engine.from_pretrained(path, adapter=tmp_path)
    )
    without = tmp_path / "without"
    shutil.copytree(checkpoints("llama"), without)
    config = json.loads((without / "config.json").read_text())
    (without / "model.safetensors").unlink()
    int4 = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {}}}}
    for settings, reason in (
        ({"quant_method": "aqlm"}, "aqlm"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "unheard"}, "unheard"),
        (int4, "torchao"),
    ):
        (without / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
        if settings["quant_method"] == "gptq" and all(map(_is_installed, FORMATS["gptq"])):
            continue
        for failure in pool.run(2, refused_job, str(without), 1):
            assert failure.startswith(f"ValueError: cannot load weights quantized by {reason} on cpu: "), failure


def _is_installed(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None
