"""The memory behind block ids: what is written, cleared and copied, and what a shadow says about a wrong read."""

from __future__ import annotations

import numpy as np
import pytest

from blockpool.cache import BlockCopy, KVCacheConfig
from blockpool.engine import (
    Access,
    CheckedStore,
    Fingerprints,
    PagedStore,
    ShadowError,
    ShadowStore,
    Store,
    StoreError,
)
from blockpool.managers import FullAttentionSpec, KVCacheGroupSpec, MambaSpec, SlidingWindowSpec

FULL = KVCacheGroupSpec(("f0", "f1"), FullAttentionSpec(4))
STATE = KVCacheGroupSpec(("s0",), MambaSpec(4))
WINDOW = KVCacheGroupSpec(("w0",), SlidingWindowSpec(2, 6), pool=1)
CONFIG = KVCacheConfig((6, 5), (FULL, STATE, WINDOW))
TOKENS = [11, 12, 13, 14, 15, 16]


def access(group: int, tokens: list[int], slots: list[int], name: str = "a", prefix: list[int] = TOKENS) -> Access:
    prints = Fingerprints(prefix).with_more([])
    return Access(
        name, group, np.array(tokens, np.int64), np.array(slots, np.int64), prints[np.array(tokens, np.int64)]
    )


def numbers(count: int, start: float = 1.0) -> np.ndarray:
    return start + np.arange(count * 6, dtype=np.float64).reshape(count, 2, 3)


# -- numbers -----------------------------------------------------------------------------------------


def store() -> PagedStore:
    return PagedStore(CONFIG, (2, 3), (2, 2))


def test_arrays_have_the_shapes_of_blocks() -> None:
    paged = store()
    assert [[[a.shape for a in layer] for layer in group] for group in paged.layers] == [
        [[(6, 4, 2, 3)] * 2] * 2,
        [[(6, 2, 2)]],
        [[(5, 2, 2, 3)] * 2],
    ]


def test_what_is_written_is_read() -> None:
    paged = store()
    paged.write(access(0, [2, 3, 4], [6, 7, 20]), 1, numbers(3), numbers(3, 100.0))
    keys, values = paged.read(access(0, [4, 2], [20, 6]), 1)
    assert (keys == numbers(3)[[2, 0]]).all()
    assert (values == numbers(3, 100.0)[[2, 0]]).all()
    assert (paged.layers[0][1][0][5, 0] == numbers(3)[2]).all()
    assert not paged.read(access(0, [4], [20]), 0)[0].any()


def test_the_null_block_reads_as_zeros_and_is_never_written() -> None:
    paged = store()
    assert not np.any(paged.read(access(0, [0, 1], [0, 3]), 0))
    assert not np.any(paged.read(access(1, [0], [0]), 0))
    with pytest.raises(StoreError, match="request 'a', group 0: token 1 written to the null block"):
        paged.write(access(0, [0, 1], [4, 3]), 0, numbers(2), numbers(2))
    with pytest.raises(StoreError, match="request 'a', group 1: token 3 written to the null block"):
        paged.write(access(1, [3], [0]), 0, np.ones((1, 2, 2)))
    with pytest.raises(StoreError, match="group 0: block 3 copied onto the null block"):
        paged.copy(BlockCopy(0, 3, 0))
    assert not any(memory[0].any() for group in paged.layers for layer in group for memory in layer)


def test_a_copy_takes_all_layers_of_the_group_and_no_other_memory() -> None:
    paged = store()
    for layer in (0, 1):
        paged.write(access(0, [0], [4]), layer, numbers(1, layer), numbers(1, 50.0))
    paged.write(access(2, [0], [2]), 0, numbers(1), numbers(1))
    paged.copy(BlockCopy(0, 1, 5))
    for layer in (0, 1):
        keys, values = paged.read(access(0, [0], [20]), layer)
        assert (keys == numbers(1, layer)).all()
        assert (values == numbers(1, 50.0)).all()
    assert not paged.read(access(2, [0], [8]), 0)[0].any()
    paged.clear(0, [1, 5])
    assert not np.any(paged.read(access(0, [0, 0], [4, 20]), 1))
    assert paged.read(access(2, [0], [2]), 0)[0].all()


def test_groups_that_share_a_pool_share_the_memory_of_its_blocks() -> None:
    paged = store()
    paged.write(access(0, [0], [8]), 0, numbers(1), numbers(1))
    paged.write(access(1, [3], [2]), 0, np.full((1, 2, 2), 7.0))
    assert (paged.read(access(0, [0], [8]), 0)[0] != numbers(1)).any()


def test_states_need_a_shape() -> None:
    with pytest.raises(StoreError, match=r"layers \('s0',\) keep states: give a state_shape"):
        PagedStore(CONFIG, (2, 3))


# -- what is not there -------------------------------------------------------------------------------

STORES = {
    "paged": store,
    "shadow": lambda: ShadowStore(CONFIG),
    "checked": lambda: CheckedStore(CONFIG, store()),
}


