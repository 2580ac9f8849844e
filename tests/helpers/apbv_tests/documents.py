"""The README and the pages of docs/: their code blocks, commands and links.

A code block's info string says how it is tested. Behind the language stands one of these marks:

``quickstart``  ``.ci/run`` and tests/test_readme.py run the commands as they stand
``run``         the commands, or the script, are run; a block ``output`` behind it is what they
                print to stdout
``ask``         clips are rendered, and asked about, as the commands say
``parse``       the scripts parse the options, for what needs GPUs, several machines or hours
``install``     the extra that pip installs exists
``serve``       a server is started as the first line says, and asked as the rest says
``client``      the script is run against that server
``compile``     the script is compiled, for what needs vLLM
``vllm``        the connector that the command names exists
``deploy``      the files that the commands name exist, for programs that are not part of the
                project
``output``      what the block before prints
``layout``      a drawing, or the form of something
"""

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.run import get_args_parser

from apbv.testing.clips import DEMO_CLIP, make_clip, questions

from apbv_tests.scripts import ROOT

README = ROOT / "README.md"
PAGES = (
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
)

_BLOCK = re.compile(r"^```(.*)\n((?:.*\n)*?)^```$", re.MULTILINE)
_ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")


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
        Block(page, text.count("\n", 0, found.start()) + 1, found[1], found[2])
        for found in _BLOCK.finditer(text)
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


def require_table(page: Path, table: str) -> None:
    """Compare a page's table, which the first line finds, with what it should be.

    With APBV_WRITE_TABLES=1 it is written there before.

    Raises:
        AssertionError: the page shows another table.
    """
    text = page.read_text(encoding="utf-8")
    place = text.find(table.partition("\n")[0])
    assert place >= 0, f"{page} has no such table:\n{table}"
    shown = re.match(r"(?:\|.*\n)*", text[place:])[0].rstrip("\n")
    if os.environ.get("APBV_WRITE_TABLES") == "1":
        page.write_text(text[:place] + table + text[place + len(shown) :], encoding="utf-8")
    else:
        assert shown == table, f"APBV_WRITE_TABLES=1 writes another table to {page}:\n{table}"


def text_table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table of texts, whose columns are aligned at the left."""
    lines = []
    for row in (header, ["---"] * len(header), *rows):
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def cells_in(line: str) -> list[str]:
    """The cells of a line of a Markdown table."""
    return [cell.strip() for cell in line.strip("|").split("|")]


def prose(text: str) -> str:
    """A page without its code blocks."""
    return _BLOCK.sub("", text)


def commands_in(code: str) -> list[str]:
    """The commands of a block, each on one line."""
    return [line for line in code.replace("\\\n", " ").splitlines() if line.strip()]


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
    hosts = 1
    is_module = False
    if program == "torchrun":
        started = get_args_parser().parse_args(rest)
        rest = [started.training_script, *started.training_script_args]
        hosts = int(started.nproc_per_node)
        is_module = started.module
    elif rest[0] == "-m":
        rest = rest[1:]
        is_module = True
    assert program in ("python", "torchrun"), f"{command}: not a command that these tests know"
    name, *options = rest
    script = _module_file(name) if is_module else Path(name)
    assert (ROOT / script).is_file(), f"{command}: there is no {script}"
    return Job(script, options, hosts)


def _module_file(module: str) -> Path:
    """Where a module that is run should lie below the root: in launch/, in apbv/, or as a package's
    main one."""
    inside = module.removeprefix("apbv.").replace(".", "/")
    files = [Path(inside).with_suffix(".py"), Path("apbv", inside).with_suffix(".py")]
    return next(
        (file for file in files if (ROOT / file).is_file()), Path("apbv", inside, "__main__.py")
    )


def answer_to(question: str) -> str:
    """The right answer to a question about the packaged clip."""
    return next(
        answer for _, asked, answer in questions(make_clip(*DEMO_CLIP)) if asked == question
    )
