"""The command-line options of an engine, which the scripts share, and what is done with them.

They are read and checked before torch and transformers are imported, which takes seconds. Most are settings of a
config: their types, ranges, choices and defaults are those of its fields.
"""

import argparse
import importlib
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from apbv.config import (
    DTYPE_NAMES,
    FRAME_RATE,
    SPARSE_NAMES,
    STRATEGY_NAMES,
    DecodeConfig,
    PrefillConfig,
    ReduceConfig,
    ReuseConfig,
    SamplingParams,
    SparseConfig,
    SpeculativeConfig,
    VideoConfig,
)
from apbv.warn import report_error

if TYPE_CHECKING:
    from apbv import Engine, HostGroup

_MIB = 2**20
_FORMAT = warnings.formatwarning


class Setting(NamedTuple):
    """An option that is a field of a config, and what argparse is told besides."""

    config: type
    option: str
    field: str
    help: str
    more: Mapping[str, Any] = {}


def _of(config: type, *rows: tuple) -> tuple[Setting, ...]:
    return tuple(Setting(config, *row) for row in rows)


PREFILL = _of(
    PrefillConfig,
    ("--method", "method", "how to prefill"),
    ("--anchor-len", "anchor_len", "anchor tokens (default: from the prompt's length)"),
    ("--anchor-query", "anchor_query", "put the question into the anchor, as APB does (apb, apbv)"),
    ("--passing-len", "passing_len", "KV pairs that each block passes on (default: from the prompt's length)"),
    ("--query-len", "query_len", "tokens at the end of a text without --context that are the question"),
    (
        "--importance",
        "importance",
        "how the KV pairs to pass on are ranked; the APB-V paper's code: dot, with --anchor-query",
    ),
    ("--kv", "kv", "where the KV lies for decoding"),
    ("--backend", "backend", "what computes attention; auto: by device"),
)
GRAPHS = _of(DecodeConfig, ("--cuda-graphs", "cuda_graphs", "launch all kernels of a decoding step at once"))
# Those below are None where they are not given.
VIDEO = _of(
    VideoConfig,
    ("--video-backend", "backend", "what decodes videos; auto: torchcodec on a GPU if it is installed, else pyav"),
    ("--video-chunk-mib", "chunk_bytes", "for one part of a video (default: by free memory)"),
)
THREADS = _of(
    VideoConfig, ("--threads", "threads", "of the CPU (default: OMP_NUM_THREADS, or a share of the cores)")
)
REDUCE = _of(
    ReduceConfig,
    ("--reduce", "method", "leave visual tokens out (default: none)"),
    ("--reduce-ratio", "ratio", "the share of a video's visual tokens that is left"),
    ("--reduce-layer", "layer", "leave them out after N layers of the language model (default: the method's own)"),
    ("--reduce-asked-by", "asked_by", "fastv, pdrop: rank tokens by the attention of these (default: last)"),
)
SPARSE = _of(
    SparseConfig,
    ("--sparse", "method", "compute only chosen blocks, of a host's own with apbv, apb and star (default: all)"),
    ("--sparse-threshold", "threshold", "the share of attention in chosen blocks (default: as in the papers)"),
    ("--sparse-block", "block_size", "tokens of a block of queries"),
    ("--sparse-stride", "stride", "xattention: tokens that get one score"),
    ("--sparse-similarity", "similarity", "spargeattn: how alike the rows of a block must be to be left out"),
    ("--sparse-skip-margin", "skip_margin", "spargeattn: skip values with no score within X of the highest"),
    ("--sparse-divergence", "divergence", "flexprefill: how near to its estimate a head's attention must be"),
    ("--sparse-min-blocks", "min_blocks", "flexprefill: columns and diagonals that every head computes"),
)
DRAFT = _of(
    SpeculativeConfig,
    ("--draft-model", "draft_model", "a directory or a hub id (demo: the packaged one)", {"metavar": "PATH"}),
    ("--draft-host", "draft_host", "the last host drafts while the others verify"),
    ("--num-draft-tokens", "num_draft_tokens", "tokens drafted per round", {"metavar": "N|auto"}),
    ("--keep-losing-draft", "keep_losing_draft", "draft on even where an answer takes longer with the draft"),
    ("--num-tree-nodes", "num_tree_nodes", "draft a tree of N tokens instead of a chain (sd_tree: 25)"),
    ("--keep", "keep", "which visual tokens the draft sees (default: the strategy's)"),
    ("--hippo-terms", "hippo_terms", "the terms of HIPPO's scores (default: all)", {"nargs": "+"}),
    ("--prune", "prune", "prune what the draft reads, or the KV it keeps"),
    ("--keep-ratio", "keep_ratio", "the share of visual tokens that the draft sees (default 0.1)"),
    ("--keep-tokens", "keep_tokens", "instead: how many of the prompt's tokens, text included"),
    ("--ensemble", "ensemble", "what tabed drafts from: MT, MT*, MTCP, MTCP*, …"),
)
ANSWER_LENGTH = _of(SamplingParams, ("--max-new-tokens", "max_new_tokens", "(default: the model's, or 128)"))
SAMPLING = _of(
    SamplingParams,
    ("--temperature", "temperature", "0 is greedy"),
    ("--top-p", "top_p", "draw from the likeliest tokens that have this share"),
    ("--top-k", "top_k", "draw from the so many likeliest tokens, 0: from all"),
    ("--min-p", "min_p", "draw from tokens at least this times as likely as the likeliest"),
    ("--repetition-penalty", "repetition_penalty", "make tokens that were there before less likely"),
    ("--seed", "seed", "the same seed draws the same tokens"),
)
_SETTINGS = (*PREFILL, *GRAPHS, *VIDEO, *THREADS, *REDUCE, *SPARSE, *DRAFT, *ANSWER_LENGTH, *SAMPLING)


