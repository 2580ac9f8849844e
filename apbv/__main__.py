"""The installed command ``apbv``, which runs the scripts of launch/ as ``apbv infer`` and ``apbv serve``.

torchrun --nproc-per-node 2 -m apbv infer --model demo
apbv infer --model demo          (one host)
"""

import sys
from importlib import import_module

from apbv import __version__
from apbv.launch.options import OptionParser, exit_with

COMMANDS = {
    "infer": "answer a question about a video, images or a long text",
    "serve": "serve a model over HTTP, with OpenAI's chat-completions interface",
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
    return import_module(f"apbv.launch.{command}").main(arguments[1:], prog=f"apbv {command}")


def main() -> None:
    """Run the installed command ``apbv``, and end this process."""
    exit_with(run)


if __name__ == "__main__":
    main()
