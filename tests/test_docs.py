"""What the README and the pages of docs/ say, run or parsed; documents.py lists the marks of their
code blocks."""

import argparse
import ast
import importlib
import json
import re
import runpy
import shlex
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest

from apbv import demo
from apbv.compat.versions import how_to_install
from apbv.config import (
    KEEP_FACTS,
    METHOD_FACTS,
    REDUCER_FACTS,
    SPARSE_CONFIGS,
    STRATEGY_FACTS,
    AblationConfig,
    DecodeConfig,
    FlexPrefillConfig,
    HippoConfig,
    LayerSkipConfig,
    PrefillConfig,
    ReduceConfig,
    ReuseConfig,
    SamplingParams,
    SpargeAttnConfig,
    SparseConfig,
    SpeculativeAblationConfig,
    SpeculativeConfig,
    TabedConfig,
    UVPruneConfig,
    VideoConfig,
    XAttentionConfig,
)
from apbv.config.descriptions import describe
from apbv.config.refusals import CONFLICTS
from apbv.launch.options import SETTINGS, SPARSE
from apbv.launch.serve import limit_option
from apbv.serve.settings import MediaLimits, ServerSettings
from tests.test_structure import LAYERS

from apbv_tests.documents import (
    BLOCKS,
    PAGES,
    README,
    answer_to,
    blocks_in,
    cells_in,
    commands_in,
    marked,
    output_of,
    prose,
    read_command,
    require_table,
    text_table,
)
from apbv_tests.scripts import ROOT, run_hosts, run_script

CONFIGS = (
    PrefillConfig,
    VideoConfig,
    ReduceConfig,
    SparseConfig,
    XAttentionConfig,
    SpargeAttnConfig,
    FlexPrefillConfig,
    AblationConfig,
    DecodeConfig,
    SamplingParams,
    ReuseConfig,
    SpeculativeConfig,
    HippoConfig,
    UVPruneConfig,
    LayerSkipConfig,
    TabedConfig,
    SpeculativeAblationConfig,
)
MARKS = {
    "bash": ("quickstart", "run", "ask", "parse", "install", "serve", "vllm", "router", "deploy"),
    "python": ("run", "client", "compile"),
    "text": ("quickstart", "output", "layout"),
}
_INLINE_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_STARTS_A_SCRIPT = re.compile(r"([A-Z_]+=\S+ )*(python|torchrun|pytest|compute-sanitizer) ")


def indented_commands(text: str) -> list[str]:
    """The commands that are indented, as in docstrings, and start one of the project's scripts."""
    lines = re.findall(r"^    (\S.*)$", text.replace("\\\n", " "), re.MULTILINE)
    return [line for line in lines if _STARTS_A_SCRIPT.match(line)]


def inline_commands(page: Path) -> list[str]:
    """The commands in running text that start one of the project's scripts."""
    found = _INLINE_CODE.findall(prose(page.read_text(encoding="utf-8")))
    return [code for code in found if _STARTS_A_SCRIPT.match(code)]


def parse_command(command: str, monkeypatch) -> argparse.Namespace | None:
    """Let the script that a command starts parse its options.

    Raises:
        AssertionError, SystemExit: it refuses them, or the command is wrong in itself.
    """
    job = read_command(command)
    if job is None:
        return None
    folder = job.script.parts[0]
    name = job.name
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    modules = {"launch": f"apbv.launch.{name}", "apbv": ".".join(job.script.with_suffix("").parts)}
    return importlib.import_module(modules.get(folder, name)).parse_arguments(job.options)


def require_installable(command: str) -> None:
    """Check that pip would find the extras that a command names.

    Raises:
        AssertionError: apbv has no such extra.
    """
    program, *_, wanted = shlex.split(command)
    assert program == "pip", command
    extras = re.findall(r"\[(.*)\]", wanted)
    known = metadata("apbv").get_all("Provides-Extra")
    assert all(extra in known for extra in extras), f"{command}: the extras are {', '.join(known)}"


