"""TABED's draft: one model that reads the prompt in several contexts, and drafts from the mixture.

The contexts are: M, the prompt itself; T, a line break instead of every run of visual tokens; C, a
caption instead of them; P, visual tokens pooled 2 x 2. They are the rows of one batch, so that a
drafted token still takes one forward pass (Algorithm 1). A context's weight depends on how well it
has predicted the tokens verified so far.
"""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from ...config import TabedConfig
from ...device.copies import to_device
from ...input.prompts.model_inputs import ModelInputs
from ...input.prompts.visual import VisualItem
from ...kv.cache import kv_layers
from ...model.attention import PaddedAttention, apbv_attention
from ...model.forward import LayerRows, run_layers
from ...model.parts import ModelParts
from ...prefilling.encoding.vision import encode_pooled
from ...prefilling.reduction.choosing import means_of_groups
from ...prefilling.reduction.frames import frame_shape
from ..drafters.draft import DraftTask, prefill_draft, run_prompt
from ..drafters.drafters import ModelDrafter, ReadPrompt

GRID_STEPS = 10  # n of Appendix B.2
LINE_BREAK = "\n"
FINITE = torch.finfo(torch.float64).max
# Nats: a context that was never wrong gets all the weight, without a division by zero.
ERROR_FLOOR = 1e-6


class AdaptedWeights:
    """Weights of m contexts, by the KL divergences of mixtures from the target.

    Divergences are summed over verified tokens, all or the latest. Of two contexts (MT*) it takes
    the best of the mixtures ``[1 - j/10, j/10]`` (Algorithm 1). More contexts (MTCP*) are weighed
    by softmax(1 / e), e the divergence of each alone.

    Args:
        num_contexts: m.
        window: of how many tokens, the latest, divergences count (Appendix B.1); None: of all.
    """

    def __init__(self, num_contexts: int, window: int | None = None):
        self._candidates = torch.eye(num_contexts, dtype=torch.float64)
        if num_contexts == 2:
            second = torch.arange(GRID_STEPS + 1, dtype=torch.float64) / GRID_STEPS
            self._candidates = torch.stack([1 - second, second], dim=1)
        # The divergences of the tokens in the window, of which the oldest goes first; or all in
        # one.
        self._errors: deque[Tensor] = deque(maxlen=window)
        self._counts_all = window is None

    def learn(self, p: Tensor, q: Tensor) -> None:
        """Learn from a verified token.

        Args:
            p: the target's distribution, ``[V]``.
            q: the contexts' distributions, ``[m, V]``.
        """
        self._candidates = to_device(self._candidates, q.device)
        divergence = kl_divergence(p, self._candidates @ q)
        if self._counts_all and self._errors:
            divergence = self._errors.pop() + divergence
        self._errors.append(divergence)

    def choose(self) -> Tensor:
        """Return weights ``[m]`` that sum to 1; after at least one token."""
        assert self._errors, "a token was learnt from"
        errors = torch.stack(tuple(self._errors)).sum(dim=0)
        num_contexts = self._candidates.shape[1]
        if num_contexts > 2:
            return torch.softmax(1 / errors.clamp(min=ERROR_FLOOR), dim=0)
        best = errors.nan_to_num(nan=FINITE, posinf=FINITE).argmin(dim=0, keepdim=True)
        return self._candidates.index_select(0, best)[0]


