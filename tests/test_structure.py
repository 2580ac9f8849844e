"""Import rules (imports point down, kernels stand alone, one file knows torch.distributed); who
tells model families apart; phrases to avoid."""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from apbv.config import (
    KEEP_POLICIES,
    LAYER_REDUCER_NAMES,
    METHOD_NAMES,
    REDUCER_NAMES,
    STRATEGY_NAMES,
)
from apbv.model.families.table import ROWS, WHY_UNSUPPORTED

ROOT = Path(__file__).parents[1]

# From the ground up. A module may import from lower layers only; a package named here stands for
# the modules in it that are not named themselves, and these may also import one another.
LAYERS = (
    ("apbv.errors",),
    ("apbv.pending", "apbv.reporting"),
    ("apbv.compat", "apbv.config", "apbv.device", "apbv.layout", "apbv.kernels"),
    ("apbv.hosts", "apbv.demo", "apbv.grammar"),
    ("apbv.stats", "apbv.model"),
    ("apbv.input",),
    ("apbv.request", "apbv.kv"),
    ("apbv.runner",),
    ("apbv.prefilling",),
    ("apbv.decode",),
    ("apbv.speculate",),
    ("apbv.planning",),
    ("apbv.engine",),
    ("apbv",),
    ("apbv.testing",),
    ("apbv.integrations",),
    ("apbv.serve",),
    ("apbv.launch",),
    ("apbv.doctor",),
    ("apbv.__main__",),
    ("benchmarks", "tests"),
)
LAYER = {name: height for height, names in enumerate(LAYERS) for name in names}
FOLDERS = {"apbv": "apbv", "kernels": "apbv.kernels", "launch": "apbv.launch"}
SCRIPTS = {"benchmarks": "benchmarks", "tests": "tests"}
ONLY_FOR_SERVING = {"starlette", "uvicorn", "pydantic", "pydantic_core", "prometheus_client"}

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
    """Everything that a file imports, at its top or inside functions; ``from a import b`` is
    ``a.b``."""
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
            names = [node.attr]
            value = node.value
            while isinstance(value, ast.Attribute):
                names.append(value.attr)
                value = value.value
            if isinstance(value, ast.Name):
                yield ".".join([value.id, *reversed(names)]), node.lineno


def owner(name: str, known: dict) -> str | None:
    """The longest leading part of a dotted name that is known."""
    parts = name.split(".")
    return next(
        (head for i in range(len(parts), 0, -1) if (head := ".".join(parts[:i])) in known), None
    )


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
                against(
                    line, f"imports {name}: kernels import torch, triton and the standard library"
                )
        elif top == "triton" and module in OURS:
            against(line, "imports triton outside a kernel file")
        elif top == "vllm" and module in OURS and not starts_with(module, "apbv.integrations"):
            against(line, "imports vllm outside apbv.integrations")
        elif top in {"pytest", "_pytest", "hypothesis"} and module in OURS:
            against(line, f"imports {name}, a framework of tests")
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


# Of the tests elsewhere: what imports everything once, and what the benchmarks of questions share.
_KNOW_BENCHMARKS = {"tests.helpers.apbv_tests.asked", "tests.helpers.apbv_tests.preloaded"}


def test_only_tests_of_benchmarks_import_their_code():
    """What others need of it belongs in apbv.testing."""
    found = []
    for module, path in modules({"tests": "tests"}).items():
        if starts_with(module, "tests.benchmarks") or module in _KNOW_BENCHMARKS:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for name, line in imports(tree, module, path.name == "__init__.py"):
            if starts_with(name, "support"):
                found.append(f"{module}:{line}: imports {name}")
    assert not found, "\n".join(found)