def names_in(path: Path) -> set[str]:
    """What a Python file defines: functions and classes, and methods as ``Class.method``."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{member.name}"
                for member in node.body
                if isinstance(member, ast.FunctionDef)
            }
    return names


def places_named(text: str) -> list[str]:
    """The places in the code that a text names: a file, a file with ``:name``, or a package with
    ``:name``."""
    return re.findall(r"`((?:[\w.]+/)*\w+\.py(?::[\w.]+)?|(?:\w+/)+\w+:[\w.]+)`", text)


def is_there(place: str) -> bool:
    """Whether there is such a file, and such a name in it; of a package, a name that it offers."""
    name, _, inside = place.partition(":")
    if name.startswith("apbv/kernels"):  # the folder kernels/ is installed as apbv.kernels
        name = name.removeprefix("apbv/")
    path = ROOT / name
    if path.is_dir():
        imported = ast.parse((path / "__init__.py").read_text(encoding="utf-8")).body
        aliases = [
            alias for node in imported if isinstance(node, ast.ImportFrom) for alias in node.names
        ]
        return inside in [alias.name for alias in aliases]
    if "/" not in name:  # a file that the text has placed already
        return not inside and any(ROOT.glob(f"*/**/{name}"))
    return path.is_file() and (not inside or inside in names_in(path))


def anchors_of(text: str) -> set[str]:
    """The anchors of a page: those that GitHub gives to headings, and those set with ``<a id>``."""
    anchors = set(re.findall(r'<a id="([\w-]+)"></a>', prose(text)))
    seen = {}
    for heading in re.findall(r"^#+ +(.*)$", prose(text), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        seen[slug] = seen.get(slug, -1) + 1
        anchors.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
    return anchors


def linked_pages(page: Path) -> set[str]:
    """The paths of the pages that a page links to, without anchors."""
    targets = {
        target.partition("#")[0]
        for target in _LINK.findall(prose(page.read_text(encoding="utf-8")))
    }
    return {target for target in targets if target.endswith(".md") and ":" not in target}


def broken_links(page: Path, text: str) -> list[str]:
    """The relative links of a page that lead nowhere: no such file in the project, or no such
    heading."""
    broken = []
    for target in _LINK.findall(prose(text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        is_known = there.exists() and there.is_relative_to(ROOT)
        if is_known and anchor:
            is_known = anchor in anchors_of(
                text if there == page else there.read_text(encoding="utf-8")
            )
        if not is_known:
            broken.append(target)
    return broken


ARCHITECTURE = ROOT / "docs" / "architecture.md"
CHOOSING = ROOT / "docs" / "choosing.md"
PREFILL = ROOT / "docs" / "prefill.md"
SERVING = ROOT / "docs" / "serving.md"
DEMO_README = ROOT / "apbv" / "demo" / "README.md"
LINKED_PAGES = (*PAGES, DEMO_README)


def listed(facts: Mapping[str, Any], has_it: Callable[[Any], bool], joint: str = "or") -> str:
    """The names of those that have it, as a sentence lists them."""
    *names, last = [f"`{name}`" for name, each in facts.items() if has_it(each)]
    return f"{', '.join(names)} {joint} {last}" if names else last


# Names of features on the page.
FEATURES = {
    "anchor_query": "`--anchor-query`",
    "no_anchor": "a method without an anchor",
    "passing_len": "`--passing-len`",
    "passing_budget": "`--passing-budget`",
    "early_passing": "`--early-passing-len`",
    "passing_weights": "`--passing-weights`",
    "sparse": "`--sparse`",
    "dense_method": listed(METHOD_FACTS, lambda method: not method.takes_sparse),
    "other_sparse_method": "a different sparse `--method`",
    "reduction": "`--reduce`",
    "layer_reduction": "`--reduce` between layers",
    "early_reduction": "`--reduce` before the language model",
    "other_ranking": "any other `--reduce` than "
    + listed(REDUCER_FACTS, lambda reducer: reducer.ranks_by_asking, "and"),
    "reduce_layer": "`--reduce-layer`",
    "reduce_asked_by": "`--reduce-asked-by`",
    "decode_pruning": "`--reduce-decode-ratio`",
    "whole_decoding": "any other `--reduce` than `dycoke`",
    "sharded_kv": "`--kv sharded`",
    "several_hosts": "several hosts",
    "kv_reuse": "`--reuse kv`",
    "watching_draft": "a draft that uses the target's prefill scores",
    "handing_over": "`--kv-transfer`",
    "hybrid": "a hybrid model",
    "rope_by_length": "rotary frequencies of the type `dynamic` or `longrope`",
    "offering": "`--kv-transfer`",
    "continuing": "`generate_inputs()`",
    "last_token_lost": "a hybrid's prefill that split the question over the hosts",
    "drafting": "`--speculate`",
    "context": "`--context`",
    "source": "`--video`, `--image` or `--audio`",
    "draft_host": "`--draft-host`",
    "one_host": "one host",
    "prefills_in_turn": "`SpeculativeAblationConfig(concurrent_prefill=False)`",
    "no_draft_host": "no `--draft-host`",
    "one_model": listed(STRATEGY_FACTS, lambda strategy: not strategy.needs_draft_model),
    "self_drafting": listed(STRATEGY_FACTS, lambda strategy: strategy.runs_target),
    "quantized": "quantized weights",
    "adapter": "`--adapter`",
    "tensor_parallel": "`--tensor-parallel`",
    "learning_draft": listed(STRATEGY_FACTS, lambda strategy: strategy.needs_verdicts),
    "tree": "a draft tree",
    "chain_only": listed(STRATEGY_FACTS, lambda strategy: not strategy.drafts_trees),
    "keep": "`--keep`",
    "no_choice": listed(STRATEGY_FACTS, lambda strategy: strategy.keep is None),
    "keep_ratio": "`--keep-ratio`",
    "keep_tokens": "`--keep-tokens`",
    "fixed_share": "a strategy that keeps all visual tokens, or none",
    "hippo": "`--hippo-terms`",
    "not_by_hippo": "any other `--keep` than `hippo`",
    "uv_prune": "`UVPruneConfig`",
    "not_by_uv_prune": "any other `--keep` than `uv_prune`",
    "layerskip": "`--layer-ratio`",
    "all_layers": "any other draft than `layerskip`",
    "tabed": "`--ensemble`",
    "one_context": "any other draft than `tabed`",
    "prune_kv": "`--prune kv`",
    "drops_nothing": "a strategy that keeps all visual tokens or none, or "
    + listed(STRATEGY_FACTS, lambda strategy: strategy.needs_verdicts),
    "ranking_on_draft_host": "`--draft-host` and `--keep` by the target's scores",
    "caption": "`--ensemble` with a C",
    "no_captioner": "no `--captioner`",
}


def test_every_code_block_says_how_it_is_tested():
    for page in PAGES:
        assert page.read_text(encoding="utf-8").count("\n```") == 2 * len(blocks_in(page)), (
            f"{page}: not closed"
        )
    unknown = [
        f"{block}: {block.info!r}" for block in BLOCKS if block.mark not in MARKS[block.language]
    ]
    assert not unknown, "\n".join(unknown)
    assert {block.info for block in BLOCKS} == {
        f"{name} {mark}" for name, marks in MARKS.items() for mark in marks
    }


@pytest.mark.parametrize("block", marked("bash run"), ids=str)
def test_commands_run(block):
    said = []
    for command in commands_in(block.code):
        job = read_command(command)
        result = run_script(ROOT / job.script, *job.options, hosts=job.hosts)
        assert result.returncode == 0, f"{command}\n{result.stderr}"
        prompt = (
            job.options[job.options.index("--prompt") + 1] if "--prompt" in job.options else None
        )
        assert result.stdout.strip() == answer_to(prompt or demo.DEMO_QUESTION), command
        said.append(result.stdout)
    assert output_of(block) in (None, "".join(said))


@pytest.mark.parametrize("block", marked("python run"), ids=str)
def test_library_examples_run(block, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(block.code)
    (result,) = run_hosts(script, folders=[tmp_path])
    assert result.returncode == 0, result.stderr
    assert result.stdout == output_of(block)


@pytest.mark.parametrize("block", marked("bash parse"), ids=str)
def test_commands_are_understood(block, monkeypatch):
    for command in commands_in(block.code):
        parse_command(command, monkeypatch)


def test_commands_in_running_text_are_understood(monkeypatch):
    commands = [command for page in PAGES for command in inline_commands(page)]
    assert commands
    for command in commands:
        parse_command(command, monkeypatch)


@pytest.mark.parametrize("block", [*marked("python compile"), *marked("python client")], ids=str)
def test_other_scripts_compile(block):
    compile(block.code, str(block), "exec")


def test_every_benchmark_says_how_it_is_run(monkeypatch):
    for script in (ROOT / "benchmarks").glob("*.py"):
        commands = indented_commands(
            ast.get_docstring(ast.parse(script.read_text(encoding="utf-8")))
        )
        for command in commands:
            parse_command(command, monkeypatch)
        assert read_command(commands[0]).script == script.relative_to(ROOT)
    in_the_demo = [
        c for c in indented_commands(DEMO_README.read_text(encoding="utf-8")) if "benchmarks/" in c
    ]
    assert len(in_the_demo) >= 5
    for command in in_the_demo:
        parse_command(command, monkeypatch)


@pytest.mark.parametrize("block", marked("bash install"), ids=str)
def test_extras_exist(block):
    for command in commands_in(block.code):
        require_installable(command)


@pytest.mark.parametrize("block", marked("bash vllm"), ids=str)
def test_the_connector_that_vllm_is_told_of_exists(block):
    words = shlex.split(block.code)
    settings = json.loads(words[words.index("--kv-transfer-config") + 1])
    folder = settings["kv_connector_module_path"].replace(".", "/")
    assert is_there(f"{folder}:{settings['kv_connector']}")


@pytest.mark.parametrize("block", marked("bash deploy"), ids=str)
def test_the_files_of_other_programs_commands_exist(block):
    for command in commands_in(block.code):
        named = [
            word for word in shlex.split(command) if word.startswith(("deploy/", "benchmarks/"))
        ]
        assert all((ROOT / path).exists() for path in named), command


def test_every_benchmark_that_writes_figures_is_in_the_results():
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    first = next(
        block for block in blocks_in(ROOT / "docs" / "results.md") if block.mark == "parse"
    )
    named = {read_command(command).name for command in commands_in(first.code)}
    schemas = json.loads(
        (ROOT / "benchmarks" / "schemas" / "benchmarks.json").read_text(encoding="utf-8")
    )
    described = {name.removeprefix("batch_") for name in schemas["$defs"]}
    assert named == {"doctor", *described} - {"fields"}
    assert "All benchmarks" in results


def test_extras_are_installed_from_a_checkout():
    """Nothing installs apbv by its name, which no package index knows; so say the pages, and the
    scripts' errors."""
    scripts = [
        *(ROOT / "launch").glob("*.py"),
        *(ROOT / "benchmarks").rglob("*.py"),
        *(ROOT / "deploy").glob("*"),
    ]
    for path in [*PAGES, *(each for each in scripts if each.is_file())]:
        named = re.findall(r"pip install [^`\n]*apbv\[\w+\]", path.read_text(encoding="utf-8"))
        assert not named, f"{path}: {named}"
    assert how_to_install("serve").startswith('pip install -c constraints.txt -e ".[serve]"')


