"""blockpool keeps the books of an LLM engine's KV cache.

Who holds which block, which block may be handed out next, and which prefix each block still remembers.
"""

from blockpool.build_info import BuildInfo, build_info

__version__ = "0.1.0"
__all__ = ["BuildInfo", "__version__", "build_info"]
