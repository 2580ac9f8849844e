"""Command-line options of the engine, shared by the scripts.

Options are validated before torch and transformers are imported, which takes seconds. Most
correspond to a config field and take its type, range, choices and default; their help is what the
config's docstring says of the field.
"""

import argparse
import importlib
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from apbv.config import (
    DTYPE_NAMES,
    FRAME_RATE,
    SPARSE_CONFIGS,
    STRATEGY_NAMES,
    DecodeConfig,
    FlexPrefillConfig,
    HippoConfig,
    LayerSkipConfig,
    PrefillConfig,
    ReduceConfig,
    ReuseConfig,
    SamplingParams,
    SpargeAttnConfig,
    SparseConfig,
    SpeculativeAblationConfig,
    SpeculativeConfig,
    TabedConfig,
    VideoConfig,
    XAttentionConfig,
)
from apbv.config.descriptions import describe
from apbv.errors import ApbvError, InvalidConfigError
from apbv.reporting import raised_as, report_error

if TYPE_CHECKING:
    from apbv import Engine, HostGroup

_MIB = 2**20
_FORMAT = warnings.formatwarning


class Setting(NamedTuple):
    """Option for a config field, which says its type, range, choices and default.

    Attributes:
        config: the class of the config.
        field: the field's name.
        name: the option's name, with underscores.
    """

    config: type
    field: str
    name: str

    @property
    def option(self) -> str:
        """The option as it is typed."""
        return f"--{self.name.replace('_', '-')}"


# Options that are not named as their fields, and further arguments of argparse.
_NAMES = {"block_size": "sparse_block", "chunk_bytes": "video_chunk_mib"}
_MORE: dict[str, dict[str, Any]] = {
    "draft_model": {"metavar": "PATH"},
    "num_draft_tokens": {"metavar": "N|auto"},
    "terms": {"nargs": "+"},
    "passing_weights": {"nargs": "+", "type": float, "metavar": "WEIGHT"},
}


def _of(config: type, *field_names: str, prefix: str = "") -> tuple[Setting, ...]:
    """Make the options for fields; with a prefix, ``method``'s is the prefix alone."""
    settings = []
    for field_name in field_names:
        name = field_name
        if prefix:
            name = prefix if field_name == "method" else f"{prefix}_{field_name}"
        settings.append(Setting(config, field_name, _NAMES.get(field_name, name)))
    return tuple(settings)


PREFILL = _of(
    PrefillConfig,
    "method",
    "anchor_len",
    "anchor_query",
    "passing_len",
    "early_passing_len",
    "passing_budget",
    "passing_weights",
    "query_len",
    "importance",
    "kv",
    "backend",
)
DECODE = _of(DecodeConfig, "cuda_graphs", "generation_config")
# The options below are None if not given.
VIDEO = _of(VideoConfig, "chunk_bytes")
THREADS = _of(VideoConfig, "threads")
REDUCE = _of(ReduceConfig, "method", "ratio", "layer", "asked_by", "decode_ratio", prefix="reduce")
SPARSE = (
    *_of(SparseConfig, "method", "threshold", "block_size", prefix="sparse"),
    *_of(XAttentionConfig, "stride", prefix="sparse"),
    *_of(SpargeAttnConfig, "similarity", "skip_below", prefix="sparse"),
    *_of(FlexPrefillConfig, "divergence", "min_blocks", prefix="sparse"),
)
DRAFT = (
    *_of(SpeculativeConfig, "draft_model", "draft_host", "num_draft_tokens"),
    *_of(SpeculativeAblationConfig, "keep_losing_draft"),
    *_of(SpeculativeConfig, "num_tree_nodes", "keep", "prune", "keep_ratio", "keep_tokens"),
    *_of(HippoConfig, "terms", prefix="hippo"),
    *_of(LayerSkipConfig, "layer_ratio"),
    *_of(TabedConfig, "ensemble"),
    *_of(TabedConfig, "window", prefix="ensemble"),
)
_ABSENT_BY_DEFAULT = (REDUCE[0], SPARSE[0])
ANSWER_LENGTH = _of(SamplingParams, "max_new_tokens")
SAMPLING = _of(
    SamplingParams, "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"
)
SETTINGS = (
    *PREFILL,
    *DECODE,
    *VIDEO,
    *THREADS,
    *REDUCE,
    *SPARSE,
    *DRAFT,
    *ANSWER_LENGTH,
    *SAMPLING,
)