def test_what_the_pages_commands_write_is_ignored_by_git():
    if not (ROOT / ".git").exists():
        pytest.skip("needs a checkout")
    written = ["kv/manifest.json", "clips/questions.jsonl", "clip-7.mp4", "results/answers.jsonl"]
    told = subprocess.run(
        ["git", "check-ignore", *written], cwd=ROOT, capture_output=True, text=True
    )
    assert told.stdout.split() == written
    tracked = subprocess.run(
        ["git", "check-ignore", "docs/ruler.png"], cwd=ROOT, capture_output=True
    )
    assert tracked.returncode == 1


def test_every_script_under_all_benchmarks_takes_a_file_for_figures(monkeypatch):
    results = ROOT / "docs" / "results.md"
    assert "These scripts take `--json FILE`" in results.read_text(encoding="utf-8")
    first = next(block for block in blocks_in(results) if block.mark == "parse")
    for command in commands_in(first.code):
        script = command.partition("#")[0].strip()
        options = parse_command(f"{script} --json figures.jsonl", monkeypatch)
        assert str(options.json) == "figures.jsonl", command


def test_pages_agree_on_how_long_the_tests_take():
    pages = [page.read_text(encoding="utf-8") for page in (README, ROOT / "CONTRIBUTING.md")]
    said = [set(re.findall(r"(\w+) minutes on two", page)) for page in pages]
    assert said[0] == said[1] and len(said[0]) == 1


