"""No part of vLLM: its names are its own."""

from vllm.v1.core.block_pool import BlockPool

__all__ = ["BlockPool"]
