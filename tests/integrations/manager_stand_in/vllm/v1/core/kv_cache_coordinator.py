from abc import ABCMeta

UnitaryKVCacheCoordinator = ABCMeta("UnitaryKVCacheCoordinator", (), {"__module__": __name__})
HybridKVCacheCoordinator = ABCMeta("HybridKVCacheCoordinator", (), {"__module__": __name__})
KVCacheCoordinatorNoPrefixCache = ABCMeta("KVCacheCoordinatorNoPrefixCache", (), {"__module__": __name__})
