"""The command-line options of an engine, which the scripts share.

They are read and checked before torch and transformers are imported, which takes seconds.
"""

import argparse
import importlib
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NoReturn

from apbv.config import (
    BACKEND_NAMES,
    CUDA_GRAPH_MODES,
    DTYPE_NAMES,
    HIPPO_TERMS,
    IMPORTANCE_NAMES,
    KEEP_POLICIES,
    KV_PLACEMENTS,
    METHOD_NAMES,
    PRUNINGS,
    STRATEGY_NAMES,
    VIDEO_BACKEND_NAMES,
    DecodeConfig,
    PrefillConfig,
    ReuseConfig,
    SamplingConfig,
    SpeculativeConfig,
    VideoConfig,
    require_frame_rate,
)
from apbv.launch.reduction import add_reduce_options, reduce_config
from apbv.launch.sparse import add_sparse_options, sparse_config

if TYPE_CHECKING:
    from apbv import Engine, HostGroup

# Options that mean nothing without a draft: its settings, and two others. They are None unless they are given.
_NOT_SETTINGS = ("captioner", "save_kept")
_SPECULATION = (*(field.name for field in fields(SpeculativeConfig)), *_NOT_SETTINGS)

_FORMAT = warnings.formatwarning


class OptionParser(argparse.ArgumentParser):
    """A parser whose errors are one line, like the scripts' other errors, because every host prints it."""

    def error(self, message: str) -> NoReturn:
        """End the process with status 2."""
        self.exit(2, f"error: {message} (--help lists the options)\n")


def add_prefill_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of sampling frames, prefill and attention."""
    prefill = parser.add_argument_group("prefill")
    prefill.add_argument(
        "--method",
        choices=METHOD_NAMES,
        default=PrefillConfig().method,
        help="how to prefill (default %(default)s)",
    )
    prefill.add_argument("--frames", type=int, help="frames sampled from each video (default: the model's, or 64)")
    prefill.add_argument("--fps", type=float, help="sample so many frames per second, at most --frames")
    prefill.add_argument("--anchor-len", type=int, help="anchor tokens (default: from the prompt's length)")
    prefill.add_argument(
        "--anchor-query", action="store_true", help="put the question into the anchor, as APB does (apb, apbv)"
    )
    prefill.add_argument("--passing-len", type=int, help="KV pairs that each block passes on (default: likewise)")
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
        help="how the KV pairs to pass on are ranked (default %(default)s)",
    )
    prefill.add_argument(
        "--kv",
        choices=KV_PLACEMENTS,
        default="gathered",
        help="where the KV lies for decoding (default %(default)s)",
    )
    prefill.add_argument(
        "--backend",
        choices=BACKEND_NAMES,
        default="auto",
        help="what computes attention (default: by device)",
    )
    prefill.add_argument(
        "--cuda-graphs",
        choices=CUDA_GRAPH_MODES,
        default=DecodeConfig().cuda_graphs,
        help="launch a decoding step's kernels all at once, on a GPU that allows it (default %(default)s)",
    )
    prefill.add_argument(
        "--video-backend",
        choices=VIDEO_BACKEND_NAMES,
        help="what decodes videos (default: torchcodec on a GPU where it is installed, else pyav)",
    )
    prefill.add_argument(
        "--video-chunk-mib",
        type=int,
        metavar="N",
        help="memory that reading and encoding may take for one part of a video, about (default: by what is free)",
    )
    prefill.add_argument(
        "--dtype", choices=DTYPE_NAMES, default="auto", help="the weights' type (default auto: the model's)"
    )
    add_reduce_options(parser)
    add_sparse_options(parser)


def add_draft_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options of speculative decoding, and return their group, for what a script adds to it.

    An option that is not given must be None.
    """
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
    draft.add_argument(
        "--num-draft-tokens", type=draft_tokens, metavar="N|auto", help="tokens drafted per round (default 5)"
    )
    draft.add_argument(
        "--keep-losing-draft",
        action="store_true",
        default=None,
        help="draft on even where an answer takes longer with the draft than without",
    )
    draft.add_argument(
        "--num-tree-nodes", type=int, help="draft a tree of so many tokens instead of a chain (sd_tree: 25)"
    )
    draft.add_argument(
        "--keep", choices=KEEP_POLICIES, help="which visual tokens the draft sees (default: the strategy's)"
    )
    draft.add_argument(
        "--hippo-terms", nargs="+", choices=HIPPO_TERMS, help="the terms of HIPPO's scores (default: all)"
    )
    draft.add_argument(
        "--prune", choices=PRUNINGS, help="prune what the draft reads, or the KV it keeps (default prompt)"
    )
    draft.add_argument(
        "--vision-first", action="store_true", default=None, help="a draft host begins before attention is known"
    )
    draft.add_argument(
        "--keep-ratio", type=float, help="the share of visual tokens that the draft sees (default 0.1)"
    )
    draft.add_argument("--keep-tokens", type=int, help="instead: how many of the prompt's tokens, text included")
    draft.add_argument("--ensemble", help="what tabed drafts from: MT, MT*, MTCP, MTCP*, … (default MT*)")
    draft.add_argument(
        "--captioner", metavar="MODULE:FUNCTION", help="a function that describes what the prompt shows"
    )
    return draft


