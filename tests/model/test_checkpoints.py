"""Checkpoints that lack weights, have others than their config says, or bring code: one error, and
nothing runs."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import apbv
from apbv import Engine, HostGroup, PrefillConfig, SpeculativeConfig

from apbv_tests import families
from apbv_tests.fresh_hosts import described
from apbv_tests.prompts import text_batch
from apbv_tests.scripts import infer

WEIGHTS = "model.safetensors"


def without(*parts: str):
    """A change that leaves out the weights that have one of these in their names."""

    def is_left_out(name: str) -> bool:
        return any(part in name for part in parts)

    def change(weights: dict) -> dict:
        return {name: weight for name, weight in weights.items() if not is_left_out(name)}

    return change


def renamed(weights: dict) -> dict:
    return {f"language_model.{name}": weight for name, weight in weights.items()}


def with_shorter_rows(weights: dict) -> dict:
    return {
        name: weight[:, :-1].contiguous() if "k_proj.weight" in name else weight
        for name, weight in weights.items()
    }


# What is changed, of which family, and what the error names.
CASES = {
    "no head": ("llama", without("lm_head"), "lacks weights of the model: lm_head.weight"),
    "no layer": ("qwen2", without("layers.1."), "model.layers.1.input_layernorm.weight, .* more"),
    "no vision tower": (
        "qwen2_5_vl",
        without("visual"),
        "model.visual.blocks.0.attn.proj.bias, .* more",
    ),
    "no norm": (
        "internvl",
        without("language_model.model.norm"),
        "model.language_model.norm.weight",
    ),
    "no expert": ("qwen3_moe", without("experts.2."), "model.layers.0.mlp.experts"),
    "half an expert": (
        "qwen3_moe",
        without("experts.2.up"),
        "model.layers.0.mlp.experts.gate_up_proj",
    ),
    "no linear layer's gate": (
        "qwen3_5_text",
        without("A_log"),
        "model.layers.0.linear_attn.A_log",
    ),
    "other names": ("llama", renamed, "lm_head.weight, model.embed_tokens.weight, .* more"),
    "other shapes": (
        "llama",
        with_shorter_rows,
        "other shapes than its config says: .*k_proj.weight is 32x63, not 32x64",
    ),
}


@pytest.fixture
def changed(checkpoints, tmp_path):
    """A copy of a checkpoint with a change to its weights."""

    def make(family: str, change, base: Path | None = None) -> Path:
        path = tmp_path / f"changed-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(base or checkpoints(family), path)
        save_file(change(load_file(path / WEIGHTS)), path / WEIGHTS, {"format": "pt"})
        return path

    return make


def test_what_a_checkpoint_lacks_is_named(changed):
    for case, (family, change, message) in CASES.items():
        path = changed(family, change)
        with pytest.raises(ValueError, match=f"^cannot load the model {path}: .*{message}"):
            Engine.from_pretrained(path)
            pytest.fail(case)


def loaded_job(processes: HostGroup, size: int, path: str, settings: dict) -> str | None:
    hosts = HostGroup.from_process_group(processes.process_group, "cpu", 60, tensor_parallel=size)
    return described(lambda: Engine.from_pretrained(path, hosts=hosts, **settings))


def test_every_way_to_load_checks_it(pool, changed, checkpoints):
    base = str(checkpoints("llama"))
    broken = str(changed("llama", without("lm_head")))
    draft = {"speculate": SpeculativeConfig(strategy="vanilla", draft_model=broken)}
    for size, path, settings in ((1, broken, {}), (2, broken, {}), (1, base, draft)):
        for failure in pool.run(2, loaded_job, size, path, settings):
            assert "the checkpoint lacks weights of the model: lm_head.weight" in failure, (
                size,
                settings,
            )
    run = infer("--model", broken, "--prompt", "What?", hosts=2)
    assert run.returncode != 0
    assert "lacks weights of the model: lm_head.weight" in run.stderr


def test_tied_and_older_checkpoints_load(changed, tmp_path):
    """A tied head is not stored; and weights that the model does not have are no error."""
    model = families.build_model("llama")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path / "tied")
    families.build_processor("llama").save_pretrained(tmp_path / "tied")
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / WEIGHTS)
    more = changed(
        "llama", lambda weights: {**weights, "other.weight": torch.ones(2)}, tmp_path / "tied"
    )
    for path in (tmp_path / "tied", more):
        engine = Engine.from_pretrained(path)
        assert engine.model.lm_head.weight is engine.model.model.embed_tokens.weight
    with pytest.raises(ValueError, match=r"lm_head.weight, model.embed_tokens.weight"):
        Engine.from_pretrained(changed("llama", without("embed_tokens"), tmp_path / "tied"))


def mixed_job(processes: HostGroup, size: int, weight: str) -> str | None:
    """Host 1 has another number in one of its weights."""
    hosts = HostGroup.from_process_group(processes.process_group, "cpu", 60, tensor_parallel=size)
    path = apbv.demo.model_path()
    if size > 1:
        model = Engine.from_pretrained(path, hosts=hosts).model
    else:
        model = families.build_model("qwen2_5_vl")
    if weight and hosts.rank == 1:
        with torch.no_grad():
            changed = model.get_parameter(weight)
            changed = changed.to_local() if hasattr(changed, "to_local") else changed
            changed[-1] += 1
    config = PrefillConfig(query_len=4)
    return described(lambda: apbv.prefill(model, text_batch(40), hosts=hosts, config=config))


@pytest.mark.parametrize(
    ("num_processes", "size", "weight", "differs"),
    [
        (2, 1, "", False),
        (2, 1, "lm_head.weight", True),
        (3, 1, "model.visual.blocks.1.norm2.weight", True),
        (4, 2, "", False),
        (4, 2, "lm_head.weight", True),
    ],
)
def test_hosts_with_other_weights_do_not_prefill_together(
    pool, num_processes, size, weight, differs
):
    for failure in pool.run(num_processes, mixed_job, size, weight):
        expected = "a sample of the model's weights of host 1" if differs else "nothing raised"
        assert expected in failure


# ---- code ----

MARK = "ran"
CODE = f"""
from pathlib import Path
Path(__file__).with_name("{MARK}").touch()
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin
class Own(PreTrainedConfig):
    model_type = "own"
