"""PEFT adapters: merged on every host, they give the answers of transformers with peft."""

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

import apbv
from apbv import Engine, HostGroup, PrefillConfig, SpeculativeConfig, plan
from apbv.model.loading import adapters
from apbv.model.parts import inspect_model

from apbv_tests import families
from apbv_tests.fresh_hosts import described
from apbv_tests.prompts import text_batch, video_batch
from apbv_tests.scripts import infer

peft = pytest.importorskip("peft")

# Of every kind that merges in another way: ranks by module, DoRA, a whole module, and the vision
# tower.
SETTINGS = {
    "llama": {"target_modules": ["q_proj", "k_proj", "down_proj"], "rank_pattern": {"k_proj": 2}},
    "qwen2_5_vl": {
        "target_modules": ".*(v_proj|o_proj|qkv|gate_proj)",
        "use_dora": True,
        "modules_to_save": ["lm_head", "embed_tokens"],
    },
}
WEIGHTS = "adapter_model.safetensors"
BATCHES = {"llama": text_batch(50), "qwen2_5_vl": video_batch("qwen2_5_vl", 9)}


def save_adapter(family: str, base: Path, path: Path, config: peft.PeftConfig | None = None) -> str:
    """Save an adapter with random weights."""
    torch.manual_seed(3)
    config = config or peft.LoraConfig(
        r=4, lora_alpha=8, init_lora_weights=False, **SETTINGS[family]
    )
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
    return {
        each: save_adapter(each, checkpoints(each), tmp_path_factory.mktemp(each))
        for each in SETTINGS
    }


def tokens_job(processes: HostGroup, family: str, size: int, path: str, settings: dict) -> tuple:
    hosts = HostGroup.from_process_group(processes.process_group, "cpu", 60, tensor_parallel=size)
    engine = Engine.from_pretrained(path, hosts=hosts, **settings)
    config = PrefillConfig(passing_len=10_000, anchor_len=8, query_len=8)
    state = apbv.prefill(engine.model, BATCHES[family], hosts=hosts, config=config)
    digest = inspect_model(engine.model).weights_digest()
    return engine.decode(state, max_new_tokens=6).token_ids, digest, engine.name


@pytest.mark.parametrize("family", SETTINGS)
def test_tokens_are_those_of_transformers_with_peft(pool, checkpoints, saved, family):
    base = checkpoints(family)
    adapter = saved[family]
    batch = BATCHES[family]

    def tokens_of(model) -> list[int]:
        out = model.generate(**batch, max_new_tokens=6, do_sample=False)
        return out[0, batch["input_ids"].shape[1] :].tolist()

    plain = Engine.from_pretrained(base).model
    without = tokens_of(plain)
    digest_without = inspect_model(plain).weights_digest()
    expected = tokens_of(peft.PeftModel.from_pretrained(plain, adapter).eval())
    assert expected != without
    named = (adapter, {})
    given = (str(base), {"adapter": adapter})
    digests = {digest_without}
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
        # Which is not yet the processor of a model that reads videos.
        tokenizer.save_pretrained(path)
        assert (Engine.from_pretrained(path).processor.chat_template == template) == (
            family == "llama"
        )
        processor.save_pretrained(path)
        assert Engine.from_pretrained(path).processor.chat_template == template


def refused_job(hosts: HostGroup, cases: list[tuple[str, str | None]]) -> list[str]:
    return [
        described(lambda each=each: Engine.from_pretrained(each[0], adapter=each[1], hosts=hosts))
        for each in cases
    ]


def test_what_cannot_be_merged_is_refused_before_weights_are_loaded(
    pool, checkpoints, saved, tmp_path
):
    base = str(checkpoints("llama"))
    others = iter(range(10))

    def changed(**fields) -> str:
        path = tmp_path / str(next(others))
        shutil.copytree(saved["llama"], path)
        config = path / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | fields))
        return str(path)

    prompt_tuning = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    no_weights = changed()
    (Path(no_weights) / WEIGHTS).unlink()
    both = Path(changed())
    shutil.copytree(base, both, dirs_exist_ok=True)
    cases = {
        (saved["llama"], None): None,
        (base, str(tmp_path)): "is not a PEFT adapter: it has no adapter_config.json",
        (
            base,
            "your/adapter",
        ): "your/adapter is not in the local cache, and HF_HUB_OFFLINE forbids to ask the hub",
        (base, "/nowhere"): "the adapter /nowhere does not exist",
        (
            no_weights,
            None,
        ): "has no weights: neither adapter_model.safetensors nor adapter_model.bin",
        (
            changed(base_model_name_or_path=["a", "list"]),
            None,
        ): "names no model: give its model and adapter=",
        (
            changed(base_model_name_or_path="/nowhere"),
            None,
        ): "there is no directory of its base model /nowhere",
        (
            changed(base_model_name_or_path=None),
            None,
        ): "names no model: give its model and adapter=",
        (saved["llama"], saved["llama"]): "has an adapter_config.json itself",
        (str(both), None): "has an adapter_config.json itself",
        (
            save_adapter("llama", base, tmp_path / "prompt", prompt_tuning),
            None,
        ): "PROMPT_TUNING changes no weights",
        (changed(r=8), None): "size mismatch for base_model.model.model.layers.0.self_attn.q_proj",
        (
            changed(target_modules=["q_proj", "up_proj"]),
            None,
        ): "its weights are not those of the model's modules",
        (changed(target_modules=["nothing"]), None): "nothing",
        (str(checkpoints("qwen2")), saved["qwen2_5_vl"]): "cannot merge the adapter",
    }
    for broken in ("config.json", "weights"):
        path = Path(changed())
        name = "adapter_config.json" if broken == "config.json" else WEIGHTS
        (path / name).write_text("{")
        cases[str(path), None] = "cannot "
    with mock.patch.object(adapters, "is_peft_available", return_value=False):
        assert '-e ".[adapters]"' in described(Engine.from_pretrained, saved["llama"])
    for found in pool.run(2, refused_job, list(cases)):
        for case, failure, reason in zip(cases, found, cases.values(), strict=True):
            assert "\n" not in str(failure), case
            if reason is None:
                assert "Error" not in str(failure)
            else:
                assert failure.startswith("UnsupportedModelError: "), (case, failure)
                assert reason in failure, (case, failure)


