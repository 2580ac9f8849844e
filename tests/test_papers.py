"""Every method that the papers' tables compare is here, by the settings that make it.

A row of a table is a paper's name for a method, and this project's settings for it. What the
papers compare with and this project lacks is listed, too, as expected to fail: a test that begins
to pass says that the row has to be moved.
"""

import re
import tomllib
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import pytest

from apbv import PrefillConfig, ReduceConfig, SparseConfig, SpeculativeConfig
from apbv.config import TabedConfig
from apbv.model.families import VISION_FAMILIES
from apbv.prefilling.methods import METHODS
from apbv.prefilling.methods.block_selection import BLOCK_SELECTION
from apbv.prefilling.reduction import LAYER_REDUCERS, REDUCERS
from apbv.speculate.strategies.table import STRATEGIES

from apbv_tests.configs import prefill_config, speculative_config
from apbv_tests.documents import ROOT, cells_in

Config = PrefillConfig | SpeculativeConfig


class Row(NamedTuple):
    """A method of a paper's table.

    Attributes:
        table: the paper and its table or figure.
        name: the paper's name of the method.
        config: makes the settings for it.
    """

    table: str
    name: str
    config: Callable[[], Config]


def prefill(table: str, name: str, **settings) -> Row:
    return Row(table, name, lambda: prefill_config(**settings))


def sparse(table: str, name: str, method: str, **settings) -> Row:
    def config() -> PrefillConfig:
        return PrefillConfig(method="full", sparse=SparseConfig(method=method, **settings))

    return Row(table, name, config)


def reduction(table: str, name: str, method: str, **settings) -> Row:
    def config() -> PrefillConfig:
        return PrefillConfig(method="full", reduce=ReduceConfig(method=method, **settings))

    return Row(table, name, config)


def draft(table: str, name: str, strategy: str, **settings) -> Row:
    return Row(table, name, lambda: speculative_config(strategy=strategy, **settings))


APBV_1 = "APB-V, Tables 1 and 2"
APBV_4 = "APB-V, Table 4"
HIPPO_1 = "HIPPO, Table 1"
HIPPO_3 = "HIPPO, Table 3"
HIPPO_6 = "HIPPO, Figure 6"
HIPPO_7 = "HIPPO, Figure 7"
PARALLEL_1 = "ParallelVLM, Table 1"
PARALLEL_2 = "ParallelVLM, Table 2"
STD_1 = "STD, Table 1"
TABED_2 = "TABED, Tables 1 and 2"

BESIDE = {"draft_host": True, "num_draft_tokens": "auto"}

ROWS = [
    prefill(APBV_1, "FullAttn", method="full"),
    sparse(APBV_1, "XAttn", "xattention"),
    sparse(APBV_1, "Sparge", "spargeattn"),
    reduction(APBV_1, "SlowFast", "slowfast"),
    prefill(APBV_1, "StarAttn", method="star"),
    prefill(APBV_1, "APB", method="apb", importance="dot", anchor_query=True),
    prefill(APBV_1, "APB-V", method="apbv", importance="dot", anchor_query=True),
    prefill("APB-V, Table 3", "w/o A", anchor_len=0),
    prefill("APB-V, Table 3", "w/o P", passing_len=0),
    prefill(APBV_4, "-O", overlap=False),
    prefill(APBV_4, "-O-F", overlap=False, fused_query=False),
    prefill(APBV_4, "-O-F-Z", overlap=False, fused_query=False, zigzag=False),
    prefill(
        APBV_4,
        "-O-F-Z-V",
        overlap=False,
        fused_query=False,
        zigzag=False,
        frame_parallel=False,
    ),
    prefill("APB-V, Table 5", "ZigZagRing", method="zigzag_ring"),
    draft(HIPPO_1, "Vanilla SD", "vanilla"),
    draft(HIPPO_1, "SD-tree", "sd_tree"),
    draft(HIPPO_1, "SpecVLM", "specvlm"),
    draft(HIPPO_1, "HIPPO", "hippo", **BESIDE),
    draft(HIPPO_3, "PEARL-video", "vanilla", concurrent_prefill=False, **BESIDE),
    draft(HIPPO_3, "PEARL w/ Syn-Prefill", "vanilla", **BESIDE),
    draft(HIPPO_3, "PEARL-SpecVLM", "specvlm", **BESIDE),
    draft(HIPPO_6, "w/o attn", "hippo", hippo_terms=("time", "space"), **BESIDE),
    draft(HIPPO_6, "w/o temp", "hippo", hippo_terms=("attention", "space"), **BESIDE),
    draft(HIPPO_6, "w/o spa", "hippo", hippo_terms=("attention", "time"), **BESIDE),
    draft(HIPPO_6, "w/o vpsd", "hippo"),
    draft(HIPPO_7, "HIPPO-Random", "hippo", keep="random", **BESIDE),
    draft(HIPPO_7, "HIPPO-Frame", "hippo", keep="frames", **BESIDE),
    draft(HIPPO_7, "HIPPO-FastVID", "hippo", keep="transitions", **BESIDE),
    draft(HIPPO_7, "HIPPO-DyCoke", "hippo", keep="dycoke", **BESIDE),
    draft(PARALLEL_1, "Vanilla SD", "vanilla"),
    draft(PARALLEL_1, "OnSD", "text_only"),
    draft(PARALLEL_1, "SD-Tree", "sd_tree"),
    draft(PARALLEL_1, "SpecVLM", "specvlm"),
    draft(PARALLEL_1, "STD", "std", num_draft_tokens=9, keep_tokens=1024),
    draft(PARALLEL_1, "ParallelVLM", "parallelvlm", **BESIDE),
    reduction("APB-V, Table 10", "FastV", "fastv", asked_by="question"),
    reduction(PARALLEL_2, "DyCoke", "dycoke", ratio=0.1, decode_ratio=0.3),
    reduction(PARALLEL_2, "FastV", "fastv", ratio=0.1),
    reduction(PARALLEL_2, "SparseVLM", "sparsevlm", ratio=0.1),
    reduction(PARALLEL_2, "P-Drop", "pdrop", ratio=0.1),
    draft(STD_1, "LayerSkip", "layerskip", num_draft_tokens=9),
    draft(STD_1, "Streaming", "streaming", num_draft_tokens=9, keep_tokens=1024),
    draft(STD_1, "STD", "std", num_draft_tokens=9, keep_tokens=1024),
    draft(TABED_2, "M", "vanilla"),
    draft(TABED_2, "T", "text_only"),
    draft(TABED_2, "C", "tabed", ensemble="C"),
    draft(TABED_2, "P", "tabed", ensemble="P"),
    draft(TABED_2, "MT", "tabed", ensemble="MT"),
    draft(TABED_2, "MT*", "tabed", ensemble="MT*"),
    draft(TABED_2, "MTCP", "tabed", ensemble="MTCP"),
    draft(TABED_2, "MTCP*", "tabed", ensemble="MTCP*"),
    draft("TABED, Table 3", "h = 1", "tabed", tabed=TabedConfig(ensemble="MT*", window=1)),
    draft("TABED, Table 3", "h = 4", "tabed", tabed=TabedConfig(ensemble="MT*", window=4)),
    draft("TABED, Table 3", "h = 16", "tabed", tabed=TabedConfig(ensemble="MT*", window=16)),
    draft("TABED, Table 3", "ALL", "tabed", tabed=TabedConfig(ensemble="MT*")),
]

