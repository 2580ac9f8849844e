"""Everything that runs on a GPU, rehearsed on one that is not there: the answers of the CPU, and no fault."""

from dataclasses import replace

import pytest
import torch

from apbv import HostGroup, ReduceConfig, SparseConfig

import families
from answers import decoder_behind
from engines import QUESTION
from pretend_gpu import assert_same_order
from rehearsals import FURTHER_QUESTION, Case, rehearse, resizing_as_on_gpu

SHORT = {"anchor_len": 4, "passing_len": 4}  # so that blocks are compressed
SAMPLED = {"temperature": 0.9, "top_p": 0.9}
TREE = {"num_tree_nodes": 6}


def drafting(strategy: str, **options) -> Case:
    """A draft that is never switched off: what is drawn after that is drawn otherwise."""
    options.setdefault("keep_losing_draft", True)
    request, prefill = options.pop("request", {}), {**SHORT, **options.pop("prefill", {})}
    family = options.pop("family", "qwen2_5_vl")
    return Case(family, prefill=prefill, speculate={"strategy": strategy, **options}, request=request)


def reducing(family: str, reducer: str, reduce: dict | None = None, **prefill) -> Case:
    return Case(family, prefill={"reduce": ReduceConfig(method=reducer, **(reduce or {})), **SHORT, **prefill})


def sparse(prefill: dict | None = None, **settings) -> Case:
    return Case("internvl", prefill={"sparse": SparseConfig(block_size=32, **settings), **(prefill or {})})


# (hosts, case): every family, kind of attention, exchange and draft; what is behind those is thorough.
QUICK = [
    (2, reducing("qwen3_vl", "fastv", {"ratio": 0.3, "layer": 1})),
    (1, Case("qwen3_vl", reuse="kv", request=SAMPLED)),
    (3, Case("qwen2_vl", prefill={"method": "apb", "kv": "sharded", **SHORT})),
    (1, sparse()),
    (1, drafting("tabed", family="llava_onevision")),
    (2, drafting("sd_tree", prefill={"kv": "sharded"})),
    (1, drafting("hippo", family="qwen2_vl", prune="kv", draft_host=True)),
]
THOROUGH = [
    (2, Case("llava_onevision", prefill={"method": "star", "kv": "sharded", **SHORT})),
    (3, Case("internvl", prefill={"method": "zigzag_ring"})),
    (2, reducing("qwen2_5_vl", "sparsevlm", {"layer": 1}, kv="sharded")),
    (1, reducing("llava_onevision", "uv_prune", {"ratio": 0.3})),
    (1, sparse(method="flexprefill", min_blocks=1)),
    (2, sparse(SHORT, method="spargeattn", skip_margin=0.5)),
    (2, Case("qwen2_5_vl", prefill={"importance": "dot", "overlap": False, **SHORT}, request=SAMPLED)),
    (2, Case("qwen2_vl", prefill={"importance": "received", "kv": "sharded", "fused_query": False, **SHORT})),
    (3, Case("qwen3_vl", prefill={"frame_parallel": False, "zigzag": False, **SHORT}, reuse="exact")),
    (3, drafting("hippo", family="qwen3_vl", vision_first=True, draft_host=True, request=SAMPLED)),
    (1, drafting("specvlm", prune="kv", **TREE)),
    (1, drafting("specvlm", family="internvl", num_draft_tokens="auto", request=SAMPLED)),
    (1, drafting("tabed", ensemble="MTCP*", request=SAMPLED)),
    (2, drafting("parallelvlm", family="qwen2_vl", prefill={"kv": "sharded"})),
    (2, drafting("layerskip", prefill={"kv": "sharded"}, request=SAMPLED)),
]
CASES = [*QUICK[::2], *(pytest.param(*case, marks=pytest.mark.thorough) for case in [*QUICK[1::2], *THOROUGH])]


@pytest.mark.parametrize(("num_hosts", "case"), CASES)
def test_the_answer_is_that_of_the_cpu(pool, clip, num_hosts, case):
    if num_hosts == 1:
        results = [rehearse(HostGroup.single("cpu"), case, clip)]
    else:
        results = pool.run(num_hosts, rehearse, case, clip)
    assert_same_order([result.events for result in results])
    for result in results:
        assert result.on_gpu == result.on_cpu
        assert len(result.on_gpu) >= 5


@torch.no_grad()
def regrets_job(hosts, case: Case, clip) -> list[float]:
    """By how much of the largest logit each token of a GPU's last answer falls short of the most probable one.

    The logits are those of the same weights on the CPU, in fp32.
    """
    tokens = rehearse(hosts, case, clip).on_gpu[-5:]
    exact = replace(case, dtype=torch.float32).engine(hosts)
    exact.model.load_state_dict(families.build_model(case.family, dtype=case.dtype).state_dict())
    request = {"video": clip, "num_frames": 8}
    with resizing_as_on_gpu():
        if case.reuse:
            exact.generate(QUESTION, max_new_tokens=5, **request)
        state = exact.prefill(FURTHER_QUESTION if case.reuse else QUESTION, **request)
    rows = decoder_behind(state, exact.model).advance(tokens[:-1])
    if rows is None:
        return []
    logits = torch.cat([state.logits, rows])
    return ((logits.amax(-1) - logits[range(5), tokens]) / logits.abs().amax(-1)).tolist()


@pytest.mark.parametrize(
    ("num_hosts", "case"),
    [
        (1, Case("qwen2_5_vl", torch.float16, reuse="kv")),
        pytest.param(2, Case("internvl", torch.float16, {"method": "ulysses"}), marks=pytest.mark.thorough),
    ],
)
def test_in_half_precision_every_token_is_nearly_the_most_probable(pool, clip, num_hosts, case):
    """Ties are broken by rounding, so that the tokens themselves may be others than the CPU's."""
    if num_hosts == 1:
        regrets = regrets_job(HostGroup.single("cpu"), case, clip)
    else:
        regrets = pool.run(num_hosts, regrets_job, case, clip)[0]
    assert len(regrets) == 5 and max(regrets) < 0.03
