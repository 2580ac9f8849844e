"""Quantized checkpoints: the answers of transformers on several hosts, and refused if they cannot
run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import apbv
from apbv import Engine, HostGroup, PrefillConfig, SpeculativeConfig, plan
from apbv.model import row_chunks
from apbv.model.loading.load import load_model
from apbv.model.parts import inspect_model
from apbv.model.row_chunks import rows_in_chunks

from apbv_tests.families import TEXT_FAMILIES
from apbv_tests.fresh_hosts import described
from apbv_tests.prompts import relative_error, text_batch, video_batch

GROUP = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# The packages that each format needs; of the last two the kernels are compiled when they are first
# loaded.
FORMATS = {
    "torchao-int8": ["torchao"],
    "torchao-int8-dynamic": ["torchao"],
    "torchao-fp8": ["torchao"],
    "bitsandbytes-int8": ["bitsandbytes"],
    "bitsandbytes-nf4": ["bitsandbytes"],
    "compressed-tensors-fp8": ["compressed_tensors"],
    "compressed-tensors-int8": ["compressed_tensors"],
    "fp8": [],
    "gptq": ["gptqmodel", "optimum"],
    "awq": ["gptqmodel"],
}


def auto_class(family: str) -> type:
    """Transformers' class that loads a family's checkpoints."""
    if family in TEXT_FAMILIES:
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForImageTextToText


def save_quantized(family: str, base: Path, path: Path, name: str) -> Path:
    """Quantize a checkpoint, its language model at least; skip the test if a package is missing."""
    for package in FORMATS[name]:
        pytest.importorskip(package)
    shutil.copytree(base, path)
    if name.startswith(("torchao", "bitsandbytes")):
        auto_class(family).from_pretrained(
            base, quantization_config=_own_config(name)
        ).save_pretrained(path)
        return path
    settings, quantize = _by_hand(name)
    config = path / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"quantization_config": settings})
    )
    weights = {}
    for key, weight in load_file(path / "model.safetensors").items():
        is_quantized = key.endswith("_proj.weight") and "visual" not in key
        if not is_quantized:
            weights[key] = weight
            continue
        prefix = key.removesuffix("weight")
        for part, tensor in quantize(weight).items():
            weights[prefix + part] = tensor
    save_file(
        {key: weight.contiguous() for key, weight in weights.items()},
        path / "model.safetensors",
        {"format": "pt"},
    )
    return path


def _own_config(name: str):
    if name == "bitsandbytes-int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    if name == "bitsandbytes-nf4":
        small = {"llm_int8_skip_modules": ["model.visual", "lm_head"]}  # rows shorter than a block
        return transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", **small
        )
    from torchao import quantization

    kind = {
        "int8": "Int8WeightOnly",
        "int8-dynamic": "Int8DynamicActivationInt8Weight",
        "fp8": "Float8WeightOnly",
    }
    return transformers.TorchAoConfig(
        getattr(quantization, f"{kind[name.removeprefix('torchao-')]}Config")()
    )


def _by_hand(name: str) -> tuple[dict, Callable[[Tensor], dict[str, Tensor]]]:
    """Return a ``quantization_config``, and a function from a weight to what is stored of it, by
    name."""
    if name == "fp8":
        blocks = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
        return blocks, _fp8_block
    if name in ("gptq", "awq"):
        common = {"quant_method": name, "bits": 4, "group_size": GROUP}
        own = {"zero_point": True, "version": "gemm", "modules_to_not_convert": ["model.visual"]}
        own = {"desc_act": False, "sym": True} if name == "gptq" else own
        return common | own, _gptq if name == "gptq" else _awq
    kind = "float" if name.endswith("fp8") else "int"
    common = {"num_bits": 8, "type": kind, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**common, "strategy": "channel", "dynamic": False},
        "input_activations": {**common, "strategy": "token", "dynamic": True},
    }
    settings = {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*visual.*"],
        "config_groups": {"group_0": group},
    }
    return settings, _fp8_rows if kind == "float" else _int8_rows


def _fp8_block(weight: Tensor) -> dict[str, Tensor]:
    scale = weight.abs().max() / 448
    return {
        "weight": (weight / scale).to(torch.float8_e4m3fn),
        "weight_scale_inv": scale.view(1, 1),
    }


def _fp8_rows(weight: Tensor) -> dict[str, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def _int8_rows(weight: Tensor) -> dict[str, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def _int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``[in, out]`` numbers of 0 .. 15, and each group's scale and zero point."""
    weight = weight.T
    scale = weight.view(-1, GROUP, weight.shape[1]).abs().amax(1) / 7
    numbers = (weight / scale.repeat_interleave(GROUP, 0)).round().clamp(-8, 7).long() + 8
    return numbers, scale.half(), torch.full_like(scale, 8).long()


