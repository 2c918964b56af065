"""The furthest boundary that tiers allow, as defined: each boundary tried, each needed block looked up."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from blockpool.cache import KVCacheConfig, KVCacheManager, Request
from blockpool.hashing import BlockHasher
from blockpool.managers import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    ReferenceWindowSpec,
    SlidingWindowSpec,
)
from blockpool.offload.finding import Finder
from tests.sizes import property_settings

HASHER = BlockHasher(hash_block_size=2, seed="finding")


def by_definition(manager: KVCacheManager, finder: Finder, request: Request, start: int, here: set[bytes]) -> int:
    keys = finder.keys(request)
    for boundary in range(request.num_tokens - 1, start, -1):
        if boundary % finder.alignment:
            continue
        for one, its in zip(finder.managers, keys, strict=True):
            ends = [boundary, boundary + one.block_size] if one.draft_margin else [boundary]
            wanted = {
                position for end in ends for position in one.needed(end) if (position + 1) * one.block_size > start
            }
            if any(position >= its.num_blocks or its[position] not in here for position in wanted):
                break
        else:
            return boundary
    return start


def random_spec(c: random.Random) -> KVCacheSpec:
    size = c.choice([2, 4, 6])
    return c.choice(
        [
            FullAttentionSpec(size),
            SlidingWindowSpec(size, c.randint(1, 14)),
            ChunkedLocalAttentionSpec(size, c.randint(1, 14)),
            ReferenceWindowSpec(size, c.randint(1, 9)),
            MambaSpec(size, 0, "align"),
        ]
    )


@property_settings(400)
@given(st.integers(0, 2**32))
def test_the_furthest_boundary_is_the_one_of_the_definition(seed: int) -> None:
    c = random.Random(seed)
    groups = []
    for at in range(c.randint(1, 4)):
        spec = random_spec(c)
        groups.append(KVCacheGroupSpec((str(at),), spec, draft_margin=not spec.is_state and c.random() < 0.3))
    manager = KVCacheManager(KVCacheConfig(9, tuple(groups), hash_block_size=2), tells_stored=True)
    finder = Finder(manager, [b"start"] * len(groups))
    request = Request("a", [c.randrange(9) for _ in range(c.randint(1, 70))], hasher=HASHER)
    keys = [its[position] for its in finder.keys(request) for position in range(its.num_blocks)]
    share = c.choice([0.5, 0.9, 0.97, 1.0])
    here = {key for key in keys if c.random() < share}
    start = c.randrange(0, request.num_tokens, finder.alignment)

    def look_up(asked: Sequence[bytes]) -> list[bool]:
        assert set(asked) <= set(keys)
        return [key in here for key in asked]

    assert finder.furthest(request, start, look_up) == by_definition(manager, finder, request, start, here)