# The models of the papers' tables, by transformers' model_type.
MODELS = {
    "Qwen2.5-VL (APB-V, HIPPO, ParallelVLM)": "qwen2_5_vl",
    "InternVL3 (APB-V)": "internvl",
    "Qwen3-VL (HIPPO)": "qwen3_vl",
    "LLaVA-OneVision (HIPPO, ParallelVLM, STD, TABED)": "llava_onevision",
    "Qwen2-VL (STD)": "qwen2_vl",
    "LLaVA-1.5 (TABED)": "llava",
    "LLaVA-NeXT (TABED)": "llava_next",
}

# What the papers compare with and this project lacks.
MISSING: list[Row] = []


def _named(row: Row) -> str:
    return f"{row.table}: {row.name}"


def _missing(row: Row):
    expected = pytest.mark.xfail(raises=(ValueError, TypeError), strict=True)
    return pytest.param(row, marks=expected, id=_named(row))


@pytest.mark.parametrize("family", [pytest.param(each, id=name) for name, each in MODELS.items()])
def test_a_model_of_the_papers_runs(family):
    assert family in VISION_FAMILIES


@pytest.mark.parametrize(
    "row", [*(pytest.param(row, id=_named(row)) for row in ROWS), *map(_missing, MISSING)]
)
def test_a_row_of_the_papers_is_here(row):
    config = row.config()
    if isinstance(config, SpeculativeConfig):
        assert callable(STRATEGIES[config.strategy].build)
        return
    assert isinstance(METHODS[config.method], type)
    if config.sparse is not None:
        assert callable(BLOCK_SELECTION[config.sparse.method])
    if config.reduce is not None:
        assert callable((REDUCERS | LAYER_REDUCERS)[config.reduce.method])


PAGE = ROOT / "docs" / "papers.md"


def rows_on_the_page() -> dict[str, tuple[set[str], str]]:
    """By the table's name, the methods that the page names, and the commands."""
    rows = {}
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        paper, _, text = section.partition("\n")
        for line in text.splitlines():
            if line.startswith(("| Table", "| Figure")):
                table, names, command, _ = cells_in(line)
                rows[f"{paper}, {table}"] = (set(names.split(", ")), command)
    return rows


def test_the_page_about_the_papers_names_every_row():
    named: dict[str, set[str]] = defaultdict(set)
    for row in ROWS:
        named[row.table].add(row.name)
    page = rows_on_the_page()
    assert {table: names for table, (names, _) in page.items()} == named
    presets = tomllib.loads((ROOT / "benchmarks/support/presets.toml").read_text(encoding="utf-8"))
    for table, (_, commands) in page.items():
        found = re.findall(r"`(\w+)\.py --preset (\w+)`", commands)
        assert found, table
        for script, preset in found:
            assert preset in presets[script], (table, preset)
