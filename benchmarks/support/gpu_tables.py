"""Tables of what a GPU was measured with: of the records of on_gpu.py's stages, and of docs/records/h200.jsonl."""

from collections.abc import Callable

import roofline

from .cost_model import Shape
from .records import markdown_table
from .ruler.tables import kl_table
from .summaries import grouped
from .workloads import CONFIGS, config_of

PREFILLS = ("full", "zigzag_ring", "apbv")
# How much faster the APB-V paper's own was on eight A800, for 64 frames of 1440p.
PAPER, PAPERS_HEIGHT = {"full": 12.72, "zigzag_ring": 1.70}, 1440
# Of the fastest library, or of the ceiling that an operator is bound by.
TARGETS = {"segmented_attention": 0.9, "verify_attention": 0.8, "kv_importance": 0.8, "merge_states": 0.8}


def of(records: list[dict], benchmark: str) -> list[dict]:
    return [record for record in records if record.get("benchmark") == benchmark]


def name_of_gpu(records: list[dict]) -> str | None:
    """Return the GPU that the roofline knows and the records are of; None for others."""
    names = " ".join(record.get("device", "") for record in records)
    return next((gpu for gpu in roofline.PEAKS if gpu in names), None)


def prefill(records: list[dict]) -> str:
    """TTFT by method, the fastest run of each."""
    lines = []
    for (tokens,), rows in grouped(of(records, "throughput"), "num_input_tokens").items():
        ms = {row["label"]: min(row["samples"]["ttft_ms"]) for row in rows}
        cells = [f"{ms[label]:,.0f} ms" if label in ms else "–" for label in PREFILLS]
        over = [f"{ms[label] / ms['apbv']:.2f}x" if {label, "apbv"} <= ms.keys() else "–" for label in PAPER]
        lines.append([f"{tokens:,}", *cells, *over])
    header = ["tokens", "`full`, 1 host", "`zigzag_ring`, 8", "`apbv`, 8", "over `full`", "over the ring"]
    return markdown_table(header, lines)


def prefill_ms(record: dict) -> float:
    """Return the milliseconds of a prefill's stage, or where they were not recorded the TTFT."""
    return record.get("stages_ms", {}).get("prefill") or min(record["samples"]["ttft_ms"])


def predicted_parts(record: dict, gpu: str | None) -> dict[str, float]:
    """Predict a prefill's parts in milliseconds; nothing where the roofline knows the GPU or the prompt not."""
    if gpu is None or record.get("frames") or record["model"] not in CONFIGS or record["label"] not in PREFILLS:
        return {}
    what = config_of(record["model"]), record["num_input_tokens"], record["label"], record["hosts"]
    return roofline.prefill_parts(*what, gpu)


def predicted_ms(record: dict, gpu: str | None) -> float | None:
    """Predict a prefill's milliseconds, by what is slower: the GPU, or the CPU that launches its kernels."""
    parts = predicted_parts(record, gpu)
    return (
        max(sum(parts.values()), roofline.launching_ms(config_of(record["model"]), record["label"]))
        if parts
        else None
    )


def kernels(records: list[dict]) -> str:
    """A prefill's kernels on one host by parts, beside what the roofline predicts."""
    columns, gpu = [], name_of_gpu(records)
    for record in of(records, "profile"):
        parts = predicted_parts(record, gpu)
        predicted = {
            "attention": parts["attention"],
            "matrix products": parts["projections"] + parts["MLP"],
            "the rest": parts["element-wise"] + parts["selection of passing KV"],
        }
        measured = {name: record["kernels_ms"].get(name, 0.0) for name in ("attention", "matrix products")}
        measured["the rest"] = sum(record["kernels_ms"].values()) - sum(measured.values())
        columns.append([(measured[name], predicted[name]) for name in predicted])
    names = ["attention", "matrix products", "the rest", "all"]
    columns = [[*column, tuple(map(sum, zip(*column, strict=True)))] for column in columns]
    lines = [
        [name, *(cell for measured, least in row for cell in (f"{measured:,.0f} ms", f"{least:,.0f} ms"))]
        for name, row in zip(names, zip(*columns, strict=True), strict=True)
    ]
    header = [each for r in of(records, "profile") for each in (f"`{r['label']}`, {r['hosts']}", "predicted")]
    return markdown_table(["kernels", *header], lines)


def whole_operators(records: list[dict]) -> list[dict]:
    """Return the records of operators that were right, but not those of their attention kernels alone."""
    return [row for row in of(records, "operators") if row["ms"] is not None and row["variant"] == "operator"]


def operators(records: list[dict]) -> str:
    """Every operator by backend: its time, and the share of the ceiling that bounds it."""
    lines = [
        [f"`{row['op']}`", row["case"], row["backend"], f"{row['ms']:.3g} ms", f"{row['share_of_ceiling']:.0%}"]
        for row in whole_operators(records)
    ]
    return markdown_table(["operator", "case", "backend", "time", "of the ceiling"], lines)


