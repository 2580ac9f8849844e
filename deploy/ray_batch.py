"""Answer a file of requests on a Ray cluster: each shard is a Ray task, which runs a torchrun group
of its own.

    python deploy/ray_batch.py requests.jsonl --out answers --shards 8 --gpus 4 \
        --model Qwen/Qwen2.5-VL-7B-Instruct --frames 256 --media-dir videos

Ray places the tasks, and starts one again if its worker or node dies; it continues its shard's
file. The requests, the folder of answers and the media must have the same paths on every node, as
on a shared file system. Options that --help does not list are those of "apbv batch". The exit
status is 1 if a request failed.
"""

import argparse
import ctypes
import fcntl
import json
import signal
import subprocess
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # of Linux's prctl


def parse_arguments(arguments: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Parse the options; return those of "apbv batch" apart."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("requests", type=Path, help="JSON lines")
    parser.add_argument("--out", type=Path, required=True, help="folder of the shards' answers")
    parser.add_argument(
        "--shards", type=int, required=True, help="more than fit at once even out their lengths"
    )
    parser.add_argument(
        "--gpus", type=int, default=1, help="GPUs of each shard; 0: it uses CPUs (default 1)"
    )
    parser.add_argument(
        "--processes", type=int, help="processes of each shard (default: --gpus, or 1)"
    )
    parser.add_argument(
        "--cpus", type=int, default=1, help="CPUs that Ray reserves for each shard (default 1)"
    )
    parser.add_argument(
        "--retries", type=int, default=3, help="further attempts of a shard (default 3)"
    )
    return parser.parse_known_args(arguments)


def answer(
    requests: Path, out: Path, shard: tuple[int, int], processes: int, options: list[str]
) -> int:
    """Answer a shard, or what is left of it; return the number of its errors.

    Raises:
        RuntimeError: there are requests without an answer; with the end of what the processes said.
    """
    from apbv.serve.batch.files import Requests

    with out.open("ab") as file:
        # Processes of an attempt whose worker was lost may still be ending.
        fcntl.flock(file, fcntl.LOCK_EX)
    torchrun = [
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
        "-m",
        "apbv.launch.batch",
    ]
    batch = [
        str(requests),
        f"--out={out}",
        f"--shard={shard[0]}/{shard[1]}",
        "--retry-errors",
        *options,
    ]
    command = [sys.executable, "-m", *torchrun, *batch]
    ended = subprocess.run(
        command, stderr=subprocess.PIPE, text=True, preexec_fn=_end_with_parent, check=False
    )
    answers = (
        [json.loads(line) for line in out.read_bytes().splitlines()] if ended.returncode else []
    )
    if ended.returncode and len(answers) < Requests(requests, shard).count():
        raise RuntimeError(
            f"shard {shard[0]} has {len(answers)} answers and is not "
            f"complete:\n{ended.stderr[-4000:]}"
        )
    return sum(
        each["error"] is not None or each["response"]["status_code"] != 200 for each in answers
    )


def _end_with_parent() -> None:
    """Let torchrun get SIGTERM when the Ray worker that started it dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def main(arguments: list[str] | None = None) -> int:
    """Answer all shards; return the exit status."""
    options, of_batch = parse_arguments(arguments)
    try:
        import ray
    except ImportError:
        print(
            'error: needs ray: pip install -c constraints.txt -e ".[ray]" in apbv\'s checkout',
            file=sys.stderr,
        )
        return 2
    requests = options.requests.resolve()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    ray.init()  # the cluster that RAY_ADDRESS names, or the one of this machine
    wanted = {"num_gpus": options.gpus, "num_cpus": options.cpus, "max_retries": options.retries}
    task = ray.remote(retry_exceptions=True, **wanted)(answer)
    processes = options.processes or options.gpus or 1
    size = options.shards
    running = {
        task.remote(
            requests, out / f"answers-{index}.jsonl", (index, size), processes, of_batch
        ): index
        for index in range(size)
    }
    num_failed = num_lost = 0
    while running:
        (ended,), _ = ray.wait(list(running))
        index = running.pop(ended)
        try:
            found = ray.get(ended)
            print(
                f"shard {index}: answered, with {found} errors; {len(running)} shards are left",
                flush=True,
            )
            num_failed += found
        except ray.exceptions.RayError as error:
            print(f"shard {index}: not answered: {error}", file=sys.stderr, flush=True)
            num_lost += 1
    return int(num_failed + num_lost > 0)


if __name__ == "__main__":
    sys.exit(main())
