"""PEFT adapters: merged on every host, they give the answers of transformers with peft."""

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch

import apbv
from apbv import Engine, HostGroup, PrefillConfig, SpeculativeConfig, plan
from apbv.model import adapters
from apbv.model.parts import inspect_model

import families
from fresh_hosts import described
from prompts import text_batch, video_batch
from scripts import infer

peft = pytest.importorskip("peft")

# Of every kind that merges in another way: ranks by module, DoRA, a whole module, and the vision tower.
SETTINGS = {
    "llama": {"target_modules": ["q_proj", "k_proj", "down_proj"], "rank_pattern": {"k_proj": 2}},
    "qwen2_5_vl": {
        "target_modules": ".*(v_proj|o_proj|qkv|gate_proj)",
        "use_dora": True,
        "modules_to_save": ["lm_head", "embed_tokens"],
    },
}
BATCHES = {"llama": text_batch(50), "qwen2_5_vl": video_batch("qwen2_5_vl", 9)}


def save_adapter(family: str, base: Path, path: Path, config: peft.PeftConfig | None = None) -> str:
    """Save an adapter with random weights."""
    torch.manual_seed(3)
    config = config or peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **SETTINGS[family])
    config.base_model_name_or_path = str(base)
    model = families.build_model(family)
    model.name_or_path = str(base)
    adapted = peft.get_peft_model(model, config)
    for parameter in adapted.parameters():
        if parameter.requires_grad:  # where a whole module is replaced
            parameter.data += 0.1 * torch.randn_like(parameter)
    adapted.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def saved(checkpoints, tmp_path_factory):
    return {each: save_adapter(each, checkpoints(each), tmp_path_factory.mktemp(each)) for each in SETTINGS}


def tokens_job(processes: HostGroup, family: str, size: int, path: str, settings: dict) -> tuple:
    hosts = HostGroup.from_process_group(processes._groups.data, "cpu", 60, tensor_parallel=size)
    engine = Engine.from_pretrained(path, hosts=hosts, **settings)
    config = PrefillConfig(passing_len=10_000, anchor_len=8, query_len=8)
    state = apbv.prefill(engine.model, BATCHES[family], hosts=hosts, config=config)
    digest = inspect_model(engine.model).weights_digest()
    return engine.decode(state, max_new_tokens=6).token_ids, digest, engine.name


@pytest.mark.parametrize("family", SETTINGS)
def test_tokens_are_those_of_transformers_with_peft(pool, checkpoints, saved, family):
    base, adapter, batch = checkpoints(family), saved[family], BATCHES[family]

    def tokens_of(model) -> list[int]:
        out = model.generate(**batch, max_new_tokens=6, do_sample=False)
        return out[0, batch["input_ids"].shape[1] :].tolist()

    plain = Engine.from_pretrained(base).model
    without, digest_without = tokens_of(plain), inspect_model(plain).weights_digest()
    expected = tokens_of(peft.PeftModel.from_pretrained(plain, adapter).eval())
    assert expected != without
    named, given, digests = (adapter, {}), (str(base), {"adapter": adapter}), {digest_without}
    for size, (path, settings) in ((1, named), (2, given)):
        found = pool.run(2, tokens_job, family, size, path, settings)
        for tokens, _, name in found:
            assert tokens == expected
            assert name == (path if not settings else f"{base}+{adapter}")
        digests.add(found[0][1])  # which is a host's, also where its processes share the model
    assert len(digests) == 2


def test_a_draft_may_be_an_adapter(checkpoints, saved):
    base = checkpoints("llama")
    config = SpeculativeConfig(strategy="vanilla", draft_model=saved["llama"], num_draft_tokens=3)
    engine = Engine.from_pretrained(base, adapter=saved["llama"], speculate=config)
    speculation = engine.generate("What?", max_new_tokens=8).stats["speculation"]
    assert speculation["num_accepted"] == speculation["num_drafted"] > 0


