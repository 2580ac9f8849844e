"""The command-line options of an engine, which the scripts share.

They are read and checked before torch and transformers are imported, which takes seconds.
"""

import argparse
import importlib
import logging
import math
import os
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NoReturn

from apbv.config import (
    BACKEND_NAMES,
    DTYPE_NAMES,
    HIPPO_TERMS,
    IMPORTANCE_NAMES,
    KEEP_POLICIES,
    KV_PLACEMENTS,
    METHOD_NAMES,
    PRUNINGS,
    STRATEGY_NAMES,
    PrefillConfig,
    ReuseConfig,
    SamplingConfig,
    SpeculativeConfig,
)

if TYPE_CHECKING:
    from apbv import Engine, HostGroup

# What means nothing without a draft: its settings, which are None unless they are given, and what goes with them.
_NOT_SETTINGS = ("captioner", "save_kept")
_SPECULATION = (*(field.name for field in fields(SpeculativeConfig)), *_NOT_SETTINGS)

_FORMAT = warnings.formatwarning


class OptionParser(argparse.ArgumentParser):
    """A parser whose errors are one line, as the scripts' other errors are: every host prints it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (--help lists the options)\n")


def add_prefill_options(parser: argparse.ArgumentParser) -> None:
    prefill = parser.add_argument_group("prefill")
    prefill.add_argument(
        "--method", choices=METHOD_NAMES, default=PrefillConfig().method, help="(default %(default)s)"
    )
    prefill.add_argument("--frames", type=int, help="frames sampled from a video (default: the model's, or 64)")
    prefill.add_argument("--fps", type=float, help="sample at this rate, at most --frames")
    prefill.add_argument("--anchor-len", type=int, help="anchor tokens (default: from the prompt's length)")
    prefill.add_argument("--passing-len", type=int, help="KV pairs each block passes on (default: likewise)")
    prefill.add_argument(
        "--query-len",
        type=int,
        default=PrefillConfig().query_len,
        help="tokens at the end of a text without --context that are the question (default %(default)s)",
    )
    prefill.add_argument(
        "--importance",
        choices=IMPORTANCE_NAMES,
        default=PrefillConfig().importance,
        help="what ranks them (default %(default)s)",
    )
    prefill.add_argument("--kv", choices=KV_PLACEMENTS, default="gathered", help="where decoding finds the KV")
    prefill.add_argument(
        "--backend",
        choices=BACKEND_NAMES,
        default="auto",
        help="what computes attention (default: by device)",
    )
    prefill.add_argument(
        "--dtype", choices=DTYPE_NAMES, default="auto", help="of the weights (default auto: the model's)"
    )


def add_draft_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Returns their group, for what a script adds to it; an option that is not given must be None."""
    draft = parser.add_argument_group("speculative decoding")
    draft.add_argument(
        "--speculate", choices=("off", *STRATEGY_NAMES), default="off", help="how to draft (default off)"
    )
    draft.add_argument("--draft-model", metavar="PATH", help="a directory or a hub id (demo: the packaged one)")
    draft.add_argument(
        "--draft-host",
        action="store_true",
        default=None,
        help="the last host (of one: a thread) drafts while the others verify",
    )
    draft.add_argument("--num-draft-tokens", type=draft_tokens, metavar="N|auto", help="per round (default 5)")
    draft.add_argument(
        "--keep-losing-draft",
        action="store_true",
        default=None,
        help="also where an answer takes longer with it than without",
    )
    draft.add_argument("--num-tree-nodes", type=int, help="draft a tree of so many, as deep at most (sd_tree: 25)")
    draft.add_argument("--keep", choices=KEEP_POLICIES, help="which visual tokens (default: the strategy's)")
    draft.add_argument("--hippo-terms", nargs="+", choices=HIPPO_TERMS, help="of its scores (default: all)")
    draft.add_argument("--prune", choices=PRUNINGS, help="what the draft reads or keeps (default prompt)")
    draft.add_argument(
        "--vision-first", action="store_true", default=None, help="a draft host begins before attention is known"
    )
    draft.add_argument("--keep-ratio", type=float, help="the share of them the draft sees (default 0.1)")
    draft.add_argument("--keep-tokens", type=int, help="or so many of the prompt's tokens, text included")
    draft.add_argument("--ensemble", help="what tabed drafts from: MT, MT*, MTCP, MTCP*, … (default MT*)")
    draft.add_argument("--captioner", metavar="MODULE:FUNCTION", help="gets the prompt, says what it shows")
    return draft


