"""The table of what works with which family of models, in docs/library.md. No cell is typed in:

"yes"         pytest collects a test that is marked ``shows(feature)``, for the family: the test's
parameter
              ``family``, or one of the mark's ``families``. A feature's name may have parameters,
              as ``{method}``. Only what passes its tests is merged, so no record of outcomes is
              kept.
"no"          apbv's own check of such a model raises an error, or returns a reason.
"not tested"  neither.
"""

import json
import os
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from apbv import ReduceConfig
from apbv.config.refusals import refuse
from apbv.decode.batch import model_batching_obstacle
from apbv.model.families import TEXT_FAMILIES, VISION_FAMILIES, hybrid_family
from apbv.model.loading.tensor_parallel import require_divisible
from apbv.model.parts import inspect_model
from apbv.prefilling.reduction.pruning import require_usable

from apbv_tests import families
from apbv_tests.documents import require_table, text_table
from apbv_tests.pool import exit_statuses, start
from apbv_tests.scripts import ROOT

FAMILIES = VISION_FAMILIES + TEXT_FAMILIES


def _reduces(method: str) -> Callable:
    return lambda model: require_usable(ReduceConfig(method=method), model.config, None)


def _refused_for_hybrids(feature: str) -> Callable:
    return lambda model: refuse(hybrid=hybrid_family(model.config), **{feature: True})


# Of each column the features, and apbv's check of a model.
COLUMNS = {
    "`apbv`": (("apbv",), None),
    "exact methods": (("zigzag_ring", "ulysses"), None),
    "drafts": (("drafts",), None),
    "visual-token pruning": (("reduction",), _reduces("fastvid")),
    "batches": (("batches",), lambda model: model_batching_obstacle(inspect_model(model))),
    "KV on disk": (("KV on disk",), None),
    "KV to vLLM": (("KV to vLLM",), _refused_for_hybrids("offering")),
    "tensor parallelism": (
        ("tensor parallelism",),
        lambda model: require_divisible(model.config, 2),
    ),
}


class Shown:
    """A plugin of pytest that takes down which features the collected tests show of which
    families."""

    def __init__(self):
        self.pairs: set[tuple[str, str]] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            for mark in item.iter_markers("shows"):
                named = mark.kwargs.get("families") or (parameters["family"],)
                self.pairs |= {(mark.args[0].format(**parameters), family) for family in named}


def collect(path: Path) -> None:
    """Write to a file what the marked tests show, the thorough ones too."""
    marked = [
        path
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.shows(" in path.read_text("utf-8")
    ]
    plugin = Shown()
    options = ["--collect-only", "-q", "-m", "shows", "-p", "no:cacheprovider"]
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        status = pytest.main([*options, *map(str, marked)], plugins=[plugin])
    known = {feature for features, _ in COLUMNS.values() for feature in features}
    assert status == pytest.ExitCode.OK and plugin.pairs, "the tests cannot be collected"
    unknown = {pair for pair in plugin.pairs if pair[0] not in known or pair[1] not in FAMILIES}
    assert not unknown, f"no column and no row for {unknown}"
    path.write_text(json.dumps(sorted(plugin.pairs)))


def refused() -> set[tuple[str, str]]:
    """Ask apbv's checks of which columns they refuse which families."""
    pairs = set()
    for family in FAMILIES:
        model = families.build_model(family)
        for column, (_, check) in COLUMNS.items():
            reason = None
            try:
                reason = check and check(model)
            except ValueError as error:
                reason = error
            pairs |= {(column, family)} if reason else set()
    return pairs


def test_the_page_about_the_library_has_the_table_of_families(tmp_path):
    """A process of its own collects: within a session there can be no other."""
    assert exit_statuses([start(collect, tmp_path / "shown.json")]) == [0]
    works = {tuple(pair) for pair in json.loads((tmp_path / "shown.json").read_text())}
    fails = refused()
    alike: dict[tuple[str, ...], list[str]] = {}  # by what is known, the families
    for family in FAMILIES:
        cells = []
        for column, (features, _) in COLUMNS.items():
            is_shown = any((each, family) in works for each in features)
            is_refused = (column, family) in fails
            assert not (is_shown and is_refused), f"{column} is shown and refused for {family}"
            cells.append("yes" if is_shown else "no" if is_refused else "not tested")
        alike.setdefault(tuple(cells), []).append(f"`{family}`")
    rows = [[", ".join(names), *cells] for cells, names in alike.items()]
    table = text_table(["`model_type`", *COLUMNS], rows)
    require_table(ROOT / "docs" / "library.md", table)
