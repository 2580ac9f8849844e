"""Settings for prefill, visual-token pruning, decoding, caching, sampling and speculative decoding.

They are validated once. Nothing here imports torch or transformers, so that a command line can
check its options before these are loaded.
"""

from .answering import DecodeConfig, ReuseConfig, SamplingParams
from .drafts import HippoConfig, LayerSkipConfig, TabedConfig, UVPruneConfig
from .facts import (
    KEEP_FACTS,
    METHOD_FACTS,
    REDUCER_FACTS,
    STRATEGY_FACTS,
    KeepFacts,
    MethodFacts,
    ReducerFacts,
    StrategyFacts,
)
from .names import (
    BACKEND_NAMES,
    CUDA_GRAPH_MODES,
    DEFAULT_QUERY_LEN,
    DTYPE_NAMES,
    FRAME_POLICIES,
    GENERATION_CONFIGS,
    HIPPO_TERMS,
    IMPORTANCE_NAMES,
    KEEP_POLICIES,
    KV_PLACEMENTS,
    LAYER_REDUCER_NAMES,
    MAX_FPS,
    METHOD_NAMES,
    PRUNINGS,
    REASONING_TAGS,
    REDUCER_NAMES,
    REUSE_MODES,
    SPARSE_NAMES,
    STRATEGY_NAMES,
)
from .prefill import (
    FRAME_RATE,
    AblationConfig,
    PrefillConfig,
    ReduceConfig,
    VideoConfig,
)
from .sparse import (
    SPARSE_CONFIGS,
    FlexPrefillConfig,
    SpargeAttnConfig,
    SparseConfig,
    XAttentionConfig,
)
from .speculative import SpeculativeAblationConfig, SpeculativeConfig, longest_window
