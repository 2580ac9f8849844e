"""Everything that runs on a GPU, rehearsed on one that is not there: the answers of the CPU, and no
fault."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from apbv import HostGroup, ReduceConfig, SparseConfig

from apbv_tests import families
from apbv_tests.answers import decoder_behind
from apbv_tests.engines import QUESTION
from apbv_tests.pretend_gpu import Events, assert_same_order, rehearsal
from apbv_tests.rehearsals import FURTHER_QUESTION, Case, on_gpus, resizing_as_on_gpu


def rehearse(hosts: HostGroup, case: Case, clip: Path) -> tuple[list[int], list[int], Events]:
    """The tokens of the answers on the CPU and on a pretended GPU a host, and what the host asked
    of that.

    Raises:
        GpuError: a GPU would refuse something, or do it wrong.
    """
    with resizing_as_on_gpu():
        on_cpu = case.ask(case.engine(hosts), clip)
        with rehearsal() as gpu:
            engine = case.engine(on_gpus(hosts), gpu)
            gpu.reset()
            return on_cpu, case.ask(engine, clip), gpu.events


SHORT = {"anchor_len": 4, "passing_len": 4}  # so that blocks are compressed
SAMPLED = {"temperature": 0.9, "top_p": 0.9}


def drafting(
    strategy: str, family: str = "qwen2_5_vl", request=None, prefill=None, **options
) -> Case:
    """A draft that is never switched off: what is drawn after that is drawn otherwise."""
    options = {"strategy": strategy, "keep_losing_draft": True, **options}
    return Case(
        family, prefill={**SHORT, **(prefill or {})}, speculate=options, request=request or {}
    )


def reducing(family: str, reducer: str, reduce: dict | None = None, **prefill) -> Case:
    return Case(
        family,
        prefill={"reduce": ReduceConfig(method=reducer, **(reduce or {})), **SHORT, **prefill},
    )


def sparse(prefill: dict | None = None, **settings) -> Case:
    return Case(
        "internvl", prefill={"sparse": SparseConfig(block_size=32, **settings), **(prefill or {})}
    )


# (hosts, case): families, kinds of attention, exchanges and drafts.
QUICK = [
    (2, reducing("qwen3_vl", "fastvid", {"ratio": 0.3})),
    (2, drafting("hippo", family="qwen2_vl", prune="kv", draft_host=True)),
]
THOROUGH = [
    (3, Case("qwen2_vl", prefill={"method": "apb", "kv": "sharded", **SHORT})),
    (1, drafting("tabed", family="llava_onevision")),
    (1, Case("qwen3_vl", reuse="kv", request=SAMPLED)),
    (2, drafting("sd_tree", prefill={"kv": "sharded"})),
    (3, Case("internvl", prefill={"method": "zigzag_ring"})),
    (2, reducing("qwen2_5_vl", "slowfast", kv="sharded")),
    (1, sparse(method="flexprefill", min_blocks=1)),
    (2, sparse(SHORT, method="spargeattn")),
    (
        2,
        Case(
            "qwen2_vl",
            prefill={"importance": "softmax", "kv": "sharded", "fused_query": False, **SHORT},
        ),
    ),
    (3, drafting("hippo", family="qwen3_vl", draft_host=True, request=SAMPLED)),
    (1, drafting("specvlm", prune="kv", num_tree_nodes=6)),
    (2, Case("qwen3_5", prefill=SHORT)),
]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.thorough) for case in THOROUGH)]


@pytest.mark.parametrize(("num_hosts", "case"), CASES)
def test_the_answer_is_that_of_the_cpu(pool, clip, num_hosts, case):
    results = pool.run(num_hosts, rehearse, case, clip)
    assert_same_order([events for *_, events in results])
    for on_cpu, on_gpu, _ in results:
        assert on_gpu == on_cpu and len(on_gpu) >= 4


@torch.no_grad()
def test_in_half_precision_every_token_is_nearly_the_most_probable(clip):
    """Ties are broken by rounding, so that the tokens themselves may be others than the CPU's.

    They are compared with logits of the same weights on the CPU, in fp32.
    """
    case = Case("qwen2_5_vl", torch.float16, reuse="kv")
    hosts = HostGroup.single("cpu")
    tokens = rehearse(hosts, case, clip)[1][-4:]
    exact = replace(case, dtype=torch.float32).engine(hosts)
    exact.model.load_state_dict(
        families.build_model(case.family, dtype=case.dtype, layers=2).state_dict()
    )
    request = {"video": clip, "num_frames": 6}
    with resizing_as_on_gpu():
        exact.generate(QUESTION, max_new_tokens=4, **request)
        state = exact.prefill(FURTHER_QUESTION, **request)
    logits = torch.cat([state.logits, decoder_behind(state, exact.model).advance(tokens[:-1])])
    assert ((logits.amax(-1) - logits[range(4), tokens]) / logits.abs().amax(-1)).max() < 0.03