def comparisons(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Texts with which a file compares something for equality, alone or among others."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Compare):
            continue
        operands = [node.left, *node.comparators]
        for operand in operands:
            texts = operand.elts if isinstance(operand, (ast.Tuple, ast.List, ast.Set)) else []
            if isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
                texts = [operand]
            for text in texts:
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    yield text.value, node.lineno


def test_no_file_compares_the_names_of_methods_strategies_reducers_and_keep_policies():
    """What depends on one of them is a fact in ``apbv/config/facts.py``."""
    names = {*METHOD_NAMES, *STRATEGY_NAMES, *KEEP_POLICIES, *REDUCER_NAMES, *LAYER_REDUCER_NAMES}
    is_of_package = {("apbv.reporting", "apbv")}
    found = [
        f"{module}:{line}: compares {text!r}"
        for module, path in OURS.items()
        for text, line in comparisons(ast.parse(path.read_text(encoding="utf-8")))
        if text in names and (module, text) not in is_of_package
    ]
    assert not found, "\n".join(found)


def imports_among(known: dict[str, Path], root: str = "") -> dict[str, set[str]]:
    """Which modules each of these imports.

    Args:
        root: of names that stand below a folder on the path, such as ``benchmarks.``.
    """
    graph = {}
    for module, path in known.items():
        names = imports(
            ast.parse(path.read_text(encoding="utf-8")), module, path.name == "__init__.py"
        )
        found = {owner(name, known) or owner(root + name, known) for name, _ in names}
        graph[module] = found - {None, module}
    return graph


def test_there_are_no_import_cycles():
    """Within a package too, where the layers say nothing; a package's __init__ needs what it
    imports."""
    tuple(TopologicalSorter(imports_among(OURS)).static_order())
    tuple(TopologicalSorter(imports_among(BENCHMARKS, "benchmarks.")).static_order())


def imports_between_rooms(package: str, imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """Which files and subfolders of a folder import which others of it, at any depth.

    Args:
        imports: which modules each module imports.
    """
    graph: dict[str, set[str]] = {}
    for module, imported in imports.items():
        for target in imported:
            both_inside = starts_with(module, package) and starts_with(target, package)
            if not both_inside or package in (module, target):
                continue
            depth = package.count(".") + 2
            room = ".".join(module.split(".")[:depth])
            target_room = ".".join(target.split(".")[:depth])
            if room != target_room:
                graph.setdefault(room, set()).add(target_room)
    return graph


def test_the_rooms_of_every_folder_import_in_one_direction():
    """Folder by folder, and not only file by file."""
    packages = [module for module, path in OURS.items() if path.name == "__init__.py"]
    assert "apbv.serve" in packages and "apbv.serve.control" in packages
    imports_of_modules = imports_among(OURS)
    for package in packages:
        rooms = imports_between_rooms(package, imports_of_modules)
        tuple(TopologicalSorter(rooms).static_order())


def test_no_module_rebinds_its_globals():
    """The host group and the layout travel as arguments."""
    rebinding = set()
    for module, path in OURS.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Global):
                rebinding.add(module)
    assert not rebinding


# Only these read a model's config.
READ_CONFIGS = (
    "apbv.model.families",
    # To load a model.
    "apbv.model.loading.adapter_names",
    "apbv.model.loading.adapters",
    "apbv.model.digest",
    "apbv.model.loading.load",
    "apbv.model.loading.quantization",
    # To make a model with random weights.
    "apbv.testing.random_models",
    # The decoder's, as transformers' rotary module has it.
    "apbv.model.rotary",
    # That of vLLM's model.
    "apbv.integrations.vllm.admission",
)
# These have names of other things, of which some are those of families, too: reasoning parsers.
HAVE_SUCH_NAMES = ("apbv.config.names",)
FAMILIES = {*ROWS, *WHY_UNSUPPORTED}
MODELS = {"model", "language_model", "decoder", "tower", "vision_tower", "audio_tower", "target"}
PARTS_OF_CONFIGS = {
    "audio_config",
    "get_text_config",
    "model_type",
    "text_config",
    "thinker_config",
    "vision_config",
}

ATTENTION_IN_FORCE = "_attn_implementation"  # apbv's or the model's own: no fact about the model


def last_name(node: ast.AST) -> str | None:
    """The last part of a dotted name: ``family`` of ``parts.family``."""
    return getattr(node, "attr", getattr(node, "id", None))


def is_family(node: ast.AST) -> bool:
    """Whether an expression is a family, or its name."""
    if last_name(node) == "name" and isinstance(node, ast.Attribute):
        node = node.value
    return last_name(node) == "family"


def given_configs(function: ast.FunctionDef) -> set[str]:
    """The parameters of a function that are configs of transformers."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return {
        argument.arg
        for argument in arguments
        if argument.annotation and "PreTrainedConfig" in ast.unparse(argument.annotation)
    }


def is_config_of_model(node: ast.AST) -> bool:
    """Whether an expression is a model's config, as ``parts.model.config``."""
    return last_name(node) == "config" and last_name(getattr(node, "value", node)) in MODELS


def config_reads(tree: ast.AST, is_config: Callable[[ast.AST], bool]) -> Iterator[Import]:
    """The fields that a file reads of a config, with their lines."""
    for node in ast.walk(tree):
        read_from = None
        if isinstance(node, ast.Attribute) and node.attr != ATTENTION_IN_FORCE:
            read_from = node.value
        elif isinstance(node, ast.Call) and last_name(node.func) == "getattr":
            read_from = node.args[0]
        if read_from is not None and is_config(read_from):
            yield ast.unparse(node), node.lineno


def differences_of_families(source: str, module: str = "") -> list[str]:
    """Where a file asks itself which family a model is of, or reads its config."""
    tree = ast.parse(source)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in FAMILIES:
            found.append((f"names the family {node.value}", node.lineno))
        elif isinstance(node, ast.Attribute) and node.attr in PARTS_OF_CONFIGS:
            found.append((f"reads {ast.unparse(node)}", node.lineno))
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(map(is_family, sides)) and not all(map(is_family, sides)):
                found.append((f"compares {ast.unparse(node)}", node.lineno))
        elif isinstance(node, ast.Call) and last_name(node.func) in ("isinstance", "startswith"):
            asked = node.args[0] if isinstance(node.func, ast.Name) else node.func.value
            if is_family(asked):
                found.append((f"asks {ast.unparse(node)}", node.lineno))
        elif isinstance(node, ast.FunctionDef):
            configs = given_configs(node)
            reads = config_reads(node, lambda each, names=configs: last_name(each) in names)
            found += [(f"reads {name}", line) for name, line in reads]
    found += [(f"reads {name}", line) for name, line in config_reads(tree, is_config_of_model)]
    return [f"{module}:{line}: {what}" for what, line in found]


def test_only_families_tell_models_apart():
    """And nothing else reads a model's config, except to load the model."""
    found = []
    for module, path in OURS.items():
        readers = (*READ_CONFIGS, *HAVE_SUCH_NAMES)
        if not any(starts_with(module, reader) for reader in readers):
            found += differences_of_families(path.read_text(encoding="utf-8"), module)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "parts.family == name",
        "if parts.family.name in names: pass",
        "isinstance(parts.family, QwenVL)",
        "family.name.startswith(start)",
        "TOKENS = {'internvl': 9}",
        "config.vision_config",
        "model.config.image_seq_length",
        "getattr(parts.model.config, 'rope_parameters', None)",
        "def size(config: PreTrainedConfig): return config.hidden_size",
        "def size(config: PreTrainedConfig): return getattr(config, 'hidden_size', 0)",
    ],
)
def test_the_rule_about_families_sees_a_violation(source):
    assert differences_of_families(source)