class OwnModel(PreTrainedModel):
    pass
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
class OwnProcessor(ProcessorMixin):
    pass
"""


def with_code(path: Path, file: str, fields: dict) -> Path:
    """A checkpoint that names a class of its own in one of its files."""
    (path / "own.py").write_text(CODE)
    config = path / file
    known = json.loads(config.read_text()) if config.exists() else {}
    config.write_text(json.dumps(known | fields))
    return path


OTHER_CLASSES = {
    "config.json": {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"},
    },
    "tokenizer_config.json": {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]},
    },
}


def test_code_of_a_checkpoint_never_runs_and_nobody_is_asked(checkpoints, tmp_path, monkeypatch):
    """transformers would ask on the terminal, and take the first line of standard input for the
    answer."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    for file, fields in OTHER_CLASSES.items():
        path = tmp_path / file.removesuffix(".json")
        shutil.copytree(checkpoints("llama"), path)
        with_code(path, file, fields)
        for load in (
            lambda path=path: Engine.from_pretrained(path),
            lambda path=path: apbv.plan(path, tokens=50),
        ):
            failure = described(load)
            refused = (
                "UnsupportedModelError: cannot load the model" in failure
                and "code of its own, which is never" in failure
            )
            assert refused or (failure == "nothing raised" and file != "config.json"), failure
        assert not list(tmp_path.rglob(MARK))


def test_a_model_that_transformers_knows_is_loaded_without_its_code(
    checkpoints, tmp_path, monkeypatch
):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    path = tmp_path / "known"
    shutil.copytree(checkpoints("llama"), path)
    with_code(
        path,
        "config.json",
        {"auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}},
    )
    (path / "custom_generate").mkdir()
    (path / "custom_generate" / "generate.py").write_text(CODE)
    engine = Engine.from_pretrained(path)
    expected = (
        Engine.from_pretrained(checkpoints("llama")).generate("What?", max_new_tokens=4).token_ids
    )
    assert engine.generate("What?", max_new_tokens=4).token_ids == expected
    assert not list(tmp_path.rglob(MARK))
