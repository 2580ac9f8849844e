"""Random tiny models of every family, with random methods, lengths and numbers of hosts, against a
dense mask."""

from random import Random

import pytest
import torch

import apbv
from apbv import HostGroup, ModelInputs
from apbv.model.parts import inspect_model

from apbv_tests import families
from apbv_tests.configs import prefill_config
from apbv_tests.families import HYBRID_FAMILIES, TEXT_FAMILIES
from apbv_tests.oracle import as_double, oracle_of, run_oracle
from apbv_tests.prompts import (
    ALL_FAMILIES,
    relative_error,
    shown_batch,
    text_batch,
    unwritten_memory_is_nan,
)

METHODS = ("apbv", "apbv", "apbv", "apb", "star", "zigzag_ring", "ulysses", "full")
EXACT = ("zigzag_ring", "ulysses", "full")
CLOSE = 1e-4  # linear attention and rotary angles are computed in fp32
SCHEDULES = [
    {},
    {"early_passing_len": 4},
    {"early_passing_len": 8},
    {"passing_weights": (2, 1)},
    {"passing_weights": (0, 3, 1)},
]
HAVE_NO_OTHER_ROPE = ("smollm3",)  # some of its layers have no positions


def draw_case(family: str, number: int) -> dict:
    """A model, a prompt and settings: the same ones in every process."""
    random = Random(f"{family} {number}")
    is_text = family in TEXT_FAMILIES
    method = random.choice(METHODS)
    settings = {"method": method, "kv": random.choice(["gathered", "sharded"])}
    if method in ("apbv", "apb"):
        settings |= {
            "passing_len": random.choice([0, 1, 3, 5, 1000]),
            "anchor_len": random.choice([0, 9, 20]),
            **random.choice(SCHEDULES),
            "importance": random.choice(["peak", "softmax", "dot"]),
            "overlap": random.random() < 0.5,
        }
    if method == "apbv":
        settings["zigzag"] = random.random() < 0.7
        settings["fused_query"] = not is_text or random.random() < 0.6
    has_own_query_pass = method in ("apb", "star") or settings.get("fused_query") is False
    if has_own_query_pass and not is_text:
        settings["method"] = "zigzag_ring"  # the oracle's second pass is for texts
        settings = {name: settings[name] for name in ("method", "kv")}
    return {
        "family": family,
        "seed": random.randrange(1000),
        "layers": random.choice([4, 5, 8])
        if family in HYBRID_FAMILIES
        else random.choice([2, 3, 4]),
        "num_tokens": random.randrange(70, 150),
        "num_query_tokens": random.randrange(1, 12),
        "num_frames": random.randrange(9, 24),
        "num_hosts": random.choice([1, 2, 2, 3, 3, 4]),
        "has_dynamic_rope": family not in HAVE_NO_OTHER_ROPE and random.random() < 0.4,
        "settings": settings,
    }


def build_case(case: dict) -> tuple:
    """The model, its prompt, and where a text's question begins."""
    family = case["family"]
    model = families.build_model(
        family, seed=case["seed"], dtype=torch.float64, layers=case["layers"]
    )
    if case["has_dynamic_rope"]:
        config = model.config.get_text_config()
        config.max_position_embeddings = 64
        config.rope_parameters = {**config.rope_parameters, "rope_type": "dynamic", "factor": 20.0}
        decoder = model.get_decoder()
        decoder.rotary_emb = type(decoder.rotary_emb)(config)
    if family in TEXT_FAMILIES:
        return model, text_batch(case["num_tokens"]), case["num_tokens"] - case["num_query_tokens"]
    batch = shown_batch(family, case["num_frames"], "What?", case["seed"])
    return model, as_double(batch), None


def fuzz_job(hosts: HostGroup, case: dict) -> tuple:
    model, batch, query_start = build_case(case)
    inputs = ModelInputs.from_processor(inspect_model(model), batch, hosts, query_start)
    settings = {"on_single_host": True, **case["settings"]}
    config = prefill_config(**settings)
    with unwritten_memory_is_nan():
        state = apbv.prefill(model, inputs, hosts=hosts, config=config)
    return state.logits, state.method, inputs.query_start, inputs.context_start


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:a prompt of")
@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_a_random_prefill_is_that_of_a_dense_mask(pool, family, number):
    case = draw_case(family, number)
    results = pool.run(case["num_hosts"], fuzz_job, case)
    model, batch, _ = build_case(case)
    _, method, query_start, prefix = results[0]
    if method in EXACT:
        expected = model(**batch).logits[:, -1]
    else:
        expected = run_oracle(
            model, batch, oracle_of(case["settings"], case["num_hosts"], query_start, prefix)
        )
    for logits, *_ in results:
        assert relative_error(logits, expected) < CLOSE, case