class OptionParser(argparse.ArgumentParser):
    """A parser whose errors are one line, like the scripts' other errors, because every host prints it.

    Args:
        first: the names of the options that ``--help`` shows; ``--help-all`` shows all. None: ``--help`` does.
    """

    def __init__(self, prog: str | None = None, first: Sequence[str] | None = None, **kwargs):
        if first is not None:
            kwargs |= {"add_help": False, "usage": "%(prog)s --model MODEL [options]"}
        super().__init__(prog, **kwargs)
        self._first = first
        if first is not None:
            about = "show the options that matter first"
            self.add_argument("-h", "--help", action=_ShortHelp, nargs=0, help=about)
            self.add_argument("--help-all", action="help", help="show all options")

    def format_short_help(self) -> str:
        """Lay out the options that matter first."""
        formatter = self._get_formatter()
        shown = [action for action in self._actions if action.dest in self._first]
        formatter.add_usage(self.usage, [], [])
        formatter.add_text(self.description)
        formatter.start_section("options")
        formatter.add_arguments(sorted(shown, key=lambda action: self._first.index(action.dest)))
        formatter.end_section()
        formatter.add_text(f"--help-all shows all {len(self._actions)} options, by group.")
        return formatter.format_help()

    def error(self, message: str) -> NoReturn:
        """End the process with status 2."""
        which = "help" if self._first is None else "help-all"
        report_error(f"error: {message} (--{which} lists the options)")
        self.exit(2)


class _ShortHelp(argparse.Action):
    def __call__(self, parser, *_) -> None:
        parser.exit(0, parser.format_short_help())


def add_settings(
    group: argparse._ActionsContainer, settings: Sequence[Setting], with_defaults: bool = False
) -> None:
    """Add options that are fields of configs.

    Args:
        with_defaults: an option that is not given has the field's default, else None.
    """
    for each in settings:
        (about,) = (field for field in fields(each.config) if field.name == each.field)
        default, told = about.default, about.metadata
        is_told = "default" in each.help or default in (None, MISSING) or isinstance(default, bool)
        more = {"help": each.help if is_told else f"{each.help} (default {default})"}
        more |= {"default": default if with_defaults else None}
        if isinstance(default, bool):
            more["action"] = "store_true"
        elif told.get("choices") is not None:
            more |= {"choices": told["choices"], "type": told["kind"]}
        elif told:
            more["type"] = reading(told["kind"], told["says"], told["may_be"])
            more |= {} if each.more else {"metavar": {int: "N", float: "X"}.get(told["kind"])}
        group.add_argument(each.option, **more, **each.more)


