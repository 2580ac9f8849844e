"""This module defines how videos are read and prompts prefilled."""

from dataclasses import dataclass

from .checks import is_int, require_known
from .names import (
    BACKEND_NAMES,
    DEFAULT_QUERY_LEN,
    IMPORTANCE_NAMES,
    KV_PLACEMENTS,
    MAX_FPS,
    METHOD_NAMES,
    SPARSE_NAMES,
    VIDEO_BACKEND_NAMES,
)
from .reduction import ReduceConfig
from .sparse import SparseConfig


def require_frame_rate(fps: float) -> None:
    """Make sure that frames can be sampled at this rate, in frames per second.

    Raises:
        ValueError: the rate is not in 0 < fps <= MAX_FPS.
    """
    if not 0 < fps <= MAX_FPS:
        raise ValueError(f"fps must lie in 0 < fps <= {MAX_FPS:g}, not {fps!r:.50}")


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
        require_known("backend", self.backend, VIDEO_BACKEND_NAMES)
        for name in ("threads", "chunk_bytes"):
            value = getattr(self, name)
            if value is not None and (not is_int(value) or not 1 <= value < 2**63):
                raise ValueError(f"{name} must be a positive integer, not {value!r}")


@dataclass(frozen=True, kw_only=True)
class PrefillConfig:
    """A PrefillConfig says how prompts are prefilled.

    Attributes:
        method: name in :data:`apbv.prefilling.methods.METHODS`. Exact: ``"full"`` (host 0 computes everything),
            ``"zigzag_ring"``, ``"ulysses"``. Approximate: ``"apbv"``, ``"apb"``, ``"star"``, and on host 0 alone
            ``"xattention"``, ``"spargeattn"``, ``"flexprefill"``, which are ``"full"`` with sparse attention. Of
            the settings below, lengths, importance and the switches O, F, Z are for ``"apbv"``; ``"apb"`` takes
            the lengths and the importance, ``"zigzag_ring"`` the overlap.
        anchor_len: tokens of the anchor block l_a. None: ``max(128, ceil(n / 64))``, at most a quarter of n.
            0: no anchor (Table 9).
        anchor_query: put the question in front of the context in the anchor, as APB has it: the anchor is then a
            copy of the prompt's start with the question in it, at the positions that such a prompt would have.
            All blocks but the first see it, and nothing of it is kept. For ``"apbv"`` and ``"apb"``.
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
        sparse: compute chosen blocks of attention only: of the whole prompt with ``"full"``, and of every context
            block's attention to itself with ``"apbv"``, ``"apb"`` and ``"star"``; what else they attend to, and
            the question's attention, stay dense. None: dense, but for a method that is sparse by itself.
        reduce: which visual tokens are left out; None: none.

    Raises:
        ValueError: a length is negative or absurd, a name is unknown, or the method has no sparse attention.
    """

    method: str = "apbv"
    anchor_len: int | None = None
    anchor_query: bool = False
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
    sparse: SparseConfig | None = None
    reduce: ReduceConfig | None = None

    def __post_init__(self):
        for name in ("anchor_len", "passing_len"):
            value = getattr(self, name)
            if value is None:
                continue
            if not is_int(value):
                raise ValueError(f"{name} must be an integer number of tokens, not {value!r}")
            if not 0 <= value < 2**31:
                raise ValueError(f"{name} must lie in 0 .. 2^31-1, not {value}")
        if not is_int(self.query_len) or not 1 <= self.query_len < 2**31:
            raise ValueError(f"query_len must be an integer in 1 .. 2^31-1, not {self.query_len!r}")
        require_known("method", self.method, METHOD_NAMES)
        if self.anchor_query and (self.method not in ("apbv", "apb") or self.anchor_len == 0):
            without = "without an anchor" if self.method in ("apbv", "apb") else f"method {self.method}"
            raise ValueError(f"anchor_query puts the question into the anchor of apbv or apb: not {without}")
        reduce = self.reduce
        if self.anchor_query and reduce is not None and reduce.is_late and not reduce.leaves_all:
            raise ValueError(
                "anchor_query copies the prompt's start into every anchor: not together with "
                f"{reduce.method}, which leaves tokens out between layers"
            )
        require_known("importance", self.importance, IMPORTANCE_NAMES)
        require_known("kv", self.kv, KV_PLACEMENTS)
        if self.sparse is not None and self.method in ("zigzag_ring", "ulysses"):
            raise ValueError(f"sparse attention is for full, apbv, apb and star: {self.method} has none")
        if self.sparse is not None and self.method in SPARSE_NAMES and self.sparse.method != self.method:
            raise ValueError(f"the method {self.method} cannot choose blocks as {self.sparse.method}")
        require_known("backend", self.backend, BACKEND_NAMES)

    @property
    def sparse_attention(self) -> SparseConfig | None:
        """How blocks of attention are chosen; None where attention is dense."""
        if self.sparse is None and self.method in SPARSE_NAMES:
            return SparseConfig(method=self.method)
        return self.sparse
