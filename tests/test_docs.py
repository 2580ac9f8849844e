"""What the README and the pages of docs/ say, run or parsed; documents.py lists the marks of their code blocks."""

import ast
import json
import re
import runpy
import shlex

import pytest
import refusal_table

from apbv import demo
from apbv.speculate import STRATEGIES
from tests.test_structure import LAYERS

from documents import (
    BLOCKS,
    MARKS,
    PAGES,
    README,
    answer_to,
    blocks_in,
    broken_links,
    commands_in,
    indented_commands,
    inline_commands,
    is_there,
    linked_pages,
    marked,
    output_of,
    parse_command,
    places_named,
    prose,
    read_command,
    require_installable,
)
from scripts import ROOT, run_hosts, run_script

ARCHITECTURE = ROOT / "docs" / "architecture.md"
CHOOSING = ROOT / "docs" / "choosing.md"
DEMO_README = ROOT / "apbv" / "demo" / "README.md"
LINKED_PAGES = (*PAGES, DEMO_README)


def test_every_code_block_says_how_it_is_tested():
    for page in PAGES:
        assert page.read_text(encoding="utf-8").count("\n```") == 2 * len(blocks_in(page)), f"{page}: not closed"
    unknown = [f"{block}: {block.info!r}" for block in BLOCKS if block.mark not in MARKS[block.language]]
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
        prompt = job.options[job.options.index("--prompt") + 1] if "--prompt" in job.options else None
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
        commands = indented_commands(ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))))
        for command in commands:
            parse_command(command, monkeypatch)
        assert read_command(commands[0]).script == script.relative_to(ROOT)
    in_the_demo = [c for c in indented_commands(DEMO_README.read_text(encoding="utf-8")) if "benchmarks/" in c]
    assert len(in_the_demo) >= 7
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
        named = [word for word in shlex.split(command) if word.startswith(("deploy/", "benchmarks/"))]
        assert all((ROOT / path).exists() for path in named), command


def test_every_benchmark_that_writes_figures_is_in_the_results():
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    first = next(block for block in blocks_in(ROOT / "docs" / "results.md") if block.mark == "parse")
    named = {read_command(command).name for command in commands_in(first.code)}
    schemas = json.loads((ROOT / "benchmarks" / "schemas" / "benchmarks.json").read_text(encoding="utf-8"))
    described = {name.removeprefix("batch_") for name in schemas["$defs"]}
    assert named == {"doctor", *described} - {"fields"}
    assert "All benchmarks" in results


def test_the_architecture_names_what_there_is():
    code = places_named(prose(ARCHITECTURE.read_text(encoding="utf-8")))
    assert len(code) > 40
    assert not [place for place in code if not is_there(place)]


def test_the_architecture_has_the_layers_that_the_imports_obey():
    rows = re.findall(r"^\| (`.*?`) \|", ARCHITECTURE.read_text(encoding="utf-8"), re.MULTILINE)
    told = [set(re.findall(r"`([^`]+)`", row)) for row in rows]
    assert told == [set(names) for names in reversed(LAYERS)], "tests/test_structure.py has other LAYERS"


def test_the_page_about_choosing_has_the_table_of_refusals():
    assert CHOOSING.read_text(encoding="utf-8").endswith(f"\n{refusal_table.table()}\n")
    named = {feature for pair in refusal_table.REFUSALS for feature in pair}
    assert named == set(refusal_table.FEATURES)
    for feature, has_it in (
        ("one_model", lambda strategy: not strategy.needs_draft_model),
        ("self_drafting", lambda strategy: strategy.runs_target),
        ("chain_only", lambda strategy: not strategy.drafts_trees),
        ("no_choice", lambda strategy: strategy.keep is None),
    ):
        told = set(re.findall(r"`(\w+)`", refusal_table.FEATURES[feature]))
        assert told == {name for name, strategy in STRATEGIES.items() if has_it(strategy)}, feature


def test_the_page_about_the_library_has_the_table_of_families():
    result = run_script(ROOT / "tests" / "helpers" / "family_table.py", "--check")
    assert result.returncode == 0, result.stderr


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
    assert (ROOT / "docs" / "road.svg").read_text(encoding="utf-8") == drawn, "run python docs/draw_road.py"