def add_host_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="T",
        help="processes (GPUs) that share a model (default 1)",
    )
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds to wait for a silent host (300)")


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with one line where options are wrong in themselves, or cannot be meant together."""
    if options.speculate == "off" and (useless := given_for_draft(options)):
        parser.error(f"--{next(iter(useless)).replace('_', '-')} needs --speculate")
    if options.frames is not None and options.frames < 1:
        parser.error(f"--frames must be at least 1, not {options.frames}")
    if options.fps is not None and not 0 < options.fps < math.inf:
        parser.error(f"--fps must be a positive number, not {options.fps}")
    if not options.timeout > 0:
        parser.error(f"--timeout must be a positive number of seconds, not {options.timeout}")
    for make in (prefill_config, speculative_config, sampling_config):
        try:
            make(options)
        except ValueError as error:
            parser.error(str(error))


def given_for_draft(options: argparse.Namespace) -> dict[str, Any]:
    """The options for a draft that were given; those of :class:`SpeculativeConfig` have their names there."""
    found = {name: getattr(options, name, None) for name in _SPECULATION}
    return {name: value for name, value in found.items() if value is not None}


def prefill_config(options: argparse.Namespace) -> PrefillConfig:
    """Raises ValueError where a value is out of range."""
    return PrefillConfig(
        method=options.method,
        anchor_len=options.anchor_len,
        passing_len=options.passing_len,
        query_len=options.query_len,
        importance=options.importance,
        kv=options.kv,
        backend=options.backend,
    )


def speculative_config(options: argparse.Namespace) -> SpeculativeConfig | None:
    """Raises ValueError where a value is out of range."""
    if options.speculate == "off":
        return None
    given = given_for_draft(options)
    for name in _NOT_SETTINGS:
        given.pop(name, None)
    if "hippo_terms" in given:
        given["hippo_terms"] = tuple(given["hippo_terms"])
    return SpeculativeConfig(strategy=options.speculate, **given)


def sampling_config(options: argparse.Namespace) -> SamplingConfig:
    """Raises ValueError where a value is out of range."""
    given = {"max_new_tokens": options.max_new_tokens, "seed": getattr(options, "seed", None)}
    given = {name: value for name, value in given.items() if value is not None}
    return SamplingConfig(temperature=options.temperature, top_p=options.top_p, **given)


def load_engine(options: argparse.Namespace, hosts: "HostGroup", reuse: ReuseConfig | None = None) -> "Engine":
    """The engine that the options describe; collective.

    Raises:
        ValueError: options do not go together, or there is no such model.
        HostError: another host failed to load it.
    """
    from apbv import Engine
    from apbv.speculate import require_effective

    speculate = speculative_config(options)
    with hosts.local_stage("reading the options"):
        if speculate is not None:
            require_effective(speculate, given_for_draft(options))
        captioner = load_function(options.captioner) if options.captioner else None
    return Engine.from_pretrained(
        options.model,
        prefill=prefill_config(options),
        speculate=speculate,
        hosts=hosts,
        dtype=options.dtype,
        captioner=captioner,
        reuse=reuse,
    )


def draft_tokens(text: str) -> int | str:
    """A number, or ``auto``."""
    return text if text == "auto" else int(text)


def load_function(name: str) -> Callable:
    """A function by its name, ``package.module:function``, of an importable module.

    Raises:
        ValueError: there is none.
    """
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"cannot load {name}, which should be MODULE:FUNCTION: {error}") from error


def exit_with(main: Callable[[], int]) -> NoReturn:
    """End this process with a script's status; Ctrl-C is one line, and not a traceback."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        # torchrun passes on to its processes what the terminal has sent them already.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if os.environ.get("LOCAL_RANK", "0") == "0":  # once per machine
            sys.stderr.write("\ninterrupted\n" if sys.stderr.isatty() else "interrupted\n")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + signal.SIGINT)  # an exchange with other hosts that is under way would be waited for


def quieten(hosts: "HostGroup") -> None:
    """Warnings and progress bars once, not once per process."""
    from transformers.utils import logging as transformers_logging

    warnings.formatwarning = _formatted_warning
    if not hosts.is_leader:
        warnings.simplefilter("ignore")
        transformers_logging.set_verbosity_error()
        logging.disable(logging.WARNING)
    if not hosts.is_leader or not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()


def _formatted_warning(message, category, *place) -> str:
    """What a user is told is one line; what a developer is told, such as a deprecation, has its place."""
    return f"warning: {message}\n" if category is UserWarning else _FORMAT(message, category, *place)