def test_commands_take_adapters(checkpoints, saved):
    """Planned is the model that the adapter names, with its own processor."""
    base = checkpoints("llama")
    adapter = saved["llama"]
    by_option = infer(
        "--model", base, "--adapter", adapter, "--prompt", "What?", "--max-new-tokens", 4, hosts=1
    )
    assert by_option.returncode == 0, by_option.stderr
    by_name = Engine.from_pretrained(adapter).generate("What?", max_new_tokens=4)
    assert by_option.stdout.splitlines()[0] == by_name.text.splitlines()[0]
    assert plan(adapter, tokens=100).weights == plan(base, tokens=100).weights
    video = {"num_frames": 8, "resolution": (64, 96)}
    planned = [
        plan(path, **video).num_tokens for path in (saved["qwen2_5_vl"], checkpoints("qwen2_5_vl"))
    ]
    assert planned[0] == planned[1]


def test_a_hub_that_cannot_be_reached_is_told_at_once(monkeypatch, checkpoints):
    """Its own client would try every file six times; and the cause is not that something is no
    adapter."""
    monkeypatch.setattr(adapters.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(adapters.constants, "ENDPOINT", "http://127.0.0.1:9")
    with mock.patch("huggingface_hub.utils._http.time.sleep") as slept:
        for settings in (
            {"name": "some/model"},
            {"name": checkpoints("llama"), "adapter": "some/adapter"},
        ):
            message = described(lambda settings=settings: Engine.from_pretrained(**settings))
            assert (
                "not in the local cache, and the hub, http://127.0.0.1:9, cannot be reached"
                in message
            )
    assert not slept.called


# ---- what is merged is what peft computes beside the model ----


def tied_model(family: str):
    """A model whose head is its embedding."""
    model = families.build_model(family)
    model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = True
    model.tie_weights()
    return model


def peft_model(base, config: peft.PeftConfig, path: Path) -> None:
    """Save an adapter with random weights for a model."""
    torch.manual_seed(3)
    adapted = peft.get_peft_model(base, config)
    for parameter in adapted.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.data += 0.1 * torch.randn_like(parameter)
    adapted.save_pretrained(path)


def require_merged(base, merged_model, path: Path, tolerance: float = 1e-5) -> None:
    """Compare a merged adapter with peft's own model, in whose layers the adapter stands beside the
    weights."""
    batch = text_batch(40)
    with torch.no_grad():
        expected = peft.PeftModel.from_pretrained(base, path).eval()(**batch).logits
        found = merged_model.eval()(**batch).logits
    assert (found - expected).abs().max() < tolerance * expected.abs().max()


TIED = {
    "head": {"target_modules": ["lm_head", "q_proj"]},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "one for both": {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
    "head saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "embedding saved": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "some tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5, 70]},
}


@pytest.mark.parametrize("case", TIED)
def test_what_is_added_to_tied_weights_changes_one_of_them(tmp_path, case):
    config = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **TIED[case])
    peft_model(tied_model("llama"), config, tmp_path)
    require_merged(tied_model("llama"), adapters.merged(tied_model("llama"), tmp_path), tmp_path)


def test_tied_weights_are_also_right_where_processes_share_the_model(pool, tmp_path):
    tied_model("llama").save_pretrained(tmp_path / "base")
    families.build_processor("llama").save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **TIED["head"])
    model = tied_model("llama")
    model.name_or_path = str(tmp_path / "base")
    peft_model(model, config, tmp_path / "adapter")
    batch = BATCHES["llama"]
    beside = peft.PeftModel.from_pretrained(tied_model("llama"), tmp_path / "adapter").eval()
    output = beside.generate(**batch, max_new_tokens=6, do_sample=False)
    for tokens, *_ in pool.run(2, tokens_job, "llama", 2, str(tmp_path / "adapter"), {}):
        assert tokens == output[0, batch["input_ids"].shape[1] :].tolist()


