"""This module says what a reduction will leave of a prompt and take in memory, before anything is computed.

How many tokens are left is known beforehand, but for SparseVLM, of which there are bounds. Where they lie depends
on what the frames show; then the numbers of a host are the most that may come to it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...config import PrefillConfig, ReduceConfig
from ...layout import ContextLayout, single_host_layout
from ...model.sizes import DecoderSizes
from ..memory import LayerRun, ReductionMemory, Share
from ..methods import PrefillMethod, method_alone, resolve_method
from . import LATE_REDUCERS
from .late import Remainder, require_layers
from .shape import PromptShape, count_of, shares_of_videos
from .slowfast import num_kept_by_slowfast


def shape_left(settings: ReduceConfig, shape: PromptShape) -> PromptShape:
    """Return the shape of what a reduction before the language model leaves of a prompt with videos."""
    count = count_of(settings.ratio, shape.num_in_frames)
    shares = shares_of_videos(count, [frames * height * width for frames, height, width in shape.videos])
    if settings.method == "slowfast":  # the others keep all that they may
        shares = [
            num_kept_by_slowfast(*video, share) if share else 0
            for video, share in zip(shape.videos, shares, strict=True)
        ]
    return shape.with_visual(shape.num_visual - shape.num_in_frames + sum(shares))


def remainders(settings: ReduceConfig, num_layers: int, shape: PromptShape) -> tuple[Remainder, ...]:
    """Return what a reduction between the language model's layers leaves behind each place where it chooses.

    Raises:
        ValueError: the model has too few layers.
    """
    require_layers(settings, num_layers)
    return LATE_REDUCERS[settings.method].remainders(settings, num_layers, shape)


@dataclass(frozen=True)
class Forecast:
    """A Forecast is what the layers of a prefill will compute.

    Attributes:
        most, fewest: the runs of layers with as many tokens as there may be, and with as few.
    """

    most: tuple[LayerRun, ...]
    fewest: tuple[LayerRun, ...]

    @classmethod
    def of(
        cls,
        config: PrefillConfig,
        sizes: DecoderSizes,
        method: type[PrefillMethod],
        layout: ContextLayout,
        shape: PromptShape,
    ) -> "Forecast":
        """Foretell the runs of a model's layers.

        Args:
            sizes: of the model's decoder.
            method: the method by which the prompt is prefilled.
            layout: of the whole prompt that the language model reads.
            shape: its shape, which may show nothing.

        Raises:
            ValueError: the model has too few layers for a reduction between them.
        """
        settings = config.reduce
        if settings is None or not settings.is_late or settings.leaves_all or not shape.num_visual:
            run = LayerRun(sizes.layers, layout, shape.visual, sparse=config.sparse_attention)
            return cls((run,), (run,))
        found = remainders(settings, sizes.layers, shape)
        counts = [[each.most for each in found], [each.fewest for each in found]]
        ends = [*(each.behind for each in found), sizes.layers]
        num_asking = LATE_REDUCERS[settings.method].num_asking(shape.num_question, sizes)
        most, fewest = (_runs(config, method, layout, shape, ends, left, num_asking) for left in counts)
        return cls(most, fewest)

    @classmethod
    def of_shape(
        cls, config: PrefillConfig, sizes: DecoderSizes, num_hosts: int, shape: PromptShape
    ) -> "Forecast":
        """Foretell them from the shape alone, by the method that the config means on so many hosts.

        Raises:
            LayoutError: a length does not fit.
            ValueError: as :meth:`of`.
        """
        method = resolve_method(config, num_hosts)
        layout = method.plan(num_hosts, shape.num_tokens, shape.context_start, shape.query_start, config)
        if method.splits and not layout.is_split:
            method = method_alone(config)
        return cls.of(config, sizes, method, layout, shape)


def next_layout(
    method: type[PrefillMethod], layout: ContextLayout, shape: PromptShape, config: PrefillConfig
) -> tuple[type[PrefillMethod], ContextLayout, PrefillConfig]:
    """Return the method, the layout and the config of the tokens that are left behind some layers.

    Args:
        method: that of the layers before.
        layout: likewise.
        shape: of the tokens that are left.
    """
    if config.anchor_len is not None and config.anchor_len >= shape.query_start:
        config = replace(config, anchor_len=None)  # one for all of the prompt would leave no context
    num_hosts = layout.num_hosts
    following = method.plan(num_hosts, shape.num_tokens, shape.context_start, shape.query_start, config)
    if layout.is_split and following.is_split:
        return method, following, config
    # Once host 0 has all of it, it goes on alone.
    return method_alone(config), single_host_layout(num_hosts, shape.num_tokens), config


def _runs(
    config: PrefillConfig,
    method: type[PrefillMethod],
    layout: ContextLayout,
    shape: PromptShape,
    ends: Sequence[int],
    left: Sequence[int],
    num_asking: int,
) -> tuple[LayerRun, ...]:
    """Return the runs of layers that end at ``ends``, of which all but the last leave so many visual tokens."""
    runs, start = [], 0
    for end, count in zip(ends, [*left, None], strict=True):
        asking = 0 if count is None else num_asking
        runs.append(LayerRun(end - start, layout, shape.visual, asking, config.sparse_attention))
        if count is not None:
            shape, start = shape.with_visual(count), end
            method, layout, _ = next_layout(method, layout, shape, config)
    return tuple(runs)


@dataclass(frozen=True)
class _Rows:
    """What a host has of a prompt's embeddings.

    Attributes:
        share: of one process of the model.
        encoded: the embeddings that it encodes.
        reachable: those from its first on, which may come to it.
        kept: those that may be left on it.
        frame: those of a frame.
    """

    share: Share
    encoded: int
    reachable: int
    kept: int
    frame: int

    @property
    def row(self) -> int:
        """The bytes of an embedding, deepstack included."""
        return self.share.hidden_row * (1 + self.share.num_deepstack_layers)

    @property
    def wide(self) -> int:
        """The bytes of an embedding without deepstack in fp32."""
        return 4 * self.share.sizes.hidden

    @property
    def copied(self) -> int:
        """The bytes of a copy of an embedding in fp32, where it is not fp32 already."""
        return self.wide if self.share.itemsize < 4 else 0


def _choosing_by_slowfast(rows: _Rows) -> int:
    return rows.frame * (1 + rows.share.num_deepstack_layers) * rows.wide


def _choosing_by_hippo(rows: _Rows) -> int:
    """Unit vectors and their products; kernels on a GPU make neither."""
    return 2 * (rows.encoded + 2 * rows.frame) * rows.wide if rows.share.device.type == "cpu" else 0


def _choosing_by_dycoke(rows: _Rows) -> int:
    """The frames with which others are compared, half of all at most, sent and received; and those kept."""
    return rows.encoded // 2 * 2 * rows.share.hidden_row + rows.kept * rows.row


def _choosing_by_fastvid(rows: _Rows) -> int:
    """All that may come to a segment, and once more with tokens merged, into three fifths of what is kept."""
    fetched = rows.reachable - rows.encoded
    merging = rows.kept * 3 // 5 * 4 * (1 + rows.share.num_deepstack_layers) * rows.wide
    reducing = 2 * rows.reachable * rows.row + rows.reachable * rows.copied + merging + rows.kept * rows.row
    return max(rows.encoded * rows.copied, (2 * fetched + rows.reachable) * rows.row, reducing)


_CHOOSING: dict[str, Callable[[_Rows], int]] = {
    "slowfast": _choosing_by_slowfast,
    "hippo": _choosing_by_hippo,
    "dycoke": _choosing_by_dycoke,
    "fastvid": _choosing_by_fastvid,
}


def reduction_memory(
    settings: ReduceConfig, share: Share, shape: PromptShape, pieces: Sequence[range], host: int
) -> ReductionMemory:
    """Compute what a reduction before the language model takes on one host, at most.

    Args:
        shape: of the whole prompt.
        pieces: for every host, which of the prompt's embeddings it encodes.
    """
    mine, num_left = pieces[host], shape_left(settings, shape).num_visual
    reachable = shape.num_visual - mine.start if settings.method == "fastvid" else len(mine)
    kept = min(num_left, reachable)
    frame = max((height * width for _, height, width in shape.videos), default=0)
    rows = _Rows(share, len(mine), reachable, kept, frame)
    # What is kept is collected, and then joined.
    choosing = max(_CHOOSING[settings.method](rows), 2 * kept * rows.row)
    return ReductionMemory(encoded=len(mine) * rows.row, choosing=choosing, kept=kept * rows.row)
