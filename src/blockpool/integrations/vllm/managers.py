"""The manager class that vLLM gets. Not compiled, so that people can subclass it and set attributes on it."""

from __future__ import annotations

from typing import Any

from blockpool.integrations.vllm.kv_cache_manager import ManagerOverBooks
from blockpool.integrations.vllm.notice import logger
from blockpool.integrations.vllm.swap import own_manager
from blockpool.integrations.vllm.translate import NotForUs, translate


class KVCacheManager(ManagerOverBooks):
    """vLLM's KVCacheManager over blockpool's; vLLM's own where it asks for what blockpool's does not do."""

    def __new__(
        cls,
        kv_cache_config: Any,
        max_model_len: int,
        scheduler_block_size: int,
        hash_block_size: int,
        max_in_flight_tokens: int | None = None,
        enable_caching: bool = True,
        use_eagle: bool = False,
        num_hash_lookahead_tokens: int = 0,
        num_prefill_lookahead: int = 0,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        metrics_collector: Any = None,
        watermark: float = 0.0,
        enable_mamba_shared_prefix_checkpoint: bool = False,
    ) -> Any:
        asked = {name: value for name, value in locals().items() if name not in ("cls", "__class__")}
        try:
            translate(
                kv_cache_config,
                max_model_len=max_model_len,
                max_in_flight_tokens=max_model_len if max_in_flight_tokens is None else max_in_flight_tokens,
                scheduler_block_size=scheduler_block_size,
                hash_block_size=hash_block_size,
                enable_caching=enable_caching,
                use_eagle=use_eagle,
                num_prefill_lookahead=num_prefill_lookahead,
                dcp_world_size=dcp_world_size,
                pcp_world_size=pcp_world_size,
                shared_prefix_checkpoint=enable_mamba_shared_prefix_checkpoint,
            )
        except NotForUs as reason:
            logger.warning("vLLM's own KVCacheManager is used: blockpool's does not do %s", reason)
            return own_manager()(**asked)
        return super().__new__(cls)
