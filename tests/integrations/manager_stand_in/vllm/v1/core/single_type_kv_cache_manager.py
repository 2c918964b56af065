from abc import ABCMeta

FullAttentionManager = ABCMeta("FullAttentionManager", (), {"__module__": __name__})
SlidingWindowManager = ABCMeta("SlidingWindowManager", (), {"__module__": __name__})
MambaManager = ABCMeta("MambaManager", (), {"__module__": __name__})
CrossAttentionManager = ABCMeta("CrossAttentionManager", (), {"__module__": __name__})
CircularBufferManager = ABCMeta("CircularBufferManager", (), {"__module__": __name__})
