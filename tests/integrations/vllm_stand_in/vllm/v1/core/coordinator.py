from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock as Block


def make_pool():
    return BlockPool(8, True, 16), Block(7)
