"""The installed command ``apbv``: ``apbv infer``, ``batch``, ``plan``, ``serve`` and ``doctor``.

torchrun --nproc-per-node 2 -m apbv infer --model demo
apbv infer --model demo          (one host)
"""

import sys
from importlib import import_module

from apbv import __version__
from apbv.launch.options import OptionParser, exit_with

COMMANDS = {
    "infer": "answer a question about videos, images, audio or a long text",
    "batch": "answer a file of requests in OpenAI's batch format",
    "plan": "estimate whether a prompt fits in memory, without loading weights",
    "serve": "start an OpenAI-compatible HTTP server",
    "doctor": "check which parts work on this machine, and why the others do not",
}


def run(arguments: list[str] | None = None) -> int:
    """Run a command with the arguments that follow its name; return its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = OptionParser(
        "apbv", description="Sequence-parallel prefill for long-video vision-language models."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    command = parser.parse_args(arguments[:1]).command
    module = "apbv.doctor.__main__" if command == "doctor" else f"apbv.launch.{command}"
    return import_module(module).main(arguments[1:], prog=f"apbv {command}")


def main() -> None:
    """Run the installed command ``apbv`` and exit."""
    exit_with(run)


if __name__ == "__main__":
    main()
