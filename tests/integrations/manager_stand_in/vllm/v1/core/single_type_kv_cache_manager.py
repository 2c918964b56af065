from abc import ABC


class FullAttentionManager(ABC):
    pass


class SlidingWindowManager(ABC):
    pass


class MambaManager(ABC):
    pass


class CrossAttentionManager(ABC):
    pass


class CircularBufferManager(ABC):
    pass