def add_host_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the group of hosts."""
    parser.add_argument(
        "--device",
        metavar="cpu|cuda|cuda:N",
        help="where each process computes (default: on a GPU, of which several may share one, or else on the CPU)",
    )
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="T",
        help="processes (GPUs) that share a model (default 1)",
    )
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds to wait for a silent host (300)")
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="CPU threads of each process (default: as OMP_NUM_THREADS says; where torchrun has set that to 1, a "
        "fair share of the machine's cores)",
    )


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the process with one line where options are wrong in themselves, or do not go together."""
    if options.speculate == "off" and (useless := given_for_draft(options)):
        parser.error(f"--{next(iter(useless)).replace('_', '-')} needs --speculate")
    if options.frames is not None and options.frames < 1:
        parser.error(f"--frames must be at least 1, not {options.frames}")
    if options.threads is not None and options.threads < 1:
        parser.error(f"--threads must be at least 1, not {options.threads}")
    if options.video_chunk_mib is not None and not 1 <= options.video_chunk_mib < 2**40:
        parser.error(f"--video-chunk-mib must be a positive number, not {options.video_chunk_mib}")
    if options.device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", options.device):
        parser.error(f"--device must be cpu, cuda, or a GPU as in cuda:0, not {options.device!r}")
    if not options.timeout > 0:
        parser.error(f"--timeout must be a positive number of seconds, not {options.timeout}")
    if options.fps is not None:
        try:
            require_frame_rate(options.fps)
        except ValueError as error:
            parser.error(f"--{error}")  # which begins with the option's name
    for make in (prefill_config, speculative_config, sampling_config):
        try:
            make(options)
        except ValueError as error:
            parser.error(str(error))


def given_for_draft(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options for a draft that were given, most by the names of :class:`SpeculativeConfig`."""
    found = {name: getattr(options, name, None) for name in _SPECULATION}
    return {name: value for name, value in found.items() if value is not None}


def prefill_config(options: argparse.Namespace) -> PrefillConfig:
    """Make the settings of prefill; ValueError where a value is out of range."""
    return PrefillConfig(
        method=options.method,
        anchor_len=options.anchor_len,
        anchor_query=options.anchor_query,
        passing_len=options.passing_len,
        query_len=options.query_len,
        importance=options.importance,
        kv=options.kv,
        backend=options.backend,
        sparse=sparse_config(options),
        video=VideoConfig(
            backend=options.video_backend or VideoConfig().backend,
            threads=options.threads,
            chunk_bytes=None if options.video_chunk_mib is None else options.video_chunk_mib * 2**20,
        ),
        reduce=reduce_config(options),
    )


def speculative_config(options: argparse.Namespace) -> SpeculativeConfig | None:
    """Make the settings of speculative decoding, if any; ValueError where a value is out of range."""
    if options.speculate == "off":
        return None
    given = given_for_draft(options)
    for name in _NOT_SETTINGS:
        given.pop(name, None)
    if "hippo_terms" in given:
        given["hippo_terms"] = tuple(given["hippo_terms"])
    return SpeculativeConfig(strategy=options.speculate, **given)


def sampling_config(options: argparse.Namespace) -> SamplingConfig:
    """Make the settings of sampling; ValueError where a value is out of range."""
    given = {"max_new_tokens": options.max_new_tokens, "seed": getattr(options, "seed", None)}
    given = {name: value for name, value in given.items() if value is not None}
    return SamplingConfig(temperature=options.temperature, top_p=options.top_p, **given)


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
        decode=DecodeConfig(cuda_graphs=options.cuda_graphs),
    )


def prepare_process(options: argparse.Namespace, hosts: "HostGroup") -> None:
    """Make the most of this process's CPU cores and memory, and let one process of all show warnings."""
    import torch

    from apbv.allocator import keep_freed_memory

    if hosts.device.type == "cpu":
        keep_freed_memory()
    if (num_threads := threads_wanted(options.threads, hosts.device.type)) is not None:
        torch.set_num_threads(num_threads)
    _quieten(hosts)


def threads_wanted(given: int | None, device_type: str) -> int | None:
    """Return how many threads torch should use on the CPU; None: as many as it has chosen by itself.

    If the user says nothing, torchrun gives each of several processes a single thread, however many cores there
    are. A GPU's host has little to compute: its other cores are left to whatever reads the video.
    """
    from apbv.hosts import fair_share_of_cores

    if given is not None:
        return given
    is_torchruns_choice = (
        int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > 1 and os.environ.get("OMP_NUM_THREADS") == "1"
    )
    return fair_share_of_cores() if is_torchruns_choice and device_type == "cpu" else None


def draft_tokens(text: str) -> int | str:
    """Read a number, or ``auto``."""
    return text if text == "auto" else int(text)


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


def _quieten(hosts: "HostGroup") -> None:
    """Let one process show warnings and progress bars, instead of every one."""
    from transformers.utils import logging as transformers_logging

    if not hosts.is_leader:
        warnings.simplefilter("ignore")
        transformers_logging.set_verbosity_error()
        logging.disable(logging.WARNING)
    if not hosts.is_leader or not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()


def _formatted_warning(message, category, *place) -> str:
    """Format a warning: to a user one line, to a developer, as of a deprecation, with its place in the code."""
    return f"warning: {message}\n" if category is UserWarning else _FORMAT(message, category, *place)
