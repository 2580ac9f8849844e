"""Measure the peak memory and the stages of an answer without a draft, with one in turn, and with one beside.

    python benchmarks/speculation_memory.py --json memory.jsonl
    python benchmarks/speculation_memory.py --keep-ratio 0.1 -- --model TARGET --draft-model DRAFT \
        --video clip.mp4 --prompt "What happens?"

After ParallelVLM's Table 6. Each way is a process of its own, which runs launch/infer.py with what stands behind
`--` (options of a draft are left out where there is none), so that memory is that of one way: on a GPU what torch
allocated there, on a CPU all that the process holds. ParallelVLM's draft works in a thread, on a GPU on a stream
of its own. As it works while the target does, its decoding is in brackets, and its prefill not shown.
"""

import argparse
import sys
from pathlib import Path

from support.arguments import add_json_option
from support.processes import figures_of
from support.records import made_by, write
from support.tables import markdown_table

INFER = Path(__file__).parents[1] / "launch" / "infer.py"
DEMO = ["--model", "demo", "--prompt", "describe the clip shot by shot", "--max-new-tokens", "128"]
_OF_DRAFTS = ("--draft-model", "--draft-timeout")
PREFILL_STAGES = ("encode", "exchange", "prefill", "handoff")


def ways(keep_ratio: float) -> dict[str, list[str]]:
    """Return the options of every way, by its name in the paper."""
    beside = ["--draft-host", "--num-draft-tokens", "auto", "--keep-ratio", str(keep_ratio)]
    return {
        "Autoregressive": [],
        "SD": ["--speculate", "vanilla", "--keep-losing-draft"],
        "ParallelVLM": ["--speculate", "parallelvlm", "--keep-losing-draft", *beside],
    }


def without_draft(arguments: list[str]) -> list[str]:
    """Leave out the options that mean nothing without a draft, with their values."""
    left, skipped = [], False
    for argument in arguments:
        is_of_draft = argument.split("=")[0] in _OF_DRAFTS
        if not is_of_draft and not skipped:
            left.append(argument)
        skipped = is_of_draft and "=" not in argument
    return left


def measure(label: str, speculation: list[str], arguments: list[str]) -> dict:
    """Answer in a process of its own, and return its figures.

    Raises:
        ValueError: the process failed; with what it wrote.
    """
    if not speculation:
        arguments = without_draft(arguments)
    answer = figures_of([str(INFER), *arguments, *speculation], label)[-1]
    stages, drafting = answer["stages_ms"], answer["speculation"] or {}
    draft, overlaps = drafting.get("draft_seconds"), "--draft-host" in speculation
    return {
        "benchmark": "speculation_memory",
        "label": label,
        "model": answer["model"],
        "device": answer["device"],
        "num_input_tokens": answer["num_input_tokens"],
        "num_new_tokens": len(answer["token_ids"]),
        "token_ids": answer["token_ids"],
        "peak_memory_bytes": max(answer["peak_memory_bytes"]),
        "draft_prefill_ms": stages["draft"] if speculation and not overlaps else None,
        "target_prefill_ms": sum(stages[name] for name in PREFILL_STAGES),
        "draft_decode_ms": None if draft is None else 1e3 * draft,
        "target_decode_ms": 1e3 * drafting["verify_seconds"] if drafting else stages["decode"],
        "overlaps": overlaps,
        "output_throughput": answer["output_throughput"],
        "total_ms": answer["total_ms"],
    }


def table(records: list[dict]) -> str:
    """Format the records as the paper's table: a column per way."""
    rows = {
        "peak memory, MiB": lambda r: f"{r['peak_memory_bytes'] / 2**20:.0f}",
        "draft prefill, ms": lambda r: _beside(r, "draft_prefill_ms"),
        "target prefill, ms": lambda r: f"{r['target_prefill_ms']:.0f}",
        "draft decode, ms": lambda r: _beside(r, "draft_decode_ms"),
        "target decode, ms": lambda r: f"{r['target_decode_ms']:.0f}",
        "tokens / s": lambda r: f"{r['output_throughput']:.1f}",
        "total latency, ms": lambda r: f"{r['total_ms']:.0f}",
    }
    lines = [[name, *(show(record) for record in records)] for name, show in rows.items()]
    return markdown_table(["", *(record["label"] for record in records)], lines)


def _beside(record: dict, name: str) -> str:
    if record[name] is None:
        return "–"
    return f"({record[name]:.0f})" if record["overlaps"] else f"{record[name]:.0f}"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep-ratio", type=float, default=0.1, help="of visual tokens, for ParallelVLM (0.1)")
    add_json_option(parser)
    parser.add_argument("infer", nargs="*", metavar="-- OPTIONS", help=f"of infer.py (default: {' '.join(DEMO)})")
    options = parser.parse_args(arguments)
    if not 0 < options.keep_ratio <= 1:
        parser.error("--keep-ratio must lie in (0, 1]")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    records = []
    try:
        for label, speculation in ways(options.keep_ratio).items():
            record = measure(label, speculation, options.infer or DEMO)
            records.append({**record, **made_by("speculation_memory.py")})
        write(options, records, table)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    first = records[0]["token_ids"]
    print(f"\nAll answers are the same: {all(record['token_ids'] == first for record in records)}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
