"""A decode step that needs no block costs the same however long the request is, and leaves nothing behind."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from operator import is_

import pytest

from blockpool import build_info
from blockpool.cache import EMPTY_PLAN, KVCacheManager, Request
from blockpool.managers import ChunkedLocalAttentionSpec, CircularBufferSpec, MambaSpec, ReferenceWindowSpec
from tests.cache.groups import SINK, cache, compute, group, request, window

COMPILED = build_info().compiled["blockpool.cache.manager"]


def decoding(num_tokens: int, *, hashed: bool = True) -> tuple[KVCacheManager, Request]:
    """A request with slots in hand, in groups of all kinds, before a token that fills no block and drops none."""
    manager = cache(
        3 * num_tokens + 200,
        SINK,
        group(window(17), draft_margin=True),
        ChunkedLocalAttentionSpec(4, 16),
        ReferenceWindowSpec(4, 16),
        MambaSpec(16, 0, "align"),
        MambaSpec(4, 1, "none"),
        CircularBufferSpec(4),
    )
    r = request("r", num_tokens) if hashed else Request("r", num_prompt_tokens=num_tokens)
    compute(manager, r, num_tokens - 160)
    compute(manager, r, num_tokens - 15, num_lookahead_tokens=40)
    while manager.plan(r, 1) is not EMPTY_PLAN:
        assert manager.allocate_slots(r, 1) is not None
        r.num_computed_tokens += 1
        assert r.num_computed_tokens < num_tokens
    return manager, r


@pytest.mark.skipif(COMPILED, reason="calls inside compiled code cannot be counted")
def test_the_number_of_calls_does_not_depend_on_the_length() -> None:
    counts = []
    for num_tokens in (320, 3_200):
        manager, r = decoding(num_tokens)
        calls = 0

        def count(frame: object, event: str, arg: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            blocks = manager.allocate_slots(r, 1)
        finally:
            sys.setprofile(None)
        assert blocks is not None
        assert blocks.num_blocks == 0
        counts.append(calls)
    assert counts[0] == counts[1]
    assert counts[0] < 300


@pytest.mark.parametrize("hashed", [True, False])
@pytest.mark.parametrize("num_tokens", [320, 3_200])
def test_it_is_the_shared_empty_plan_and_changes_nothing(num_tokens: int, hashed: bool) -> None:
    manager, r = decoding(num_tokens, hashed=hashed)
    version = manager.version
    assert manager.plan(r, 1) is EMPTY_PLAN
    first = manager.allocate_slots(r, 1)
    assert first is manager.allocate_slots(r, 1)  # shared too
    assert manager.version == version


def traced(call: Callable[[], object]) -> tuple[int, int]:
    """Bytes that a call leaves allocated, and the most that it had allocated meanwhile."""
    call()
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        call()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()
        call()
        after = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    return after[0] - before[0], after[1] - before[0]


@pytest.mark.skipif(not COMPILED, reason="interpreted code makes objects all the time")
@pytest.mark.parametrize("hashed", [True, False])
def test_it_leaves_no_object_behind_at_any_length(hashed: bool) -> None:
    """No list, plan or table stays, and none is made meanwhile. What measuring allocates is taken off."""
    left, most = traced(partial(is_, None, 1))
    for num_tokens in (320, 3_200, 32_000):
        manager, r = decoding(num_tokens, hashed=hashed)
        step_left, step_most = traced(partial(manager.plan, r, 1))
        assert step_left == left
        assert step_most - most < 200
