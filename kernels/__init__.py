"""Attention over sharded keys and values, and selection of important keys.

It imports torch and, in the files named ``triton_*``, triton; it imports nothing else of apbv. The
folder is installed and imported as ``apbv.kernels``:

- ``operators.py`` documents and checks the public functions;
- for each family of operators ``torch_<family>.py`` and ``triton_<family>.py`` implement them with
  the same signatures, except ``varlen_attention``, which needs no kernel of ours;
- ``triton_attention_tiles.py`` and ``triton_specialization.py`` have what Triton kernels share;
- ``segments.py``, ``sequences.py``, ``listed_blocks.py``, ``strides.py`` and ``tiles.py`` describe
  how keys lie in memory and what kernels are launched with;
- ``triton_elementwise.py`` has a decoder's element-wise operators, defined by transformers'
  modules;
- ``visual_scores.py`` has the scores of visual tokens, which need none either, nor a choice of
  backends;
- :mod:`apbv.kernels.reference` defines in fp64 what every implementation of the others must return.

:mod:`apbv.kernels.backends` decides which implementation runs.
"""

from .backends import BackendError
from .listed_blocks import ListedBlocks
from .operators import (
    antidiagonal_scores,
    batch_decode_attention,
    block_means,
    block_sparse_attention,
    kv_importance,
    merge_states,
    segmented_attention,
    select_topk,
    varlen_attention,
    verify_attention,
)
from .sequences import BufferTable, PackedSequences, SequenceBuffers
from .visual_scores import similarity_to, spatial_variety, temporal_change

# Code that mistakes this folder for the Hugging Face package "kernels" must read a valid version.
__version__ = "0.1.0"
