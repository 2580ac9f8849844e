"""PyramidDrop, which prunes visual tokens in three steps, in deeper layers more.

Source: Xing et al., *PyramidDrop: Accelerating Your Large Vision-Language Models via Pyramid Visual
Redundancy Reduction* (CVPR 2025).

- After a quarter, a half and three quarters of the layers the same share of the visual tokens that
  are left stays: the third root of the ratio, so that the last layers read the ratio. The paper's λ
  is 0.5, a ratio of 0.125.
- Those stay to which the instruction's last token attends most, mean over heads, in the layer that
  follows, whose queries and keys are computed for that.

What is different here: the authors' program numbers the tokens that stay anew, from 0. Here they
stay at their positions, which have a time, height and width in most families, and a decoded token
has one for all layers. ``layer`` is where the first step is; the others divide the layers after it
evenly. Numbers of tokens are rounded, where the program rounds down. ``asked_by="question"`` is
this project's own form, as in :mod:`.fastv`.
"""

from ...config import ReduceConfig
from ...model.forward import LayerRows
from .choosing import count_of, keep_best
from .layer_reducer import LayerReducer, Selection, asking_tokens

_STEPS = 3


class PyramidDrop(LayerReducer):
    """Prunes in steps, by the attention in the layer that follows."""

    name = "pdrop"

    @staticmethod
    def choose_layers(settings: ReduceConfig, num_layers: int) -> tuple[int, ...]:
        first = settings.layer or max(1, num_layers // (_STEPS + 1))
        steps = {first + (num_layers - first) * step // _STEPS for step in range(_STEPS)}
        return tuple(sorted(layer for layer in steps if layer < num_layers))

    def choose(self, rows: LayerRows) -> Selection:
        q, k, scale = self.next_attention_inputs(rows)
        raters = asking_tokens(self.settings, self.num_question)
        scores = self.attention_of(raters, q, k, scale).mean(dim=0)
        share = self.settings.ratio ** ((self.step + 1) / len(self.layers))
        return Selection(keep_best(scores, count_of(share, self.num_visual)))
