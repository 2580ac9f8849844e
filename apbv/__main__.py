"""The installed command ``apbv``, which runs ``apbv infer``, ``plan``, ``serve`` and ``doctor``.

torchrun --nproc-per-node 2 -m apbv infer --model demo
apbv infer --model demo          (one host)
"""

import sys
from importlib import import_module

from apbv import __version__
from apbv.launch.options import OptionParser, exit_with

COMMANDS = {
    "infer": "answer a question about a video, images or a long text",
    "plan": "say whether a prompt will fit in memory, before any weights are loaded",
    "serve": "serve a model over HTTP, with OpenAI's chat-completions interface",
    "doctor": "find out what works on this machine, and why the rest does not",
}


def run(arguments: list[str] | None = None) -> int:
    """Hand the arguments behind a command's name to the command, and return its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = OptionParser("apbv", description="Sequence-parallel prefill for long-video vision-language models.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    command = parser.parse_args(arguments[:1]).command
    module = "apbv.doctor.__main__" if command == "doctor" else f"apbv.launch.{command}"
    return import_module(module).main(arguments[1:], prog=f"apbv {command}")


def main() -> None:
    """Run the installed command ``apbv``, and end this process."""
    exit_with(run)


if __name__ == "__main__":
    main()