def test_the_architecture_names_what_there_is():
    code = places_named(prose(ARCHITECTURE.read_text(encoding="utf-8")))
    assert len(code) > 40
    assert not [place for place in code if not is_there(place)]


def test_the_architecture_has_the_rooms_of_the_server():
    _, after = ARCHITECTURE.read_text(encoding="utf-8").split("### The server's rooms")
    table, _ = after.split("## How to add")
    told = set()
    for row in re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE):
        told |= {name.rstrip("/") for name in re.findall(r"`([^`]+)`", row)}
    folder = ROOT / "apbv" / "serve"
    rooms = {path.name for path in folder.iterdir() if not path.name.startswith("__")}
    assert told == rooms


def test_the_architecture_has_the_layers_that_the_imports_obey():
    code_map, _ = ARCHITECTURE.read_text(encoding="utf-8").split("### The server's rooms")
    rows = re.findall(r"^\| (`.*?`) \|", code_map, re.MULTILINE)
    told = [set(re.findall(r"`([^`]+)`", row)) for row in rows]
    assert told == [set(names) for names in reversed(LAYERS)], (
        "tests/test_structure.py has other LAYERS"
    )


def test_the_page_about_prefill_has_the_options_of_sparse_attention():
    """With the defaults of every method, and what the command line says of them."""
    rows = []
    for setting in SPARSE:
        if setting.field == "method":
            continue
        row = [f"`{setting.option}`", describe(setting.config, setting.field).summary]
        for config in SPARSE_CONFIGS.values():
            made = config()
            value = (
                made.share if setting.field == "threshold" else getattr(made, setting.field, "–")
            )
            row.append(str(value))
        rows.append(row)
    header = ["option", "meaning", *(f"`{name}`" for name in SPARSE_CONFIGS)]
    require_table(PREFILL, text_table(header, rows))


