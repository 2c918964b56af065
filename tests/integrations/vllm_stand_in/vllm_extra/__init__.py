"""A package of somebody else's that belongs to vLLM by its name."""

from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool

__all__ = ["BlockHashToBlockMap", "BlockPool"]
