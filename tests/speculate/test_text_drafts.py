"""Drafts that read no video: a text-only model, and what it has to share with the target."""

import json
from functools import partial
from unittest.mock import patch

import pytest
import torch

from apbv import Engine, HostGroup, PrefillConfig, SpeculativeConfig
from apbv.model.parts import inspect_model
from apbv.speculate import builders
from apbv.speculate.drafters import ModelDrafter

import families
from engines import QUESTION, build_engine

STEPS = 24


def text_draft_job(hosts: HostGroup, kv: str, path: str, nodes: int | None):
    """The answer with a draft that reads text only; what it read, what it was asked and what it proposed."""
    model, draft = (families.build_model(name, dtype=torch.float64) for name in ("qwen2_5_vl", "qwen2"))
    speculate = SpeculativeConfig(strategy="text_only", num_tree_nodes=nodes, keep_losing_draft=True)
    processor, prefill = families.build_processor("qwen2_5_vl"), PrefillConfig(kv=kv)
    engine = Engine(model, processor, hosts, prefill, speculate=speculate, draft=draft)
    run_prompt, propose = builders.run_prompt, ModelDrafter.propose
    read, asked = [], []

    def reading(parts, input_ids, *args):
        read.append(input_ids[0].tolist())
        return run_prompt(parts, input_ids, *args)

    def proposing(self, tokens, count):
        asked.append((list(tokens), propose(self, tokens, count)))
        return asked[-1][1]

    with patch.object(builders, "run_prompt", reading), patch.object(ModelDrafter, "propose", proposing):
        answer = engine.generate(QUESTION, video=path, num_frames=8, max_new_tokens=STEPS)
    return answer.token_ids, read, [(tokens, proposal.tokens) for tokens, proposal in asked]


@pytest.mark.parametrize(
    ("num_hosts", "kv"), [pytest.param(1, "gathered", marks=pytest.mark.thorough), (2, "sharded")]
)
def test_a_text_only_model_drafts_from_the_text(pool, clip, num_hosts, kv):
    single = build_engine(HostGroup.single(), "qwen2_5_vl", "gathered", None, 0)
    plain = single.generate(QUESTION, video=str(clip), num_frames=8, max_new_tokens=STEPS).token_ids
    results = pool.run(num_hosts, text_draft_job, kv, str(clip), None)
    assert all(tokens == plain for tokens, *_ in results)
    _, (read,), asked = results[0]
    tokenizer = families.build_tokenizer("qwen2_5_vl")
    assert QUESTION in tokenizer.decode(read) and inspect_model(single.model).video_token_id not in read
    model = families.build_model("qwen2", dtype=torch.float64)
    for tokens, proposed in asked:
        ids = torch.tensor([[*read, *tokens]])
        with torch.no_grad():
            logits = model(input_ids=torch.cat([ids, torch.tensor([proposed])], dim=1)).logits[
                0, ids.shape[1] - 1 : -1
            ]
        assert proposed == logits.argmax(dim=-1).tolist()
    for tokens, *_ in pool.run(num_hosts, text_draft_job, kv, str(clip), 6):
        assert tokens == plain


@pytest.mark.parametrize("agrees", [True, False])
def test_a_text_only_draft_has_the_targets_tokens(tmp_path, agrees):
    families.save_checkpoint("qwen2_5_vl", tmp_path / "target")
    folder = families.save_checkpoint("qwen2", tmp_path / "draft")
    if not agrees:
        saved = json.loads((folder / "tokenizer.json").read_text())
        vocabulary = saved["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
        (folder / "tokenizer.json").write_text(json.dumps(saved))
    speculate = SpeculativeConfig(strategy="text_only", draft_model=str(folder))
    load = partial(Engine.from_pretrained, tmp_path / "target", speculate=speculate, hosts=HostGroup.single())
    if agrees:
        assert load().draft_model is not None
        return
    with pytest.raises(ValueError, match=r"the draft has other tokens than the target: \d+ is '[ab]', not '[ab]'"):
        load()
