"""APB's own anchor, with the question in it, against a dense mask over the copy and the prompt."""

from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from transformers import DynamicCache

from apbv import PrefillConfig, SparseConfig

from apbv_tests.families import TEXT_FAMILIES
from apbv_tests.oracle import DenseOracle, as_double, decoder_inputs, run_oracle, with_attention
from apbv_tests.prompts import (
    build,
    check_prefill,
    prefill_job,
    relative_error,
    reset_rope,
    text_batch,
    video_batch,
)

ANCHOR_LEN = 27


@dataclass
class CopiedAnchorOracle(DenseOracle):
    """The copy's tokens come first, and ``anchor_len`` is their number; then the whole prompt, cut
    into blocks."""

    def visible(self, query, key, scale):
        """As the parent's, but the first block sees no copy, nor does the question that sees all of
        the prompt."""
        visible = super().visible(query, key, scale)
        visible[:, self.blocks()[0], : self.anchor_len] = False
        if not self.separate_query:
            visible[:, self.query_start :, : self.anchor_len] = False
        return visible


@contextmanager
def apart(decoder, start: int):
    """Linear attention reads the first rows, which are the copy, and the others as two
    sequences."""
    hybrid = [layer.linear_attn for layer in decoder.layers if hasattr(layer, "linear_attn")]
    for module in hybrid:

        def both(hidden_states, run=module.forward, **options):
            parts = hidden_states[:, :start], hidden_states[:, start:]
            return torch.cat([run(part, **options) for part in parts], dim=1)

        module.forward = both
    yield
    for module in hybrid:
        del module.forward


@torch.no_grad()
def by_definition(
    family: str, batch: dict, query_start: int, prefix: int, settings: dict, num_blocks: int
):
    """Logits, and the KV of the prompt's tokens, of the model run on the copy and the prompt
    together."""
    model = build(family, torch.float64)
    reset_rope(model)
    ids = batch["input_ids"]
    num_tokens = batch["input_ids"].shape[1]
    num_of_context = max(0, ANCHOR_LEN - prefix - (num_tokens - query_start))
    copy = [
        *range(prefix),
        *range(query_start, num_tokens),
        *range(prefix, prefix + num_of_context),
    ]
    seen = decoder_inputs(model, as_double(batch))
    decoder = model.get_decoder()
    embeds = seen["inputs_embeds"] if family == "qwen2_5_vl" else decoder.embed_tokens(ids)
    if family == "qwen2_5_vl":  # where a prompt that has the question first would have its tokens
        first = [*range(prefix), *range(query_start, num_tokens), *range(prefix, query_start)]
        grids = {name: batch[name] for name in ("video_grid_thw", "second_per_grid_ts")}
        kinds = batch["mm_token_type_ids"]
        find = model.model.get_rope_index
        of_first, _ = find(ids[:, first], mm_token_type_ids=kinds[:, first], **grids)
        of_copy = of_first[..., : len(copy)]
        of_prompt, _ = find(ids, mm_token_type_ids=kinds, **grids)
    else:
        of_copy = torch.arange(len(copy))[None]
        of_prompt = torch.arange(num_tokens)[None]
    start = len(copy)
    oracle = CopiedAnchorOracle(
        anchor_len=start,
        query_start=start + query_start,
        num_blocks=num_blocks,
        passing_len=settings["passing_len"],
        separate_query=settings.get("method") == "apb",
        sparse=settings.get("sparse"),
    )
    with with_attention(model, oracle), apart(decoder, start):
        hidden = decoder(
            inputs_embeds=torch.cat([embeds[:, copy], embeds], dim=1),
            position_ids=torch.cat([of_copy, of_prompt], dim=-1),
            use_cache=False,
        ).last_hidden_state
    keys = [states[:, :, start:] for states in oracle.keys]
    values = [states[:, :, start:] for states in oracle.values]
    if not oracle.separate_query:
        return model.lm_head(hidden[:, -1]), keys, values
    cache = DynamicCache()
    for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
        cache.update(k[:, :, :query_start], v[:, :, :query_start], layer)
    hidden = decoder(
        input_ids=ids[:, query_start:],
        position_ids=of_prompt[..., query_start:],
        past_key_values=cache,
    ).last_hidden_state
    keys = [layer.keys for layer in cache.layers]
    values = [layer.values for layer in cache.layers]
    return model.lm_head(hidden[:, -1]), keys, values


SPARSE = SparseConfig(block_size=32, stride=8, threshold=0.3)


@pytest.mark.parametrize(
    ("family", "settings", "num_hosts"),
    [
        ("qwen2", {}, 1),
        ("qwen2", {}, 2),
        ("qwen2", {"zigzag": False}, 3),
        ("qwen2", {"sparse": SPARSE}, 2),
        ("qwen3_next", {}, 2),
        ("qwen3_next", {}, 1),
        ("qwen2_5_vl", {}, 3),
        ("qwen2_5_vl", {"method": "apb"}, 2),
    ],
)
def test_the_copied_anchor_equals_a_dense_mask(on_hosts, family, settings, num_hosts):
    """Also of blocks that attend sparsely to themselves."""
    length = 290 if "sparse" in settings else 130
    if family in TEXT_FAMILIES:
        batch = text_batch(length)
        asked = length - 10
    else:
        batch = video_batch(family)
        asked = None
    settings = {"passing_len": 3, "anchor_query": True, "anchor_len": ANCHOR_LEN, **settings}
    results = on_hosts(num_hosts, prefill_job, family, batch, asked, settings)
    prefix = results[0].start
    query_start = results[0].query_start
    one_block_a_host = settings.get("method") == "apb" or "zigzag" in settings
    num_blocks = num_hosts if one_block_a_host else 2 * num_hosts
    expected, keys, values = by_definition(family, batch, query_start, prefix, settings, num_blocks)
    if family == "qwen3_next":  # every second layer attends
        results[0].kv = results[0].kv[1::2]
    tolerance = 1e-4 if family == "qwen3_next" else 1e-9  # the rule computes in fp32
    check_prefill(results, expected, zip(keys, values, strict=True), tolerance)
    assert not results[0].exact
    if family == "qwen2":  # the switch is not idle, and what is sparse is
        plain = run_oracle(
            build(family, torch.float64), batch, DenseOracle(ANCHOR_LEN, query_start, num_blocks, 3)
        )
        assert relative_error(expected, plain) > 1e-4
    if "sparse" in settings:
        dense, *_ = by_definition(
            family, batch, query_start, prefix, {"passing_len": 3}, num_blocks
        )
        assert relative_error(expected, dense) > 1e-4


def test_no_anchor_to_put_the_question_into():
    for settings, reason in (
        ({"method": "full"}, "not method full"),
        ({"anchor_len": 0}, "not without an anchor"),
    ):
        with pytest.raises(ValueError, match=f"^anchor_query .*: {reason}$"):
            PrefillConfig(anchor_query=True, **settings)