def content(memory: Store) -> list[np.ndarray]:
    """All that a store holds, as it is now."""
    if isinstance(memory, PagedStore):
        return [array.copy() for group in memory.layers for layer in group for array in layer]
    if isinstance(memory, ShadowStore):
        counts = np.array([memory.num_reads, memory._next_operation])
        arrays = (*memory._prints, *memory._tokens, *memory._writers, *memory._last)
        return [counts, *[array.copy() for array in arrays]]
    assert isinstance(memory, CheckedStore)
    return [array for part in (memory.store, *memory.shadows) for array in content(part)]


def filled(name: str) -> Store:
    memory: Store = STORES[name]()
    memory.begin_step(0)
    memory.write(access(0, [0, 1], [4, 23]), 0, numbers(2), numbers(2))
    memory.write(access(0, [0, 1], [4, 23]), 1, numbers(2), numbers(2))
    memory.write(access(2, [0, 1], [2, 9]), 0, numbers(2), numbers(2))
    return memory


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize(
    ("group", "slots", "wrong", "last"),
    [
        (0, [4, -1], -1, "23: 6 blocks of 4"),
        (0, [-24, 5], -24, "23: 6 blocks of 4"),
        (0, [24, 5], 24, "23: 6 blocks of 4"),
        (0, [4, (2**31 - 1) * 4], (2**31 - 1) * 4, "23: 6 blocks of 4"),
        (1, [1, -1], -1, "5: 6 blocks of 1"),
        (1, [1, 6], 6, "5: 6 blocks of 1"),
        (2, [2, 10], 10, "9: 5 blocks of 2"),
        (2, [-2, 2], -2, "9: 5 blocks of 2"),
    ],
)
def test_slots_that_are_not_there(name: str, group: int, slots: list[int], wrong: int, last: str) -> None:
    memory = filled(name)
    before = content(memory)
    token = slots.index(wrong)
    message = f"^request 'a', group {group}: token {token} is in slot {wrong}, where slots are 0 to {last}$"
    values = (np.ones((2, 2, 2)),) if group == 1 else (numbers(2, 500.0), numbers(2, 600.0))
    for layer in {0, len(CONFIG.kv_cache_groups[group].layer_names) - 1}:
        with pytest.raises(StoreError, match=message):
            memory.write(access(group, [0, 1], slots), layer, *values)
        with pytest.raises(StoreError, match=message):
            memory.read(access(group, [0, 1], slots), layer)
    assert all(map(np.array_equal, before, content(memory)))


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize(("group", "last"), [(0, 5), (1, 5), (2, 4)])
def test_blocks_that_are_not_there(name: str, group: int, last: int) -> None:
    memory = filled(name)
    before = content(memory)
    for block in (-1, -last, last + 1, 2**31 - 1):
        message = f"^group {group}: there is no block {block}, blocks are 0 to {last}$"
        with pytest.raises(StoreError, match=message):
            memory.clear(group, [1, block])
        with pytest.raises(StoreError, match=message):
            memory.copy(BlockCopy(group, block, 2))
        with pytest.raises(StoreError, match=message):
            memory.copy(BlockCopy(group, 1, block))
    assert all(map(np.array_equal, before, content(memory)))


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize("group", [-1, 3])
def test_groups_that_are_not_there(name: str, group: int) -> None:
    memory = filled(name)
    before = content(memory)
    message = f": there is no group {group}, groups are 0 to 2$"
    for call in (
        lambda: memory.clear(group, [1]),
        lambda: memory.copy(BlockCopy(group, 1, 2)),
        lambda: memory.write(access(group, [0], [4]), 0, numbers(1), numbers(1)),
        lambda: memory.read(access(group, [0], [4]), 0),
    ):
        with pytest.raises(StoreError, match=message):
            call()
    assert all(map(np.array_equal, before, content(memory)))


@pytest.mark.parametrize("name", ["paged", "checked"])
@pytest.mark.parametrize(("group", "layer", "last"), [(0, -1, 1), (0, 2, 1), (2, 1, 0)])
def test_layers_that_are_not_there(name: str, group: int, layer: int, last: int) -> None:
    memory = filled(name)
    before = content(memory)
    message = f"^request 'a', group {group}: there is no layer {layer}, layers are 0 to {last}$"
    with pytest.raises(StoreError, match=message):
        memory.write(access(group, [0], [4]), layer, numbers(1), numbers(1))
    with pytest.raises(StoreError, match=message):
        memory.read(access(group, [0], [4]), layer)
    assert all(map(np.array_equal, before, content(memory)))


@pytest.mark.parametrize("name", STORES)
def test_the_first_and_the_last_of_all_are_there(name: str) -> None:
    memory = filled(name)
    memory.read(access(0, [0, 1], [4, 23]), 1)
    memory.copy(BlockCopy(0, 0, 5))
    memory.clear(0, [0, 5])
    memory.clear(0, [])
    none = access(0, [], [])
    memory.write(none, 0, numbers(0), numbers(0))
    memory.read(none, 0)


