"""KV connector that lets vLLM decode from KV prefilled by apbv; it only loads.

Start vLLM with

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "ApbvConnector",
        "kv_role": "kv_consumer", "kv_connector_module_path": "apbv.integrations.vllm"}'

and send with a request the ``kv_transfer_params`` of a prefill instance's reply, as routers do, or
what :func:`request_params` returns for saved KV. vLLM itself prefills requests with neither.
"""

from .connector import ApbvConnector
from .sources import request_params

__all__ = ["ApbvConnector", "request_params"]
