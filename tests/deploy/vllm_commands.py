"""Let vLLM and vllm-router parse command lines; in the environment that
tests/integrations/test_vllm.py names.

Reads ``{"vllm": [[…], …], "router": [[…], …]}`` from stdin, and ends with a status other than 0
where one is refused.
"""

import json
import sys

import apbv  # noqa: F401  (before vLLM: it lets transformers be imported beside a CPU-only torch)

# isort: split
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm_router.launch_router import parse_router_args

commands = json.load(sys.stdin)
for words in commands["vllm"]:
    options = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    print(options.model_tag, options.kv_transfer_config.kv_connector)
for words in commands["router"]:
    parse_router_args(words)._validate_router_args()  # as launching it does