@pytest.mark.parametrize(
    "source",
    [
        "writer.family != reader.family",
        "parts.language_model.config._attn_implementation = 'apbv'",
        "inspect(model.config)",
        "self.config.threads",
    ],
)
def test_the_rule_about_families_allows_the_rest(source):
    assert not differences_of_families(source)


# Of these, ``from_pretrained`` runs no code of a checkpoint.
RUN_NO_CODE = {"Engine", "PeftConfig"}


def calls_that_may_run_code(tree: ast.Module) -> list[int]:
    """The lines of calls by which transformers may run code of a checkpoint, or ask whether it
    should."""
    lines = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        receiver = getattr(node.func.value, "id", None)
        if node.func.attr != "from_pretrained" or receiver in RUN_NO_CODE:
            continue
        given = {keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords}
        if given.get("trust_remote_code") is not False:
            lines.append(node.lineno)
    return lines


def test_no_call_may_run_code_of_a_checkpoint():
    may_run = {}
    for name, path in modules(FOLDERS | {"benchmarks": "benchmarks"}).items():
        lines = calls_that_may_run_code(ast.parse(path.read_text(encoding="utf-8")))
        if lines:
            may_run[name] = lines
    assert may_run == {}
    for call in (
        "AutoModel.from_pretrained(path)",
        "model_class.from_pretrained(path, trust_remote_code=None)",
    ):
        assert calls_that_may_run_code(ast.parse(call)) == [1]


def test_scripts_import_apbv_before_transformers():
    """Which may fail otherwise (see apbv.compat.torchvision_guard), but not in these tests, where
    apbv comes first.

    The modules of launch/ are imported as part of apbv.
    """
    for module, path in BENCHMARKS.items():
        names = imports(
            ast.parse(path.read_text(encoding="utf-8")), module, path.name == "__init__.py"
        )
        tops = [name.split(".")[0] for name, _ in names]
        assert [top for top in tops if top in ("apbv", "transformers")][:1] in ([], ["apbv"]), (
            module
        )


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("apbv.layout", "from .hosts import HostGroup"),
        ("apbv.prefilling.methods.apbv", "from ...engine import Engine"),
        ("apbv.prefilling.forward", "from .. import engine"),
        ("apbv.model.attention", "from kernels import merge_states"),
        ("apbv.model.attention", "import triton.language as tl"),
        ("apbv.kernels.operators", "from ..config import PrefillConfig"),
        ("apbv.kernels.operators", "from transformers import Cache"),
        ("apbv.prefilling.result", "from vllm import LLM"),
        ("apbv.kv.cache", "import torch.distributed as dist"),
        ("apbv.engine", "import starlette"),
        ("apbv.testing.simulated", "import pytest"),
    ],
)
def test_the_rules_see_a_violation(module, source):
    assert violations(module, False, source)


# Literal translations and pro-forms whose form is clear enough to search for, with a better phrase.
PHRASES = {
    r"(?<!there )\b(is|are) no (?!longer|more|less|fewer)": "is not a",
    r"\bmay come\b": "can be repeated, may follow",
    r"\bso many\b": "the quantity's name",
    r"\blikewise\b": "what is the same",
    r"\bshall\b": "must",
    r"\breturns? what\b": "return, and the thing's name",
    r"^\W*(a|an) \w+ (is what|says)\b": "the thing, without its name",
}


def phrases(text: str) -> list[str]:
    """Phrases to avoid in a text, with their lines."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        for pattern, better in PHRASES.items():
            if match := re.search(pattern, line, re.IGNORECASE):
                found.append(f"{number}: {match[0]!r}; better: {better}")
    return found


def test_no_phrase_to_avoid():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "apbv").rglob("*.md")]
    paths = [*OURS.values(), *BENCHMARKS.values(), *pages]
    found = [
        f"{path.relative_to(ROOT)}:{each}"
        for path in paths
        for each in phrases(path.read_text("utf-8"))
    ]
    assert not found, "\n".join(found)
