"""The command-line options of an engine, which the scripts share."""

import argparse
import importlib
import logging
import sys
import warnings
from collections.abc import Callable

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
from transformers.utils import logging as transformers_logging

from apbv import Engine, HostGroup, PrefillConfig, ReuseConfig, SpeculativeConfig
from apbv.config import HIPPO_TERMS, KEEP_POLICIES, KV_PLACEMENTS, PRUNINGS
from apbv.kernels.backends import BACKENDS
from apbv.loading import DTYPES
from apbv.methods import METHODS
from apbv.methods.importance import IMPORTANCE
from apbv.speculate import STRATEGIES

# Every frame of the demo's clip, the precision its scores were measured in, and room for a description.
_DEFAULTS = {"frames": 64, "dtype": "auto", "max_new_tokens": 128}
_DEMO_DEFAULTS = {"frames": 2048, "dtype": "float32", "max_new_tokens": 512}
_NEED_A_DRAFT = ("draft_model", "draft_host", "num_tree_nodes", "keep", "vision_first", "captioner")


def add_prefill_options(parser: argparse.ArgumentParser) -> None:
    prefill = parser.add_argument_group("prefill")
    prefill.add_argument("--method", default="apbv", help=f"one of {', '.join(sorted(METHODS))}")
    prefill.add_argument("--frames", type=int, help="frames sampled from a video (default 64; demo 2048)")
    prefill.add_argument("--fps", type=float, help="sample at this rate, at most --frames")
    prefill.add_argument("--anchor-len", type=int, help="anchor tokens (default: from the prompt's length)")
    prefill.add_argument("--passing-len", type=int, help="KV pairs each block passes on (default: likewise)")
    prefill.add_argument(
        "--importance", default=PrefillConfig().importance, help=f"one of {', '.join(sorted(IMPORTANCE))}"
    )
    prefill.add_argument("--kv", choices=KV_PLACEMENTS, default="gathered", help="where decoding finds the KV")
    prefill.add_argument(
        "--backend",
        choices=BACKENDS,
        default="auto",
        help="what computes attention (default: by device)",
    )
    prefill.add_argument("--dtype", help=f"{', '.join(DTYPES)} (default auto; demo float32)")


def add_draft_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Returns their group, for what a script adds to it."""
    draft = parser.add_argument_group("speculative decoding")
    draft.add_argument("--speculate", default="off", help=f"off, or one of {', '.join(sorted(STRATEGIES))}")
    draft.add_argument("--draft-model", metavar="PATH", help="a directory or a hub id (demo: the packaged one)")
    draft.add_argument(
        "--draft-host", action="store_true", help="the last host (of one: a thread) drafts while the others verify"
    )
    draft.add_argument(
        "--num-draft-tokens", type=draft_tokens, default=5, metavar="N|auto", help="per round (default 5)"
    )
    draft.add_argument("--num-tree-nodes", type=int, help="draft a tree of so many, as deep at most (sd_tree: 25)")
    draft.add_argument("--keep", help=f"which visual tokens (default: the strategy's): {', '.join(KEEP_POLICIES)}")
    draft.add_argument("--hippo-terms", nargs="+", choices=HIPPO_TERMS, default=HIPPO_TERMS, help="of its scores")
    draft.add_argument(
        "--prune",
        choices=PRUNINGS,
        default=SpeculativeConfig().prune,
        help="what the draft reads or keeps",
    )
    draft.add_argument("--vision-first", action="store_true", help="a draft host begins before attention is known")
    draft.add_argument("--keep-ratio", type=float, default=0.1, help="the share of them the draft sees (0.1)")

    draft.add_argument("--ensemble", default="MT*", help="what tabed drafts from: MT, MT*, MTCP, MTCP*, …")
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
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds to wait for another host")


def fill_in(options: argparse.Namespace) -> None:
    """Give what depends on the model, and was not given, its default."""
    for name, value in (_DEMO_DEFAULTS if options.model == "demo" else _DEFAULTS).items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def load_engine(options: argparse.Namespace, hosts: HostGroup, reuse: ReuseConfig | None = None) -> Engine:
    """The engine that the options describe; collective.

    Raises:
        ValueError: options do not go together, or there is no such model.
        HostError: another host failed to load it.
    """
    with hosts.local_stage("reading the options"):
        config = PrefillConfig(
            method=options.method,
            anchor_len=options.anchor_len,
            passing_len=options.passing_len,
            importance=options.importance,
            kv=options.kv,
            backend=options.backend,
        )
        speculate = None
        for name in _NEED_A_DRAFT:
            require_draft(options, name)
        if options.speculate != "off":
            speculate = SpeculativeConfig(
                strategy=options.speculate,
                draft_model=options.draft_model,
                num_draft_tokens=options.num_draft_tokens,
                num_tree_nodes=options.num_tree_nodes,
                keep=options.keep,
                keep_ratio=options.keep_ratio,
                hippo_terms=tuple(options.hippo_terms),
                prune=options.prune,
                vision_first=options.vision_first,
                ensemble=options.ensemble,
                draft_host=options.draft_host,
            )
        captioner = load_function(options.captioner) if options.captioner else None
    return Engine.from_pretrained(
        options.model,
        prefill=config,
        speculate=speculate,
        hosts=hosts,
        dtype=options.dtype,
        captioner=captioner,
        reuse=reuse,
    )


def require_draft(options: argparse.Namespace, name: str) -> None:
    """Refuse an option that means nothing without a draft.

    Raises:
        ValueError: it is given, and ``--speculate`` is not.
    """
    if options.speculate == "off" and getattr(options, name):
        raise ValueError(f"--{name.replace('_', '-')} needs --speculate")


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


def quieten(hosts: HostGroup) -> None:
    """Warnings and progress bars once, not once per process."""
    if not hosts.is_leader:
        warnings.simplefilter("ignore")
        transformers_logging.set_verbosity_error()
        logging.disable(logging.WARNING)
    if not hosts.is_leader or not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
