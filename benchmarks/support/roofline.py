"""Counts what an operator computes and moves, the two roofs of its speed (Williams et al., 2009), and GPUs' peaks.

What follows from it is a prediction: no kernel is faster than both its arithmetic and its memory allow.
"""

import math

import torch

# Dense bf16 arithmetic with sums in fp32, and memory bandwidth, by data sheets: operations and bytes per second.
PEAKS = {"A100": (312e12, 2.0e12), "H100": (989e12, 3.35e12), "H200": (989e12, 4.8e12), "B200": (2250e12, 8.0e12)}


def cost_of(operator: str, shapes: dict[str, int], dtype: torch.dtype) -> tuple[int, int]:
    """Count the floating-point operations of an operator's products, and the bytes that it must move.

    Args:
        operator: ``"segmented_attention"``, ``"verify_attention"``, ``"merge_states"`` or ``"kv_importance"``.
        shapes: by name: ``batch`` (by default 1), ``heads``, ``kv_heads``, ``queries``, ``keys``, ``dim``;
            ``causal``, how many of the keys are causal, the last ones (by default 0); ``parts``, how many partial
            results ``merge_states`` has.
        dtype: that of the operands; results of merging are in it, too.

    Returns:
        operations, where what is seen counts, an addition and a product being two; and bytes, every operand being
        read once and every result written once.

    Raises:
        ValueError: there is no count for the operator.
    """
    batch, heads, queries, dim = (shapes.get(name, 1) for name in ("batch", "heads", "queries", "dim"))
    rows = batch * heads * queries
    element, lse = dtype.itemsize, 4
    if operator == "merge_states":
        parts = shapes["parts"]
        return 2 * parts * rows * dim, rows * (parts + 1) * (dim * element + lse)
    keys, kv_heads, causal = shapes["keys"], shapes["kv_heads"], shapes.get("causal", 0)
    key_bytes = batch * kv_heads * keys * dim * element
    if operator == "kv_importance":
        return 2 * rows * keys * dim, rows * (dim * element + lse) + key_bytes + batch * kv_heads * keys * 4
    if operator not in ("segmented_attention", "verify_attention"):
        raise ValueError(f"there is no count of what {operator!r} computes")
    # Query s of S sees the first causal - S + s + 1 of the causal keys: the last min(S, causal) queries see some.
    seeing = min(queries, causal)
    seen = seeing * (2 * causal - seeing + 1) // 2
    scores = batch * heads * (queries * (keys - causal) + seen)
    return 4 * scores * dim, rows * (2 * dim * element + lse) + 2 * key_bytes


def predicted_seconds(cost: tuple[int, int], flops: float, bandwidth: float) -> tuple[float, str]:
    """Predict the least time that something takes, and what bounds it.

    Args:
        cost: what :func:`cost_of` counted.
        flops: the device's operations per second.
        bandwidth: the device's bytes per second.

    Returns:
        seconds, and ``"arithmetic"`` or ``"memory"``.

    Raises:
        ValueError: the device computes or moves nothing.
    """
    if not (flops > 0 and bandwidth > 0 and math.isfinite(flops) and math.isfinite(bandwidth)):
        raise ValueError(f"a device with {flops} operations and {bandwidth} bytes per second has no roof")
    arithmetic, memory = cost[0] / flops, cost[1] / bandwidth
    return max(arithmetic, memory), "arithmetic" if arithmetic > memory else "memory"
