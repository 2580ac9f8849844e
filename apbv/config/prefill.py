"""Settings for video reading, prefill, visual-token pruning, and ablations of the method."""

import warnings
from dataclasses import asdict, dataclass
from typing import Any

from .checks import Allowed, Checked, instance_of, integer, number, one_of, setting, switch
from .facts import METHOD_FACTS, REDUCER_FACTS
from .names import (
    BACKEND_NAMES,
    DEFAULT_QUERY_LEN,
    IMPORTANCE_NAMES,
    KV_PLACEMENTS,
    MAX_FPS,
    METHOD_NAMES,
)
from .refusals import refuse
from .regrouped import moved_under_its_name, regrouped
from .sparse import SparseConfig

_MOST_TOKENS = 2**31 - 1
_MOST_RUNS = 256  # of layers, in a schedule
_MOST_WEIGHT = 2**20  # of a run
# The requirement on a frame rate, and its check.
FRAME_RATE = f"lie in 0 < fps <= {MAX_FPS:g}", Allowed((int, float), lambda fps: 0 < fps <= MAX_FPS)


def _are_weights(weights: Any) -> bool:
    if not isinstance(weights, tuple) or not 0 < len(weights) <= _MOST_RUNS:
        return False
    is_weight = Allowed((int, float), lambda weight: 0 <= weight <= _MOST_WEIGHT)
    return all(map(is_weight, weights)) and sum(weights) > 0


@dataclass(frozen=True, kw_only=True)
class VideoConfig(Checked):
    """Video decoding settings of a host.

    Attributes:
        threads: CPU threads. None: OMP_NUM_THREADS, or a fair share of the machine's cores.
        chunk_bytes: approximate memory for frames, pixels and activations of one chunk of a video.
            A few chunks are in memory at a time. None: a sixteenth of the free memory, at most 256
            MiB.

    Raises:
        InvalidConfigError: a number is not positive.
    """

    threads: int | None = integer(1, 2**12, None)
    chunk_bytes: int | None = integer(1, 2**63 - 1, None)


