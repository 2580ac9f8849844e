"""Which visual tokens a draft sees: scores on several hosts against their definitions on one."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import product

import pytest
import torch

from apbv import HostGroup, prefill
from apbv.kernels import spatial_variety, temporal_change
from apbv.model.parts import inspect_model
from apbv.prefilling.encoding.vision import encode_visual
from apbv.prefilling.reduction import choosing
from apbv.prefilling.reduction.frames import frame_shape
from apbv.speculate.strategies import builders, score_observers
from apbv.speculate.strategies.hippo import local_semantics, standardised
from apbv.speculate.strategies.table import make_observer
from apbv.testing.simulated import simulate

from apbv_tests import families
from apbv_tests.configs import prefill_config, speculative_config
from apbv_tests.pairs import each_choice
from apbv_tests.prompts import UNCOMPRESSED, as_inputs, build, reset_rope, video_batch

DOUBLE = torch.float64


# ---- attention ----


@cache
def seen_by_the_question(family: str):
    """By the model itself, in fp64: attention of the question to visual tokens ``[L, Hq, n_q, n]``.

    And their cosines to all tokens of text, as each layer gets them.
    """
    model = families.build_model(family, dtype=DOUBLE)
    batch = video_batch(family)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(**batch, output_attentions=True, output_hidden_states=True)
    is_visual = inspect_model(model).is_visual(batch["input_ids"][0])
    after = int(is_visual.nonzero()[-1]) + 1
    units = [torch.nn.functional.normalize(states[0], dim=-1) for states in output.hidden_states]
    weights = torch.stack(output.attentions)[:, 0, :, after:, is_visual]
    return weights, [states[is_visual] @ states[~is_visual].T for states in units]


def overheard(observer, decoder) -> None:
    """Another thread runs the same decoder while the observer observes its first layer."""
    observe = observer.on_hidden

    def on_hidden(*args):
        observer.on_hidden = observe
        with ThreadPoolExecutor(1) as executor:
            executor.submit(
                decoder, input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False
            ).result()
        observe(*args)

    observer.on_hidden = on_hidden


def watched_job(
    hosts: HostGroup, family: str, settings: dict, most_scores: int = score_observers.MOST_SCORES
):
    model = build(family, DOUBLE)
    parts = inspect_model(model)
    inputs = as_inputs(family, video_batch(family), None, hosts, DOUBLE)
    config = prefill_config(passing_len=UNCOMPRESSED, on_single_host=True, **settings)
    watching = [score_observers.Relevance(), score_observers.HeadAttention()]
    watching += [
        make_observer(speculative_config(keep="uv_prune", uv_layer=last), parts) for last in (1, 20)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score_observers, "MOST_SCORES", most_scores)
        for observer in watching:
            overheard(observer, parts.language_model)
            prefill(model, inputs, hosts=hosts, config=config, observer=observer)
            assert not any(layer._forward_pre_hooks for layer in parts.language_model.layers)
    return [observer.result() for observer in watching]


@pytest.mark.parametrize(
    ("family", "num_hosts", "settings", "most_scores"),
    [
        ("internvl", 1, {"method": "full"}, 300),
        ("qwen2_5_vl", 3, {"method": "apb"}, 2**26),
        ("internvl", 2, {"fused_query": False}, 300),
        ("qwen2_5_vl", 3, {"zigzag": False, "kv": "sharded"}, 2**26),
    ],
    ids=str,
)
def test_visual_tokens_are_scored_as_defined(pool, family, num_hosts, settings, most_scores):
    visual, cosines = seen_by_the_question(family)
    by_layer = (visual / visual.sum(dim=-1, keepdim=True)).mean(dim=(1, 2))
    num_kv_heads = inspect_model(build(family, DOUBLE)).num_kv_heads
    by_head = visual.mean(dim=2).unflatten(1, (num_kv_heads, -1)).sum(dim=2)
    # ParallelVLM's Eq. 3 as printed. The inputs of the last of 3 layers are the deepest states that
    # count: L is clamped.
    changes = [cosines[1] - cosines[0], cosines[2] - cosines[1]]
    similar = [changes[0].sum(dim=1), (changes[0] + changes[1]).sum(dim=1)]
    for attention, heads, *others in pool.run(
        num_hosts, watched_job, family, settings, most_scores
    ):
        for ours, expected in ((attention, by_layer.mean(dim=0)), (torch.stack(heads), by_head)):
            torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-7)
        for ours, expected in zip(others, similar, strict=True):
            torch.testing.assert_close(ours.double(), expected, rtol=1e-3, atol=1e-4)


def test_methods_that_share_out_the_question_cannot_be_watched():
    with pytest.raises(ValueError, match="attention with ulysses"):
        simulate(2, partial(watched_job, family="qwen2_5_vl", settings={"method": "ulysses"}))


# ---- HIPPO's scores ----


def semantics_job(hosts: HostGroup, family: str):
    model = build(family, torch.float32)
    parts = inspect_model(model)
    inputs = as_inputs(family, video_batch(family), None, hosts)
    rows = encode_visual(parts, inputs.visual)
    scores = local_semantics(parts, inputs, rows, hosts)
    return scores, frame_shape(parts, inputs), rows


@each_choice(family=families.VIDEO_FAMILIES, num_hosts=[3, 2])
def test_hosts_score_their_own_frames_as_one_host_would(pool, family, num_hosts):
    reset_rope(build(family, torch.float32))
    _, (height, width), rows = semantics_job(HostGroup.single(), family)
    hidden = build(family, torch.float32).get_decoder().config.hidden_size
    size = height * width
    whole = rows[: len(rows) // size * size, :hidden].reshape(-1, size, hidden)
    expected = standardised(temporal_change(whole), unit=1.0)
    expected = expected + standardised(spatial_variety(whole, height, width), unit=1.0)
    for scores, shape, _ in pool.run(num_hosts, semantics_job, family):
        assert shape == (height, width)
        torch.testing.assert_close(
            scores[: expected.numel()], expected.flatten(), rtol=1e-4, atol=1e-4
        )
        assert scores[expected.numel() :].isinf().all() and len(scores) == len(rows)


# ---- choosing ----


def test_what_is_best_or_spread_or_drawn_is_kept_in_order():
    assert choosing.keep_best(torch.tensor([1.0, 5.0, 5.0, 2.0, 9.0, 5.0]), 3).tolist() == [1, 2, 4]
    for total, count in ((9, 4), (100_003, 77_777)):
        kept = choosing.keep_even(total, count)
        steps = kept.diff()
        assert len(kept) == count and kept[[0, -1]].tolist() == [0, total - 1]
        assert steps.min() >= 1 and steps.max() - steps.min() <= 1
    first, again, other = (builders.keep_random(100, 10, seed).tolist() for seed in (1, 1, 2))
    assert first == again != other and len(set(first)) == 10 and first == sorted(first)


def test_specvlm_keeps_a_share_of_the_attention_and_spreads_the_rest():
    """The fewest tokens that hold so much of it, and a stride over what is left."""
    attention = torch.tensor([1.0, 1, 1, 20, 1, 1, 15, 1, 1, 1, 1, 1, 1, 40, 1, 1]) / 88
    assert builders.keep_specvlm(attention, 5).tolist() == [0, 4, 9, 13, 15]
    # Where those that hold the share are more than may be kept, the best of them.
    assert builders.keep_specvlm(torch.tensor([1.0, 2, 1, 2, 1, 1]), 1).tolist() == [1]
    for count, scores in product(range(1, 17), (attention, torch.ones(16), torch.zeros(16))):
        kept = builders.keep_specvlm(scores, count)
        assert len(kept) == count and kept.unique().tolist() == kept.tolist()
    assert builders.keep_specvlm(torch.zeros(6), 3).tolist() == [0, 1, 5]
