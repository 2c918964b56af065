from vllm.v1.core import coordinator
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.hisparse.block_pool import SharedEventQueueBlockPool

POOLS = (SharedEventQueueBlockPool,)


def start():
    return coordinator.make_pool(), get_request_block_hasher(16, hash)
