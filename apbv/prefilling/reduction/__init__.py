"""Visual-token pruning before the language model.

A reducer is one function, a :data:`.frames.Reducer`: it chooses among the embeddings of a video's
frames, which lie on several hosts.
"""

from .dycoke import keep_by_dycoke
from .fastvid import keep_by_fastvid
from .frames import Reducer
from .slowfast import keep_slow_and_fast

REDUCERS: dict[str, Reducer] = {
    "slowfast": keep_slow_and_fast,
    "fastvid": keep_by_fastvid,
    "dycoke": keep_by_dycoke,
}
