"""A kind that is not compiled leaves no memory behind when the compiled base class works for it."""

from __future__ import annotations

import resource

import pytest

from blockpool import build_info
from blockpool.managers import NOTHING_FOUND, FullAttentionSpec, KVCacheGroupSpec, SingleTypeKVCacheManager
from blockpool.pool import BlockPool
from tests.managers.rules import chain

NUM_BLOCKS = 8_000


class OwnKind(SingleTypeKVCacheManager):
    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - 63)

    def num_blocks(self, num_tokens: int, num_prompt_tokens: int = 0, num_encoder_tokens: int = 0) -> int:
        return -(-num_tokens // self.block_size)


def life(manager: SingleTypeKVCacheManager, digests: bytes) -> None:
    """Every operation that hands blocks over, on a table of NUM_BLOCKS."""
    manager.adopt("r", NOTHING_FOUND)
    manager.grow("r", NUM_BLOCKS)
    manager.register("r", 0, NUM_BLOCKS, digests, 0, None)
    manager.droppable("r", NUM_BLOCKS // 2)
    manager.drop("r", NUM_BLOCKS // 2)
    manager.find_longest_hit(digests, NUM_BLOCKS, 1)
    manager.pool.free_blocks(manager.block_ids("r"))
    del manager.tables["r"]


@pytest.mark.skipif(not build_info().is_compiled, reason="the pure build has no arrays to lose, and takes a minute")
def test_nothing_is_left_behind() -> None:
    pool = BlockPool(NUM_BLOCKS + 1, hash_block_size=1)
    manager = OwnKind(pool, 0, KVCacheGroupSpec(("layer",), FullAttentionSpec(1)))
    digests = chain(NUM_BLOCKS)
    for _ in range(10):
        life(manager, digests)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(120):
        life(manager, digests)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 120 * NUM_BLOCKS * 4 // 1024 // 2  # half of one array of ids per life, in kB
