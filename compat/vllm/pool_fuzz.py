"""Drives two pools with the same random operations and compares everything visible after each."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass

from deliberate import Deliberate, sibling_keys
from lockstep import Parting, first_difference, same_outcome, shrink
from pool_ops import WITH_KEYS, WITHOUT_KEYS, Driver, Operation
from pool_world import Scenario, World
from sides import Side
from traffic import Traffic, init_hashing

OPERATIONS_PER_SCENARIO = 200


@dataclass(frozen=True)
class Planned:
    """An operation to come: what it does follows from its seed and from what the driver holds by then."""

    operation: Operation
    seed: str


def plan(scenario: Scenario, number: int) -> list[Planned]:
    rng = random.Random(f"operations {scenario.seed}")
    choices = WITHOUT_KEYS | (WITH_KEYS if scenario.enable_caching else {})
    operations = rng.choices(list(choices), weights=list(choices.values()), k=number)
    return [Planned(operation, f"{scenario.seed} {i}") for i, operation in enumerate(operations)]


def replay(
    theirs: Side, ours: Side, scenario: Scenario, planned: Sequence[Planned], deliberate: Deliberate
) -> tuple[int, Parting | None]:
    """The number of operations done, and the first difference."""
    shape = scenario.shape
    os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = "0" if scenario.raw_hashes else "1"
    hasher = theirs.get_request_block_hasher(shape.hash_block_size, init_hashing(scenario.hash_name), shape.lookahead)
    worlds = (World(theirs, scenario), World(ours, scenario))
    driver = Driver(scenario, worlds[0], Traffic(random.Random(0), shape, hasher))
    history: list[str] = []
    siblings: set[tuple[object, int]] = set()

    def parted(found: tuple[str, object, object]) -> Parting:
        shown = tuple(f"{i}: {text}" for i, text in enumerate(history, 1))
        return Parting("the pool", scenario.seed, len(history), *found, shown)

    for one in planned:
        rng = random.Random(one.seed)
        step = one.operation(driver, rng)
        if step is None:
            continue
        history.append(step.text)
        outcomes = [world.run(step.action) for world in worlds]
        if found := same_outcome(*outcomes):
            return len(history), parted(found)
        if outcomes[0][0] == "returned":
            step.after(outcomes[0][1])
        driver.note_callbacks()
        keys = driver.some_keys(rng)
        seen = [world.see(keys) for world in worlds]
        if found := first_difference(*seen):
            return len(history), parted(found)
        events = [world.new_events() for world in worlds]
        if found := deliberate.difference(*events, frozenset(siblings)):
            return len(history), parted(found)
        siblings.update(*map(sibling_keys, worlds[0].pools))
    return len(history), None


def fuzz_pool(theirs: Side, ours: Side, seed: int, deliberate: Deliberate) -> tuple[int, Parting | None]:
    """One scenario. The number of operations done, and the first difference with as few operations as were found."""
    scenario = Scenario.of(seed)
    planned = plan(scenario, OPERATIONS_PER_SCENARIO)
    done, parting = replay(theirs, ours, scenario, planned, deliberate)
    if parting is None:
        return done, None
    return done, shrink(planned, lambda fewer: replay(theirs, ours, scenario, fewer, Deliberate())[1], parting)