class _StoreOnce(argparse.Action):
    """Stores an option's value; the parser is an :class:`OptionParser`."""

    def __call__(self, parser, namespace, values, option_string=None):
        parser.require_once(self, option_string)
        setattr(namespace, self.dest, values)


class YesOrNoOnce(argparse.BooleanOptionalAction):
    """Stores whether ``--option`` or ``--no-option`` was given.

    The parser is an :class:`OptionParser`.
    """

    def __call__(self, parser, namespace, values, option_string=None):
        parser.require_once(self, option_string)
        super().__call__(parser, namespace, values, option_string)


class OptionParser(argparse.ArgumentParser):
    """Argument parser with one-line errors, because every host prints them.

    An option with one value, given twice, is an error: argparse would silently take the last.
    """

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self._given: set[str] = set()
        # What options without an action do.
        self.register("action", None, _StoreOnce)
        self.register("action", "store", _StoreOnce)

    def parse_known_args(
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse as argparse does; see the class."""
        self._given.clear()
        return super().parse_known_args(args, namespace)

    def require_once(self, action: argparse.Action, option: str | None) -> None:
        """Exit with a one-line error if an option has been given before."""
        if option is not None and action.dest in self._given:
            self.error(f"{option} was given twice; give it once")
        self._given.add(action.dest)

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with status 2."""
        report_error(f"error: {message} (--help lists the options)")
        self.exit(2)

    @contextmanager
    def rejecting(self) -> Iterator[None]:
        """Exit with a one-line error if the block finds that options are wrong."""
        try:
            yield
        except ApbvError as error:
            self.error(str(error))


def add_settings(
    group: argparse._ActionsContainer, settings: Sequence[Setting], with_defaults: bool = False
) -> None:
    """Add options for config fields.

    Args:
        with_defaults: use the field's default for an option that is not given; otherwise None.
    """
    for setting in settings:
        field = _field_of(setting)
        default = field.default
        checks = field.metadata
        arguments: dict[str, Any] = {
            "default": default if with_defaults else None,
            "help": _help_of(setting),
        }

        # Its type and range.
        if isinstance(default, bool):
            arguments["action"] = "store_true"
        elif checks.get("choices") is not None:
            arguments["choices"] = checks["choices"]
            arguments["type"] = checks["kind"]
        elif checks.get("may_be") is not None:
            arguments["type"] = reading(checks["kind"], checks["says"], checks["may_be"])
            arguments["metavar"] = {int: "N", float: "X"}.get(checks["kind"])
        arguments |= _MORE.get(setting.field, {})
        group.add_argument(setting.option, **arguments)


def _help_of(setting: Setting) -> str:
    """Return the help of an option: its field's summary, and its default."""
    default = _field_of(setting).default
    if setting in _ABSENT_BY_DEFAULT:
        default = "none"
    options = {other.field: other.option for other in SETTINGS if other.config is setting.config}
    text = help_from_docstring(setting.config, setting.field, default, options)
    for method, config in SPARSE_CONFIGS.items():
        if setting.config is config:
            text = f"{method}: {text}"
    return text


def help_from_docstring(
    config: type, field_name: str, default: Any, options: Mapping[str, str]
) -> str:
    """Return the description of a field in its config's docstring, as the help of an option.

    Args:
        default: the option's default; of None the docstring may say what it stands for, and a
            switch shows none.
        options: the options of fields that the docstring mentions.
    """
    description = describe(config, field_name)
    text = description.summary
    # The docstring may name the default itself.
    if "default" not in text:
        if description.default is not None:
            text += f" (default: {description.default})"
        elif default not in (None, MISSING) and not isinstance(default, bool):
            text += f" (default {default})"
    for code in description.codes:
        if code in options:
            text = re.sub(rf"\b{code}\b", options[code], text)
    return text.replace("%", "%%")  # which argparse would format


def _field_of(setting: Setting) -> Field:
    """Return the config field of an option."""
    return next(field for field in fields(setting.config) if field.name == setting.field)


def reading(
    kind: Callable[[str], Any], says: str, may_be: Callable[[Any], object]
) -> Callable[[str], Any]:
    """Make an argparse type that rejects invalid values.

    Args:
        says: the requirement, for the error message.
        may_be: checks a value, or the text itself if it cannot be converted; true if it may be.
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


def positive(
    kind: type[int] | type[float] = float, most: float = sys.float_info.max
) -> Callable[[str], float]:
    """Make an argparse type for numbers above 0 and up to ``most``."""
    limit = "" if most == sys.float_info.max else f", at most {most:g}"
    says = f"be a positive {'integer' if kind is int else 'number'}{limit}"
    return reading(kind, says, lambda value: isinstance(value, kind) and 0 < value <= most)


device_name = reading(
    str, "be cpu, cuda, or a GPU as in cuda:0", re.compile(r"cpu|cuda(:\d+)?").fullmatch
)


def add_prefill_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for frame sampling, prefill and attention."""
    prefill = parser.add_argument_group("prefill")
    prefill.add_argument(
        "--frames",
        "--num-frames",
        type=positive(int),
        metavar="N",
        help="frames per video (default: the model's, or 64)",
    )
    prefill.add_argument(
        "--fps",
        type=reading(float, *FRAME_RATE),
        metavar="X",
        help="sample X frames per second, at most --frames",
    )
    add_settings(prefill, [*PREFILL, *DECODE], with_defaults=True)
    add_settings(prefill, VIDEO)
    prefill.add_argument("--adapter", metavar="PATH", help="PEFT adapter to merge into the model")
    prefill.add_argument(
        "--dtype",
        choices=DTYPE_NAMES,
        default="auto",
        help="weight dtype (default auto: the model's)",
    )
    add_settings(parser.add_argument_group("visual-token pruning"), REDUCE)
    add_settings(parser.add_argument_group("sparse attention"), SPARSE)


def add_draft_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options for speculative decoding; return their group, so that a script can add more.

    Options that are not given must be None.
    """
    draft = parser.add_argument_group("speculative decoding")
    draft.add_argument(
        "--speculate",
        choices=("off", *STRATEGY_NAMES),
        default="off",
        help="drafting strategy (default off)",
    )
    add_settings(draft, DRAFT)
    draft.add_argument(
        "--captioner", metavar="MODULE:FUNCTION", help="captions the prompt for tabed"
    )
    return draft


def add_host_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the host group."""
    hosts = parser.add_argument_group("hosts (sequence-parallel ranks)")
    hosts.add_argument(
        "--device",
        type=device_name,
        metavar="cpu|cuda|cuda:N",
        help="default: a GPU if any, else the CPU",
    )
    hosts.add_argument(
        "--tensor-parallel",
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="T",
        help="tensor-parallel GPUs per host (default 1)",
    )
    hosts.add_argument(
        "--expert-parallel",
        "--enable-expert-parallel",
        action="store_true",
        help="with --tensor-parallel: each GPU gets some of the experts whole, and not some "
        "columns of all",
    )
    hosts.add_argument(
        "--timeout",
        type=positive(float, 10**6),
        default=300.0,
        metavar="X",
        help="seconds to wait for an unresponsive host (default 300)",
    )
    add_settings(hosts, THREADS)


def check(parser: OptionParser, options: argparse.Namespace) -> None:
    """Exit with a one-line error if options are incompatible."""
    draft_options = given_for_draft(options)
    if options.speculate == "off" and draft_options:
        parser.error(f"--{draft_options[0].replace('_', '-')} needs --speculate")
    with parser.rejecting():
        prefill_config(options)
        speculative_config(options)
        SamplingParams(**given(options, SamplingParams))


def given(options: argparse.Namespace, config: type) -> dict[str, Any]:
    """Return the config fields that options set."""
    values = {}
    for setting in SETTINGS:
        if setting.config is config:
            value = getattr(options, setting.name, None)
            if value is not None:
                # argparse makes a list of several values.
                values[setting.field] = tuple(value) if isinstance(value, list) else value
    return values


def given_for_draft(options: argparse.Namespace) -> list[str]:
    """Return the names of the given draft options, with underscores."""
    names = [*(setting.name for setting in DRAFT), "captioner"]
    return [name for name in names if getattr(options, name, None) is not None]


def prefill_config(options: argparse.Namespace) -> PrefillConfig:
    """Build the prefill config; ValueError if options are incompatible."""
    video = given(options, VideoConfig)
    reduction = given(options, ReduceConfig)
    if reduction and "method" not in reduction:
        options_of_reduction = [f"--reduce-{name.replace('_', '-')}" for name in reduction]
        raise InvalidConfigError(f"{' and '.join(options_of_reduction)} needs --reduce")
    if "chunk_bytes" in video:
        video["chunk_bytes"] *= _MIB
    return PrefillConfig(
        **given(options, PrefillConfig),
        sparse=sparse_config(options),
        video=VideoConfig(**video),
        reduce=ReduceConfig(**reduction) if reduction else None,
    )


def sparse_config(options: argparse.Namespace) -> SparseConfig | None:
    """Build the sparse-attention config, if any, also for a sparse prefill method.

    Raises:
        InvalidConfigError: an option has no effect.
    """
    settings = given(options, SparseConfig)
    method = settings.get("method")
    if method is None and options.method in SPARSE_CONFIGS:
        method = options.method
    if settings and method is None:
        name = _name_of_option(SparseConfig, next(iter(settings)))
        raise InvalidConfigError(f"{name} needs --sparse, or a sparse --method")
    # Some options are of one method alone.
    for owner, config in SPARSE_CONFIGS.items():
        own = given(options, config)
        if own and method != owner:
            name = _name_of_option(config, next(iter(own)))
            raise InvalidConfigError(f"{name} needs --sparse or --method {owner}")
        settings |= own
    if not settings:
        return None
    return SparseConfig(**(settings | {"method": method}))


def _name_of_option(config: type, field_name: str) -> str:
    """Return the option of a config field."""
    for setting in SETTINGS:
        if setting.config is config and setting.field == field_name:
            return setting.option
    raise KeyError(field_name)


def speculative_config(options: argparse.Namespace) -> SpeculativeConfig | None:
    """Build the speculative-decoding config, if any; ValueError if options are incompatible."""
    if options.speculate == "off":
        return None
    hippo = given(options, HippoConfig)
    layerskip = given(options, LayerSkipConfig)
    tabed = given(options, TabedConfig)
    return SpeculativeConfig(
        strategy=options.speculate,
        **given(options, SpeculativeConfig),
        hippo=HippoConfig(**hippo) if hippo else None,
        layerskip=LayerSkipConfig(**layerskip) if layerskip else None,
        tabed=TabedConfig(**tabed) if tabed else None,
        ablation=SpeculativeAblationConfig(**given(options, SpeculativeAblationConfig)),
    )


def load_engine(
    options: argparse.Namespace, hosts: "HostGroup", reuse: ReuseConfig | None = None
) -> "Engine":
    """Load the engine that the options describe; collective.

    Raises:
        InvalidConfigError: options are incompatible, or the model does not exist or has an adapter
            that does not fit.
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
        adapter=options.adapter,
        expert_parallel=options.expert_parallel,
    )


def prepare_process(options: argparse.Namespace, hosts: "HostGroup") -> None:
    """Set up CPU threads and memory; let only the leader show warnings and progress bars."""
    import torch
    from transformers.utils import logging as transformers_logging

    from apbv.device.allocator import keep_freed_memory

    if hosts.device.type == "cpu":
        keep_freed_memory()
    num_threads = threads_wanted(options.threads, hosts.device.type)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    if not hosts.is_leader:
        warnings.simplefilter("ignore")
        transformers_logging.set_verbosity_error()
        logging.disable(logging.WARNING)
    if not hosts.is_leader or not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()


def threads_wanted(given: int | None, device_type: str) -> int | None:
    """Return the number of torch CPU threads; None: torch's own choice.

    By default torchrun gives each of several processes a single thread, whatever the number of
    cores. With a GPU the CPU side has little to compute: the remaining cores are left to video
    decoding.
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
        InvalidConfigError: the function does not exist.
    """
    module, _, function = name.partition(":")
    what = f"cannot load {name} (expected MODULE:FUNCTION)"
    with raised_as(InvalidConfigError, what, ImportError, AttributeError, ValueError):
        return getattr(importlib.import_module(module), function)


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Run a script and exit with its status; Ctrl-C prints one line instead of a traceback."""
    warnings.formatwarning = _formatted_warning
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        # torchrun forwards the signal that the terminal has already sent to its processes.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if os.environ.get("LOCAL_RANK", "0") == "0":  # once per machine
            sys.stderr.write("\ninterrupted\n" if sys.stderr.isatty() else "interrupted\n")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + signal.SIGINT)  # a normal exit would wait for a running collective


def _formatted_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Format a user warning as one line.

    Others, such as deprecations, are formatted with their place in the code.
    """
    if category is UserWarning:
        return f"warning: {message}\n"
    return _FORMAT(message, category, filename, lineno, line)
