import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm.distributed.kv_events import BlockStored

logger = logging.getLogger("vllm")
__all__ = ["BlockStored", "KVCacheBlockCopy", "KVCacheBlocks", "KVCacheManager", "PrefixCacheStats", "logger"]


class KVCacheBlockCopy(NamedTuple):
    src_block_id: int
    dst_block_id: int


@dataclass
class KVCacheBlocks:
    blocks: tuple[Any, ...]

    def get_block_ids(self):
        return tuple([block.block_id for block in group] for group in self.blocks)


@dataclass
class PrefixCacheStats:
    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0

    def record(self, num_tokens, num_hits, preempted):
        self.requests += 1
        self.queries += num_tokens
        self.hits += num_hits


class KVCacheManager:
    def __init__(
        self,
        kv_cache_config,
        max_model_len,
        scheduler_block_size,
        hash_block_size,
        max_in_flight_tokens=None,
        enable_caching=True,
        use_eagle=False,
        num_hash_lookahead_tokens=0,
        num_prefill_lookahead=0,
        log_stats=False,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        metrics_collector=None,
        watermark=0.0,
        enable_mamba_shared_prefix_checkpoint=False,
    ):
        self.asked = locals()

    def get_computed_blocks(self, request, max_cache_hit_length=None):
        raise NotImplementedError

    def free(self, request):
        raise NotImplementedError

    @property
    def usage(self):
        raise NotImplementedError
