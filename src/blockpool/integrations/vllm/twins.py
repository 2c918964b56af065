"""vLLM's own pool and ours, given the same calls: they must answer alike and be alike after each."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import msgspec

NUM_BLOCKS = 41
UNIT = 4  # tokens per hash
#: Group id -> tokens per block.
BLOCK_SIZES = {0: UNIT, 1: 2 * UNIT}
LOOKAHEAD = 2


class Difference(msgspec.Struct, frozen=True):
    """The first one that was met: behind it everything differs. `place` says after which operations."""

    place: str
    what: str
    vllm: str
    blockpool: str

    def __str__(self) -> str:
        return f"{self.place}: {self.what}: vLLM {self.vllm}, blockpool {self.blockpool}"


class Differ(Exception):
    """Ends a comparison."""

    def __init__(self, difference: Difference) -> None:
        super().__init__(str(difference))
        self.difference = difference


class Twins:
    """The same calls to both pools. Blocks are named by their ids."""

    def __init__(self, theirs: type, ours: type, name: str, **options: Any) -> None:
        arguments = {"num_gpu_blocks": NUM_BLOCKS, "enable_caching": True, "hash_block_size": UNIT} | options
        self.name = name
        self.pools = (theirs(**arguments), ours(**arguments))
        self.num_calls = 0
        #: What the callbacks of unpin_blocks have heard, pool by pool.
        self.heard: tuple[list[int], list[int]] = ([], [])

    def do(self, what: str, call: Callable[[Any, list[int]], Any]) -> Any:
        """Call it for both pools. The answer, with blocks as ids. Raises Differ."""
        self.num_calls += 1
        place = f"{self.name}, call {self.num_calls}, {what}"
        answers = []
        for pool, heard in zip(self.pools, self.heard, strict=True):
            try:
                answers.append(plain(call(pool, heard)))
            except Exception as error:
                answers.append(error)
        theirs, ours = answers
        if isinstance(theirs, Exception) and isinstance(ours, type(theirs)):
            theirs = ours = None
        same("answer", place, theirs, ours)
        for part, look in STATE.items():
            same(part, place, look(self.pools[0]), look(self.pools[1]))
        same("callbacks", place, *self.heard)
        return theirs

    def blocks(self, ids: Sequence[int]) -> Callable[[Any], list[Any]]:
        return lambda pool: [pool.blocks[block_id] for block_id in ids]

    # -- what the walk does to both --------------------------------------------------------------------

    def take(self, count: int) -> list[int] | None:
        answer: list[int] | None = self.do(f"get_new_blocks({count})", lambda pool, _: pool.get_new_blocks(count))
        return answer

    def touch(self, ids: Sequence[int]) -> None:
        self.do(f"touch({list(ids)})", lambda pool, _: pool.touch(self.blocks(ids)(pool)))

    def free(self, ids: Sequence[int]) -> None:
        self.do(f"free_blocks({list(ids)})", lambda pool, _: pool.free_blocks(self.blocks(ids)(pool)))

    def unpin(self, ids: Sequence[int]) -> None:
        self.do(
            f"unpin_blocks({list(ids)})",
            lambda pool, heard: pool.unpin_blocks(self.blocks(ids)(pool), lambda block: heard.append(block.block_id)),
        )

    def find(self, digest: bytes, groups: list[int]) -> list[int] | None:
        answer: list[int] | None = self.do(
            f"get_cached_block({digest.hex()[:8]}, {groups})", lambda pool, _: pool.get_cached_block(digest, groups)
        )
        return answer

    def cache(
        self, request: Any, ids: Sequence[int], first: int, last: int, group: int, mask: list[bool] | None = None
    ) -> None:
        size = BLOCK_SIZES[group]
        self.do(
            f"cache_full_blocks({request.request_id}, {list(ids)}, {first}, {last}, {size}, {group}, {mask})",
            lambda pool, _: pool.cache_full_blocks(request, self.blocks(ids)(pool), first, last, size, group, mask),
        )

    def cache_partial(self, request: Any, block_id: int, num_tokens: int, group: int, replace: bool) -> None:
        size = BLOCK_SIZES[group]
        self.do(
            f"cache_partial_block({request.request_id}, {block_id}, {num_tokens}, {group}, {size}, {replace})",
            lambda pool, _: pool.cache_partial_block(
                request, pool.blocks[block_id], num_tokens, group, size, replace
            ),
        )

    def move(self, source: int, target: int) -> None:
        self.do(
            f"move_block_hashes({source}, {target})",
            lambda pool, _: pool.move_block_hashes(pool.blocks[source], pool.blocks[target]),
        )

    def evict(self, ids: set[int]) -> None:
        self.do(f"evict_blocks({sorted(ids)})", lambda pool, _: pool.evict_blocks(set(ids)))

    def reset(self) -> bool:
        return bool(self.do("reset_prefix_cache()", lambda pool, _: pool.reset_prefix_cache()))

    def writable(self, block_id: int) -> None:
        self.do(f"is_block_writable({block_id})", lambda pool, _: pool.is_block_writable(pool.blocks[block_id]))

    # -- what the walk looks at: the same in both --------------------------------------------------------

    def num_free(self) -> int:
        return int(self.pools[0].get_num_free_blocks())

    def covered(self, block_id: int) -> int:
        """Tokens of the primary key of a block, 0 without one, -1 for one of unknown length."""
        block = self.pools[0].blocks[block_id]
        if block.block_hash is None:
            return 0
        return -1 if block.block_hash_num_tokens is None else int(block.block_hash_num_tokens)


def plain(value: Any) -> Any:
    """An answer without objects of either side: blocks as ids."""
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value.block_id if hasattr(value, "block_id") else value


def same(what: str, place: str, theirs: Any, ours: Any) -> None:
    if theirs == ours and isinstance(theirs, Exception) == isinstance(ours, Exception):
        return
    if isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        at = next(i for i, (one, other) in enumerate(zip(theirs, ours, strict=True)) if one != other)
        what, theirs, ours = f"{what}[{at}]", theirs[at], ours[at]
    raise Differ(Difference(place, what, repr(theirs), repr(ours)))


def events(pool: Any) -> list[Any]:
    """The events since the last look, removals that follow each other in the order of their hashes.

    A block's additional keys are a set in vLLM, so the order in which they are removed is chance there. Where every
    block of a range is left out, vLLM announces that nothing is stored, and ours says nothing.
    """
    told: list[Any] = []
    removed: list[Any] = []
    for event in pool.take_events():
        kind = type(event).__name__
        fields = msgspec.structs.asdict(event)
        if kind == "BlockRemoved":
            removed += [(kind, one, fields["medium"], fields["group_idx"]) for one in fields["block_hashes"]]
            continue
        told += sorted(removed, key=repr)
        removed = []
        if fields.get("block_hashes") != []:
            told.append((kind, fields))
    return told + sorted(removed, key=repr)


#: What must be the same after every call.
STATE: dict[str, Callable[[Any], Any]] = {
    "free order": lambda pool: [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
    "ref_cnt of block": lambda pool: [block.ref_cnt for block in pool.blocks],
    "hash of block": lambda pool: [(block.block_hash, block.block_hash_num_tokens) for block in pool.blocks],
    "additional keys": lambda pool: {
        block_id: set(keys) for block_id, keys in pool.cached_block_hashes_by_block.items() if keys
    },
    "number of free blocks": lambda pool: (pool.get_num_free_blocks(), pool.free_block_queue.num_free_blocks),
    "usage": lambda pool: pool.get_usage(),
    "number of keys in the index": lambda pool: len(pool.cached_block_hash_to_block),
    "event": events,
}


def prompts(seed: int, count: int, num_units: int) -> list[Any]:
    """Requests, each beginning like one before it."""
    choose = random.Random(seed)
    made: list[Any] = []
    for number in range(count):
        begin = choose.randrange(num_units) * UNIT if made else 0
        tokens = choose.choice(made).all_token_ids[:begin] if made else []
        tokens = tokens + [choose.randrange(2**31) for _ in range(num_units * UNIT + LOOKAHEAD - begin)]
        made.append(request(f"request-{number}", tokens))
    return made


def request(request_id: str, tokens: list[int], **more: Any) -> Any:
    """A request with the digests of its prefixes, as far as a pool and a hasher look at one."""
    digests: list[bytes] = []
    for end in range(UNIT, len(tokens) + 1, UNIT):
        parent = digests[-1] if digests else b""
        digests.append(sha256(parent + repr(tokens[end - UNIT : end]).encode()).digest())
    return SimpleNamespace(
        request_id=request_id,
        all_token_ids=tokens,
        num_tokens=len(tokens),
        num_prompt_tokens=len(tokens),
        block_hashes=digests,
        **{"lora_request": None, "mm_features": [], "cache_salt": None, "prompt_embeds": None, "session_id": None}
        | more,
    )


def script(twins: Twins) -> None:
    """The rules of the pool, one after the other."""
    first, second = prompts(1, 2, 8)
    held = twins.take(4) or []
    twins.cache(first, held, 0, 3, 0)
    twins.free(held[::-1])  # with a hash to the back, without one to the front
    twins.touch(held[:2])  # a hit takes its blocks out of the queue
    twins.find(first.block_hashes[1], [0])
    twins.find(first.block_hashes[1], [0, 1])  # not in both groups
    twins.touch([0, *held[:1]])  # the null block is skipped
    twins.free([*held[:2], 0])
    twins.free(held[:1])
    copy = twins.take(2) or []
    twins.cache(first, copy, 0, 2, 0)  # two blocks of one key: the first one is found
    twins.find(first.block_hashes[0], [0])
    twins.evict({held[0]})  # now the second one is; and a free block keeps its place
    twins.find(first.block_hashes[0], [0])
    twins.reset()  # refused: blocks are held
    twins.free(copy)
    rest = twins.take(twins.num_free()) or []  # everything is evicted
    twins.take(1)  # refused
    twins.free(rest)
    wide = twins.take(3) or []
    twins.cache_partial(second, wide[0], UNIT, 1, False)
    twins.cache(second, wide, 0, 2, 1)  # the part grows into the whole
    twins.cache_partial(second, wide[2], 5 * UNIT, 1, False)
    twins.find(second.block_hashes[4], [1])
    twins.find(second.block_hashes[3], [1])
    twins.writable(wide[0])
    twins.unpin(wide[1:])
    twins.free(wide[:1])
    twins.reset()
    masked = twins.take(4) or []
    twins.cache(first, [0, *masked[1:]], 0, 4, 0, [True, False, True, False])
    twins.move(masked[2], masked[0])
    twins.free(masked)
    twins.take(0)
    twins.reset()


class Walk:
    """Random calls, each allowed by the rules, the way vLLM's managers make them and in stranger orders."""

    def __init__(self, twins: Twins, seed: int) -> None:
        self.twins = twins
        self.choose = random.Random(seed)
        self.requests = prompts(seed, 6, 12)
        #: (request, group, block ids) of what is running; each has one reference on each of its blocks.
        self.tables: list[tuple[Any, int, list[int]]] = []
        self.watched: set[int] = set()
        self.num_heard = 0

    def step(self) -> None:
        moves = (self.start, self.start, self.register, self.register, self.finish, self.finish, self.share)
        self.choose.choice((*moves, self.partial, self.unpin, self.look, self.evict, self.move, self.end))()
        self.watched.difference_update(self.twins.heard[0][self.num_heard :])
        self.num_heard = len(self.twins.heard[0])

    def start(self) -> None:
        """A prompt arrives: its prefix is hit, the rest gets new blocks."""
        request, group = self.choose.choice(self.requests), self.choose.choice(list(BLOCK_SIZES))
        every = BLOCK_SIZES[group] // UNIT
        digests = request.block_hashes[every - 1 :: every]
        hits: list[int] = []
        for digest in digests:
            found = self.twins.find(digest, [group])
            if found is None:
                break
            hits += found
        self.twins.touch(hits)
        new = self.twins.take(self.choose.randrange(len(digests) - len(hits) + 2))
        if new is None:
            self.twins.free(hits[::-1])
        else:
            self.tables.append((request, group, hits + new))

    def register(self) -> None:
        """A running request has filled blocks."""
        if not self.tables:
            return
        request, group, table = self.choose.choice(self.tables)
        size = BLOCK_SIZES[group]
        most = min(len(table), len(request.block_hashes) * UNIT // size)
        if not most or len(set(table)) < len(table):
            return
        first = self.choose.randrange(most)
        last = first
        while last < most and 0 <= self.twins.covered(table[last]) < (last + 1) * size:
            last += 1
        mask = [self.choose.random() < 0.7 for _ in range(last - first)] if self.choose.random() < 0.3 else None
        self.twins.cache(request, table, first, last, group, mask)

    def partial(self) -> None:
        if not self.tables:
            return
        request, group, table = self.choose.choice(self.tables)
        at = self.choose.randrange(len(request.block_hashes))
        place = at * UNIT // BLOCK_SIZES[group]
        if place < len(table):
            self.twins.cache_partial(request, table[place], (at + 1) * UNIT, group, self.choose.random() < 0.2)

    def finish(self) -> None:
        if self.tables:
            _, _, table = self.tables.pop(self.choose.randrange(len(self.tables)))
            if self.choose.random() < 0.2:
                self.choose.shuffle(table)
            self.twins.free(table[::-1])

    def share(self) -> None:
        if self.tables:
            request, group, table = self.choose.choice(self.tables)
            part = table[: self.choose.randrange(len(table) + 1)]
            self.twins.touch(part)
            self.tables.append((request, group, part))

    def unpin(self) -> None:
        if self.tables:
            _, _, table = self.choose.choice(self.tables)
            # A second callback on a block replaces the first in vLLM, and is called as well in ours.
            part = [block_id for block_id in dict.fromkeys(table[-2:]) if block_id not in self.watched]
            for block_id in part:
                table.remove(block_id)
            self.watched.update(part)
            self.twins.unpin(part)

    def look(self) -> None:
        self.twins.find(
            self.choose.choice(self.choose.choice(self.requests).block_hashes), self.choose.choice(([0], [1], [0, 1]))
        )
        self.twins.writable(self.choose.randrange(NUM_BLOCKS))

    def evict(self) -> None:
        self.twins.evict({self.choose.randrange(1, NUM_BLOCKS) for _ in range(self.choose.randrange(4))})

    def move(self) -> None:
        source, target = self.choose.sample(range(1, NUM_BLOCKS), 2)
        if self.twins.covered(target) == 0:
            self.twins.move(source, target)

    def end(self) -> None:
        """Sometimes everything ends, and the prefix cache can be reset."""
        if self.choose.random() < 0.2:
            while self.tables:
                self.finish()
        self.twins.reset()


def compare_pools(theirs: type, ours: type, num_calls: int, seed: int = 1) -> tuple[int, Difference | None]:
    """How many calls were made to both, and the first difference."""
    made = 0
    try:
        for name, options in (
            ("plain", {}),
            ("with events", {"enable_kv_cache_events": True}),
            ("with events and lookahead", {"enable_kv_cache_events": True, "num_hash_lookahead_tokens": LOOKAHEAD}),
        ):
            twins = Twins(theirs, ours, name, **options)
            script(twins)
            made += twins.num_calls
            twins = Twins(theirs, ours, f"{name}, seed {seed}", **options)
            walk = Walk(twins, seed)
            while twins.num_calls < num_calls // 3:
                walk.step()
            made += twins.num_calls
    except Differ as differ:
        return made + twins.num_calls, differ.difference
    return made, None
