"""This module defines the configurations of prefill, decoding, reuse, sampling and speculation, validated once."""

from dataclasses import dataclass

MOST_AUTO_DRAFT_TOKENS = 16
KV_PLACEMENTS = ("gathered", "sharded")
REUSE_MODES = ("exact", "kv")
CUDA_GRAPH_MODES = ("auto", "off")
HIPPO_TERMS = ("attention", "time", "space")
PRUNINGS = ("kv", "prompt")
KEEP_POLICIES = (
    "specvlm",
    "attention",
    "attention_per_frame",
    "uv_prune",
    "hippo",
    "even",
    "uniform_frames",
    "random",
    "full",
)
DEFAULT_KEEP_RATIO = 0.1
CONTEXTS = "MTCP"
DEFAULT_QUERY_LEN = 128
# Frames per second: more than any camera's, and small enough for times of years to be counted exactly.
MAX_FPS = 1e9
# The names in the registries, which need torch: a command line lists them without importing it.
METHOD_NAMES = ("full", "zigzag_ring", "ulysses", "star", "apb", "apbv")
IMPORTANCE_NAMES = ("peak", "softmax", "dot", "received")
BACKEND_NAMES = ("auto", "torch", "triton", "reference", "cudnn", "flash_attn", "flashinfer")
VIDEO_BACKEND_NAMES = ("auto", "pyav", "torchcodec")
DTYPE_NAMES = ("auto", "float32", "bfloat16", "float16")
STRATEGY_NAMES = (
    "vanilla",
    "sd_tree",
    "specvlm",
    "hippo",
    "parallelvlm",
    "text_only",
    "tabed",
    "std",
    "std_apbv",
    "streaming",
    "layerskip",
    "ngram",
)


def _is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value) -> bool:
    return _is_int(value) or isinstance(value, float)


