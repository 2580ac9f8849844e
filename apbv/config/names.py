"""Names of the registries, and other constants, without importing torch."""

from .facts import KEEP_FACTS, METHOD_FACTS, REDUCER_FACTS, STRATEGY_FACTS

MOST_AUTO_DRAFT_TOKENS = 16
KV_PLACEMENTS = ("gathered", "sharded")
REUSE_MODES = ("exact", "kv")
CUDA_GRAPH_MODES = ("auto", "off")
GENERATION_CONFIGS = ("auto", "neutral")
PRUNINGS = ("kv", "prompt")
HIPPO_TERMS = ("attention", "time", "space")
# The names in the registries, which need torch: a command line lists them without importing it.
# Views have the names that another program adds, too; tuples those that come with the package.
METHOD_NAMES = METHOD_FACTS.keys()
SPARSE_NAMES = tuple(name for name, facts in METHOD_FACTS.items() if facts.is_sparse)
STRATEGY_NAMES = STRATEGY_FACTS.keys()
KEEP_POLICIES = KEEP_FACTS.keys()
FRAME_POLICIES = tuple(name for name, facts in KEEP_FACTS.items() if facts.selects_frames)
DEFAULT_KEEP_RATIO = 0.1
CONTEXTS = "MTCP"
DEFAULT_QUERY_LEN = 128
# Frames per second: more than any camera's, and small enough for times of years to be counted
# exactly.
MAX_FPS = 1e9
IMPORTANCE_NAMES = ("peak", "softmax", "dot")
BACKEND_NAMES = ("auto", "torch", "triton", "flash_attn")
# Before the language model, and between its layers.
REDUCER_NAMES = tuple(name for name, facts in REDUCER_FACTS.items() if not facts.between_layers)
LAYER_REDUCER_NAMES = tuple(name for name, facts in REDUCER_FACTS.items() if facts.between_layers)
DTYPE_NAMES = ("auto", "float32", "bfloat16", "float16")
# By the name of a reasoning parser, as in vLLM or SGLang, the tag that begins a thought.
REASONING_TAGS = {
    "deepseek_r1": "<think>",
    "deepseek_v3": "<think>",
    "glm45": "<think>",
    "granite": "<think>",
    "kimi": "◁think▷",
    "mistral": "[THINK]",
    "qwen3": "<think>",
    "seed_oss": "<seed:think>",
}
