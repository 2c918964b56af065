"""Deliberately broken versions of vLLM's own classes: what the fuzz must find, or it proves nothing.

Each is a subclass that calls what it breaks and then does one thing wrong. `python fuzz.py --self-check` compares
each with the original and fails for every one that passes as equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from sides import Side


@dataclass(frozen=True)
class Fault:
    """`part` says which fuzz should find it."""

    name: str
    part: str
    side: Side


def faults(vllm: Side) -> Iterator[Fault]:
    for name, breaks in POOL_FAULTS.items():
        yield Fault(name, "pool", replace(vllm, name=name, BlockPool=breaks(vllm.BlockPool)))
    for name, breaks in SHARED_FAULTS.items():
        pool = breaks(vllm.SharedEventQueueBlockPool)
        yield Fault(name, "pool", replace(vllm, name=name, SharedEventQueueBlockPool=pool))
    for name, breaks in QUEUE_FAULTS.items():
        yield Fault(name, "parts", replace(vllm, name=name, FreeKVCacheBlockQueue=breaks(vllm.FreeKVCacheBlockQueue)))
    for name, breaks in MAP_FAULTS.items():
        yield Fault(name, "parts", replace(vllm, name=name, BlockHashToBlockMap=breaks(vllm.BlockHashToBlockMap)))
    for name, breaks in MANAGER_FAULTS.items():
        broken = breaks(vllm.BlockPool)
        yield Fault(name, "manager", side_with_pool_in_coordinator(vllm, name, broken))
    for name, breaks in SCHEDULER_FAULTS.items():
        broken = breaks(vllm.BlockPool)
        yield Fault(name, "scheduler", side_with_pool_in_coordinator(vllm, name, broken))
    for name, breaks in BOOKS_FAULTS.items():
        yield Fault(name, "managed", side_with_manager(vllm, name, breaks(vllm.KVCacheManager)))
    for name, breaks in HASHING_FAULTS.items():
        make = breaks(vllm.get_request_block_hasher)
        yield Fault(name, "hashing", replace(vllm, name=name, get_request_block_hasher=make))


def side_with_pool_in_coordinator(vllm: Side, name: str, pool: Any) -> Side:
    from vllm.v1.core import kv_cache_coordinator

    def install() -> None:
        kv_cache_coordinator.BlockPool = pool

    def uninstall() -> None:
        kv_cache_coordinator.BlockPool = vllm.BlockPool

    return replace(vllm, name=name, BlockPool=pool, install=install, uninstall=uninstall)


def side_with_manager(vllm: Side, name: str, manager: Any) -> Side:
    from vllm.v1.core import kv_cache_manager
    from vllm.v1.core.sched import scheduler

    def put(one: Any) -> None:
        kv_cache_manager.KVCacheManager = scheduler.KVCacheManager = one

    return replace(
        vllm,
        name=name,
        KVCacheManager=manager,
        install=lambda: put(manager),
        uninstall=lambda: put(vllm.KVCacheManager),
    )


# the pool


def frees_in_wrong_order(pool: Any) -> Any:
    class Broken(pool):
        def free_blocks(self, ordered_blocks: Any) -> None:
            super().free_blocks(list(ordered_blocks)[::-1])

    return Broken


def frees_one_by_one(pool: Any) -> Any:
    class Broken(pool):
        def free_blocks(self, ordered_blocks: Any) -> None:
            for block in ordered_blocks:
                super().free_blocks([block])

    return Broken


def keeps_foreign_blocks(pool: Any) -> Any:
    class Broken(pool):
        def free_blocks(self, ordered_blocks: Any) -> None:
            super().free_blocks([block for block in ordered_blocks if block.pool is self])

    return Broken


def touches_once(pool: Any) -> Any:
    class Broken(pool):
        def touch(self, blocks: Any) -> None:
            super().touch(list({block.block_id: block for block in blocks}.values()))

    return Broken


def gives_what_there_is(pool: Any) -> Any:
    class Broken(pool):
        def get_new_blocks(self, num_blocks: int) -> Any:
            return super().get_new_blocks(min(num_blocks, self.get_num_free_blocks()))

    return Broken


def hits_another_of_equal_blocks(pool: Any) -> Any:
    class Broken(pool):
        def get_cached_block(self, block_hash: Any, kv_cache_group_ids: Any) -> Any:
            found = super().get_cached_block(block_hash, kv_cache_group_ids)
            if found is None:
                return None
            keys = [block.block_hash for block in found]
            twins = [[b for b in self.blocks if b.block_hash == key is not None] for key in keys]
            return [some[-1] if some else block for some, block in zip(twins, found, strict=True)]

    return Broken


def forgets_removals_on_hand_out(pool: Any) -> Any:
    class Broken(pool):
        def get_new_blocks(self, num_blocks: int) -> Any:
            before = list(self.kv_event_queue)
            blocks = super().get_new_blocks(num_blocks)
            self.kv_event_queue = before
            return blocks

    return Broken


def ignores_masks(pool: Any) -> Any:
    class Broken(pool):
        def cache_full_blocks(self, *args: Any, block_mask: Any = None, **kwargs: Any) -> None:
            super().cache_full_blocks(*args, **kwargs)

    return Broken


def never_replaces(pool: Any) -> Any:
    class Broken(pool):
        def cache_partial_block(self, *args: Any, replace_existing_hashes: bool = False, **kwargs: Any) -> Any:
            return super().cache_partial_block(*args, **kwargs)

    return Broken


def loses_length_on_move(pool: Any) -> Any:
    class Broken(pool):
        def move_block_hashes(self, src_block: Any, dst_block: Any) -> None:
            super().move_block_hashes(src_block, dst_block)
            dst_block._block_hash_num_tokens = None

    return Broken


def calls_back_twice(pool: Any) -> Any:
    class Broken(pool):
        def unpin_blocks(self, blocks: Any, on_reuse: Any) -> None:
            super().unpin_blocks(blocks, lambda block: (on_reuse(block), on_reuse(block)))

    return Broken


def never_calls_back(pool: Any) -> Any:
    class Broken(pool):
        def unpin_blocks(self, blocks: Any, on_reuse: Any) -> None:
            super().unpin_blocks(blocks, lambda block: None)

    return Broken


def counts_no_access(pool: Any) -> Any:
    class Broken(pool):
        def touch(self, blocks: Any) -> None:
            collector, self.metrics_collector = self.metrics_collector, None
            super().touch(blocks)
            self.metrics_collector = collector

    return Broken


def resets_without_saying(pool: Any) -> Any:
    class Broken(pool):
        def reset_prefix_cache(self) -> bool:
            before = list(self.kv_event_queue)
            done = super().reset_prefix_cache()
            self.kv_event_queue = before
            return bool(done)

    return Broken


def resets_while_in_use(pool: Any) -> Any:
    class Broken(pool):
        def reset_prefix_cache(self) -> bool:
            return bool(super().reset_prefix_cache()) or self.get_num_free_blocks() == len(self.blocks) - 2

    return Broken


def says_nothing_was_evicted(pool: Any) -> Any:
    class Broken(pool):
        def _maybe_evict_cached_block(self, block: Any) -> bool:
            super()._maybe_evict_cached_block(block)
            return False

    return Broken


def counts_null_as_usable(pool: Any) -> Any:
    class Broken(pool):
        def get_usage(self) -> float:
            return 1.0 - self.get_num_free_blocks() / self.num_gpu_blocks

    return Broken


def with_changed_event(change: Callable[[Any], None]) -> Callable[[Any], Any]:
    def breaks(pool: Any) -> Any:
        class Broken(pool):
            def _build_block_stored_event(self, *args: Any, **kwargs: Any) -> Any:
                event = super()._build_block_stored_event(*args, **kwargs)
                change(event)
                return event

        return Broken

    return breaks


def setter(name: str, value: Any) -> Callable[[Any], None]:
    return lambda event: setattr(event, name, value)


POOL_FAULTS: dict[str, Callable[[Any], Any]] = {
    "frees in the wrong order": frees_in_wrong_order,
    "frees a batch one by one": frees_one_by_one,
    "keeps blocks of other pools": keeps_foreign_blocks,
    "counts a block touched twice once": touches_once,
    "gives fewer blocks than asked": gives_what_there_is,
    "hits the last of equal blocks": hits_another_of_equal_blocks,
    "no BlockRemoved on hand-out": forgets_removals_on_hand_out,
    "no AllBlocksCleared": resets_without_saying,
    "says it was reset while in use": resets_while_in_use,
    "caches masked blocks": ignores_masks,
    "keeps keys that a partial one replaces": never_replaces,
    "loses the length of a moved key": loses_length_on_move,
    "calls back twice": calls_back_twice,
    "never calls back": never_calls_back,
    "no access in the metrics": counts_no_access,
    "denies an eviction": says_nothing_was_evicted,
    "counts the null block as usable": counts_null_as_usable,
    "event without its parent": with_changed_event(setter("parent_block_hash", None)),
    "event without extra keys": with_changed_event(setter("extra_keys", None)),
    "event without lookahead tokens": with_changed_event(setter("lookahead_token_ids", None)),
    "event without adapter": with_changed_event(setter("lora_name", None)),
    "event without session": with_changed_event(setter("session_id", None)),
    "event one token short": with_changed_event(lambda event: event.token_ids.pop() if event.token_ids else None),
}


def has_events_of_its_own(pool: Any) -> Any:
    class Broken(pool):
        @property
        def kv_event_queue(self) -> Any:
            return vars(self).setdefault("mine", [])

        @kv_event_queue.setter
        def kv_event_queue(self, events: Any) -> None:
            vars(self)["mine"] = events

    return Broken


SHARED_FAULTS: dict[str, Callable[[Any], Any]] = {"host events go nowhere": has_events_of_its_own}


# queue and map


def prepends_backwards(queue: Any) -> Any:
    class Broken(queue):
        def prepend_n(self, blocks: Any) -> None:
            super().prepend_n(blocks[::-1])

    return Broken


def starts_at_cursor(queue: Any) -> Any:
    class Broken(queue):
        def iter_blocks_after(self, cursor: Any) -> Any:
            if cursor is not None:
                yield cursor
            yield from super().iter_blocks_after(cursor)

    return Broken


def removes_silently(queue: Any) -> Any:
    class Broken(queue):
        def remove(self, block: Any) -> None:
            if block.next_free_block is not None:
                super().remove(block)

    return Broken


def pops_any_block(index: Any) -> Any:
    class Broken(index):
        def pop(self, key: Any, block_id: int) -> Any:
            block = self.get_one_block(key)
            return None if block is None else super().pop(key, block.block_id)

    return Broken


def keeps_the_first_only(index: Any) -> Any:
    class Broken(index):
        def insert(self, key: Any, block: Any) -> None:
            if self.get_one_block(key) is None:
                super().insert(key, block)

    return Broken


QUEUE_FAULTS = {
    "prepends backwards": prepends_backwards,
    "iterates from the cursor itself": starts_at_cursor,
    "removes what is not queued": removes_silently,
}
MAP_FAULTS = {"pops a block that was not asked for": pops_any_block, "one block per key": keeps_the_first_only}


# through the manager


MANAGER_FAULTS = {
    "the manager's frees in the wrong order": frees_in_wrong_order,
    "the manager's masks ignored": ignores_masks,
    "the manager's hits are another equal block": hits_another_of_equal_blocks,
    "the manager's moved keys lose their length": loses_length_on_move,
}


SCHEDULER_FAULTS = {
    "the scheduler's frees in the wrong order": frees_in_wrong_order,
    "the scheduler's hits are another equal block": hits_another_of_equal_blocks,
}


# the manager


def with_changed_argument(name: str, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A manager whose allocate_slots is given something else."""

    def breaks(manager: Any) -> Any:
        class Broken(manager):
            def allocate_slots(self, request: Any, num_new_tokens: int, **kwargs: Any) -> Any:
                if name in kwargs:
                    kwargs[name] = change(kwargs[name])
                return super().allocate_slots(request, num_new_tokens, **kwargs)

        return Broken

    return breaks


