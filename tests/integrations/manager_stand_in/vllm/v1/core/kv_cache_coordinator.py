from abc import ABC


class UnitaryKVCacheCoordinator(ABC):
    pass


class HybridKVCacheCoordinator(ABC):
    pass


class KVCacheCoordinatorNoPrefixCache(ABC):
    pass