def steps(records: list[dict]) -> str:
    """A decoding step over a long context, one way beside the other."""
    lines = []
    for record in of(records, "decoding"):
        tokens = f"{record['num_tokens']:,}", record["num_new_tokens"]
        lines.append([*tokens, record["way"], f"{record['ms']:.2f} ms", f"{record['speedup']:.2f}x"])
    return markdown_table(["context", "new tokens", "way", "time", "over transformers"], lines)


def batch(records: list[dict]) -> str:
    """Tokens per second of all answers of a batch."""
    lines = []
    for (tokens, answers), ways in grouped(of(records, "batch_decoding"), "num_tokens", "num_answers").items():
        alone, together, theirs = (way["tokens_per_s"] for way in ways)
        ms = {way["way"]: way["ms"] for way in ways}["apbv, in a batch"]
        speeds = [f"{each:,.0f}" for each in (theirs, alone, together)]
        lines.append([f"{tokens:,}", answers, *speeds, f"{ms:.2f} ms", f"{together / theirs:.1f}x"])
    header = ["context", "answers", "transformers, a batch", "apbv, sequential", "apbv, a batch", "its step"]
    return markdown_table([*header, "over transformers"], lines)


def server(records: list[dict]) -> str:
    """The server under load, and the engine without it."""
    lines = []
    for record in of(records, "serving"):
        load = "engine alone" if record["way"] == "engine" else f"{record['concurrency']} clients"
        cells = [f"{record['request_throughput']:.1f}", f"{record['ttft_ms']['p50']:.0f} ms"]
        lines.append([load, *cells, f"{record['tpot_ms']['p50']:.1f} ms"])
    return markdown_table(["load", "requests/s", "TTFT, p50", "TPOT, p50"], lines)


def accuracy(records: list[dict]) -> str:
    """Divergence from full attention in nats per token."""
    return kl_table(of(records, "ruler"))


def judged(records: list[dict]) -> str:
    """One line for each figure that has a prediction or a target."""
    lines, gpu = [], name_of_gpu(records)
    for (model, tokens), rows in grouped(of(records, "throughput"), "model", "num_input_tokens").items():
        what = f"{model}, {tokens:,} tokens"
        ms = {row["label"]: prefill_ms(row) for row in rows}
        least = {row["label"]: predicted_ms(row, gpu) for row in rows}
        for label, each in ms.items():
            told = f"{least[label]:,.0f} ms" if least[label] else "–"
            lines.append([f"{what}: `{label}`, prefill", f"{each:,.0f} ms", told, "–"])
        for other in [label for label in PAPER if {label, "apbv"} <= ms.keys()]:
            ratio = f"{least[other] / least['apbv']:.2f}x" if least[other] else "–"
            goal = f"{PAPER[other]:.2f}x" if rows[0].get("height") == PAPERS_HEIGHT else "–"
            lines.append([f"{what}: `apbv` over `{other}`", f"{ms[other] / ms['apbv']:.2f}x", ratio, goal])
    for (op, case), rows in grouped(whole_operators(records), "op", "case").items():
        ours = [row["share_of_ceiling"] for row in rows if row["is_default"]]
        if op in TARGETS and ours:
            is_relative = op == "segmented_attention"
            share = ours[0] / max(row["share_of_ceiling"] for row in rows) if is_relative else ours[0]
            unit = "of the fastest" if is_relative else "of the ceiling"
            lines.append([f"`{op}`, {case}", f"{share:.0%} {unit}", "–", f"{TARGETS[op]:.0%}"])
    for record in [*of(records, "decoding"), *of(records, "batch_decoding")]:
        if record["way"] in ("apbv", "apbv, in a batch") and record["ms"] is not None:
            answers, new = record.get("num_answers", 1), record.get("num_new_tokens", 1)
            told = "–"
            if gpu is not None and record["model"] in CONFIGS:
                shape = Shape.from_config(config_of(record["model"]))
                seconds = roofline.step_seconds(shape, gpu, answers, answers * new, record["num_tokens"])
                told = f"{1e3 * seconds:.2f} ms"
            what = f"a step: {answers} x {new} tokens behind {record['num_tokens']:,}"
            lines.append([what, f"{record['ms']:.2f} ms", told, "–"])
    return markdown_table(["figure", "measured", "predicted", "target"], lines)


TABLES: dict[str, tuple[str, Callable[[list[dict]], str]]] = {
    "Measured, predicted, target": ("", judged),
    "Prefill by method": ("throughput", prefill),
    "A host's kernels": ("profile", kernels),
    "Operators": ("operators", operators),
    "Decoding steps": ("decoding", steps),
    "Batched decoding": ("batch_decoding", batch),
    "The server under load": ("serving", server),
    "Accuracy": ("ruler", accuracy),
}


def report(records: list[dict]) -> str:
    """Format the tables of all kinds of figures that there are records of."""
    present = {record.get("benchmark") for record in records}
    return "\n\n".join(
        f"## {title}\n\n{table(records)}"
        for title, (benchmark, table) in TABLES.items()
        if not benchmark or benchmark in present
    )
