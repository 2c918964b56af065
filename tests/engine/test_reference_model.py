"""The reference model: the same prefix gives the same bits, and whatever it should depend on changes its tokens."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from blockpool.cache import KVCacheConfig
from blockpool.engine import (
    CachedRequestData,
    CheckedStore,
    NewRequestData,
    ReferenceModel,
    Worker,
    tokens_read,
)
from blockpool.managers import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    ReferenceWindowSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from tests.engine.hand_made import alone, same_table, step

GROUPS = (
    KVCacheGroupSpec(("f0", "f1"), FullAttentionSpec(4)),
    KVCacheGroupSpec(("w0",), SlidingWindowSpec(2, 5)),
    KVCacheGroupSpec(("s0",), MambaSpec(4, 2, "align")),
    KVCacheGroupSpec(("c0",), ChunkedLocalAttentionSpec(4, 6)),
    KVCacheGroupSpec(("r0",), ReferenceWindowSpec(4, 3)),
)
CONFIG = KVCacheConfig(200, GROUPS)
MODEL = ReferenceModel(CONFIG)
PROMPT = [7, 1, 50, 3, 3, 9, 22, 41, 0, 13, 5, 5, 63]


def test_what_each_kind_reads() -> None:
    def read(spec: KVCacheSpec, token: int, prompt: int = 6) -> list[int]:
        return tokens_read(spec, token, token + 1, prompt).tolist()

    assert read(FullAttentionSpec(4), 3) == [0, 1, 2, 3]
    assert read(SinkFullAttentionSpec(4, 4), 2) == [0, 1, 2]
    assert read(SlidingWindowSpec(4, 3), 1) == [0, 1]
    assert read(SlidingWindowSpec(4, 3), 9) == [7, 8, 9]
    assert read(ChunkedLocalAttentionSpec(4, 5), 9) == [5, 6, 7, 8, 9]
    assert read(ChunkedLocalAttentionSpec(4, 5), 10) == [10]
    assert read(ReferenceWindowSpec(4, 2), 3) == [0, 1, 2, 3]
    assert read(ReferenceWindowSpec(4, 2), 10) == [0, 1, 2, 3, 4, 5, 8, 9, 10]
    assert read(CircularBufferSpec(4), 9) == [6, 7, 8, 9]
    for spec in (MambaSpec(4), CrossAttentionSpec(4)):
        with pytest.raises(TypeError, match=f"{type(spec).__name__} does not read tokens by their place"):
            read(spec, 1)


@pytest.mark.parametrize("spec", [group.kv_cache_spec for group in GROUPS if not group.kv_cache_spec.is_state])
def test_several_tokens_read_what_each_of_them_reads(spec: KVCacheSpec) -> None:
    for first, last, prompt in itertools.product(range(12), range(1, 20), (1, 5, 12)):
        if first < last:
            each = [tokens_read(spec, t, t + 1, prompt).tolist() for t in range(first, last)]
            assert tokens_read(spec, first, last, prompt).tolist() == sorted(set(itertools.chain(*each)))


def test_tokens_do_not_depend_on_chunks() -> None:
    outputs = alone(CONFIG, MODEL, MODEL.store(), PROMPT, 20)
    assert len(set(outputs)) > 3
    assert alone(CONFIG, ReferenceModel(CONFIG), MODEL.store(), PROMPT, 20) == outputs
    c = random.Random(1)
    for _ in range(8):
        chunks = [c.randint(1, 6) for _ in range(20)]
        assert alone(CONFIG, MODEL, CheckedStore(CONFIG, MODEL.store()), PROMPT, 20, chunks) == outputs


def test_memory_does_not_depend_on_chunks_to_the_last_bit() -> None:
    first, second = MODEL.store(), MODEL.store()
    alone(CONFIG, MODEL, first, PROMPT, 1)
    alone(CONFIG, MODEL, second, PROMPT, 1, [1, 5, 1, 1, 3])
    for group, table, layers, others in zip(
        GROUPS, same_table(CONFIG, len(PROMPT) + 1), first.layers, second.layers, strict=True
    ):
        blocks = table[: -(-len(PROMPT) // group.block_size)]
        if group.kv_cache_spec.is_state:  # states within the prompt are left where chunks end
            blocks = blocks[-1:]
        for layer, other in zip(layers, others, strict=True):
            for a, b in zip(layer, other, strict=True):
                assert a[blocks].any()
                assert a[blocks].tobytes() == b[blocks].tobytes()


@pytest.mark.parametrize("at", range(len(PROMPT)))
def test_every_token_of_the_prompt_matters(at: int) -> None:
    other = list(PROMPT)
    other[at] = 30
    assert alone(CONFIG, MODEL, MODEL.store(), other, 12) != alone(CONFIG, MODEL, MODEL.store(), PROMPT, 12)


def test_positions_and_weights_matter() -> None:
    outputs = alone(CONFIG, MODEL, MODEL.store(), PROMPT, 12)
    assert alone(CONFIG, MODEL, MODEL.store(), PROMPT[::-1], 12) != outputs
    assert alone(CONFIG, ReferenceModel(CONFIG, seed=2), MODEL.store(), PROMPT, 12) != outputs


@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_a_wrong_block_in_any_group_changes_what_is_said(group: int) -> None:
    """Numbers of another prompt in one block: the model is no oracle if it does not notice."""
    expected = alone(CONFIG, MODEL, MODEL.store(), PROMPT, 12)
    store = MODEL.store()
    worker = Worker(CONFIG, store, MODEL)
    tables = same_table(CONFIG, len(PROMPT) + 12)
    others = same_table(CONFIG, len(PROMPT) + 12, 80)
    foreign = NewRequestData("other", PROMPT[::-1], len(PROMPT), 0, others)
    own = NewRequestData("own", PROMPT, len(PROMPT), 0, tables)
    size = GROUPS[group].block_size
    nothing = tuple([] for _ in GROUPS)
    worker.execute(step(0, new=[own, foreign], tokens={"other": 10, "own": 10}))
    store_of = store.layers[group][0]
    at = (10 - 1) // size  # read by the next token in every group
    for memory in store_of:
        memory[tables[group][at]] = memory[others[group][at]]
    outputs: list[int] = []
    for number in range(14):
        running = [CachedRequestData("own", 10 + number, [], nothing, nothing)]
        outputs += worker.execute(step(number + 1, running=running, tokens={"own": 1})).get("own", [])
    assert outputs != expected


@pytest.mark.parametrize("num_right", [0, 1, 2])
def test_drafts_that_are_right_are_accepted_and_the_rest_leaves_no_trace(num_right: int) -> None:
    expected = alone(CONFIG, MODEL, MODEL.store(), PROMPT, 14)
    store = CheckedStore(CONFIG, MODEL.store())
    worker = Worker(CONFIG, store, MODEL)
    tables = same_table(CONFIG, len(PROMPT) + 16)
    nothing = tuple([] for _ in GROUPS)
    outputs = worker.execute(
        step(0, new=[NewRequestData("r", PROMPT, len(PROMPT), 0, tables)], tokens={"r": len(PROMPT)})
    )["r"]
    number = 1
    while len(outputs) < 11:
        right = expected[len(outputs) : len(outputs) + num_right]
        drafts = [*right, *[(expected[len(outputs) + i] + 1) % 64 for i in range(num_right, 2)]]
        computed = len(PROMPT) + len(outputs) - 1
        running = [CachedRequestData("r", computed, [], nothing, nothing)]
        result = worker.execute(step(number, running=running, tokens={"r": 3}, drafts={"r": drafts}))["r"]
        assert len(result) == num_right + 1
        outputs += result
        number += 1
    assert outputs == expected[: len(outputs)]


def test_kinds_that_it_has_not() -> None:
    for spec in (SinkFullAttentionSpec(4, 4), CircularBufferSpec(4), CrossAttentionSpec(4)):
        with pytest.raises(TypeError, match=f"no layers of {type(spec).__name__}"):
            ReferenceModel(KVCacheConfig(9, (KVCacheGroupSpec(("a",), spec),)))


def test_numbers_stay_numbers() -> None:
    store = MODEL.store()
    alone(CONFIG, MODEL, store, PROMPT * 3, 40)
    assert all(np.isfinite(memory).all() for group in store.layers for layer in group for memory in layer)
