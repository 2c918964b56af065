"""The free queue against a plain list, over enough operations that its ring is swept many times."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpool.pool import BlockPool, FreeKVCacheBlockQueue, NoFreeBlocksError, QueueError, UnknownBlockError
from tests.sizes import LONG, property_settings


def state(queue: FreeKVCacheBlockQueue) -> tuple[list[int], list[int], int]:
    return queue.get_all_free_blocks(), queue.by_place()[::-1], queue.num_free_blocks


@property_settings(60)
@given(n=st.integers(1, 40), seed=st.integers(0, 2**32), moves=st.integers(1, 12), bulk=st.booleans())
def test_any_operations_keep_the_order_of_a_list(n: int, seed: int, moves: int, bulk: bool) -> None:
    rng = random.Random(seed)
    queue = FreeKVCacheBlockQueue(n)
    model = list(range(1, n))
    outside: list[int] = []
    kinds = ["pop", "prepend"] + ["remove", "append"] * moves  # a block that moves to the back leaves a hole
    if bulk:
        kinds += ["pop_n", "append_n", "prepend_n"]
    for _ in range(400):
        kind = rng.choice(kinds)
        if kind == "pop" and model:
            outside.append(queue.popleft())
            assert outside[-1] == model.pop(0)
        elif kind == "pop_n":
            k = rng.randint(0, len(model))
            taken = queue.popleft_n(k)
            assert taken == model[:k]
            outside += taken
            del model[:k]
        elif kind == "remove" and model:
            block = rng.choice(model)
            queue.remove(block)
            model.remove(block)
            outside.append(block)
        elif outside:
            rng.shuffle(outside)
            k = rng.randint(1, len(outside)) if kind.endswith("_n") else 1
            given_back, outside = outside[:k], outside[k:]
            if kind == "append_n":
                queue.append_n(given_back)
                model += given_back
            elif kind == "prepend_n":
                queue.prepend_n(given_back)
                model = given_back + model
            elif kind == "append":
                queue.append(given_back[0])
                model += given_back
            elif kind == "prepend":
                queue.prepend(given_back[0])
                model = given_back + model
            else:
                outside += given_back
        assert state(queue) == (model, model, len(model))


@pytest.mark.parametrize("n", [200, 5000] if not LONG else [200, 5000, 100_000])
def test_holes_are_swept_and_the_ring_never_fills(n: int) -> None:
    """One block stays at the head for ever while others leave the middle and return: the ring must not fill up."""
    rng = random.Random(n)
    queue = FreeKVCacheBlockQueue(n)
    model = dict.fromkeys(range(1, n))
    sweeps = 0
    for round_ in range(60 if n < 1000 else 25):
        moved = rng.sample(range(2, n), rng.choice([1, n // 3, n - 3]))
        was = queue.sweeping
        for block in moved:
            queue.remove(block)
            del model[block]
        back = moved[:: rng.choice([1, -1])]
        if round_ % 5 == 4:
            queue.prepend_n(back)
            model = dict.fromkeys([*back, *model])
        else:
            for at in range(0, len(back), 7):
                queue.append_n(back[at : at + 7])
                model.update(dict.fromkeys(back[at : at + 7]))
        sweeps += queue.sweeping != was
        assert queue.tail - queue.head <= queue.mask + 1
        assert state(queue) == (list(model), list(model), n - 1)
    assert sweeps > 0


def test_misuse_is_named_and_changes_nothing() -> None:
    queue = FreeKVCacheBlockQueue(6)
    queue.remove(3)
    for call, error in [
        (lambda: queue.remove(3), QueueError),
        (lambda: queue.append(2), QueueError),
        (lambda: queue.append_n([3, 3]), QueueError),
        (lambda: queue.prepend_n([3, 4]), QueueError),
        (lambda: queue.append(0), UnknownBlockError),
        (lambda: queue.remove(6), UnknownBlockError),
        (lambda: queue.remove(-1), UnknownBlockError),
        (lambda: queue.popleft_n(5), NoFreeBlocksError),
        (lambda: queue.popleft_n(-1), NoFreeBlocksError),
    ]:
        with pytest.raises(error):
            call()
        assert state(queue) == ([1, 2, 4, 5], [1, 2, 4, 5], 4)
    queue.popleft_n(4)
    with pytest.raises(NoFreeBlocksError):
        queue.popleft()


def test_iteration_from_a_cursor() -> None:
    queue = FreeKVCacheBlockQueue(8)
    queue.remove(4)
    assert list(queue.iter_blocks_after(None)) == [1, 2, 3, 5, 6, 7]
    assert list(queue.iter_blocks_after(3)) == [5, 6, 7]
    assert list(queue.iter_blocks_after(7)) == []
    with pytest.raises(QueueError):
        queue.iter_blocks_after(4)
    walk = queue.iter_blocks_after(1)
    assert next(walk) == 2
    queue.remove(3)
    queue.append(3)
    assert list(walk) == [5, 6, 7, 3]
    walk = queue.iter_blocks_after(1)
    assert next(walk) == 2
    queue.remove(2)
    with pytest.raises(QueueError):
        next(walk)


def test_handles_see_their_neighbours() -> None:
    pool = BlockPool(6)
    pool.touch([3])
    assert pool.blocks[1] in pool.free_block_queue
    assert 2 in pool.free_block_queue
    assert all(other not in pool.free_block_queue for other in (0, 3, 6, -1, pool.blocks[3], "1", None))
    two, three, four, five = (pool.blocks[i] for i in (2, 3, 4, 5))
    assert two.next_free_block == four
    assert four.prev_free_block == two
    assert pool.blocks[1].prev_free_block is None
    assert five.next_free_block is None
    assert three.next_free_block is None
    assert three.prev_free_block is None