def reading(kind: Callable[[str], Any], says: str, may_be: Callable[[Any], bool]) -> Callable[[str], Any]:
    """Return a function that reads an option's value, and refuses another than may be.

    Args:
        says: what a value must do, for the error.
        may_be: of a value, or of a text that is no value.
    """

    def value_of(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = text
        if not may_be(value):
            raise argparse.ArgumentTypeError(f"must {says}, not {text}")
        return value

    return value_of


def positive(kind: type = float, most: float = sys.float_info.max) -> Callable[[str], float]:
    """Return a function that reads a number above 0, and at most as large."""
    limit = "" if most == sys.float_info.max else f", at most {most:g}"
    says = f"be a positive {'integer' if kind is int else 'number'}{limit}"
    return reading(kind, says, lambda value: isinstance(value, kind) and 0 < value <= most)


device_name = reading(str, "be cpu, cuda, or a GPU as in cuda:0", re.compile(r"cpu|cuda(:\d+)?").fullmatch)


def add_prefill_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of sampling frames, prefill and attention."""
    prefill = parser.add_argument_group("prefill")
    frames = {"type": positive(int), "metavar": "N", "help": "of each video (default: the model's, or 64)"}
    prefill.add_argument("--frames", "--num-frames", **frames)
    rate = reading(float, *FRAME_RATE)
    prefill.add_argument("--fps", type=rate, metavar="X", help="sample at this rate, at most --frames")
    add_settings(prefill, [*PREFILL, *GRAPHS], with_defaults=True)
    add_settings(prefill, VIDEO)
    prefill.add_argument(
        "--dtype", choices=DTYPE_NAMES, default="auto", help="the weights' type; auto: the model's"
    )
    add_settings(parser.add_argument_group("fewer visual tokens"), REDUCE)
    add_settings(parser.add_argument_group("sparse attention"), SPARSE)


def add_draft_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options of speculative decoding, and return their group, for what a script adds to it.

    An option that is not given must be None.
    """
    draft = parser.add_argument_group("speculative decoding")
    draft.add_argument(
        "--speculate", choices=("off", *STRATEGY_NAMES), default="off", help="how to draft (default off)"
    )
    add_settings(draft, DRAFT)
    draft.add_argument("--captioner", metavar="MODULE:FUNCTION", help="describes what the prompt shows, for tabed")
    return draft


def add_host_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the group of hosts."""
    hosts = parser.add_argument_group("hosts")
    hosts.add_argument(
        "--device", type=device_name, metavar="cpu|cuda|cuda:N", help="default: a GPU, or else the CPU"
    )
    members = {"type": int, "default": 1, "metavar": "T", "help": "GPUs that share a model (default 1)"}
    hosts.add_argument("--tensor-parallel", "--tensor-parallel-size", **members)
    patience = {"type": positive(), "default": 300.0, "metavar": "X"}
    hosts.add_argument("--timeout", **patience, help="to wait for a silent host (default 300)")
    add_settings(hosts, THREADS)


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the process with one line where options do not go together."""
    if options.speculate == "off" and (useless := given_for_draft(options)):
        parser.error(f"--{next(iter(useless)).replace('_', '-')} needs --speculate")
    try:
        prefill_config(options)
        speculative_config(options)
        SamplingParams(**given(options, SamplingParams))
    except ValueError as error:
        parser.error(str(error))


def given(options: argparse.Namespace, config: type) -> dict[str, Any]:
    """Return the fields of a config that options have values for."""
    values = {each.field: each.option[2:].replace("-", "_") for each in _SETTINGS if each.config is config}
    found = {field: getattr(options, option, None) for field, option in values.items()}
    return {field: value for field, value in found.items() if value is not None}


def given_for_draft(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options for a draft that were given, most by the names of :class:`SpeculativeConfig`."""
    captioner = getattr(options, "captioner", None)
    return given(options, SpeculativeConfig) | ({} if captioner is None else {"captioner": captioner})


def prefill_config(options: argparse.Namespace) -> PrefillConfig:
    """Make the settings of prefill; ValueError where they do not go together."""
    video, reduction = given(options, VideoConfig), given(options, ReduceConfig)
    if reduction and "method" not in reduction:
        raise ValueError(f"--reduce-{next(iter(reduction)).replace('_', '-')} needs --reduce")
    if "chunk_bytes" in video:
        video["chunk_bytes"] *= _MIB
    return PrefillConfig(
        **given(options, PrefillConfig),
        sparse=sparse_config(options),
        video=VideoConfig(**video),
        reduce=ReduceConfig(**reduction) if reduction else None,
    )


def sparse_config(options: argparse.Namespace) -> SparseConfig | None:
    """Make the settings of sparse attention, if any, which may be those of a method of that name.

    Raises:
        ValueError: one has no effect.
    """
    settings = given(options, SparseConfig)
    owners = {each.name: each.metadata["of"] for each in fields(SparseConfig)}
    method = settings.get("method") or (options.method if options.method in SPARSE_NAMES else None)
    for each in SPARSE:
        owner = owners[each.field]
        if each.field in settings and (method is None or owner not in (None, method)):
            wanted = "--sparse, or a sparse --method" if owner is None else f"--sparse or --method {owner}"
            raise ValueError(f"{each.option} needs {wanted}")
    return SparseConfig(**{**settings, "method": method}) if settings else None


def speculative_config(options: argparse.Namespace) -> SpeculativeConfig | None:
    """Make the settings of speculative decoding, if any; ValueError where they do not go together."""
    if options.speculate == "off":
        return None
    settings = given(options, SpeculativeConfig)
    if "hippo_terms" in settings:
        settings["hippo_terms"] = tuple(settings["hippo_terms"])
    return SpeculativeConfig(strategy=options.speculate, **settings)


def load_engine(options: argparse.Namespace, hosts: "HostGroup", reuse: ReuseConfig | None = None) -> "Engine":
    """Load the engine that the options describe; collective.

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
        decode=DecodeConfig(**given(options, DecodeConfig)),
    )


def prepare_process(options: argparse.Namespace, hosts: "HostGroup") -> None:
    """Make the most of this process's CPU cores and memory; let one process of all show warnings and bars."""
    import torch
    from transformers.utils import logging as transformers_logging

    from apbv.allocator import keep_freed_memory

    if hosts.device.type == "cpu":
        keep_freed_memory()
    if (num_threads := threads_wanted(options.threads, hosts.device.type)) is not None:
        torch.set_num_threads(num_threads)
    if not hosts.is_leader:
        warnings.simplefilter("ignore")
        transformers_logging.set_verbosity_error()
        logging.disable(logging.WARNING)
    if not hosts.is_leader or not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()


def threads_wanted(given: int | None, device_type: str) -> int | None:
    """Return how many threads torch should use on the CPU; None: as many as it has chosen by itself.

    If the user says nothing, torchrun gives each of several processes a single thread, however many cores there
    are. A GPU's host has little to compute: its other cores are left to whatever reads the video.
    """
    from apbv.hosts import fair_share_of_cores

    if given is not None:
        return given
    is_one_of_several = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > 1
    is_torchruns_choice = is_one_of_several and os.environ.get("OMP_NUM_THREADS") == "1"
    return fair_share_of_cores() if is_torchruns_choice and device_type == "cpu" else None


def load_function(name: str) -> Callable:
    """Import a function by its name, ``package.module:function``.

    Raises:
        ValueError: there is no such function.
    """
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"cannot load {name}, which should be MODULE:FUNCTION: {error}") from error


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Run a script and end this process with its status; Ctrl-C gives one line, and not a traceback."""
    warnings.formatwarning = _formatted_warning
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


def _formatted_warning(message, category, *place) -> str:
    """Format a warning: to a user one line, to a developer, as of a deprecation, with its place in the code."""
    return f"warning: {message}\n" if category is UserWarning else _FORMAT(message, category, *place)
