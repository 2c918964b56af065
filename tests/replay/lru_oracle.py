"""A prefix cache so simple that it is obviously right: dicts, an ordered dict as queue, one loop per rule.

It knows blocks by key (anything hashable that stands for a whole prefix) and shares no code with what it checks.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from blockpool.traces import TraceRequest


@dataclass
class Outcome:
    requests: int = 0
    refused_requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    evicted_blocks: int = 0
    evicted_unused_blocks: int = 0
    peak_held_blocks: int = 0


class LruOracle:
    """`num_blocks` counts the null block, as everywhere."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free_queue = OrderedDict.fromkeys(range(1, num_blocks))
        self.num_usable = num_blocks - 1
        self.key_of: dict[int, Hashable] = {}
        self.blocks_with: dict[Hashable, list[int]] = {}  # first registered first
        self.hit_since_cached: set[int] = set()
        self.outcome = Outcome()

    def run(self, keys: Sequence[Hashable], num_prompt_tokens: int, num_output_tokens: int) -> None:
        """One request from arrival to departure; `keys` are those of its known full blocks."""
        outcome = self.outcome
        outcome.requests += 1
        num_needed = -(-(num_prompt_tokens + num_output_tokens) // self.block_size)
        if num_needed > self.num_usable:
            outcome.refused_requests += 1
            return
        table = self.look_up(keys, most=(num_prompt_tokens - 1) // self.block_size)
        outcome.prompt_tokens += num_prompt_tokens
        outcome.hit_tokens += len(table) * self.block_size
        for block in table:
            del self.free_queue[block]
            self.hit_since_cached.add(block)
        while len(table) < num_needed:
            table.append(self.take_next())
        outcome.peak_held_blocks = max(outcome.peak_held_blocks, self.num_usable - len(self.free_queue))
        for block, key in zip(table, keys, strict=False):
            if block not in self.key_of:
                self.key_of[block] = key
                self.blocks_with.setdefault(key, []).append(block)
        self.give_back(table)

    def look_up(self, keys: Sequence[Hashable], most: int) -> list[int]:
        found = []
        for key in keys[:most]:
            if key not in self.blocks_with:
                break
            found.append(self.blocks_with[key][0])
        return found

    def take_next(self) -> int:
        block, _ = self.free_queue.popitem(last=False)
        if block in self.key_of:
            self.outcome.evicted_blocks += 1
            self.outcome.evicted_unused_blocks += block not in self.hit_since_cached
            key = self.key_of.pop(block)
            self.blocks_with[key].remove(block)
            if not self.blocks_with[key]:
                del self.blocks_with[key]
            self.hit_since_cached.discard(block)
        return block

    def give_back(self, table: list[int]) -> None:
        deepest_first = table[::-1]
        for block in deepest_first:
            if block in self.key_of:
                self.free_queue[block] = None
        for block in reversed(deepest_first):  # pushed to the front one by one: the deepest ends up first
            if block not in self.key_of:
                self.free_queue[block] = None
                self.free_queue.move_to_end(block, last=False)


def naive_keys(request: TraceRequest, block_size: int) -> list[Hashable]:
    """A key per full block whose content the trace knows, straight from the meaning of ids and tokens."""
    keys: list[Hashable] = []
    for end in range(block_size, request.num_prompt_tokens + 1, block_size):
        if request.token_ids is not None:
            keys.append(tuple(request.token_ids[:end].tolist()))
            continue
        assert request.hash_ids is not None
        number = -(-end // request.unit) - 1  # of the id in which the block ends
        if number >= len(request.hash_ids):
            break
        keys.append((request.scope, int(request.hash_ids[number]), end - number * request.unit))
    return keys


def oracle_outcome(requests: Iterable[TraceRequest], num_blocks: int, block_size: int) -> Outcome:
    """The whole trace through a fresh oracle."""
    oracle = LruOracle(num_blocks, block_size)
    for request in requests:
        oracle.run(naive_keys(request, block_size), request.num_prompt_tokens, request.num_output_tokens)
    return oracle.outcome