@dataclass(frozen=True, kw_only=True)
class ReduceConfig(Checked, name="reduce "):
    """Settings for visual-token pruning: which visual tokens the language model reads.

    The tokens that it does not read are dropped; the kept ones stay at their rotary positions.

    Attributes:
        method: method of visual-token pruning. ``"slowfast"``, ``"fastvid"`` and ``"dycoke"``
            select from the frames alone; ``"fastv"``, ``"pdrop"`` and ``"sparsevlm"`` select
            between the language model's layers by its attention, on one host. See
            :mod:`apbv.prefilling.reduction`.
        ratio: share of a video's visual tokens to keep. It is rounded, and at least one token;
            between layers it is the share of all visual tokens in the last layers. 1: all, and the
            prompt is prefilled as without pruning.
        layer: layers that see all visual tokens, in ``"fastv"``, ``"pdrop"`` and ``"sparsevlm"``,
            and with ``decode_ratio``. None: as in the method's paper, for the model's depth.
        asked_by: whose attention ranks in ``"fastv"`` and ``"pdrop"``. ``"last"``: that of the
            prompt's last token, as in the authors' programs. ``"question"``: that of the question's
            tokens. None: ``"last"``.
        decode_ratio: share of the visual tokens to which each decoding step attends in its deeper
            layers, in ``"dycoke"``. It is DyCoke's second stage
            (:mod:`apbv.runner.dynamic_pruning`), without which the method is its first stage alone.
            The share is of the tokens that the language model has read; 0.3 in the paper. What is
            left out stays in memory, and a saved prefill has all of it. On the host that has the
            KV, one answer at a time. None: all.

    Raises:
        InvalidConfigError: the method is unknown, a number is out of range, or a setting is not
            the method's.
    """

    method: str = one_of(REDUCER_FACTS)
    ratio: float = number("lie in 0 < ratio <= 1", lambda share: 0 < share <= 1, 0.5)
    layer: int | None = integer(1, _MOST_TOKENS, None)
    asked_by: str | None = one_of(("last", "question"), None)
    decode_ratio: float | None = number("lie in 0 < ratio <= 1", lambda share: 0 < share <= 1, None)

    def __post_init__(self):
        super().__post_init__()
        facts = REDUCER_FACTS[self.method]
        # Settings that are given, and the method if it does not have them.
        refuse(
            reduce_layer=self.layer is not None,
            reduce_asked_by=self.asked_by is not None,
            early_reduction=None if facts.between_layers or self.prunes_decoding else self.method,
            decode_pruning=self.decode_ratio is not None,
            whole_decoding=None if facts.prunes_decoding else self.method,
            other_ranking=None if facts.ranks_by_asking else self.method,
        )

    @property
    def prunes_between_layers(self) -> bool:
        """Whether tokens are pruned between the language model's layers."""
        return REDUCER_FACTS[self.method].between_layers

    @property
    def layer_reduction(self) -> str | None:
        """The method if it prunes something, between layers; else None."""
        return self.method if self.prunes_between_layers and not self.keeps_all else None

    @property
    def prunes_decoding(self) -> bool:
        """Whether decoding steps leave out visual tokens."""
        return self.decode_ratio is not None and self.decode_ratio < 1

    @property
    def leaves_all(self) -> bool:
        """The former name of :attr:`keeps_all`, until the next release."""
        message = "ReduceConfig.leaves_all is now ReduceConfig.keeps_all"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return self.keeps_all

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is pruned, so that the prompt is prefilled as without a reduction."""
        return self.ratio == 1


@dataclass(frozen=True, kw_only=True)
class AblationConfig(Checked):
    """Switches for benchmarks and tests.

    All but ``on_single_host`` are parts of what makes APB-V fast. Which methods have them:
    ``"apbv"`` all, ``"apb"`` and ``"star"`` ``split_anchor``, ``"zigzag_ring"`` the overlap, and
    every method that splits prompts ``frame_parallel`` and ``on_single_host``.

    Attributes:
        overlap: hide communication behind attention (Section 4.4; "O" of Table 4), and the KV
            transfer to host 0 behind MLPs.
        fused_query: run query and context in one forward pass (Section 4.2; "F").
        zigzag: 2H context blocks, two complementary ones on each host, instead of H (Section 4.3;
            "Z").
        frame_parallel: each host reads and encodes its share of the frames, images and audio, and
            gets the other embeddings of its tokens from the hosts that have them (Section 3.1;
            "V"). Off, every host reads and encodes everything, as one process does, and no
            embeddings are exchanged.
        split_anchor: each host computes a part of the anchor, and the hosts exchange its keys and
            values in every layer (this project's own). Off, every host computes all of the anchor,
            as the authors' programs do. None: ``"apbv"`` decides by the rows saved
            (:mod:`apbv.prefilling.methods.anchor`), the others do not.
        on_single_host: run the method itself even on one host. Off, one host runs ``"full"``, which
            is exact, and to which every method degenerates without other hosts to share the work.

    Raises:
        InvalidConfigError: a switch is not true or false.
    """

    split_anchor: bool | None = setting(
        None, "be true, false or None", lambda value: value is None or type(value) is bool, bool
    )
    overlap: bool = switch(True)
    fused_query: bool = switch(True)
    zigzag: bool = switch(True)
    frame_parallel: bool = switch(True)
    on_single_host: bool = switch(False)


@regrouped(*moved_under_its_name("ablation", AblationConfig))
@dataclass(frozen=True, kw_only=True)
class PrefillConfig(Checked):
    """Prefill settings.

    Attributes:
        method: prefill method. A name in :data:`apbv.prefilling.methods.METHODS`. Exact: ``"full"``
            (host 0 computes everything), ``"zigzag_ring"``, ``"ulysses"``. Approximate: ``"apbv"``,
            ``"apb"``, ``"star"``, and on host 0 alone ``"xattention"``, ``"spargeattn"``,
            ``"flexprefill"``, which are ``"full"`` with sparse attention. Of the settings below,
            lengths and importance are for ``"apbv"`` and ``"apb"``.
        anchor_len: tokens of the anchor block, l_a. None: max(128, n/64), at most a quarter of the
            prompt's n tokens. 0: no anchor (Table 9).
        anchor_query: put the question in front of the context in the anchor, as APB has it. The
            anchor is then a copy of the prompt's start with the question in it, at the positions
            that such a prompt would have. All blocks but the first see it, and nothing of it is
            kept. For ``"apbv"`` and ``"apb"``.
        passing_len: KV pairs that each context block passes on, l_p, per layer and KV head. None:
            max(256, n/128), of a prompt of n tokens; n/64 without zigzag and for ``"apb"``. 0: no
            passing blocks (Tables 3, 8).
        early_passing_len: l_p in the first quarter of the layers, where that is more than
            ``passing_len``. Answers are then closer to full attention's at a part of the cost of as
            many pairs in all layers (this project's own). None: ``passing_len`` in all layers.
        passing_budget: KV pairs that all context blocks pass on together, as a share of the prompt,
            instead of ``passing_len``. They do not grow with the hosts: each block passes on an
            equal part of them, rounded up (this project's own). 1/8 is the paper's n/128 on 8
            hosts.
        passing_weights: weights of equal runs of the layers, by which their l_p differ. The layers
            are cut into as many runs as there are weights: a run's l_p is to ``passing_len`` as its
            weight to the mean weight, rounded (this project's own). With ``(2, 1, 0.5, 0.5)`` the
            first quarter of the layers passes on twice as much, and all together as much as
            without. Only layers with attention count. None: the same in all layers.
        query_len: tokens at the end of a text that are its question, where that is not given apart
            from the text. All hosts compute them, as the query block. In a chat it never reaches
            beyond the last message.
        importance: how the pairs to pass on are ranked. See
            :func:`apbv.prefilling.methods.importance.importance_of`. ``"peak"`` is this project's
            own; the authors of APB-V rank by ``"dot"``, with ``anchor_query``.
        kv: where the KV is after the prefill: gathered on host 0, or sharded as it was computed.
        backend: kernels that compute attention, here and in decoding; ``"auto"``: the fastest for
            the device and the shape. A name in :data:`apbv.kernels.backends.BACKENDS`. The
            environment variable ``APBV_BACKEND`` goes before ``"auto"``.
        video: how each host reads its frames.
        sparse: block-sparse attention: over the whole prompt with ``"full"``, and within every
            context block with ``"apbv"``, ``"apb"`` and ``"star"``; their attention to other keys,
            and the question's, stays dense. None: dense, except for a method that is itself sparse.
        reduce: visual-token pruning; None: none.
        ablation: parts of the method, for benchmarks and tests.

    Raises:
        InvalidConfigError: a length is negative or absurd, a name is unknown, or the method has no
            sparse attention.
    """

    method: str = one_of(METHOD_NAMES, "apbv")
    anchor_len: int | None = integer(0, _MOST_TOKENS, None)
    anchor_query: bool = switch(False)
    passing_len: int | None = integer(0, _MOST_TOKENS, None)
    early_passing_len: int | None = integer(0, _MOST_TOKENS, None)
    passing_budget: float | None = number(
        "lie in 0 < budget <= 1", lambda share: 0 < share <= 1, None
    )
    passing_weights: tuple[float, ...] | None = setting(
        None, "be a tuple of at most 256 numbers in 0 .. 2^20, not all 0", _are_weights, float
    )
    query_len: int = integer(1, _MOST_TOKENS, DEFAULT_QUERY_LEN)
    importance: str = one_of(IMPORTANCE_NAMES, "peak")
    kv: str = one_of(KV_PLACEMENTS, "gathered")
    backend: str = one_of(BACKEND_NAMES, "auto")
    video: VideoConfig = instance_of(VideoConfig, default=VideoConfig())
    sparse: SparseConfig | None = instance_of(SparseConfig)
    reduce: ReduceConfig | None = instance_of(ReduceConfig)
    ablation: AblationConfig = instance_of(AblationConfig, default=AblationConfig())

    def __post_init__(self):
        super().__post_init__()
        refuse(**self.features)

    @property
    def shared(self) -> dict[str, Any]:
        """The settings that must be the same on every host, JSON-ready.

        These are all but ``video``, which fits the machine.
        """
        settings = asdict(self)
        del settings["video"]
        return settings

    @property
    def features(self) -> dict[str, str | bool | None]:
        """The requested features, in the form that :func:`apbv.config.refusals.refuse` takes."""
        reduce = self.reduce
        sparse = self.sparse
        attention = self.sparse_attention
        facts = METHOD_FACTS[self.method]
        is_other = sparse is not None and facts.is_sparse and sparse.method != self.method
        without = "without an anchor" if facts.has_anchor else f"method {self.method}"
        has_no_anchor = not facts.has_anchor or self.anchor_len == 0
        return {
            "anchor_query": self.anchor_query,
            "no_anchor": without if has_no_anchor else None,
            "reduction": None if reduce is None else reduce.method,
            "layer_reduction": None if reduce is None else reduce.layer_reduction,
            "decode_pruning": reduce is not None and reduce.prunes_decoding,
            "passing_len": self.passing_len is not None,
            "passing_budget": self.passing_budget is not None,
            "early_passing": self.early_passing_len is not None,
            "passing_weights": self.passing_weights is not None,
            "sharded_kv": self.kv == "sharded",
            "sparse": None if attention is None else attention.method,
            "dense_method": None if facts.takes_sparse else self.method,
            "other_sparse_method": self.method if is_other else None,
        }

    @property
    def sparse_attention(self) -> SparseConfig | None:
        """The sparse-attention settings in force; None if attention is dense."""
        if self.sparse is None and METHOD_FACTS[self.method].is_sparse:
            return SparseConfig(method=self.method)
        return self.sparse
