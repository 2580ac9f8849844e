"""FastV, which prunes visual tokens after the second layer by the attention of the last token.

Source: Chen et al., *An Image is Worth 1/2 Tokens After Layer 2: Plug-and-Play Inference
Acceleration for Large Vision-Language Models* (ECCV 2024).

- After the first K layers (2, or ``layer``) the visual tokens stay that got the most attention in
  the K-th, mean over heads. The ratio is the share that stays; the paper's R is what goes.
- The paper's formula averages over all tokens that attend, for which all attention has to be
  computed. The authors' program takes that of the prompt's last token, and so does this.
- Tokens stay at their positions, as in their program.

``asked_by="question"`` is this project's own form: the mean over the question's tokens, a window at
the prompt's end, with which the APB-V paper runs FastV (Appendix C.2). The last token may belong to
the chat template.
"""

from torch import Tensor

from ...config import ReduceConfig
from ...model.forward import LayerRows
from .choosing import count_of, keep_best
from .layer_reducer import LayerReducer, Selection, asking_tokens

_LAYERS = 2  # K of the paper


class FastV(LayerReducer):
    """Prunes once, by the attention in the layer before."""

    name = "fastv"
    _scores: Tensor | None = None

    @staticmethod
    def choose_layers(settings: ReduceConfig, num_layers: int) -> tuple[int, ...]:
        return (settings.layer or min(_LAYERS, num_layers - 1),)

    def on_attention(self, q: Tensor, k: Tensor, scale: float, layer: int) -> None:
        if layer + 1 in self.layers:
            raters = asking_tokens(self.settings, self.num_question)
            self._scores = self.attention_of(raters, q, k, scale).mean(dim=0)

    def choose(self, rows: LayerRows) -> Selection:
        assert self._scores is not None, "the layer before has attention"
        return Selection(keep_best(self._scores, count_of(self.settings.ratio, self.num_visual)))