def _packed(numbers: Tensor, order=range(8)) -> Tensor:
    """Pack eight numbers of a row into an int32."""
    words = sum(numbers[:, place::8] << (4 * i) for i, place in enumerate(order))
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _gptq(weight: Tensor) -> dict[str, Tensor]:
    numbers, scales, zeros = _int4(weight)
    groups = (torch.arange(len(numbers)) // GROUP).int()
    return {
        "qweight": _packed(numbers.T).T,
        "qzeros": _packed(zeros - 1),
        "scales": scales,
        "g_idx": groups,
    }


def _awq(weight: Tensor) -> dict[str, Tensor]:
    numbers, scales, zeros = _int4(weight)
    return {
        "qweight": _packed(numbers, _AWQ_ORDER),
        "qzeros": _packed(zeros, _AWQ_ORDER),
        "scales": scales,
    }


BATCHES = {"llama": text_batch(50), "qwen2_5_vl": video_batch("qwen2_5_vl", 9)}


def each_format(*others) -> list:
    """Parametrize by a format, and with it others; of two formats the kernels are compiled at
    first."""
    cases = []
    for row, name in enumerate(FORMATS):
        marks = [pytest.mark.thorough] if name in ("gptq", "awq") else []
        cases.append(pytest.param(name, *others[row % len(others)], marks=marks))
    return cases


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
    cache = state.to_dynamic_cache()
    dtype = inspect_model(engine.model).dtype
    keys = None if cache is None else cache.layers[0].keys.dtype
    tokens = [engine.decode(each, max_new_tokens=6).token_ids for each in (state, again)]
    # Though bitsandbytes packs weights anew when it is first run.
    assert engine.parts.weights_digest() == before
    return tokens, dtype, keys


@pytest.mark.parametrize(("name", "family"), each_format(("llama",), ("qwen2_5_vl",)))
def test_tokens_are_those_of_transformers(pool, quantized, family, name, tmp_path):
    path = quantized(family, name)
    batch = BATCHES[family]
    model, _ = load_model(path, "auto", HostGroup.single("cpu"))
    reference = auto_class(family).from_pretrained(path).eval()
    expected = reference.generate(**batch, max_new_tokens=6, do_sample=False)[
        0, batch["input_ids"].shape[1] :
    ]
    for tokens, dtype, keys in pool.run(2, tokens_job, family, str(path), str(tmp_path / "kv")):
        assert tokens == [expected.tolist()] * 2
        assert dtype == reference.get_input_embeddings().weight.dtype and keys in (dtype, None)
    loaded = sum(weight.nbytes for weight in model.parameters())
    file = sum(weight.nbytes for weight in load_file(path / "model.safetensors").values())
    is_dense = name.startswith(("compressed", "fp8"))
    length = {"tokens": 99} if family == "llama" else {"num_frames": 4}
    planned = plan(path, **length).weights
    assert 0.97 < planned / (loaded if is_dense else file) < 1.1


@torch.no_grad()
@pytest.mark.parametrize("name", each_format(()))
def test_fused_kernels_and_chunks_of_rows_compute_the_same(quantized, name):
    model, _ = load_model(quantized("llama", name), "auto", HostGroup.single("cpu"))
    parts = inspect_model(model, "triton")
    decoder = model.get_decoder()
    fused = [
        type(each).__name__ for each in parts.language_model.modules() if hasattr(each, "is_fused")
    ]
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


@pytest.mark.parametrize("stored", ["bfloat16", "float32", None])
def test_weights_that_are_made_dense_have_the_dtype_of_the_model(quantized, tmp_path, stored):
    """Whatever dtype the config names, and the scales have."""
    path = tmp_path / "fp8"
    shutil.copytree(quantized("llama", "fp8"), path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "dtype": stored}))
    for dtype in ("auto", "bfloat16", "float32"):
        engine = Engine.from_pretrained(path, dtype=dtype)
        expected = stored or "float32" if dtype == "auto" else dtype
        assert {weight.dtype for weight in engine.model.parameters()} == {getattr(torch, expected)}
        assert len(engine.generate("What?", max_new_tokens=4).token_ids) == 4


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("fp8", "weight_scale_inv"),
        ("fp8", "layers.0.mlp.up_proj"),
        ("compressed-tensors-fp8", "layers.1.mlp.up_proj.weight_scale"),
        ("compressed-tensors-int8", "layers.1.mlp.up_proj.weight"),
    ],
)
def test_a_quantized_checkpoint_that_lacks_something_is_refused(quantized, tmp_path, name, part):
    path = tmp_path / name
    shutil.copytree(quantized("llama", name), path)
    weights = load_file(path / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if part not in name}
    assert len(kept) < len(weights)
    save_file(kept, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="the checkpoint lacks weights"):
        Engine.from_pretrained(path)


def refused_job(processes: HostGroup, path: str, tensor_parallel: int, **settings) -> str:
    hosts = HostGroup.from_process_group(
        processes.process_group, "cpu", 60, tensor_parallel=tensor_parallel
    )
    return described(lambda: Engine.from_pretrained(path, hosts=hosts, **settings))


def test_what_cannot_run_is_refused_before_weights_are_loaded(
    pool, quantized, checkpoints, tmp_path
):
    path = str(quantized("llama", PLAIN))
    for failure in pool.run(2, refused_job, path, 2):
        assert (
            failure
            == "InvalidConfigError: quantized weights are not split across the processes of a "
            "host: use more hosts"
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
    int4 = {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {}}},
    }
    for settings, reason in (
        ({"quant_method": "aqlm"}, "aqlm"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "unheard"}, "unheard"),
        (int4, "torchao"),
    ):
        (without / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
        if settings["quant_method"] == "gptq" and all(map(_is_installed, FORMATS["gptq"])):
            continue
        if (
            settings["quant_method"] == "gptq"
        ):  # that it cannot be merged comes before what has to be installed for it
            merge = described(lambda: Engine.from_pretrained(without, adapter=tmp_path))
            assert "would round quantized weights again" in merge
        for failure in pool.run(2, refused_job, str(without), 1):
            assert failure.startswith(
                f"UnsupportedModelError: cannot load weights quantized by {reason} on cpu: "
            ), failure


def _is_installed(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None
