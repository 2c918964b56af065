from vllm.v1 import kv_cache_interface as interface
from vllm.v1.core import single_type_kv_cache_manager as managers

CLASSES = {
    interface.FullAttentionSpec: managers.FullAttentionManager,
    interface.SlidingWindowSpec: managers.SlidingWindowManager,
    interface.MambaSpec: managers.MambaManager,
    interface.CrossAttentionSpec: managers.CrossAttentionManager,
    interface.CircularBufferSpec: managers.CircularBufferManager,
}


class KVCacheSpecRegistry:
    @classmethod
    def get_manager_class(cls, kvcache_spec, role=None):
        return CLASSES.get(type(kvcache_spec))
