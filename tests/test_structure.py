"""The import rules: imports point down, kernels stand alone, one file knows torch.distributed."""

import ast
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as property_settings

ROOT = Path(__file__).parents[1]

# From the ground up. A module may import from lower layers only; a package named here stands for the modules
# in it that are not named themselves, and these may also import one another.
LAYERS = (
    (
        "apbv.torchvision_guard",
        "apbv.allocator",
        "apbv.config",
        "apbv.layout",
        "apbv.timeline",
        "apbv.transfer",
        "apbv.warn",
        "apbv.kernels",
    ),
    ("apbv.hosts", "apbv.demo"),
    ("apbv.stats", "apbv.model"),
    ("apbv.input", "apbv.kv"),
    ("apbv.decode",),
    ("apbv.prefilling",),
    ("apbv.speculate",),
    ("apbv.generated", "apbv.planning"),
    ("apbv.engine",),
    ("apbv",),
    ("apbv.serve", "apbv.integrations"),
    ("apbv.launch",),
    ("apbv.doctor",),
    ("apbv.__main__",),
    ("benchmarks", "tests"),
)
LAYER = {name: height for height, names in enumerate(LAYERS) for name in names}
FOLDERS = {"apbv": "apbv", "kernels": "apbv.kernels", "launch": "apbv.launch"}
SCRIPTS = {"benchmarks": "benchmarks", "tests": "tests"}
ONLY_FOR_SERVING = {"fastapi", "starlette", "uvicorn", "pydantic", "pydantic_core", "prometheus_client"}

Import = tuple[str, int]  # the full dotted name that is imported, and the line


def modules(folders: dict[str, str]) -> dict[str, Path]:
    """Every Python file of these folders by the name it is imported under."""
    found = {}
    for folder, package in folders.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *parts]).removesuffix(".__init__")] = path
    return found


OURS = modules(FOLDERS)
BENCHMARKS = modules({"benchmarks": "benchmarks"})
ALL = OURS | modules(SCRIPTS)


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[Import]:
    """Everything that a file imports, at its top or inside functions; ``from a import b`` is ``a.b``."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = [*base, node.module] if node.module else base
            for alias in node.names:
                yield ".".join([*prefix, alias.name]), node.lineno


def attributes(tree: ast.AST) -> Iterator[Import]:
    """Dotted names that a file uses, such as ``torch.distributed.barrier``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names, value = [node.attr], node.value
            while isinstance(value, ast.Attribute):
                names.append(value.attr)
                value = value.value
            if isinstance(value, ast.Name):
                yield ".".join([value.id, *reversed(names)]), node.lineno


def owner(name: str, known: dict) -> str | None:
    """The longest leading part of a dotted name that is known."""
    parts = name.split(".")
    return next((head for i in range(len(parts), 0, -1) if (head := ".".join(parts[:i])) in known), None)


