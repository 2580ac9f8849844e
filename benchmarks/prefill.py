"""APB-V's prefill against full attention on the same cores, side by side in one run.

    python benchmarks/prefill.py                     # 32k tokens, 4 layers: full on 2 threads, apbv on 2 x 1
    python benchmarks/prefill.py --tokens 65536 --hosts 2 --json prefill.jsonl

Both ways use the same model, the same attention kernels, compute the last token's logits only, and leave the
KV where it was computed. Rounds alternate between them, so that a drift of the machine's speed hits both; the
ratio is taken round by round. Weights are random: the time does not depend on them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from apbv import HostGroup, ModelInputs, PrefillConfig, prefill
from apbv.models import inspect_model
from apbv.stats import StageTimer

MODEL_OPTIONS = ("layers", "hidden", "intermediate", "heads", "kv_heads", "dtype")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--query", type=int, default=32, help="tokens of the question, at the end")
    parser.add_argument("--hosts", type=int, default=2, help="also the number of threads of full attention")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=1536)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--anchor-len", type=int)
    parser.add_argument("--passing-len", type=int)
    parser.add_argument("--json", metavar="FILE", help="append the figures as one JSON line")
    parser.add_argument("--profile", action="store_true", help="print where a host's time goes, by operator")
    parser.add_argument("--worker", metavar="METHOD", help=argparse.SUPPRESS)
    return parser.parse_args()


def worker(options: argparse.Namespace) -> None:
    """One timed prefill after a short warm-up, on every host of the group; host 0 prints its figures."""
    hosts = HostGroup.from_env()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        max_position_embeddings=options.tokens,
    )
    model = LlamaForCausalLM(config).to(hosts.device, getattr(torch, options.dtype)).eval()
    parts = inspect_model(model)
    ids = torch.randint(0, 32000, (1, options.tokens), generator=torch.Generator().manual_seed(1))
    settings = PrefillConfig(
        method=options.worker, kv="sharded", anchor_len=options.anchor_len, passing_len=options.passing_len
    )

    def run(input_ids: torch.Tensor) -> dict:
        start = input_ids.shape[1] - options.query
        inputs = ModelInputs.from_processor(parts, {"input_ids": input_ids}, hosts, query_start=start)
        hosts.barrier()
        state = prefill(model, inputs, hosts=hosts, config=settings, timer=StageTimer(hosts))
        lengths = {"anchor_len": len(state.layout.anchor), "passing_len": state.layout.passing_len}
        return {**state.timer.summary(), **lengths}

    run(ids[:, : min(options.tokens, 4096)])
    if options.profile:
        with torch.profiler.profile() as profile:
            run(ids)
        if hosts.rank == 0:
            print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=12), file=sys.stderr)
    figures = run(ids)
    if hosts.rank == 0:
        print(json.dumps(figures))
    hosts.close()


def launch(method: str, processes: int, threads: int, store: str) -> dict:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", store]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    command += [__file__, *sys.argv[1:], "--worker", method]
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(output.strip().splitlines()[-1])


def main() -> None:
    options = parse_arguments()
    if options.worker:
        worker(options)
        return
    samples = {"full": [], "apbv": []}
    for round_index in range(options.rounds):
        for method, shape in (("full", (1, options.hosts)), ("apbv", (options.hosts, 1))):
            figures = launch(method, *shape, f"{os.getpid()}-{round_index}-{method}")
            samples[method].append(figures)
            print(f"round {round_index}: {method:5} {figures['stages_ms']['prefill'] / 1e3:8.2f} s", flush=True)
    times = {m: [f["stages_ms"]["prefill"] for f in figures] for m, figures in samples.items()}
    ratios = [a / b for a, b in zip(times["full"], times["apbv"], strict=True)]
    last = samples["apbv"][-1]
    record = {
        "benchmark": "prefill",
        "num_input_tokens": options.tokens,
        "hosts": options.hosts,
        "threads": {"full": options.hosts, "apbv": 1},
        "model": {name: getattr(options, name) for name in MODEL_OPTIONS},
        "anchor_len": last["anchor_len"],
        "passing_len": last["passing_len"],
        "prefill_ms": times,
        "speedup": ratios,
        "speedup_median": statistics.median(ratios),
        "comm_bytes": last["comm_bytes"],
        "peak_memory_bytes": {m: figures[-1]["peak_memory_bytes"] for m, figures in samples.items()},
        "torch": torch.__version__,
    }
    print(
        f"{options.tokens} tokens, anchor {last['anchor_len']}, passing {last['passing_len']}: apbv on "
        f"{options.hosts} x 1 thread is {record['speedup_median']:.2f} times as fast as full on {options.hosts} "
        f"threads (rounds: {', '.join(f'{r:.2f}' for r in ratios)})"
    )
    if options.json:
        with open(options.json, "a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
