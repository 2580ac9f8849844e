"""deploy/ray_batch.py on a Ray cluster on this machine, which loses its only node and gets two
others."""

import json
import os
import runpy
import subprocess
import sys
from collections import Counter

import pytest

from apbv import demo

from apbv_tests.patience import limit, wait_for
from apbv_tests.scripts import ROOT


def test_without_ray_there_is_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    main = runpy.run_path(str(ROOT / "deploy" / "ray_batch.py"))["main"]
    assert main(["requests.jsonl", "--out", str(tmp_path / "out"), "--shards", "2"]) == 2
    assert capsys.readouterr().err.startswith(
        'error: needs ray: pip install -c constraints.txt -e ".[ray]"'
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
def test_a_lost_node_costs_no_request_and_none_is_answered_twice(tmp_path):
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    content = [
        {"type": "video_url", "video_url": {"url": "clip.mp4"}},
        {"type": "text", "text": "name the letters"},
    ]
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 200,
        "ignore_eos": True,
    }
    names = [f"request {number}" for number in range(80)]
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    source = tmp_path / "in.jsonl"
    out = tmp_path / "out"
    source.write_text(
        "".join(json.dumps({"custom_id": name, **line}) + "\n" for name in names) + "broken\n"
    )
    options = ["--shards", 2, "--gpus", 0, "--processes", 2, "--model", "demo", "--max-running", 2]
    options += ["--media-dir", demo.video_path().parent]
    command = [sys.executable, ROOT / "deploy" / "ray_batch.py", source, "--out", out, *options]

    def num_answered() -> int:
        return sum(len(path.read_bytes().splitlines()) for path in out.glob("*.jsonl"))

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        lost = cluster.add_node(num_cpus=1)  # a shard runs there, the other has to wait
        environment = {**os.environ, "RAY_ADDRESS": cluster.address}
        with subprocess.Popen(
            list(map(str, command)),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as driver:
            wait_for(lambda: num_answered() >= 3)
            assert num_answered() < 40  # the node is lost in the middle of a shard
            cluster.remove_node(lost, allow_graceful=False)
            for _ in range(2):
                cluster.add_node(num_cpus=1)
            said, _ = driver.communicate(timeout=limit(400.0))
    finally:
        cluster.shutdown()
    assert driver.returncode == 1 and "shard 0: answered, with 1 errors" in said, said
    answers = [
        json.loads(each) for path in out.glob("*.jsonl") for each in path.read_text().splitlines()
    ]
    assert Counter(each["custom_id"] for each in answers) == Counter([*names, None])