def looks_one_token_further(manager: Any) -> Any:
    class Broken(manager):
        def get_computed_blocks(self, request: Any, max_cache_hit_length: int | None = None) -> Any:
            return super().get_computed_blocks(request, request.num_tokens)

    return Broken


def finds_nothing(manager: Any) -> Any:
    class Broken(manager):
        def get_computed_blocks(self, request: Any, max_cache_hit_length: int | None = None) -> Any:
            return self.empty_kv_cache_blocks, 0, 0

    return Broken


def never_drops(manager: Any) -> Any:
    class Broken(manager):
        def remove_skipped_blocks(self, *args: Any, **kwargs: Any) -> None:
            pass

    return Broken


def forgets_copies(manager: Any) -> Any:
    class Broken(manager):
        def take_kv_cache_block_copies(self) -> Any:
            copies, endpoints = super().take_kv_cache_block_copies()
            return copies[1:], endpoints

    return Broken


def shares_states_within_a_step(manager: Any) -> Any:
    class Broken(manager):
        def allocate_slots(self, *args: Any, **kwargs: Any) -> Any:
            self.new_step_starts()
            return super().allocate_slots(*args, **kwargs)

    return Broken


BOOKS_FAULTS = {
    "reserved blocks are given away": with_changed_argument("reserved_blocks", lambda given: 0),
    "no watermark": with_changed_argument("has_scheduled_reqs", lambda given: False),
    "no lookahead slots": with_changed_argument("num_lookahead_tokens", lambda given: 0),
    "loaded blocks are registered at once": with_changed_argument("delay_cache_blocks", lambda given: False),
    "admits what will not fit": with_changed_argument("full_sequence_must_fit", lambda given: False),
    "the whole prompt may be a hit": looks_one_token_further,
    "no hits at all": finds_nothing,
    "nothing is dropped when it is asked for": never_drops,
    "a copy is forgotten": forgets_copies,
    "states are shared in the step that writes them": shares_states_within_a_step,
}


