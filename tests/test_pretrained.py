"""With real weights: a Qwen2 model, and a smaller one of its family, in folders that two variables name."""

from pathlib import Path

import pytest

from apbv import Engine, HostGroup, SpeculativeConfig

from scripts import ROOT, figures_of
from weights import folder

pytestmark = pytest.mark.pretrained


def test_what_blocks_pass_on_makes_up_for_what_they_do_not_see(tmp_path):
    rows = ["full", "apbv", "apbv, no passing"]
    options = ["--model", folder("APBV_PRETRAINED_DRAFT"), "--tasks", "vt", "--tokens", 1024, "--samples", 1]
    records, _ = figures_of("ruler", tmp_path / "r.jsonl", *options, "--hosts", 4, "--rows", *rows)
    full, whole, alone = (record["kl"] for record in records)
    assert full == 0 and whole < 0.05 < alone


def test_a_draft_changes_no_token():
    engine = Engine.from_pretrained(
        folder("APBV_PRETRAINED"),
        hosts=HostGroup.single("cpu"),
        dtype="float32",
        speculate=SpeculativeConfig(
            strategy="vanilla", draft_model=folder("APBV_PRETRAINED_DRAFT"), keep_losing_draft=True
        ),
    )
    prompt = "Repeat the second sentence of the text, word for word."
    context = Path(ROOT, "LICENSE").read_text()[:1500]
    drafted = engine.generate(prompt, context=context, max_new_tokens=24)
    assert drafted.stats["speculation"]["num_accepted"] > 12
    assert engine.decode(engine.prefill(prompt, context=context), max_new_tokens=24).token_ids == drafted.token_ids