def _require_known(name: str, value, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")


def require_frame_rate(fps: float) -> None:
    """Make sure that frames can be sampled at this rate, in frames per second.

    Raises:
        ValueError: the rate is not in 0 < fps <= MAX_FPS.
    """
    if not 0 < fps <= MAX_FPS:
        raise ValueError(f"fps must lie in 0 < fps <= {MAX_FPS:g}, not {fps!r:.50}")


def longest_window(num_draft_tokens: int | str) -> int:
    """Return the largest number of tokens of a draft window: γ, unless that is ``"auto"``."""
    return MOST_AUTO_DRAFT_TOKENS if num_draft_tokens == "auto" else num_draft_tokens


@dataclass(frozen=True, kw_only=True)
class VideoConfig:
    """A VideoConfig says how a host reads its frames of a video.

    Attributes:
        backend: what decodes: ``"pyav"``, ``"torchcodec"`` (the extra ``[video]``), or ``"auto"``, which is
            torchcodec where it is installed and decodes on the model's GPU, and PyAV elsewhere.
        threads: how many threads decode. None: this process's fair share of the machine's cores.
        chunk_bytes: an estimate of the memory that frames, pixels and activations of one chunk may take; a few
            chunks are in memory at a time. None: a sixteenth of the free memory, at most 256 MiB.

    Raises:
        ValueError: the back end is unknown, or a number is not positive.
    """

    backend: str = "auto"
    threads: int | None = None
    chunk_bytes: int | None = None

    def __post_init__(self):
        _require_known("backend", self.backend, VIDEO_BACKEND_NAMES)
        for name in ("threads", "chunk_bytes"):
            value = getattr(self, name)
            if value is not None and (not _is_int(value) or not 1 <= value < 2**63):
                raise ValueError(f"{name} must be a positive integer, not {value!r}")


@dataclass(frozen=True, kw_only=True)
class PrefillConfig:
    """A PrefillConfig says how prompts are prefilled.

    Attributes:
        method: name in :data:`apbv.prefilling.methods.METHODS`. Exact: ``"full"`` (host 0 computes everything),
            ``"zigzag_ring"``, ``"ulysses"``. Approximate: ``"apbv"``, ``"apb"``, ``"star"``. Of the settings
            below, lengths, importance and the switches O, F, Z are for ``"apbv"``; ``"apb"`` takes the lengths
            and the importance, ``"zigzag_ring"`` the overlap.
        anchor_len: tokens of the anchor block l_a. None: ``max(128, ceil(n / 64))``, at most a quarter of n.
            0: no anchor (Table 9).
        passing_len: KV pairs that each context block passes on, l_p, per layer and KV head. None:
            ``max(128, ceil(n / 128))`` (``ceil(n / 64)`` without zigzag and for ``"apb"``). 0: no passing blocks
            (Tables 3, 8).
        query_len: how many tokens at the end of a text are the query block, which every host computes, where the
            question is not given apart from the text (as with ``context=``); in a chat at most the last message's.
        importance: how the l_p pairs are chosen; a name in :data:`apbv.prefilling.methods.importance.IMPORTANCE`.
        overlap: hide communication behind attention (Section 4.4; "O" of Table 4).
        fused_query: run query and context in one forward pass (Section 4.2; "F").
        zigzag: 2H context blocks, two complementary ones on each host, instead of H (Section 4.3; "Z").
        frame_parallel: each host encodes its share of the frames instead of all of them (Section 3.1; "V").
        on_single_host: run the method itself even on one host. Off, one host runs ``"full"``, which is exact, and
            to which every method degenerates without other hosts to share the work.
        kv: where the KV is placed after the prefill: ``"gathered"`` on host 0, or ``"sharded"`` as it was
            computed.
        backend: the kernels that compute attention, here and in decoding; a name in
            :data:`apbv.kernels.backends.BACKENDS`. ``"auto"``: the environment variable ``APBV_BACKEND``, or else
            the fastest one for the device and the shape.
        video: how each host reads its frames.

    Raises:
        ValueError: a length is negative or absurd, or a name is unknown.
    """

    method: str = "apbv"
    anchor_len: int | None = None
    passing_len: int | None = None
    query_len: int = DEFAULT_QUERY_LEN
    importance: str = "peak"
    overlap: bool = True
    fused_query: bool = True
    zigzag: bool = True
    frame_parallel: bool = True
    on_single_host: bool = False
    kv: str = "gathered"
    backend: str = "auto"
    video: VideoConfig = VideoConfig()

    def __post_init__(self):
        for name in ("anchor_len", "passing_len"):
            value = getattr(self, name)
            if value is None:
                continue
            if not _is_int(value):
                raise ValueError(f"{name} must be an integer number of tokens, not {value!r}")
            if not 0 <= value < 2**31:
                raise ValueError(f"{name} must lie in 0 .. 2^31-1, not {value}")
        if not _is_int(self.query_len) or not 1 <= self.query_len < 2**31:
            raise ValueError(f"query_len must be an integer in 1 .. 2^31-1, not {self.query_len!r}")
        _require_known("method", self.method, METHOD_NAMES)
        _require_known("importance", self.importance, IMPORTANCE_NAMES)
        _require_known("kv", self.kv, KV_PLACEMENTS)
        _require_known("backend", self.backend, BACKEND_NAMES)


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """A DecodeConfig says how models are run over new tokens, in decoding, verification and drafting.

    Attributes:
        cuda_graphs: ``"auto"``: on a GPU, steps over as many tokens as an earlier step of the answer are recorded
            as CUDA graphs, which launch all kernels at once; where that is not possible, a warning says why. It is
            not for a KV in shares (``kv="sharded"``), tensor parallelism, or attention by other kernels than
            Triton's; an ensemble and a draft in a thread go without, too. ``"off"``: kernels are launched one by
            one.

    Raises:
        ValueError: the mode is unknown.
    """

    cuda_graphs: str = "auto"

    def __post_init__(self):
        _require_known("cuda_graphs", self.cuda_graphs, CUDA_GRAPH_MODES)


@dataclass(frozen=True, kw_only=True)
class ReuseConfig:
    """A ReuseConfig says what is kept of a video, or a long text, for further questions about it.

    Attributes:
        mode: ``"exact"`` keeps the vision tower's embeddings of a video: answers are as without. ``"kv"`` keeps
            the KV of all that comes before the question, so that only the question is run; with a method that is
            exact so are its answers, else the KV is what the first question selected.
        max_bytes: the limit of what one host keeps; the least recently used is dropped first.

    Raises:
        ValueError: the mode is unknown, or the bound is not a positive number of bytes.
    """

    mode: str = "exact"
    max_bytes: int = 4 * 2**30

    def __post_init__(self):
        _require_known("reuse", self.mode, REUSE_MODES)
        if not _is_int(self.max_bytes) or self.max_bytes < 1:
            raise ValueError(f"max_bytes must be a positive number of bytes, not {self.max_bytes!r}")


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """A SamplingConfig says how next tokens are chosen.

    Attributes:
        max_new_tokens: the largest number of generated tokens; at least 1.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: keep the smallest set of tokens whose probabilities sum to at least this (nucleus sampling).
        seed: with the same seed, prompt and model, the same tokens are drawn.
        ignore_eos: end tokens are tokens like others, and do not end the answer.
        min_tokens: before so many tokens no end token is chosen; at most ``max_new_tokens``.

    Raises:
        ValueError: a number is out of range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    min_tokens: int = 0

    def __post_init__(self):
        if not _is_int(self.max_new_tokens) or not 1 <= self.max_new_tokens <= 2**20:
            raise ValueError(f"max_new_tokens must lie in 1 .. 2^20, not {self.max_new_tokens!r}")
        # Below the lower bound, which is of no practical use, logits over temperature overflow.
        if not _is_number(self.temperature) or not (
            self.temperature == 0 or 1e-6 <= self.temperature < float("inf")
        ):
            raise ValueError(f"temperature must be 0 (greedy) or at least 1e-6, not {self.temperature!r}")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], not {self.top_p!r}")
        if not _is_int(self.seed) or not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must lie in 0 .. 2^64-1, not {self.seed!r}")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be True or False, not {self.ignore_eos!r}")
        if not _is_int(self.min_tokens) or not 0 <= self.min_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_tokens must lie in 0 .. max_new_tokens ({self.max_new_tokens}), not {self.min_tokens!r}"
            )


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """A SpeculativeConfig says how a draft proposes tokens; the verified output is always the target's own.

    Attributes:
        strategy: a name in :data:`apbv.speculate.STRATEGIES`. A second model drafts in ``"vanilla"`` (on all
            visual tokens), ``"specvlm"``, ``"hippo"``, ``"parallelvlm"`` (on some, by ``keep``), ``"text_only"``
            and ``"tabed"`` (reading the prompt in several ways, see ``ensemble``); the target drafts itself in
            ``"std"`` (on the most attended visual KV), ``"std_apbv"`` (on what the prefill passed on between
            hosts), ``"streaming"`` (the latest) and ``"layerskip"`` (its first layers); ``"ngram"`` looks up what
            followed the last tokens before.
        draft_model: a directory or hub id, of the target's family and tokenizer (for ``"text_only"``, but not on a
            draft host, also a text-only model with the target's tokens); ``"demo"`` is the packaged one.
        num_draft_tokens: γ, tokens drafted per round; ``"auto"``: at most 16, as many as promise the highest
            speed-up by the costs and the acceptance so far (see :func:`apbv.speculate.pace.best_window`). With
            ``"auto"`` a draft host drafts until the target's forward pass ends, where ParallelVLM's Theorem 6 is
            largest.
        keep_losing_draft: go on with a draft that costs more time than it saves. Off, the rest of an answer is
            decoded without a draft that has cost eight forward passes of the target more than it has saved; to
            measure that, the target now and then runs a forward pass without drafted tokens.
        keep: which visual tokens a pruned draft sees: by the question's attention to them
            ``"specvlm"`` (SpecVLM's: the fewest that hold 40 % of it, and others evenly spaced),
            ``"attention"`` (the highest) and ``"attention_per_frame"`` (the highest of each frame);
            ``"uv_prune"`` (ParallelVLM's: what comes closer to the question in the target's first layers),
            ``"hippo"`` (see ``hippo_terms``); ``"even"`` (evenly spaced), ``"uniform_frames"`` (whole frames,
            evenly spaced), ``"random"``, ``"full"``; None: as the strategy's paper does.
        keep_ratio: the share of visual tokens that a pruned draft sees; 0.1 where ``keep_tokens`` is not given.
        keep_tokens: how many of the prompt's tokens a pruned draft sees, in place of a ratio: all text tokens, and
            visual ones for the rest, at least one. With ``"std"`` that is the paper's K + m_t, of each layer and
            KV head; 1024 there.
        hippo_terms: the terms of HIPPO's scores: attention, change over time, variety in space.
        prune: ``"prompt"``: the draft reads the kept tokens only. ``"kv"``: it reads everything, and the KV of
            what is not kept is dropped; its prefill costs more. Then a draft host does not wait for the scores
            of the target's prefill: it drafts its first window on the whole prompt.
        vision_first: with ``prune="prompt"``, a draft host drafts its first window on the tokens that are best by
            HIPPO's visual terms alone, and reads the prompt again when the attention is known.
        uv_layer: the last layer of the target that ``"uv_prune"`` observes, at most its last but one; 20 in the
            paper.
        layer_ratio: the share of layers that ``"layerskip"`` runs.
        ensemble: what ``"tabed"`` drafts from: the prompt with the visual tokens that ``keep`` preserves (M), with
            line breaks instead (T), a caption (C), and pooled ones (P); ``*``: weighted by how well each has
            predicted the answer so far, instead of equally. The paper's are MT, MT*, MTCP, MTCP* and each letter
            alone; C needs a captioner.
        num_tree_nodes: the tokens of a draft tree, at most γ deep, that is drafted per round instead of a chain of
            γ. None: the strategy's default, which is 25 for ``"sd_tree"`` and a chain for the others.
        draft_host: the last host of the group drafts while the others, which run the target, verify; on a single
            host a thread drafts, on a CUDA stream of its own.
        draft_timeout: seconds after which the target's hosts go on without a draft host that does not answer, even
            if it is still computing; at most a quarter of the hosts' own timeout.

    Raises:
        ValueError: a number is out of range, or a name is unknown.
    """

    strategy: str = "specvlm"
    draft_model: str | None = None
    num_draft_tokens: int | str = 5
    keep: str | None = None
    keep_ratio: float | None = None
    keep_tokens: int | None = None
    hippo_terms: tuple[str, ...] = HIPPO_TERMS
    prune: str = "prompt"
    vision_first: bool = False
    uv_layer: int = 20
    layer_ratio: float = 0.5
    ensemble: str = "MT*"
    num_tree_nodes: int | None = None
    draft_host: bool = False
    draft_timeout: float = 60.0
    keep_losing_draft: bool = False

    def __post_init__(self):
        _require_known("strategy", self.strategy, STRATEGY_NAMES)
        gamma = self.num_draft_tokens
        if gamma != "auto" and (not _is_int(gamma) or not 1 <= gamma <= 256):
            raise ValueError(f"num_draft_tokens must lie in 1 .. 256 or be 'auto', not {gamma!r}")
        nodes = self.num_tree_nodes
        if nodes is not None and (not _is_int(nodes) or not 1 <= nodes <= 256):
            raise ValueError(f"num_tree_nodes must lie in 1 .. 256, not {nodes!r}")
        if self.keep is not None and self.keep not in KEEP_POLICIES:
            raise ValueError(f"keep must be one of {', '.join(KEEP_POLICIES)}, not {self.keep!r}")
        if not self.hippo_terms or not set(self.hippo_terms) <= set(HIPPO_TERMS):
            raise ValueError(f"hippo_terms must be some of {', '.join(HIPPO_TERMS)}, not {self.hippo_terms!r}")
        if self.prune not in PRUNINGS:
            raise ValueError(f"prune must be one of {', '.join(PRUNINGS)}, not {self.prune!r}")
        letters = self.ensemble.removesuffix("*")
        if not set(letters) <= set(CONTEXTS) or len(set(letters)) < max(len(letters), 1 + ("*" in self.ensemble)):
            raise ValueError(
                f"ensemble must be different letters of {CONTEXTS}, with a * behind two at least to adapt their "
                f"weights, not {self.ensemble!r}"
            )
        if not _is_int(self.uv_layer) or self.uv_layer < 1:
            raise ValueError(f"uv_layer must be at least 1, not {self.uv_layer!r}")
        if not _is_number(self.draft_timeout) or not self.draft_timeout > 0:
            raise ValueError(f"draft_timeout must be a positive number of seconds, not {self.draft_timeout!r}")
        if self.keep_tokens is not None:
            if self.keep_ratio is not None:
                raise ValueError(
                    "keep_ratio and keep_tokens both say how many visual tokens a draft sees: give one of them"
                )
            if not _is_int(self.keep_tokens) or not 1 <= self.keep_tokens < 2**31:
                raise ValueError(f"keep_tokens must lie in 1 .. 2^31-1, not {self.keep_tokens!r}")
        elif self.keep_ratio is None:
            object.__setattr__(self, "keep_ratio", DEFAULT_KEEP_RATIO)
        for name in ("layer_ratio",) if self.keep_ratio is None else ("keep_ratio", "layer_ratio"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 < value <= 1:
                raise ValueError(f"{name} must lie in (0, 1], not {value!r}")

    @property
    def most_draft_tokens(self) -> int:
        """The largest number of tokens of a draft window."""
        return longest_window(self.num_draft_tokens)

    @property
    def needs_caption(self) -> bool:
        """Whether the draft reads a caption in place of visual tokens."""
        return self.strategy == "tabed" and "C" in self.ensemble
