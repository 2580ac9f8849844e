"""Multi-token prediction: the draft is a layer of the target's own checkpoint.

What the layer has to know of a prompt is its own keys and values of every token. They follow from
the target's hidden state behind the token and the embedding of the next one, without attention: so
every host computes those of the tokens that it keeps, and the host that drafts gathers them.
"""

import torch
from torch import Tensor
from transformers import DynamicCache

from ...device.copies import to_device
from ...hosts.row_exchange import move_rows
from ...prefilling.prefill_observer import PrefillObserver, SplitPrompt
from ..drafters.draft import Draft, DraftTask
from ..drafters.next_token import NextTokenDrafter


class PromptOutputs(PrefillObserver):
    """Keeps the embeddings and the last norm's output of the tokens that this host keeps.

    Attributes:
        embeddings, hidden: ``[T, d]`` in cache order; None on a host that keeps none.
        last_hidden: ``[1, d]``, the output for the prompt's last token, on hosts that compute it.
    """

    hidden_layers = (0,)
    wants_output = True
    wants_question = False

    def begin(self, prompt: SplitPrompt) -> None:
        super().begin(prompt)
        self.embeddings: Tensor | None = None
        self.hidden: Tensor | None = None
        self.last_hidden: Tensor | None = None

    def on_hidden(
        self, layer: int, hidden: Tensor, question: Tensor | None, owned: Tensor | None
    ) -> None:
        self.embeddings = self._of_kept(self.embeddings, hidden, owned)

    def on_output(self, hidden: Tensor, question: Tensor | None, owned: Tensor | None) -> None:
        self.hidden = self._of_kept(self.hidden, hidden, owned)
        self.last_hidden = hidden[-1:].clone()

    def _of_kept(self, rows: Tensor | None, of_pass: Tensor, owned: Tensor | None) -> Tensor:
        """Return the rows of the kept tokens after a pass.

        Args:
            rows: those of the pass before; None: this is the first.
            of_pass: of the tokens of this pass.
            owned: the kept ones among them; None: the pass has the question alone.
        """
        if owned is not None:
            return of_pass.index_select(0, owned)
        assert rows is not None, "the context comes first"
        tokens = self.prompt.owned[self.prompt.hosts.rank]
        is_question = tokens >= self.prompt.query_start
        places = to_device(is_question.nonzero().flatten(), rows.device)
        asked = to_device(tokens[is_question] - self.prompt.query_start, rows.device)
        return rows.index_copy(0, places, of_pass.index_select(0, asked))

    def result(self) -> "PromptOutputs":
        return self


@torch.no_grad()
def draft_by_next_token(task: DraftTask) -> Draft:
    """Draft with the checkpoint's multi-token prediction layer, on the whole prompt."""
    model = task.next_token
    assert model is not None, "the strategy has such a layer"
    outputs: PromptOutputs = task.read_scores()
    hosts = task.hosts
    rank = hosts.rank
    num_tokens = task.inputs.num_tokens
    parts = model.parts

    # The tokens that each host keeps, without the prompt's last one, after which comes the answer.
    kept = outputs.prompt.owned
    is_followed = [tokens < num_tokens - 1 for tokens in kept]
    followed = [tokens[mask] for tokens, mask in zip(kept, is_followed, strict=True)]

    # Of each the hidden state behind it, and the embedding of the next, which another host may
    # have.
    nothing = torch.empty(0, parts.hidden_size, dtype=parts.dtype, device=parts.device)
    embeddings = nothing if outputs.embeddings is None else outputs.embeddings
    hidden = nothing if outputs.hidden is None else outputs.hidden
    following = [tokens + 1 for tokens in followed]
    next_embeddings = move_rows(embeddings, kept, following, hosts)
    rows = to_device(is_followed[rank].nonzero().flatten(), parts.device)
    if model.zeroes_first:
        is_first = to_device(followed[rank] == 0, parts.device)
        next_embeddings = next_embeddings.masked_fill(is_first[:, None], 0.0)

    # The layer's KV of them, on the host that drafts.
    positions = task.inputs.position_ids[..., followed[rank]]
    kv = model.keys_and_values(
        next_embeddings, hidden.index_select(0, rows), to_device(positions, parts.device)
    )
    every = torch.arange(num_tokens - 1)
    needed = [every if host == task.decode_host else every[:0] for host in range(hosts.size)]
    kv = move_rows(kv, followed, needed, hosts)

    # The hidden state behind the last token.
    last = outputs.last_hidden
    last_token_host = outputs.prompt.layout.last_token_host
    if last is None:
        last = nothing.new_empty(1, parts.hidden_size)
    if last_token_host is not None:
        last = hosts.broadcast(last, last_token_host)
    outputs.embeddings = outputs.hidden = outputs.last_hidden = None

    num_visual = task.inputs.num_visual_tokens
    if not task.is_decode_host:
        return Draft(None, num_visual)
    cache = DynamicCache()
    keys, values = kv.permute(1, 2, 0, 3)[:, None]  # [1, Hkv, n - 1, D] each
    cache.update(keys.contiguous(), values.contiguous(), 0)
    drafter = NextTokenDrafter(
        model,
        cache,
        last,
        task.inputs.next_position,
        num_tokens,
        task.sampling,
        task.vocab_size,
        task.inputs.input_ids,
    )
    return Draft(drafter, num_visual)
