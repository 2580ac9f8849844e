"""Names of the registries, and other constants, without importing torch."""

MOST_AUTO_DRAFT_TOKENS = 16
KV_PLACEMENTS = ("gathered", "sharded")
REUSE_MODES = ("exact", "kv")
CUDA_GRAPH_MODES = ("auto", "off")
GENERATION_CONFIGS = ("auto", "neutral")
PRUNINGS = ("kv", "prompt")
HIPPO_TERMS = ("attention", "time", "space")
# Those that choose from a video's frames alone, with which HIPPO's Figure 7 compares.
FRAME_POLICIES = ("frames", "transitions", "dycoke")
KEEP_POLICIES = (
    "specvlm",
    "attention",
    "uv_prune",
    "hippo",
    *FRAME_POLICIES,
    "even",
    "random",
    "full",
)
DEFAULT_KEEP_RATIO = 0.1
CONTEXTS = "MTCP"
DEFAULT_QUERY_LEN = 128
# Frames per second: more than any camera's, and small enough for times of years to be counted
# exactly.
MAX_FPS = 1e9
# The names in the registries, which need torch: a command line lists them without importing it.
SPARSE_NAMES = ("xattention", "spargeattn", "flexprefill")
METHOD_NAMES = ("full", *SPARSE_NAMES, "zigzag_ring", "ulysses", "star", "apb", "apbv")
IMPORTANCE_NAMES = ("peak", "softmax", "dot")
BACKEND_NAMES = ("auto", "torch", "triton", "flash_attn")
# Before the language model, and between its layers.
REDUCER_NAMES = ("slowfast", "fastvid", "dycoke")
LAYER_REDUCER_NAMES = ("fastv", "pdrop", "sparsevlm")
DTYPE_NAMES = ("auto", "float32", "bfloat16", "float16")
STRATEGY_NAMES = (
    "vanilla",
    "sd_tree",
    "specvlm",
    "hippo",
    "parallelvlm",
    "text_only",
    "tabed",
    "std",
    "streaming",
    "layerskip",
    "ngram",
)
