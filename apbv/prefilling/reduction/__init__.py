"""Visual-token pruning.

A reduction before the language model is one function, an :data:`.frames.EarlyReducer`: it chooses among the
embeddings of a video's frames, which lie on several hosts. One inside the language model is a class, a
:class:`.late.LateReducer`: it chooses between layers, by what the layers before have computed.
"""

from .by_attention import FastV, PyramidDrop
from .dycoke import keep_by_dycoke
from .fastvid import keep_by_fastvid
from .frames import EarlyReducer
from .hippo import HippoAttention
from .late import LateReducer
from .slowfast import keep_slow_and_fast
from .sparsevlm import SparseVLM

EARLY_REDUCERS: dict[str, EarlyReducer] = {
    "slowfast": keep_slow_and_fast,
    "fastvid": keep_by_fastvid,
    "dycoke": keep_by_dycoke,
}

LATE_REDUCERS: dict[str, type[LateReducer]] = {
    reducer.name: reducer for reducer in (FastV, PyramidDrop, SparseVLM, HippoAttention)
}
