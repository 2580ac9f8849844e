"""A request after another, for tests that disturb one: ``ask_endlessly.py FILE TIMEOUT``.

The file appears when the hosts are amid decoding from sharded KV, with an exchange in every layer.
"""

import sys
from pathlib import Path

import apbv
from apbv.hosts import HostGroup, run_on_hosts

decoding, timeout = Path(sys.argv[1]), float(sys.argv[2])


def ask(hosts: HostGroup) -> None:
    prefill = apbv.PrefillConfig(kv="sharded")
    engine = apbv.Engine.from_pretrained("demo", prefill=prefill, hosts=hosts, dtype="float32")
    answer = engine.generate(
        "name the letters in order", video=apbv.demo.video_path(), num_frames=128
    )
    print(answer.text, flush=True)
    while True:
        engine.generate(
            "describe the clip shot by shot",
            video=apbv.demo.video_path(),
            num_frames=64,
            max_new_tokens=256,
            on_token=lambda token: decoding.touch(),
        )


sys.exit(run_on_hosts(ask, timeout))
