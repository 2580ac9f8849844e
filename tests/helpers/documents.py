"""The README and the pages of docs/: their code blocks, commands and links.

A code block's info string says how it is tested. Behind the language stands one of these marks:

``quickstart``  ``.ci/run`` and tests/test_readme.py run the commands as they stand
``run``         the commands, or the script, are run; a block ``output`` behind it is what they print to stdout
``ask``         clips are rendered, and asked about, as the commands say
``parse``       the scripts parse the options, for what needs GPUs, several machines or hours
``install``     the extra that pip installs exists
``serve``       a server is started as the first line says, and asked as the rest says
``client``      the script is run against that server
``compile``     the script is compiled, for what needs vLLM
``vllm``        the connector that the command names exists
``deploy``      the files that the commands name exist, for programs that are not part of the project
``output``      what the block before prints
``layout``      a drawing, or the form of something
"""

import argparse
import ast
import importlib
import re
import shlex
from dataclasses import dataclass
from importlib.metadata import metadata
from pathlib import Path

from torch.distributed.run import get_args_parser

from scripts import ROOT
from support.clips import DEMO_CLIP, make_clip, questions

README = ROOT / "README.md"
PAGES = (README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md")))
MARKS = {
    "bash": ("quickstart", "run", "ask", "parse", "install", "serve", "vllm", "router", "deploy"),
    "python": ("run", "client", "compile"),
    "text": ("quickstart", "output", "layout"),
}

_BLOCK = re.compile(r"^```(.*)\n((?:.*\n)*?)^```$", re.MULTILINE)
_INLINE_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")
_STARTS_A_SCRIPT = re.compile(r"([A-Z_]+=\S+ )*(python|torchrun|pytest|compute-sanitizer) ")


@dataclass(frozen=True)
class Block:
    """A code block.

    Attributes:
        page: the file that it stands in.
        line: the number of the line on which it begins.
        info: the info string, such as ``bash run``.
        code: what stands in it.
    """

    page: Path
    line: int
    info: str
    code: str

    @property
    def language(self) -> str:
        return self.info.partition(" ")[0]

    @property
    def mark(self) -> str:
        return self.info.partition(" ")[2]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_in(page: Path, text: str | None = None) -> list[Block]:
    """The code blocks of a page, in order."""
    text = page.read_text(encoding="utf-8") if text is None else text
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found[1], found[2]) for found in _BLOCK.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks_in(page)]


def marked(info: str) -> list[Block]:
    """The blocks with this info string, on all pages."""
    return [block for block in BLOCKS if block.info == info]


def output_of(block: Block) -> str | None:
    """What the page says that a block prints; None where it does not say."""
    place = BLOCKS.index(block) + 1
    behind = BLOCKS[place] if place < len(BLOCKS) else None
    return behind.code if behind and behind.page == block.page and behind.mark == "output" else None


def prose(text: str) -> str:
    """A page without its code blocks."""
    return _BLOCK.sub("", text)


def commands_in(code: str) -> list[str]:
    """The commands of a block, each on one line."""
    return [line for line in code.replace("\\\n", " ").splitlines() if line.strip()]


def indented_commands(text: str) -> list[str]:
    """The commands that are indented, as in docstrings, and start one of the project's scripts."""
    lines = re.findall(r"^    (\S.*)$", text.replace("\\\n", " "), re.MULTILINE)
    return [line for line in lines if _STARTS_A_SCRIPT.match(line)]


def inline_commands(page: Path) -> list[str]:
    """The commands in running text that start one of the project's scripts."""
    found = _INLINE_CODE.findall(prose(page.read_text(encoding="utf-8")))
    return [code for code in found if _STARTS_A_SCRIPT.match(code)]


@dataclass(frozen=True)
class Job:
    """A command that starts one of the project's scripts.

    Attributes:
        script: its path below the root.
        options: its command line.
        hosts: how many processes torchrun starts; 1 without torchrun.
    """

    script: Path
    options: list[str]
    hosts: int

    @property
    def name(self) -> str:
        """The script's name, or that of the package whose main module it is."""
        return self.script.parent.name if self.script.stem == "__main__" else self.script.stem


