"""The build under test is the one that was meant, whole, and says so itself."""

from __future__ import annotations

import operator
import os

import pytest

from blockpool import build_info
from blockpool.pool import BlockPool

EXPECTED = os.environ.get("BLOCKPOOL_EXPECT")


@pytest.mark.skipif(EXPECTED is None, reason="BLOCKPOOL_EXPECT (compiled or pure) is not set: make test sets it")
def test_every_part_is_as_expected() -> None:
    info = build_info()
    assert set(info.compiled.values()) == {EXPECTED == "compiled"}
    assert info.is_compiled == (EXPECTED == "compiled")
    assert (info.hash_kernel == "pure-python") == (EXPECTED == "pure")
    assert "blockpool.pool.block_pool" in info.compiled
    assert "blockpool.managers.full_attention" in info.compiled


def test_a_handle_is_an_index_in_both_builds() -> None:
    block = BlockPool(8).blocks[3]
    assert operator.index(block) == 3
    assert int(block) == 3
    assert list(range(8))[block] == 3