# hashing


def with_changed_request(*names: str) -> Callable[[Any], Any]:
    """A hasher that does not look at these attributes of a request."""

    def breaks(make: Any) -> Any:
        def make_hasher(*args: Any) -> Any:
            hasher = make(*args)

            def hash_blind(request: Any) -> Any:
                kept = {name: getattr(request, name) for name in names}
                for name in names:
                    setattr(request, name, [] if name == "mm_features" else None)
                try:
                    return hasher(request)
                finally:
                    for name, value in kept.items():
                        setattr(request, name, value)

            return hash_blind

        return make_hasher

    return breaks


def without_lookahead(make: Any) -> Any:
    return lambda unit, function, lookahead=0: make(unit, function, 0)


def always_from_the_start(make: Any) -> Any:
    """Hashes a request that has hashes already as if it had none, which gives it the first ones again."""

    def make_hasher(*args: Any) -> Any:
        hasher = make(*args)

        def hash_all(request: Any) -> Any:
            kept = request.block_hashes[:]
            del request.block_hashes[:]
            new = hasher(request)
            request.block_hashes.extend(kept)
            return new[: len(new) - len(kept)]

        return hash_all

    return make_hasher


HASHING_FAULTS = {
    "blind for adapters": with_changed_request("lora_request"),
    "blind for salts": with_changed_request("cache_salt"),
    "blind for images": with_changed_request("mm_features"),
    "blind for embeddings": with_changed_request("prompt_embeds"),
    "blind for lookahead": without_lookahead,
    "starts over when asked again": always_from_the_start,
}
