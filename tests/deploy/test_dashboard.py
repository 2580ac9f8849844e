"""Grafana's dashboard: it is one, and shows figures that the server has."""

import json
import re

import yaml
from prometheus_client.parser import text_string_to_metric_families

from apbv.serve.metrics.prometheus import Metrics

from apbv_tests.scripts import ROOT

GRAFANA = ROOT / "deploy" / "grafana"
DASHBOARD = json.loads((GRAFANA / "apbv.json").read_text())
PANELS = DASHBOARD["panels"]
SHOWN = [panel for panel in PANELS if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"]) for panel in SHOWN for target in panel["targets"]]
# What Prometheus adds to every figure that it collects.
ADDED_LABELS = {"instance", "job"}


def samples() -> dict[str, set[str]]:
    """The names of all samples of /metrics, and their labels."""
    found = {}
    families = list(text_string_to_metric_families(Metrics("a model").render().decode()))
    for sample in (sample for family in families for sample in family.samples):
        found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_figure_that_is_shown_exists_with_the_labels_that_are_asked_for():
    known = samples()
    used = set()
    for title, query in QUERIES:
        names = re.findall(r"apbv:\w+", query)
        assert names and all(
            query.count(left) == query.count(right) for left, right in ("()", "{}", "[]")
        ), title
        for name, selected in re.findall(r"(apbv:\w+)(?:\{([^}]*)\})?", query):
            assert name in known, f"{title}: there is no {name}"
            asked = set(re.findall(r"(\w+)=", selected))
            asked |= {
                label for by in re.findall(r"by \(([^)]*)\)", query) for label in by.split(", ")
            }
            assert asked - ADDED_LABELS <= known[name], f"{title}: {name} has {known[name]}"
            used.add(re.sub(r"_(bucket|sum|count|total)$", "", name))
    families = {re.sub(r"_(bucket|sum|count|total|created)$", "", name) for name in known}
    assert used == families, "figures that nobody is shown"


def test_grafana_finds_the_dashboard_and_its_data():
    compose = yaml.safe_load((GRAFANA.parent / "compose.yaml").read_text())
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/apbv.yaml").read_text())[
        "providers"
    ]
    mounted = [volume.split(":")[1] for volume in compose["services"]["grafana"]["volumes"]]
    assert any(path.startswith(f"{provider['options']['path']}/") for path in mounted)
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    (variable,) = [each for each in DASHBOARD["templating"]["list"] if each["type"] == "datasource"]
    assert source["type"] == variable["query"] and source["uid"] == variable["current"]["value"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in compose["services"]


def test_the_documentation_lists_every_figure():
    page = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    rows = (
        re.search(r"^\| `apbv:` .*?\n\n", page, re.MULTILINE | re.DOTALL)[0]
        .strip()
        .splitlines()[2:]
    )
    kinds = {}
    for row in rows:
        names, kind = row.strip("|").split("|")[:2]
        for name in re.findall(r"`([^`]+)`", names):
            kinds[name.replace("…", "spec_decode_num")] = kind.strip()
    known = {}
    for family in text_string_to_metric_families(Metrics("a model").render().decode()):
        if not family.name.endswith("_created"):
            name = family.name.removeprefix("apbv:") + (
                "_total" if family.type == "counter" else ""
            )
            known[name] = family.type
    assert kinds == known
