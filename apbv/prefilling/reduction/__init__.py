"""Visual-token pruning, before the language model or between its layers.

A reducer before the model is one function, a :data:`.frames.Reducer`: it chooses among the
embeddings of a video's frames, which lie on several hosts. One between layers is a class, a
:class:`.layer_reducer.LayerReducer`: it chooses by what the layers before have computed.
"""

from .dycoke import keep_by_dycoke
from .fastv import FastV
from .fastvid import keep_by_fastvid
from .frames import Reducer
from .layer_reducer import LayerReducer
from .pyramiddrop import PyramidDrop
from .slowfast import keep_slow_and_fast
from .sparsevlm import SparseVLM

REDUCERS: dict[str, Reducer] = {
    "slowfast": keep_slow_and_fast,
    "fastvid": keep_by_fastvid,
    "dycoke": keep_by_dycoke,
}

LAYER_REDUCERS: dict[str, type[LayerReducer]] = {
    "fastv": FastV,
    "pdrop": PyramidDrop,
    "sparsevlm": SparseVLM,
}