Q_PROJ = {"target_modules": ["q_proj"]}
KINDS = {
    "PiSSA": peft.LoraConfig(r=4, init_lora_weights="pissa", **Q_PROJ),
    "OLoRA": peft.LoraConfig(r=4, init_lora_weights="olora", **Q_PROJ),
    "EVA": peft.LoraConfig(r=4, init_lora_weights="eva", **Q_PROJ),
    "SHiRA": peft.ShiraConfig(r=4, **Q_PROJ),
    "VB-LoRA": peft.VBLoRAConfig(r=4, num_vectors=16, vector_length=4, topk=2, **Q_PROJ),
    "WaveFT": peft.WaveFTConfig(n_frequency=10, **Q_PROJ),
    "LoHa": peft.LoHaConfig(r=4, **Q_PROJ),
    "IA3": peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "OFT": peft.OFTConfig(oft_block_size=4, **Q_PROJ),
    "VeRA": peft.VeraConfig(r=4, **Q_PROJ),
    "norms": peft.LNTuningConfig(target_modules=["input_layernorm"]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_method_that_peft_merges_is_merged(checkpoints, tmp_path, kind):
    """Some look at the model's weights, which it has not where it is first seen whether an adapter
    fits."""
    base = checkpoints("llama")
    model = families.build_model("llama")
    model.name_or_path = str(base)
    peft_model(model, KINDS[kind], tmp_path)
    require_merged(families.build_model("llama"), Engine.from_pretrained(tmp_path).model, tmp_path)


# Where a family's text model lies in its checkpoints of earlier releases; it is
# ``model.language_model`` today.
OLDER = {
    "qwen2_5_vl": "model.",
    "qwen3_vl": "model.",
    "internvl": "language_model.model.",
    "llava_onevision": "language_model.model.",
    "llava": "language_model.model.",
    "llava_next": "language_model.model.",
    "llava_next_video": "language_model.model.",
    "video_llama_3": "model.",
    "glm4v": "model.",
}
IN_TEXT_MODEL = r".*language_model.*\.(q_proj|v_proj)"


@pytest.mark.parametrize("family", OLDER)
@pytest.mark.parametrize("trained_on", ["an older release", "the text model"])
def test_adapters_of_older_releases_and_of_the_text_model_fit(tmp_path, family, trained_on):
    """By the names of their weights; a text model's adapter must not find modules of the vision
    tower."""
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        init_lora_weights=False,
        target_modules=IN_TEXT_MODEL,
        rank_pattern={"layers.1.*v_proj": 2},
    )
    peft_model(families.build_model(family), config, tmp_path)
    expected = (
        peft.PeftModel.from_pretrained(families.build_model(family), tmp_path)
        .merge_and_unload()
        .state_dict()
    )
    older = OLDER[family] if trained_on == "an older release" else "model."
    weights = load_file(tmp_path / WEIGHTS)
    assert all("model.language_model." in name for name in weights)
    renamed = {
        name.replace("model.language_model.", older): weight for name, weight in weights.items()
    }
    save_file(renamed, tmp_path / WEIGHTS)
    settings = tmp_path / "adapter_config.json"
    settings.write_text(
        json.dumps(json.loads(settings.read_text()) | {"target_modules": ["q_proj", "v_proj"]})
    )
    for name, weight in (
        adapters.merged(families.build_model(family), tmp_path).state_dict().items()
    ):
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize("is_tied", [True, False])
def test_an_adapter_with_more_tokens_resizes_the_vocabulary(tmp_path, is_tied):
    def larger():
        model = tied_model("llama") if is_tied else families.build_model("llama")
        model.resize_token_embeddings(300, mean_resizing=False)
        return model

    saved = ["embed_tokens"] if is_tied else ["embed_tokens", "lm_head"]
    tying = {"ensure_weight_tying": True} if is_tied else {}
    config = peft.LoraConfig(r=4, init_lora_weights=False, modules_to_save=saved, **Q_PROJ, **tying)
    peft_model(larger(), config, tmp_path)
    plain = tied_model("llama") if is_tied else families.build_model("llama")
    found = adapters.merged(plain, tmp_path)
    assert found.config.vocab_size == found.get_output_embeddings().out_features == 300
    require_merged(larger(), found, tmp_path)


def test_an_adapter_with_half_a_larger_vocabulary_is_refused(checkpoints, tmp_path):
    model = families.build_model("llama")
    model.resize_token_embeddings(300, mean_resizing=False)
    config = peft.LoraConfig(
        r=4, init_lora_weights=False, modules_to_save=["embed_tokens"], **Q_PROJ
    )
    peft_model(model, config, tmp_path)
    with pytest.raises(ValueError, match="300 rows of the embedding and no rows of the head"):
        Engine.from_pretrained(checkpoints("llama"), adapter=tmp_path)
