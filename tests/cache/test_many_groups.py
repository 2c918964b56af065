"""Random models, prompts, pools and steps: what is found, what it costs, what is refused, what is left."""

from __future__ import annotations

import math

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from blockpool import build_info
from blockpool.cache import KVCacheConfig, KVCacheManager, Request
from blockpool.managers import KVCacheGroupSpec
from tests.cache.many_driver import HASHER, UNIT, Engine
from tests.managers.rules import Rule, chunked, full, reference, sink, state, step_of, window
from tests.sizes import property_settings

#: The interpreted build runs the same code, far slower: a part of the cases is enough to see that it is the same.
CASES = 2_000 if build_info().is_compiled else 300


# Not shrunk: that takes minutes, and the engine can be run on the bytes that failed.
@settings(property_settings(CASES), phases=[Phase.explicit, Phase.generate])
@given(data=st.binary(min_size=120, max_size=320))
def test_a_random_engine_sees_what_the_model_says(data: bytes) -> None:
    """Hits, plans, refusals, tables, references, index, statistics, events and what each slot of memory holds.

    Where the longest hit would copy from a block that the step being planned writes itself, the next shorter one is
    looked for as if the prompt ended there: there may be a longer one that copies nothing.
    """
    Engine(data).run()


@st.composite
def cached_groups(draw: st.DrawFn) -> list[Rule]:
    rules: list[Rule] = []
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.sampled_from([2, 4, 6]))
        kind = draw(st.sampled_from([full, sink, window, chunked, reference, state]))
        width = draw(st.integers(1, 14))
        rule: Rule = kind(size) if kind in (full, sink, state) else kind(size, width)  # type: ignore[operator]
        rule.margin = kind is not state and draw(st.integers(0, 4)) == 0
        rules.append(rule)
    return rules


@property_settings(CASES // 5)
@given(data=st.data())
def test_what_is_promised_is_found(data: st.DataObject) -> None:
    """A prompt computed in chunks: the boundaries that the policy promises are hit by whoever shares so much."""
    rules = data.draw(cached_groups())
    alignment = math.lcm(*[rule.size for rule in rules])
    if all(rule.partial or rule.size == UNIT for rule in rules):
        alignment = UNIT
    interval = data.draw(st.sampled_from([None, 0, alignment, 2 * alignment]))
    specs = tuple(KVCacheGroupSpec((str(i),), rule.spec, draft_margin=rule.margin) for i, rule in enumerate(rules))
    config = KVCacheConfig(600, specs, hash_block_size=UNIT, retention_interval=interval)
    manager = KVCacheManager(config)
    assert manager.alignment == alignment

    length = data.draw(st.integers(2, 60))
    margins = [min(step_of(rule, alignment, UNIT), rule.size) if rule.margin else 0 for rule in rules]
    most = min([length - 1, *[length - length % UNIT - margin for margin in margins]])
    replay = max(0, most - most % alignment)
    ends = data.draw(st.sets(st.integers(1, length))) | {replay, length}
    ends |= set(range(alignment, length + 1, alignment)) if data.draw(st.booleans()) else set()
    r = Request("r", range(length), hasher=HASHER)
    for end in sorted(ends - {0}):
        assert manager.allocate_slots(r, end - r.num_computed_tokens) is not None
        r.num_computed_tokens = end
        manager.take_block_copies()
    if data.draw(st.booleans()):
        manager.free(r)

    def findable(rule: Rule, boundary: int, margin: int) -> bool:
        """Whether the prompt left in this group what a hit at the boundary needs, were all of it kept."""
        if boundary + margin > length - length % UNIT or (rule.spec.is_state and boundary not in ends):
            return False
        end = boundary + margin
        tail = length if rule.margin else length - 1
        full_now = end + rule.size - end % rule.size <= length  # its block has one hash, that of its end
        kept = rule.spec.is_state or not full_now
        return end % rule.size == 0 or (end == tail - tail % UNIT and kept) or not rule.needed(end)

    promised = {replay} | set(
        range(interval or alignment, length + 1, interval or alignment) if interval != 0 else ()
    )
    for boundary in sorted(promised - {0}):
        if all(findable(rule, boundary, margin) for rule, margin in zip(rules, margins, strict=True)):
            shared = boundary + max(margins)
            again = Request("again", [*range(shared), *range(900, 910)], hasher=HASHER)
            assert manager.get_computed_blocks(again).num_tokens >= boundary
    if all(findable(rule, replay, margin) for rule, margin in zip(rules, margins, strict=True)):
        for more in (0, 1):
            again = Request("again", range(length + more), hasher=HASHER)
            assert manager.get_computed_blocks(again).num_tokens >= replay
    for pool in manager.pools:
        assert pool.audit() == []
