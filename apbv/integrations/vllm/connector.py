"""The connector's vLLM interface, which forwards calls to its scheduler's or its worker's half."""

from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from ...errors import InvalidConfigError
from .kv_loading import Loading
from .scheduling import Scheduling
from .sources import LoadMetadata


class ApbvConnector(KVConnectorBase_V1):
    """vLLM connector that loads KV prefilled by apbv, and saves nothing.

    A request names the KV in its ``kv_transfer_params``: by the ticket of a prefill worker, or as
    ``apbv_path``, a directory written by :meth:`apbv.PrefillResult.save`.
    ``kv_connector_extra_config`` may hold

    - ``root``: a directory outside which no request may name KV;
    - ``networks``: a list of networks (``"10.0.0.0/8"``) outside which no ticket may name hosts;
    - ``timeout``: seconds to wait for an unresponsive source (30).

    Raises:
        InvalidConfigError: loaded KV would be wrong with the engine's settings, or a setting is
            wrong.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ):
        super().__init__(vllm_config, role, kv_cache_config)

        # Reject settings with which loaded KV would be wrong.
        transfer = vllm_config.kv_transfer_config
        parallel = vllm_config.parallel_config
        if transfer.kv_role != "kv_consumer":
            raise InvalidConfigError(
                f"ApbvConnector only loads: kv_role must be kv_consumer, not {transfer.kv_role}"
            )
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise InvalidConfigError(
                "ApbvConnector needs a model whose layers all have full attention"
            )
        if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
            raise InvalidConfigError("ApbvConnector does not support vLLM's context parallelism")
        if vllm_config.speculative_config is not None:
            raise InvalidConfigError(
                "ApbvConnector does not support vLLM's speculative decoding: no draft's KV is saved"
            )

        # vLLM has a connector for its scheduler, and one for each worker.
        self._scheduling: Scheduling | None = None
        self._loading: Loading | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduling = Scheduling(vllm_config)
        else:
            self._loading = Loading(vllm_config, kv_cache_config.kv_cache_groups[0])

    def shutdown(self) -> None:
        if self._scheduling is not None:
            self._scheduling.close()
        if self._loading is not None:
            self._loading.close()

    # The scheduler's half.

    @property
    def _own_scheduling(self) -> Scheduling:
        assert self._scheduling is not None, "vLLM calls this for its scheduler"
        return self._scheduling

    def on_new_request(self, request: Request) -> None:
        self._own_scheduling.add(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        count = self._own_scheduling.count_tokens(request, num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._own_scheduling.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> LoadMetadata:
        return self._own_scheduling.take_metadata(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._own_scheduling.update(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        self._own_scheduling.remove(request.request_id)
        return False, None

    # The worker's half.

    @property
    def _own_loading(self) -> Loading:
        assert self._loading is not None, "vLLM calls this for a worker"
        return self._loading

    def start_load_kv(self, forward_context, **kwargs) -> None:
        self._own_loading.step(self._get_connector_metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._own_loading.take_results()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing, because a request does not run before all its layers are loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata, **kwargs) -> None:
        """Do nothing, because this connector saves nothing."""

    def wait_for_save(self) -> None:
        """Do nothing, because this connector saves nothing."""