def starts_with(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def violations(module: str, is_package: bool, source: str) -> list[str]:
    """What a file does against the rules, one line each."""
    tree = ast.parse(source)
    layer = owner(module, LAYER)
    found = []

    def against(line: int, rule: str) -> None:
        found.append(f"{module}:{line}: {rule}")

    if module in OURS and layer == "apbv" and module != "apbv":
        against(0, "stands in no layer: add it to LAYERS")
    for name, line in imports(tree, module, is_package):
        target = owner(name, OURS)
        top = name.split(".")[0]
        if starts_with(module, "apbv") and top in {"kernels", "launch", "benchmarks", "tests"}:
            against(line, f"imports {name}, which is not importable from here")
        if target is not None:
            target_layer = owner(target, LAYER)
            same_unit = target_layer == layer and layer != "apbv"
            if LAYER[target_layer] >= LAYER[layer] and not same_unit:
                against(line, f"imports {target}, which is not below it")
        if starts_with(module, "apbv.kernels"):
            if target is not None and not starts_with(target, "apbv.kernels"):
                against(line, f"imports {target}: kernels import nothing of ours")
            if target is None and top not in {"torch", "triton", *sys.stdlib_module_names}:
                against(line, f"imports {name}: kernels import torch, triton and the standard library")
        elif top == "triton" and module in OURS:
            against(line, "imports triton outside a kernel file")
        elif top == "vllm" and module in OURS and not starts_with(module, "apbv.integrations"):
            against(line, "imports vllm outside apbv.integrations")
        if top in ONLY_FOR_SERVING and module in OURS and not starts_with(module, "apbv.serve"):
            against(line, f"imports {name}, which only the extra 'serve' installs")
    if module in OURS and not starts_with(module, "apbv.hosts"):
        for name, line in [*imports(tree, module, is_package), *attributes(tree)]:
            if starts_with(name, "torch.distributed"):
                against(line, f"uses {name}: only apbv.hosts knows torch.distributed")
    return found


def test_import_rules():
    broken = [
        line
        for module, path in ALL.items()
        for line in violations(module, path.name == "__init__.py", path.read_text(encoding="utf-8"))
    ]
    assert not broken, "\n".join(broken)


def test_no_folder_of_ours_is_importable_as_kernels():
    """It is the name of a package which transformers looks for, and pytest may put folders on the path."""
    spec = find_spec("kernels")
    found = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    assert not [path for path in found if path and Path(path).is_relative_to(ROOT)]


def test_no_test_imports_from_another():
    """What several tests need stands in tests/helpers, or is a fixture of a conftest.py."""
    for module, path in modules({"tests": "tests"}).items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        is_helper = package.startswith("tests.helpers.")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for name, line in imports(tree, module, path.name == "__init__.py"):
            assert (is_helper and name.startswith(f"{package}.")) or not name.split(".")[0].startswith(
                ("test_", "conftest", "tests")
            ), f"{module}:{line} imports {name}"


def test_no_file_is_too_long_to_be_read_in_one_sitting():
    lines = {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in ALL.items()}
    assert not {module: count for module, count in lines.items() if count > 400}


def imports_among(known: dict[str, Path], root: str = "") -> dict[str, set[str]]:
    """Which modules each of these imports.

    Args:
        root: of names that stand below a folder on the path, such as ``benchmarks.``.
    """
    graph = {}
    for module, path in known.items():
        names = imports(ast.parse(path.read_text(encoding="utf-8")), module, path.name == "__init__.py")
        found = {owner(name, known) or owner(root + name, known) for name, _ in names}
        graph[module] = found - {None, module}
    return graph


def test_there_are_no_import_cycles():
    """Within a package too, where the layers say nothing; a package's __init__ needs what it imports."""
    tuple(TopologicalSorter(imports_among(OURS)).static_order())
    tuple(TopologicalSorter(imports_among(BENCHMARKS, "benchmarks.")).static_order())


def test_benchmarks_import_what_supports_them_and_no_other_script():
    """Nor does what several share, in the package itself, import from the folders about one subject."""
    graph = imports_among(BENCHMARKS, "benchmarks.")
    assert sum(len(imported) for imported in graph.values()) > 100
    for module, imported in graph.items():
        above = [name for name in imported if not starts_with(name, "benchmarks.support")]
        assert not above, f"{module} imports {above}"
        if module.count(".") == 2 and BENCHMARKS[module].name != "__init__.py":
            subjects = [name for name in imported if name.count(".") > 2]
            assert not subjects, f"{module} imports {subjects}"


def test_no_benchmark_hides_a_package():
    """The folder stands first on the path, before the packages that are installed."""
    elsewhere = [path for path in sys.path if not Path(path or ".").resolve().is_relative_to(ROOT)]
    names = {path.stem for path in (ROOT / "benchmarks").iterdir() if path.is_dir() or path.suffix == ".py"}
    assert "support" in names
    hidden = [n for n in names if n in sys.stdlib_module_names or PathFinder.find_spec(n, elsewhere)]
    assert not hidden


def test_no_module_rebinds_its_globals():
    """The host group and the layout travel as arguments."""
    rebinding = {
        module
        for module, path in OURS.items()
        if any(isinstance(node, ast.Global) for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert not rebinding


def test_no_property_test_depends_on_how_fast_the_machine_is():
    """The profile in conftest.py turns off what measures examples, and no test turns it on again."""
    assert property_settings().deadline is None
    assert HealthCheck.too_slow in property_settings().suppress_health_check
    for module, path in modules(SCRIPTS).items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.keyword) and node.arg == "deadline" and module != "tests.conftest"), (
                f"{module}:{node.lineno} sets a deadline"
            )


def test_scripts_import_apbv_before_transformers():
    """Which may fail otherwise (see apbv.torchvision_guard), but not in these tests, where apbv comes first.

    The modules of launch/ are imported as part of apbv.
    """
    for module, path in BENCHMARKS.items():
        names = imports(ast.parse(path.read_text(encoding="utf-8")), module, path.name == "__init__.py")
        tops = [name.split(".")[0] for name, _ in names]
        assert [top for top in tops if top in ("apbv", "transformers")][:1] in ([], ["apbv"]), module


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("apbv.layout", "from .hosts import HostGroup"),
        ("apbv.prefilling.methods.apbv", "from ...engine import Engine"),
        ("apbv.model.parts", "from ..input.model_inputs import ModelInputs"),
        ("apbv.engine", "from .launch import infer"),
        ("apbv.prefilling.forward", "import apbv"),
        ("apbv.prefilling.forward", "from .. import engine"),
        ("apbv.model.attention", "from kernels import merge_states"),
        ("apbv.model.attention", "import triton.language as tl"),
        ("apbv.kernels.attention", "from ..config import PrefillConfig"),
        ("apbv.kernels.attention", "from transformers import Cache"),
        ("apbv.prefilling.result", "from vllm import LLM"),
        ("apbv.kv.cache", "import torch.distributed as dist"),
        ("apbv.stats", "import torch\ntorch.distributed.barrier()"),
        ("apbv.engine", "import fastapi"),
    ],
)
def test_the_rules_see_a_violation(module, source):
    assert violations(module, False, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("apbv.prefilling.methods.apbv", "from .base import PrefillMethod\nfrom ...kernels import merge_states"),
        ("apbv.kernels.flash", "import math\nimport torch, triton\nfrom .attention import merge_states"),
        ("apbv.launch.infer", "from apbv import Engine, demo\nfrom apbv.config import KV_PLACEMENTS"),
    ],
)
def test_the_rules_allow_what_points_down(module, source):
    assert not violations(module, False, source)