def test_an_adapter_brings_its_own_tokenizer_or_processor(checkpoints, saved, tmp_path):
    for family in SETTINGS:
        path = tmp_path / family
        shutil.copytree(saved[family], path)
        template = "{{ 'its own' }}"
        processor = families.build_processor(family)
        assert Engine.from_pretrained(path).processor.chat_template == processor.chat_template
        tokenizer = getattr(processor, "tokenizer", processor)
        processor.chat_template = tokenizer.chat_template = template
        tokenizer.save_pretrained(path)  # which is not yet the processor of a model that reads videos
        assert (Engine.from_pretrained(path).processor.chat_template == template) == (family == "llama")
        processor.save_pretrained(path)
        assert Engine.from_pretrained(path).processor.chat_template == template


def refused_job(hosts: HostGroup, cases: list[tuple[str, str | None]]) -> list[str]:
    return [
        described(lambda each=each: Engine.from_pretrained(each[0], adapter=each[1], hosts=hosts)) for each in cases
    ]


def test_what_cannot_be_merged_is_refused_before_weights_are_loaded(pool, checkpoints, saved, tmp_path):
    base, others = str(checkpoints("llama")), iter(range(10))

    def changed(**fields) -> str:
        path = tmp_path / str(next(others))
        shutil.copytree(saved["llama"], path)
        config = path / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | fields))
        return str(path)

    prompt_tuning = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    both = Path(changed())
    shutil.copytree(base, both, dirs_exist_ok=True)
    cases = {
        (saved["llama"], None): None,
        (base, str(tmp_path)): "is not a PEFT adapter: it has no adapter_config.json",
        (changed(base_model_name_or_path="/nowhere"), None): "there is no such directory as its base, /nowhere",
        (changed(base_model_name_or_path=None), None): "names no model: give its model and adapter=",
        (saved["llama"], saved["llama"]): "has an adapter_config.json itself",
        (str(both), None): "has an adapter_config.json itself",
        (save_adapter("llama", base, tmp_path / "prompt", prompt_tuning), None): "PROMPT_TUNING changes no weights",
        (changed(r=8), None): "size mismatch for base_model.model.model.layers.0.self_attn.q_proj",
        (changed(target_modules=["q_proj", "up_proj"]), None): "its weights are not those of the model's modules",
        (changed(target_modules=["nothing"]), None): "nothing",
        (str(checkpoints("qwen2")), saved["qwen2_5_vl"]): "cannot merge the adapter",
    }
    for broken in ("config.json", "weights"):
        path = Path(changed())
        name = "adapter_config.json" if broken == "config.json" else "adapter_model.safetensors"
        (path / name).write_text("{")
        cases[str(path), None] = "cannot "
    with mock.patch.object(adapters, "is_peft_available", return_value=False):
        assert "pip install 'apbv[adapters]'" in described(Engine.from_pretrained, saved["llama"])
    for found in pool.run(2, refused_job, list(cases)):
        for case, failure, reason in zip(cases, found, cases.values(), strict=True):
            assert "\n" not in str(failure), case
            assert reason is None or (failure.startswith("ValueError: ") and reason in failure), (case, failure)
            assert reason is not None or "ValueError" not in str(failure)


def test_commands_take_adapters(checkpoints, saved):
    """Planned is the model that the adapter names, with its own processor."""
    base, adapter = checkpoints("llama"), saved["llama"]
    by_option = infer("--model", base, "--adapter", adapter, "--prompt", "What?", "--max-new-tokens", 4, hosts=1)
    assert by_option.returncode == 0, by_option.stderr
    by_name = Engine.from_pretrained(adapter).generate("What?", max_new_tokens=4)
    assert by_option.stdout.splitlines()[0] == by_name.text.splitlines()[0]
    assert plan(adapter, tokens=100).weights == plan(base, tokens=100).weights
    video = {"num_frames": 8, "resolution": (64, 96)}
    planned = [plan(path, **video).num_tokens for path in (saved["qwen2_5_vl"], checkpoints("qwen2_5_vl"))]
    assert planned[0] == planned[1]
