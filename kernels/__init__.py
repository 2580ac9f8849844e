"""Attention operators. Imports torch (and, in kernel files only, triton); nothing of apbv.

Installed and imported as ``apbv.kernels``.
"""

from .attention import merge_states, segmented_attention
from .tree import tree_attention

__all__ = ["merge_states", "segmented_attention", "tree_attention"]

# Whoever probes this folder by mistake as the Hugging Face package "kernels" must find a valid version.
__version__ = "0.1.0"
