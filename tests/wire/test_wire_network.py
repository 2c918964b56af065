"""Whatever happens to a pool and on the way: a live mirror is the pool's index, and one that is not is not live."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpool.wire import MirrorStatus
from tests.sizes import property_settings
from tests.wire.world import World

#: What happens, and how often.
HAPPENINGS = {
    "step": 20,
    "send": 24,
    "lose": 2,
    "deliver": 30,
    "ask": 12,
    "respond": 12,
    "hear": 12,
    "heartbeat": 4,
    "notice": 8,
    "connect": 12,
    "cut": 1,
    "restart": 1,
}


def run(world: World, num_steps: int) -> None:
    engines = [world.engine]
    names, weights = list(HAPPENINGS), list(HAPPENINGS.values())
    for _ in range(num_steps):
        happening = world.rng.choices(names, weights)[0]
        if happening == "step":
            world.engine.step()
        elif happening == "lose":
            world.send(lose=True)
        else:
            getattr(world, happening)()
        if world.engine is not engines[-1]:
            engines.append(world.engine)
        world.check(engines)
    world.settle()
    world.check(engines)


@pytest.mark.parametrize("events", ["first_last", "per_copy"])
@property_settings(80)
@given(
    seed=st.integers(0, 10**6),
    buffer_steps=st.sampled_from([1, 4, 100]),
    queue_size=st.sampled_from([1, 3, 100]),
    says_convention=st.booleans(),
)
def test_ours(events: str, seed: int, buffer_steps: int, queue_size: int, says_convention: bool) -> None:
    world = World(
        random.Random(seed),
        events,
        says_convention=says_convention,
        buffer_steps=buffer_steps,
        queue_size=queue_size,
    )
    run(world, 200)
    # With a snapshot to be had, everything heals.
    assert world.mirror.status is MirrorStatus.LIVE, world.mirror.reason
    assert world.mirror.publisher == world.engine.desk.publisher_id
    assert world.mirror.sequence == len(world.engine.history) - 1
    assert world.mirrored() == world.engine.traced.keys()


@pytest.mark.parametrize("events", ["first_last", "per_copy"])
@property_settings(80)
@given(seed=st.integers(0, 10**6), buffer_steps=st.sampled_from([1, 4, 100]), queue_size=st.sampled_from([3, 100]))
def test_without_status_and_snapshots(events: str, seed: int, buffer_steps: int, queue_size: int) -> None:
    """As vLLM's publisher is."""
    world = World(random.Random(seed), events, has_status=False, buffer_steps=buffer_steps, queue_size=queue_size)
    run(world, 200)
    if world.mirror.status is MirrorStatus.LIVE:
        assert world.mirrored() == world.engine.keys_at(world.mirror.sequence)


@pytest.mark.parametrize("events", ["first_last", "per_copy"])
@property_settings(80)
@given(seed=st.integers(0, 10**6))
def test_without_anybody_to_ask(events: str, seed: int) -> None:
    world = World(random.Random(seed), events, has_status=False, can_replay=False, queue_size=100)
    run(world, 200)