def read_command(command: str) -> Job | None:
    """Take a command apart.

    Returns:
        The script that it starts; None for a run of tests.

    Raises:
        AssertionError: there is no such file, or the command is of no known form.
        SystemExit: torchrun refuses its own options.
    """
    words = shlex.split(command, comments=True)
    while words and _ASSIGNMENT.fullmatch(words[0]):
        words.pop(0)
    if words[0] == "compute-sanitizer":
        words.pop(0)
    program, *rest = words
    if program == "pytest":
        missing = [word for word in rest if word.startswith("tests") and not (ROOT / word).exists()]
        assert not missing, f"{command}: there is no {', '.join(missing)}"
        return None
    hosts, is_module = 1, False
    if program == "torchrun":
        started = get_args_parser().parse_args(rest)
        rest = [started.training_script, *started.training_script_args]
        hosts, is_module = int(started.nproc_per_node), started.module
    elif rest[0] == "-m":
        rest, is_module = rest[1:], True
    assert program in ("python", "torchrun"), f"{command}: not a command that these tests know"
    name, *options = rest
    script = _module_file(name) if is_module else Path(name)
    assert (ROOT / script).is_file(), f"{command}: there is no {script}"
    return Job(script, options, hosts)


def _module_file(module: str) -> Path:
    """Where a module that is run should lie below the root: in launch/, in apbv/, or as a package's main one."""
    inside = module.removeprefix("apbv.").replace(".", "/")
    files = [Path(inside).with_suffix(".py"), Path("apbv", inside).with_suffix(".py")]
    return next((file for file in files if (ROOT / file).is_file()), Path("apbv", inside, "__main__.py"))


def parse_command(command: str, monkeypatch) -> argparse.Namespace | None:
    """Let the script that a command starts parse its options.

    Raises:
        AssertionError, SystemExit: it refuses them, or the command is wrong in itself.
    """
    job = read_command(command)
    if job is None:
        return None
    folder, name = job.script.parts[0], job.name
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
            names |= {f"{node.name}.{member.name}" for member in node.body if isinstance(member, ast.FunctionDef)}
    return names


def places_named(text: str) -> list[str]:
    """The places in the code that a text names: a file, a file with ``:name``, or a package with ``:name``."""
    return re.findall(r"`((?:[\w.]+/)*\w+\.py(?::[\w.]+)?|(?:\w+/)+\w+:[\w.]+)`", text)


def is_there(place: str) -> bool:
    """Whether there is such a file, and such a name in it; of a package, a name that it offers."""
    name, _, inside = place.partition(":")
    if name.startswith("apbv/kernels"):  # the folder kernels/ is installed as apbv.kernels
        name = name.removeprefix("apbv/")
    path = ROOT / name
    if path.is_dir():
        imported = ast.parse((path / "__init__.py").read_text(encoding="utf-8")).body
        aliases = [alias for node in imported if isinstance(node, ast.ImportFrom) for alias in node.names]
        return inside in [alias.name for alias in aliases]
    if "/" not in name:  # a file that the text has placed already
        return not inside and any(ROOT.glob(f"*/**/{name}"))
    return path.is_file() and (not inside or inside in names_in(path))


def anchors_of(text: str) -> set[str]:
    """The anchors of a page: those that GitHub gives to headings, and those set with ``<a id>``."""
    anchors, seen = set(re.findall(r'<a id="([\w-]+)"></a>', prose(text))), {}
    for heading in re.findall(r"^#+ +(.*)$", prose(text), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        seen[slug] = seen.get(slug, -1) + 1
        anchors.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
    return anchors


def linked_pages(page: Path) -> set[str]:
    """The paths of the pages that a page links to, without anchors."""
    targets = {target.partition("#")[0] for target in _LINK.findall(prose(page.read_text(encoding="utf-8")))}
    return {target for target in targets if target.endswith(".md") and ":" not in target}


def broken_links(page: Path, text: str) -> list[str]:
    """The relative links of a page that lead nowhere: no such file in the project, or no such heading."""
    broken = []
    for target in _LINK.findall(prose(text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        is_known = there.exists() and there.is_relative_to(ROOT)
        if is_known and anchor:
            is_known = anchor in anchors_of(text if there == page else there.read_text(encoding="utf-8"))
        if not is_known:
            broken.append(target)
    return broken


def answer_to(question: str) -> str:
    """The right answer to a question about the packaged clip."""
    return next(answer for _, asked, answer in questions(make_clip(*DEMO_CLIP)) if asked == question)