def test_the_page_about_serving_has_the_limits_with_their_defaults():
    rows = []
    for config in (ServerSettings, MediaLimits):
        for field in fields(config):
            if "is_limit" not in field.metadata:
                continue
            description = describe(config, field.name)
            default = description.default
            if field.default is not None:
                unit = 2**20 if field.name.endswith("_bytes") else 1
                default = str(int(field.default / unit))
            rows.append([f"`{limit_option(field)}`", default, description.summary])
    require_table(SERVING, text_table(["option", "default", "limit"], rows))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_the_page_about_settings_has_every_field(config):
    """With its option on the command line, its default, and all that its docstring says."""
    options = {each.field: f"`{each.option}`" for each in SETTINGS if each.config is config}
    rows = []
    for field in fields(config):
        if any(hasattr(above, field.name) for above in config.__bases__):
            continue  # it stands in the table of the class above
        default = "" if field.default is MISSING else shown_default(field.default)
        text = describe(config, field.name).text.replace("``", "`").replace("*", r"\*")
        rows.append([f"`{field.name}`", options.get(field.name, ""), default, text])
    page = ROOT / "docs" / "settings.md"
    require_table(page, text_table([f"`{config.__name__}`", "option", "default", "meaning"], rows))


def shown_default(default: Any) -> str:
    """Return a default as Python writes it; of a config in a config its class is enough."""
    if is_dataclass(default):
        return f"`{type(default).__name__}()`"
    return f"`{default!r}`"


def test_the_page_about_choosing_has_the_table_of_refusals():
    others: dict[str, list[str]] = {}  # what is incompatible with the same shares a row
    for feature, other, _ in CONFLICTS:
        others.setdefault(FEATURES[feature], []).append(FEATURES[other])
    rows = [[feature, "; ".join(found)] for feature, found in others.items()]
    require_table(CHOOSING, text_table(["option", "incompatible with"], rows))
    named = {feature for conflict in CONFLICTS for feature in conflict[:2]}
    assert named == set(FEATURES)


@pytest.mark.parametrize(
    ("page", "option", "facts"),
    [
        ("prefill.md", "`--method`", METHOD_FACTS),
        ("reduction.md", "`--reduce`", REDUCER_FACTS),
        ("speculation.md", "`--speculate`", STRATEGY_FACTS),
        ("speculation.md", "`--keep`", KEEP_FACTS),
    ],
)
def test_a_page_has_a_row_for_every_name(page, option, facts):
    """Of its tables, those whose first column has the option's name."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    told: list[str] = []
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        header, _, *rows = table.splitlines()
        if cells_in(header)[0] == option:
            for row in rows:
                told += _INLINE_CODE.findall(cells_in(row)[0])
    assert set(told) == set(facts)


@pytest.mark.parametrize("page", LINKED_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert not broken_links(page, page.read_text(encoding="utf-8"))


def test_every_page_is_reached_from_the_readme():
    """Directly, or from a page that the README links to."""
    first = {README.parent / link for link in linked_pages(README)}
    reached = first | {page.parent / link for page in first for link in linked_pages(page)}
    assert {page.resolve() for page in reached} >= set(PAGES) - {README}


def test_the_picture_is_what_its_script_draws():
    drawn = runpy.run_path(str(ROOT / "docs" / "draw_road.py"))["draw"]()
    assert (ROOT / "docs" / "road.svg").read_text(encoding="utf-8") == drawn, (
        "run python docs/draw_road.py"
    )