def kl_divergence(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p ‖ q) over the last dimension in nats; infinite where q is 0 and p is not."""
    return torch.where(p > 0, p * (p.log() - q.log()), 0.0).sum(dim=-1)


def read_contexts(
    task: DraftTask, kept_visual: Tensor, rows: Tensor | None
) -> list[tuple[DynamicCache, int]]:
    """Draft prefill in each context of an ensemble, sequentially, on the leader; collective.

    M and P keep the prompt's positions, a pooled token its top left one's; T and C are texts of
    their own.

    Args:
        kept_visual: the visual tokens that M keeps; see
            :func:`apbv.speculate.drafters.draft.prefill_draft`.
        rows: the draft's visual embeddings of this host's frames, for M and P.

    Returns:
        On the leader, of each context its KV, ``[1, Hkv, n, D]`` per layer, and the rotary position
        of the first new token; elsewhere nothing.
    """
    parts = task.draft_parts
    inputs = task.inputs
    hosts = task.hosts
    contexts = []
    for letter in task.config.settings_of(TabedConfig).contexts:
        prompt = None
        if letter == "M":
            prompt = prefill_draft(parts, inputs, kept_visual, hosts, rows)
        elif letter == "P":
            cells = pooling_cells(parts, inputs)
            pooled = _pooled_rows(task, cells, rows)
            prompt = prefill_draft(parts, inputs, cells.unique(), hosts, pooled)
        elif hosts.is_leader:
            contexts.append(_read_text(task, with_caption=letter == "C"))
        if prompt is not None:
            contexts.append((prompt.cache, inputs.next_position))
    return contexts if hosts.is_leader else []


def _pooled_rows(task: DraftTask, cells: Tensor, rows: Tensor | None) -> Tensor:
    """Return this host's visual embeddings, pooled 2 x 2; every token of a cell can stand for it.

    Args:
        cells: see :func:`pooling_cells`.
        rows: the embeddings that are not pooled.
    """
    parts = task.draft_parts
    visual = task.inputs.visual
    assert visual is not None and rows is not None, "the draft has embedded the visual tokens"
    if parts.projector is not None:
        return encode_pooled(parts, visual)
    # This pools the projector's output, where the paper pools its input: in other families that may
    # not be one row for each visual token.
    piece = visual.pieces[visual.host]
    local_cells = cells[piece.start : piece.stop] - piece.start
    return means_of_groups(rows, local_cells, len(rows))


def _read_text(task: DraftTask, with_caption: bool) -> tuple[DynamicCache, int]:
    """Run the draft on the prompt as text: with a caption (C), or without (T).

    Returns:
        The KV, and the number of tokens.
    """
    parts = task.draft_parts
    assert task.tokenize is not None, "a draft that reads other text has the tokenizer"
    prompt = task.inputs.input_ids[0]
    line_break = task.tokenize(LINE_BREAK)
    first = task.tokenize(f"image: {task.caption}") if with_caption else line_break
    is_placeholder = parts.is_placeholder(prompt).tolist()
    ids = torch.tensor([as_text(prompt.tolist(), is_placeholder, first, line_break)])
    num_tokens = ids.shape[1]
    positions = torch.arange(num_tokens)[None]
    if parts.uses_mrope:
        positions = positions.expand(3, 1, -1)
    return run_prompt(parts, ids, positions).cache, num_tokens


def as_text(
    input_ids: Sequence[int], is_placeholder: Sequence[bool], first: list[int], others: list[int]
) -> list[int]:
    """Replace a prompt's first run of placeholders by ``first``, and all others by ``others``.

    The paper's prompts have one placeholder per image, which becomes one "\\n" (Appendix I.2); here
    it is the run of placeholders into which the processor has expanded that one.
    """
    text = []
    replacement = first
    in_run = False
    for token, stands_in in zip(input_ids, is_placeholder, strict=True):
        if not stands_in:
            text.append(token)
        elif not in_run:
            text += replacement
            replacement = others
        in_run = stands_in
    return text


def pooling_cells(parts: ModelParts, inputs: ModelInputs) -> Tensor:
    """Return for each visual token the number of the top left one of its 2 x 2 cell.

    Cells lie within a frame or an image. A token outside any grid, such as a separator at a video's
    end, is a cell by itself; so are the tokens of LLaVA-OneVision's images, which may be resized
    after the projector, and those of frames that lack tokens. Cells of LLaVA-NeXT's images lie
    within tiles, before these are put together.
    """
    visual = inputs.visual
    assert visual is not None, "the prompt has visual tokens"
    cells = torch.arange(inputs.num_visual_tokens)
    for item, patches in zip(visual.items, visual.item_patches, strict=True):
        if not item.is_whole:
            continue
        if item.kind == "video" or parts.uses_mrope:
            height, width = frame_shape(parts, inputs, patches.start)
        elif parts.rows_per_tile is not None:
            height = width = round(parts.rows_per_tile**0.5)
        else:
            _set_image_cells(cells, parts, visual.rows_of(patches), item)
            continue
        row = torch.arange(height)[:, None] // 2 * 2
        column = torch.arange(width) // 2 * 2
        frame = (row * width + column).flatten()
        rows = visual.rows_of(patches)
        for start in range(rows.start, rows.stop - item.num_ending_rows, len(frame)):
            cells[start : start + len(frame)] = start + frame
    return cells


def _set_image_cells(cells: Tensor, parts: ModelParts, rows: range, item: VisualItem) -> None:
    """Write the cells of an image that a LLaVA model has cut into tiles.

    Args:
        cells: of all visual tokens, see :func:`pooling_cells`.
        rows: the image's visual tokens.
    """
    size = None if item.size is None else torch.tensor(item.size)
    cell_of_token = parts.image_cells(size)
    if cell_of_token is None:
        return
    num_tokens = len(cell_of_token)
    _, groups = cell_of_token.unique(return_inverse=True)
    places = torch.arange(num_tokens)
    no_place = places.new_full([num_tokens], num_tokens)
    first_of_group = no_place.scatter_reduce(0, groups, places, "amin")
    in_cell = cell_of_token >= 0
    cells_of_image = cells[rows.start : rows.stop]  # a view
    cells_of_image[in_cell] = rows.start + first_of_group[groups][in_cell]


def stack_left_padded(caches: Sequence[DynamicCache]) -> DynamicCache:
    """Stack caches as rows of one batch, padded with zeros on the left.

    The rows end together, so that they can grow together.
    """
    longest = max(cache.get_seq_length() for cache in caches)

    def pad(kv: Tensor) -> Tensor:
        return functional.pad(kv, (0, 0, longest - kv.shape[2], 0))

    stacked = DynamicCache()
    for index in range(len(caches[0].layers)):
        layers = [kv_layers(cache)[index] for cache in caches]
        keys = torch.cat([pad(layer.keys) for layer in layers])
        values = torch.cat([pad(layer.values) for layer in layers])
        stacked.update(keys, values, index)
    return stacked


class EnsembleDrafter(ModelDrafter):
    """Drafts from the mixture of one model's distributions in several contexts.

    Each context's distribution is at the sampling temperature (1 where decoding is greedy), and
    top-p cuts the mixture. Weights are equal in the first block, and stay as they are within one.

    Attributes:
        weights: the contexts' weights in the latest block, fp64 ``[m]``.

    Args:
        contexts: from :func:`read_contexts`; one batch row each.
    """

    def __init__(self, task: DraftTask, contexts: Sequence[tuple[DynamicCache, int]]):
        parts = task.draft_parts
        caches = [cache for cache, _ in contexts]
        positions = [position for _, position in contexts]
        super().__init__(
            parts,
            ReadPrompt(stack_left_padded(caches)),
            0,
            task.inputs.num_tokens,
            task.sampling,
            task.vocab_size,
            prompt_ids=task.inputs.input_ids,
        )
        device = parts.device
        self._positions = torch.tensor(positions, device=device)[:, None]
        lengths = [cache.get_seq_length() for cache in caches]
        longest = max(lengths)
        padding = [longest - length for length in lengths]
        self._attention = PaddedAttention(parts.backend, padding)
        self._policy: AdaptedWeights | None = None
        settings = task.config.settings_of(TabedConfig)
        if settings.adapts_weights:
            self._policy = AdaptedWeights(len(contexts), settings.window)
        equal = torch.full((len(contexts),), 1 / len(contexts), dtype=torch.float64)
        self.weights = to_device(equal, device)
        # [m, Vq] each: the contexts' distributions after every cached token that is not learnt from
        # yet.
        self._predictions: list[Tensor] = []
        self._verified: list[Tensor] = []  # the target's logits

    def learn(self, tokens: Sequence[int], logits: Tensor) -> None:
        """Collect verified tokens; see :meth:`apbv.speculate.drafters.drafters.Drafter.learn`."""
        if self._policy is not None:
            self._verified += logits

    def _run(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Run all contexts, and return their mixture's logits ``[1, Vq]`` after the last token."""
        temperature = self._config.temperature or 1.0
        q = torch.softmax(self.run_contexts(tokens).double() / temperature, dim=-1)
        if self._policy is not None:
            self._predictions += q.unbind(dim=1)
            self._adapt(self._policy)
        return (self.weights @ q[:, -1]).log()[None] * temperature

    def _adapt(self, policy: AdaptedWeights) -> None:
        """Learn from tokens verified since the latest block, if any, and choose new weights."""
        if not self._verified:
            return
        temperature = self._config.temperature or 1.0
        for logits, q in zip(self._verified, self._predictions, strict=False):
            p = torch.softmax(logits.to(q) / temperature, dim=-1)
            policy.learn(p[: q.shape[-1]], q)
        del self._predictions[: len(self._verified)]
        self._verified.clear()
        self.weights = policy.choose()

    def _roll_back(self, tokens: Sequence[int], num_verified: int | None = None) -> list[int]:
        num_before = self._num_cached
        missing = super()._roll_back(tokens, num_verified)
        num_rejected = num_before - self._num_cached
        if self._policy is not None and num_rejected:
            del self._predictions[-num_rejected:]
        return missing

    @torch.no_grad()
    def run_contexts(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Run all contexts on S tokens, cache their KV, and return logits ``[m, S, Vq]``."""
        parts = self.parts
        count = len(tokens)
        input_ids = to_device(tokens, parts.device)[None].expand(len(self._positions), -1)
        positions = self._positions + self._num_cached + torch.arange(count, device=parts.device)
        rows = LayerRows(parts.embed_tokens(input_ids), positions)
        with apbv_attention(parts.language_model):
            hidden = run_layers(parts, rows, self.cache, self._attention)
        return parts.lm_head(hidden)[..., : self.vocab_size]