# -- fingerprints ------------------------------------------------------------------------------------


def test_prints_name_prefixes() -> None:
    grown = Fingerprints()
    for token in TOKENS[:4]:
        grown.extend([token])
    assert (grown.with_more(TOKENS[4:]) == Fingerprints(TOKENS).with_more([])).all()
    assert len(grown) == 4
    assert len(set(Fingerprints([0] * 500).with_more([]).tolist())) == 500
    assert Fingerprints([1, 2]).with_more([])[1] != Fingerprints([2, 2]).with_more([])[1]


def test_a_prefix_finds_what_the_same_prefix_wrote() -> None:
    shadow = ShadowStore(CONFIG)
    shadow.write(access(0, [0, 1, 2, 3], [4, 5, 6, 7]))
    shadow.copy(BlockCopy(0, 1, 3))
    assert shadow.read(access(0, [3, 1], [15, 5], "b", [*TOKENS[:4], 99, 98])) == ()
    assert shadow.num_reads == 2


def failure(shadow: ShadowStore, wrong: Access) -> ShadowError:
    with pytest.raises(ShadowError) as caught:
        shadow.read(wrong)
    return caught.value


def test_an_error_says_who_reads_what_and_what_is_there() -> None:
    shadow = ShadowStore(CONFIG)
    shadow.begin_step(3)
    shadow.write(access(0, [0, 1], [4, 5]))
    error = failure(shadow, access(0, [0, 1], [4, 5], "b", [11, 99]))
    assert (error.request_id, error.group_id, error.token, error.block_id) == ("b", 0, 1, 1)
    assert (error.held, error.writer) == (1, "a")
    assert str(error) == (
        "request 'b', group 0: reads token 1 in block 1, which holds another one's, of token 1 as request 'a' of"
        " group 0 in step 3 has written it"
    )


def test_an_error_names_the_copy_that_brought_it() -> None:
    shadow = ShadowStore(CONFIG)
    shadow.write(access(0, [0], [4]))
    shadow.begin_step(1)
    shadow.copy(BlockCopy(0, 1, 2))
    error = failure(shadow, access(0, [1], [8]))
    assert error.held == 0
    assert str(error).endswith("it came there by the copy from block 1 of group 0 in step 1")


def test_nothing_is_there() -> None:
    shadow = ShadowStore(CONFIG)
    assert str(failure(shadow, access(0, [0], [4]))).endswith(
        "block 1, which is empty; the last to touch it was nothing: it is as it was made"
    )
    shadow.write(access(0, [0], [4]))
    shadow.begin_step(2)
    shadow.clear(0, [1])
    error = failure(shadow, access(0, [0], [4]))
    assert (error.held, error.writer) == (None, None)
    assert str(error).endswith("which is empty; the last to touch it was the clear in step 2")
    assert "the null block, which holds nothing" in str(failure(shadow, access(0, [0], [0])))


def test_another_group_is_another_content() -> None:
    """The blocks of a pool are those of all its groups; a state fills its block."""
    shadow = ShadowStore(CONFIG)
    shadow.write(access(0, [0, 1, 2, 3], [4, 5, 6, 7]))
    shadow.write(access(1, [3], [1]))
    error = failure(shadow, access(0, [2], [6]))
    assert error.held is None
    error = failure(shadow, access(0, [0], [4]))
    assert (error.held, error.writer) == (3, "a")
    shadow.read(access(1, [3], [1]))
    assert "reads the state after token 4" in str(failure(shadow, access(1, [4], [1])))
    shadow.write(access(2, [0], [2]))
    shadow.read(access(1, [3], [1]))


def test_the_null_block_takes_no_fingerprints() -> None:
    shadow = ShadowStore(CONFIG)
    with pytest.raises(StoreError, match="token 5 written to the null block"):
        shadow.write(access(0, [4, 5], [4, 1]))
    with pytest.raises(StoreError, match="block 2 copied onto the null block"):
        shadow.copy(BlockCopy(0, 2, 0))


def test_operations_that_no_slot_names_are_forgotten() -> None:
    shadow = ShadowStore(CONFIG)
    for step in range(5000):
        shadow.begin_step(step)
        shadow.write(access(0, [0], [4 + step % 16]))
    assert len(shadow._operations) < 1200
    assert failure(shadow, access(0, [1], [4])).last.step_id == 4992


def test_a_checked_store_does_both() -> None:
    checked = CheckedStore(CONFIG, store())
    checked.begin_step(0)
    checked.write(access(0, [0], [4]), 1, numbers(1), numbers(1))
    checked.copy(BlockCopy(0, 1, 2))
    assert (checked.read(access(0, [0], [8]), 1)[0] == numbers(1)).all()
    with pytest.raises(ShadowError):
        checked.read(access(0, [0], [8]), 0)
    checked.clear(0, [2])
    with pytest.raises(ShadowError):
        checked.read(access(0, [0], [8]), 1)
