"""The drop-in's pool against the model of a pool: random operations, exact comparison after each."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from blockpool.integrations.vllm import BlockPool, KVCacheBlock
from blockpool.pool import AllBlocksCleared, BlockPoolError, BlockRemoved, BlockStored
from tests.pool.model import ModelPool, Refused
from tests.sizes import machine_settings

UNIT, SIZE = 4, 8
FORKS = ((0, 0), (1, 2), (2, 4))


def chains(width: int) -> list[list[bytes]]:
    """Three sequences that share prefixes; hashes of `width` bytes."""
    return [
        [hashlib.shake_128(bytes([c if i >= fork else 0, i])).digest(width) for i in range(8)] for c, fork in FORKS
    ]


class Model(ModelPool):
    """As vLLM has it: a longer prefix replaces a shorter one wherever that ended, and every copy is announced."""

    def cache_full(self, table: list[int], chain: list[bytes], first: int, last: int, size: int, group: int) -> None:
        named = [block for block in table[first:last] if block]
        for i in range(first, last):
            covered = self.hashes[table[i]][0][1] if table[i] and self.hashes[table[i]] else None
            if covered is not None and not 0 < covered < (i + 1) * size:
                raise Refused
        if len(set(named)) < len(named):
            raise Refused
        for i in range(first, last):
            if table[i]:
                self.drop(table[i])
                parent = chain[i * 2 - 1] if i else None
                self.add(table[i], (chain[(i + 1) * 2 - 1], group), (i + 1) * size, parent)

    def cache_partial(self, block: int, digest: bytes, num_tokens: int, group: int, replace: bool) -> None:
        unknown = bool(self.hashes[block]) and self.hashes[block][0][1] == 0
        if block and unknown and not replace:  # a key of unknown length is never replaced by a longer one
            if (digest, group) not in [key for key, _ in self.hashes[block]]:
                self.add(block, (digest, group), num_tokens, None)
            return
        super().cache_partial(block, digest, num_tokens, group, replace)

    def free(self, blocks: list[int], after: int | None = None) -> None:
        super().free(blocks)

    def insert(self, block: int, key: tuple[bytes, int], num_tokens: int) -> None:
        if block == 0:
            raise Refused
        if key not in [known for known, _ in self.hashes[block]]:
            self.hashes[block].append((key, num_tokens))
            self.index.setdefault(key, []).append(block)


class VLLMPoolMachine(RuleBasedStateMachine):
    @initialize(n=st.integers(1, 12), events=st.booleans(), width=st.sampled_from([32, 16, 5, 24, 40]))
    def start(self, n: int, events: bool, width: int) -> None:
        self.pool = BlockPool(n, True, UNIT, enable_kv_cache_events=events)
        self.model = Model(n, UNIT, "per_copy" if events else "off")
        self.chains = chains(width)
        self.objects = list(self.pool.blocks)
        self.fired: list[int] = []
        self.expected: list[int] = []

    def both(self, real: Any, model: Any) -> Any:
        try:
            expected = model()
        except Refused:
            with pytest.raises(BlockPoolError):
                real()
            return None
        answer = real()
        assert answer == expected
        return answer

    def some(self, data: st.DataObject, most: int = 5) -> list[int]:
        return data.draw(st.lists(st.integers(0, self.model.n - 1), max_size=most))

    def request(self, chain: int) -> SimpleNamespace:
        return SimpleNamespace(block_hashes=self.chains[chain], all_token_ids=list(range(64)), lora_request=None)

    @rule(n=st.integers(0, 6))
    def get_new_blocks(self, n: int) -> None:
        self.both(
            lambda: [block.block_id for block in self.pool.get_new_blocks(n)], lambda: self.model.get_new_blocks(n)
        )

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        ids = [b for b in self.some(data) if self.model.n > 1]
        self.both(lambda: self.pool.touch([self.objects[b] for b in ids]), lambda: self.model.touch(ids))

    @rule(data=st.data(), lazily=st.booleans())
    def free(self, data: st.DataObject, lazily: bool) -> None:
        ids = self.some(data)
        blocks = [self.objects[b] for b in ids]
        self.both(lambda: self.pool.free_blocks(iter(blocks) if lazily else blocks), lambda: self.model.free(ids))

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        ids = self.some(data, 3)
        self.both(
            lambda: self.pool.unpin_blocks(
                [self.objects[b] for b in ids], lambda block: self.fired.append(block.block_id)
            ),
            lambda: self.model.unpin(ids, self.expected.append),
        )

    @rule(data=st.data(), chain=st.integers(0, 2), group=st.integers(0, 1), mask=st.booleans())
    def cache_full(self, data: st.DataObject, chain: int, group: int, mask: bool) -> None:
        table = self.some(data, 4)
        first = data.draw(st.integers(0, len(table)))
        last = data.draw(st.integers(first, len(table)))
        keep = data.draw(st.lists(st.booleans(), min_size=last - first, max_size=last - first)) if mask else None
        seen = [b if keep is None or not first <= i < last or keep[i - first] else 0 for i, b in enumerate(table)]
        self.both(
            lambda: self.pool.cache_full_blocks(
                self.request(chain), [self.objects[b] for b in table], first, last, SIZE, group, keep
            ),
            lambda: self.model.cache_full(seen, self.chains[chain], first, last, SIZE, group),
        )

    @rule(
        data=st.data(), chain=st.integers(0, 2), at=st.integers(1, 8), group=st.integers(0, 1), replace=st.booleans()
    )
    def cache_partial(self, data: st.DataObject, chain: int, at: int, group: int, replace: bool) -> None:
        block = data.draw(st.integers(0, self.model.n - 1))
        block_hash = self.chains[chain][at - 1]
        before = list(self.model.events)
        there = (block_hash, group) in [key for key, _ in self.model.hashes[block]]
        if replace and there:
            self.model.drop(block)  # announced anew, where our own pool would say nothing
        self.model.cache_partial(block, block_hash, at * UNIT, group, replace)
        key = self.pool.cache_partial_block(self.request(chain), self.objects[block], at * UNIT, group, SIZE, replace)
        assert key == (None if block == 0 else block_hash + bytes([0, 0, 0, group]))
        assert self.model.events[: len(before)] == before

    @rule(data=st.data(), chain=st.integers(0, 2), at=st.integers(1, 8), known=st.booleans())
    def insert(self, data: st.DataObject, chain: int, at: int, known: bool) -> None:
        block = data.draw(st.integers(0, self.model.n - 1))
        key = (self.chains[chain][at - 1], 1)
        length = at * UNIT if known else None
        self.both(
            lambda: self.pool._insert_block_hash(key[0] + b"\0\0\0\1", self.objects[block], length),
            lambda: self.model.insert(block, key, length or 0),
        )

    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        src, dst = data.draw(st.tuples(*[st.integers(0, self.model.n - 1)] * 2))
        self.both(
            lambda: self.pool.move_block_hashes(self.objects[src], self.objects[dst]),
            lambda: self.model.move(src, dst),
        )

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        ids = self.some(data, 3)
        self.pool.evict_blocks(set(ids))
        self.model.evict(list(set(ids)))

    @rule(data=st.data())
    def evict_one(self, data: st.DataObject) -> None:
        block = data.draw(st.integers(0, self.model.n - 1))
        assert self.pool._maybe_evict_cached_block(self.objects[block]) is bool(self.model.hashes[block])
        self.model.drop(block)

    @rule()
    def reset(self) -> None:
        assert self.pool.reset_prefix_cache() is self.model.reset()

    @rule(data=st.data())
    def unknown_ids_change_nothing(self, data: st.DataObject) -> None:
        stranger = data.draw(st.sampled_from([-1, self.model.n, 1 << 70]))
        with pytest.raises(AssertionError):
            self.pool.evict_blocks({stranger})

    @invariant()
    def agree(self) -> None:
        pool, model = self.pool, self.model
        assert [b.block_id for b in pool.free_block_queue.get_all_free_blocks()] == model.queue
        assert pool.get_num_free_blocks() == len(model.queue)
        assert len(pool.cached_block_hash_to_block) == len(model.index)
        assert all(block is known for block, known in zip(pool.blocks, self.objects, strict=True))
        for b, block in enumerate(self.objects):
            assert block.ref_cnt == model.ref[b]
            keys = [key + bytes([0, 0, 0, group]) for (key, group), _ in model.hashes[b]]
            assert block.block_hash == (keys[0] if keys else None)
            assert (block.block_hash_num_tokens or 0) == (model.hashes[b][0][1] if keys else 0)
            assert pool.cached_block_hashes_by_block.get(b, set()) == set(keys[1:])
            assert pool.is_block_writable(block) == (b > 0 and model.ref[b] == 1 and not keys)
        for (block_hash, group), blocks in model.index.items():
            found = pool.get_cached_block(block_hash, [group])
            assert found is not None
            assert found[0] is self.objects[blocks[0]]
        assert self.fired == self.expected
        assert pool.books.audit() == []
        self.compare_events()

    def compare_events(self) -> None:
        told: list[Any] = []
        for event in self.pool.take_events():
            if isinstance(event, BlockStored):
                end = event.token_ids[-1] + 1
                told.append(("stored", list(event.block_hashes), event.group_idx, event.parent_block_hash, end))
            elif isinstance(event, BlockRemoved):
                assert len(event.block_hashes) == 1
                told.append(("removed", event.block_hashes[0], event.group_idx))
            else:
                assert isinstance(event, AllBlocksCleared)
                told.append(("cleared",))
        expected, self.model.events = self.model.events, []
        # one event per call here, one per block there: the hashes in order, and what each removal says
        assert [t for t in told if t[0] != "stored"] == [e for e in expected if e[0] != "stored"]
        stored = [(one, t[2]) for t in told if t[0] == "stored" for one in t[1]]
        assert stored == [(e[1], e[2]) for e in expected if e[0] == "stored"]


VLLMPoolMachine.TestCase.settings = machine_settings(120)
TestVLLMPool = VLLMPoolMachine.TestCase


def test_a_block_is_the_same_object_for_ever() -> None:
    pool = BlockPool(5, True, 16)
    first = pool.get_new_blocks(4)
    assert [block is pool.blocks[block.block_id] for block in first] == [True] * 4
    pool.free_blocks(first)
    assert pool.get_new_blocks(1)[0] is first[0]
    assert isinstance(first[0], KVCacheBlock)
    assert first[0].pool is pool
