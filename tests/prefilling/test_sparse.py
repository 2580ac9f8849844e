"""Sparse attention: which blocks are chosen, and what the methods make of them, against loops in fp64."""

import pytest
import torch

from apbv import Engine, HostGroup, PrefillConfig, ReduceConfig, SparseConfig, demo, prefill
from apbv.kernels import ListedBlocks
from apbv.prefilling.methods.block_selection import BLOCK_SELECTION

from oracle import DenseOracle, as_double, oracle_of, run_oracle
from prompts import as_inputs, build, hugging_face, relative_error, reset_rope, text_batch, video_batch
from sparse_oracle import chosen_pairs

ALONE = HostGroup.single("cpu")


def drifting_states(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """q ``[1, 4, l, 16]`` and k ``[1, 2, l, 16]``: stretches of rows that are alike, and others that are not."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    states = []
    for heads in (4, 2):
        topics = 2 * randn(heads, -(-tokens // 20), 16).repeat_interleave(20, dim=1)[:, :tokens]
        noise = torch.rand(heads, -(-tokens // 33), 1, generator=generator).repeat_interleave(33, dim=1)[
            :, :tokens
        ]
        states.append((topics + 4 * noise**2 * randn(heads, tokens, 16))[None])
    return tuple(states)


def pairs_of(kept: torch.Tensor, sparse: SparseConfig, tokens: int) -> torch.Tensor:
    """Which key each query sees, bool ``[Hq, l, l]``."""
    kept = ListedBlocks.of(kept, sparse.block_size, sparse.key_block).kept[0]
    own = torch.arange(tokens) // sparse.block_size
    pairs = kept.repeat_interleave(sparse.block_size, dim=1).repeat_interleave(sparse.key_block, dim=2)
    return (pairs[:, :tokens, :tokens] | (own[:, None] == own)) & torch.ones(
        tokens, tokens, dtype=torch.bool
    ).tril()


@pytest.mark.parametrize(
    "sparse",
    [
        SparseConfig(block_size=32, stride=8),
        SparseConfig(block_size=32, stride=16, threshold=0.5),
        SparseConfig(block_size=64, stride=4, threshold=0.95),
        SparseConfig(block_size=32, stride=2, threshold=0.01),
        SparseConfig(method="spargeattn", block_size=32),
        SparseConfig(method="spargeattn", block_size=32, threshold=0.5, similarity=0.5),
        SparseConfig(method="spargeattn", block_size=64, threshold=0.01, similarity=-1),
        SparseConfig(method="spargeattn", block_size=32, similarity=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens", [1, 64, 201])
def test_the_chosen_blocks_are_those_of_the_papers(sparse, tokens):
    computed = 0.0
    for seed in range(2):
        q, k = drifting_states(tokens, seed)
        kept = BLOCK_SELECTION[sparse.method](q, k, 0.25, sparse, "torch")
        pairs = pairs_of(kept, sparse, tokens)
        assert torch.equal(pairs, chosen_pairs(q[0], k[0], 0.25, sparse))
        computed += float(pairs.sum()) / (2 * 4 * tokens * (tokens + 1) / 2)
    # What is chosen is neither everything nor only what is chosen always.
    if tokens > 200:
        assert (computed == 1) == (sparse.similarity == 1)
        assert computed > 0.25


def test_of_equal_scores_the_earlier_block_is_taken():
    q, k = torch.zeros(1, 1, 320, 16), torch.zeros(1, 1, 320, 16)
    kept = BLOCK_SELECTION["xattention"](q, k, 1.0, SparseConfig(block_size=32, threshold=0.5), "torch")
    assert kept[0, 0, 9].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 9]
    q[..., 0], k[..., 0] = 1, 1
    k[:, :, 160:, 1] = 1e-3  # the mean key is subtracted first: what is left is alike within blocks
    k[:, :, :160, 1] = -1e-3
    sparse = SparseConfig(method="spargeattn", block_size=32, threshold=0.52)
    kept = BLOCK_SELECTION["spargeattn"](q, k, 1.0, sparse, "torch")
    assert kept[0, 0, 9].nonzero().flatten().tolist() == list(range(10))


# ---- prefill ----

XATTENTION = SparseConfig(block_size=32, stride=8, threshold=0.3)
SPARGE = SparseConfig(method="spargeattn", block_size=32, threshold=0.4, similarity=-1)


def prefill_job(hosts: HostGroup, family: str, batch: dict, query_start, settings: dict):
    inputs = as_inputs(family, batch, query_start, hosts, torch.float64)
    state = prefill(build(family, torch.float64), inputs, hosts=hosts, config=PrefillConfig(**settings))
    gathered = state.to_dynamic_cache()
    kv = None if gathered is None else [(layer.keys, layer.values) for layer in gathered.layers]
    return state.logits, kv, state.method, state.exact, state.density


def check(results, model, batch, oracle, exact):
    expected = run_oracle(model, as_double(batch), oracle)
    assert relative_error(expected, exact) > 1e-4  # or a test would prove nothing
    logits, kv, *_ = results[0]
    assert relative_error(logits, expected) < 1e-6
    for layer, (keys, values) in enumerate(kv):
        assert relative_error(keys, oracle.keys[layer]) < 1e-6
        assert relative_error(values, oracle.values[layer]) < 1e-6
    assert all(relative_error(result[0], logits) < 1e-6 for result in results)
    assert not any(is_exact for *_, is_exact, _ in results)


@pytest.mark.parametrize("family", ["qwen2", "qwen2_5_vl"])
@pytest.mark.parametrize("num_hosts", [1, 2])
@pytest.mark.parametrize("sparse", [XATTENTION, SPARGE], ids=lambda sparse: sparse.method)
def test_methods_of_one_host_equal_the_dense_definition(pool, sparse, num_hosts, family):
    batch, start = (text_batch(301), 290) if family == "qwen2" else (video_batch(family, 200), None)
    # Full attention with sparse blocks is the method of their name.
    method = {1: sparse.method, 2: "full"}[num_hosts]
    results = pool.run(num_hosts, prefill_job, family, batch, start, {"method": method, "sparse": sparse})
    assert {result[2] for result in results} == {sparse.method}
    model = build(family, torch.float64)
    reset_rope(model)
    tokens = batch["input_ids"].shape[1]
    oracle = DenseOracle(0, tokens, 1, 0, "received", sparse=sparse)
    check(results, model, batch, oracle, hugging_face(family, torch.float64, as_double(batch))[0])
    (density,) = {result[4] for result in results}
    assert 0.2 < density < 0.9


CASES = {
    "apbv": {},
    "apbv without overlap": {"overlap": False},
    "no anchor": {"anchor_len": 0, "passing_len": 0},
    "apb": {"method": "apb"},
    "star": {"method": "star"},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_hosts", [1, 2, 3, 4])
@pytest.mark.parametrize("sparse", [XATTENTION, SPARGE], ids=lambda sparse: sparse.method)
@pytest.mark.pairwise
def test_blocks_attend_sparsely_to_themselves(pool, sparse, num_hosts, case):
    length = 130 * num_hosts * (1 if case in ("apb", "star") else 2) + 37
    batch, query_start = text_batch(length), length - 10
    settings = {"anchor_len": 21, "passing_len": 5, **CASES[case]}
    results = pool.run(
        num_hosts, prefill_job, "qwen2", batch, query_start, {**settings, "sparse": sparse, "on_single_host": True}
    )
    oracle = oracle_of({**settings, "sparse": sparse}, num_hosts, query_start, 0)
    # What the blocks would see without sparse attention.
    dense = run_oracle(build("qwen2", torch.float64), batch, oracle_of(settings, num_hosts, query_start, 0))
    if (case, num_hosts) == ("star", 1):  # all of it is the anchor, which stays dense
        assert relative_error(results[0][0], dense) < 1e-6 and results[0][4] is None
        return
    check(results, build("qwen2", torch.float64), batch, oracle, dense)
    (density,) = {result[4] for result in results}
    assert 0.2 < density < 0.95


def test_a_video_with_apbv(pool):
    family, settings = "qwen2_5_vl", {"anchor_len": 16, "passing_len": 4, "sparse": XATTENTION}
    batch = video_batch(family, 240)
    inputs = as_inputs(family, batch, None, ALONE, torch.float64)
    results = pool.run(2, prefill_job, family, batch, None, settings)
    model = build(family, torch.float64)
    oracles = [
        oracle_of({**settings, "sparse": sparse}, 2, inputs.query_start, inputs.context_start)
        for sparse in (None, XATTENTION)
    ]
    reset_rope(model)
    dense = run_oracle(model, as_double(batch), oracles[0])
    reset_rope(model)
    check(results, model, batch, oracles[1], dense)


@pytest.mark.parametrize("method", ["xattention", "spargeattn", "apbv"])
@pytest.mark.parametrize("num_hosts", [1, 3])
def test_threshold_1_is_dense(pool, method, num_hosts):
    sparse = SparseConfig(method="xattention" if method == "apbv" else method, threshold=1, block_size=32)
    batch = text_batch(230)
    settings = {"method": method, "sparse": sparse, "passing_len": 10**6}
    expected, cache = hugging_face("qwen2", torch.float64, batch)
    for logits, kv, _, exact, density in pool.run(num_hosts, prefill_job, "qwen2", batch, 220, settings):
        assert relative_error(logits, expected) < 1e-9
        assert exact and density is None
        for (keys, values), layer in zip(kv or [], cache.layers, strict=kv is not None):
            assert relative_error(keys, layer.keys) < 1e-9 and relative_error(values, layer.values) < 1e-9


@pytest.mark.parametrize("sparse", [XATTENTION, SPARGE], ids=lambda sparse: sparse.method)
def test_triton_chooses_and_computes_the_same(sparse):
    batch, config = text_batch(100), PrefillConfig(method=sparse.method, sparse=sparse, backend="triton")
    model = build("qwen2", torch.float32)
    logits = prefill(model, as_inputs("qwen2", batch, 90, ALONE), hosts=ALONE, config=config).logits
    oracle = DenseOracle(0, 100, 1, 0, "received", sparse=sparse)
    expected = run_oracle(build("qwen2", torch.float64), batch, oracle)
    assert relative_error(expected, hugging_face("qwen2", torch.float64, batch)[0]) > 1e-3
    assert relative_error(logits, expected) < 1e-4


@pytest.mark.parametrize("method", ["xattention", "spargeattn"])
def test_the_demo_answers_with_less_attention(method):
    config = PrefillConfig(method=method, sparse=SparseConfig(method=method, block_size=32))
    engine = Engine.from_pretrained("demo", prefill=config, hosts=ALONE)
    answer = engine.generate(demo.DEMO_QUESTION, video=demo.video_path())
    assert answer.text == "J"
    assert answer.stats["method"] == method and 0.5 < answer.stats["attention_density"] < 0.9


def test_the_density_is_that_of_all_layers_however_few_tokens_later_ones_have(monkeypatch):
    """Behind the first of three layers one visual token is left: all blocks of so few tokens are computed."""
    batch, sparse = video_batch("qwen2_5_vl", 120), SparseConfig(block_size=32, threshold=0.3)
    inputs = as_inputs("qwen2_5_vl", batch, None, ALONE, torch.float64)
    told, gather = [], HostGroup.gather_floats
    monkeypatch.setattr(HostGroup, "gather_floats", lambda hosts, mine: told.append(mine) or gather(hosts, mine))
    config = PrefillConfig(
        method="xattention", sparse=sparse, reduce=ReduceConfig(method="fastv", ratio=1e-6, layer=1)
    )
    state = prefill(build("qwen2_5_vl", torch.float64), inputs, hosts=ALONE, config=config)
    lengths = inputs.num_tokens, inputs.num_tokens - inputs.num_visual_tokens + 1
    assert lengths[0] > 200 and lengths[1] < 64
    of_first, of_others = (4 * n * (n + 1) // 2 for n in lengths)  # scores of four heads
    computed, visible = told[-1]
    assert visible == of_first + 2 * of_others and computed > 2 * of_others
    assert state.density == computed / visible and 0.2 < state.density < 0.9
