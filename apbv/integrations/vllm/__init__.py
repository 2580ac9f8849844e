"""Lets vLLM continue from KV that apbv prefilled, by a KV connector that only loads.

Start vLLM with

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "ApbvConnector", "kv_role": "kv_consumer",
        "kv_connector_module_path": "apbv.integrations.vllm"}'

and send with a request the ``kv_transfer_params`` that a prefill worker has answered with, as routers do, or
what :func:`request_params` returns for saved KV. vLLM prefills requests that have neither itself.
"""

from .connector import ApbvConnector
from .sources import request_params

__all__ = ["ApbvConnector", "request_params"]
