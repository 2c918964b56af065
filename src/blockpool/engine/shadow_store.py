"""A memory of fingerprints: it knows which prefix each slot was written for, and checks that at every read."""

from __future__ import annotations

from dataclasses import dataclass
from threading import RLock

import numpy as np
import numpy.typing as npt

from blockpool.cache import BlockCopy, KVCacheConfig
from blockpool.engine.errors import EngineError
from blockpool.engine.fingerprint import mixed
from blockpool.engine.store import (
    Access,
    Array,
    Prints,
    StoreError,
    must_be_blocks,
    must_be_copy,
    must_be_group,
    must_be_page,
    must_be_slots,
    must_not_be_null,
)

EMPTY = 0  # the print of a slot that was never written, or was cleared


@dataclass(frozen=True)
class Operation:
    """What wrote slots: a forward pass of a request, a copy from another block, a load, a clear, or the start."""

    step_id: int
    kind: str
    request_id: str | None = None
    group_id: int | None = None
    block_id: int | None = None

    def __str__(self) -> str:
        if self.request_id is not None:
            return f"request {self.request_id!r} of group {self.group_id} in step {self.step_id}"
        if self.block_id is not None:
            return f"the copy from block {self.block_id} of group {self.group_id} in step {self.step_id}"
        return f"the {self.kind} in step {self.step_id}" if self.kind != "start" else "nothing: it is as it was made"


class ShadowError(EngineError, AssertionError):
    """A read met a slot that holds another prefix than the reader's.

    `request_id`, `group_id`, `token`, `block_id`: who read what where; `held`: the token that the slot was written
    for, None for nothing; `writer`: the request that wrote it, None for nobody; `last`: the operation that touched
    the slot last.
    """

    def __init__(
        self,
        access: Access,
        token: int,
        block_id: int,
        held: int | None,
        writer: Operation | None,
        last: Operation,
        is_state: bool,
    ) -> None:
        self.request_id = access.request_id
        self.group_id = access.group_id
        self.token = token
        self.block_id = block_id
        self.held = held
        self.writer = None if writer is None else writer.request_id
        self.last = last
        what = "the state after token" if is_state else "token"
        if block_id == 0:
            content = "the null block, which holds nothing"
        elif held is None or writer is None:
            content = f"which is empty; the last to touch it was {last}"
        else:
            content = f"which holds another one's, of token {held} as {writer} has written it"
            content += "" if last is writer else f"; it came there by {last}"
        super().__init__(
            f"request {access.request_id!r}, group {access.group_id}: reads {what} {token} in block {block_id},"
            f" {content}"
        )


class ShadowStore:
    """The interface of a store with a fingerprint per slot of (prefix, group) in place of numbers; `read` raises
    ShadowError where it is not the reader's, and returns nothing.

    Groups that share a pool share its blocks here too. `num_reads`: slots that were checked.
    """

    def __init__(self, config: KVCacheConfig) -> None:
        groups = config.kv_cache_groups
        self.block_sizes = [1 if group.kv_cache_spec.is_state else group.block_size for group in groups]
        self.is_state = [group.kv_cache_spec.is_state for group in groups]
        self.pool_of = [group.pool for group in groups]
        self.num_blocks = [config.pool_sizes[pool] for pool in self.pool_of]
        self.num_reads = 0
        self._salts = [np.uint64(mixed(number + 1)) for number in range(len(groups))]
        self._prints: list[Prints] = []
        self._tokens: list[npt.NDArray[np.int64]] = []
        self._writers: list[npt.NDArray[np.int64]] = []  # the forward pass that wrote the content: an operation
        self._last: list[npt.NDArray[np.int64]] = []  # the operation that touched the slot last
        for pool, num_blocks in enumerate(config.pool_sizes):
            sizes = [size for size, of in zip(self.block_sizes, self.pool_of, strict=True) if of == pool]
            shape = (num_blocks, max(sizes))
            self._prints.append(np.zeros(shape, np.uint64))
            self._tokens.append(np.zeros(shape, np.int64))
            self._writers.append(np.zeros(shape, np.int64))
            self._last.append(np.zeros(shape, np.int64))
        self._step_id = -1
        self._lock = RLock()  # of the operations: pages are written by other threads
        self._operations: dict[int, Operation] = {0: Operation(-1, "start")}
        self._next_operation = 1
        self._most_operations = 1000

    def begin_step(self, step_id: int) -> None:
        self._step_id = step_id
        if len(self._operations) > self._most_operations:
            with self._lock:
                self._forget_operations()

    def clear(self, group_id: int, block_ids: list[int]) -> None:
        must_be_group("clear", group_id, len(self.pool_of))
        must_be_blocks(group_id, block_ids, self.num_blocks[group_id])
        pool = self.pool_of[group_id]
        self._prints[pool][block_ids] = EMPTY
        self._last[pool][block_ids] = self._operation(Operation(self._step_id, "clear"))

    def copy(self, order: BlockCopy) -> None:
        group_id, source, target = order
        must_be_group("copy", group_id, len(self.pool_of))
        must_be_copy(order, self.num_blocks[group_id])
        pool = self.pool_of[group_id]
        for memory in (self._prints[pool], self._tokens[pool], self._writers[pool]):
            memory[target] = memory[source]
        self._last[pool][target] = self._operation(Operation(self._step_id, "copy", None, group_id, source))

    def write(self, access: Access, layer: int = 0, *values: Array) -> None:
        group_id = access.group_id
        blocks, offsets = self._places(access)
        must_not_be_null(access, self.block_sizes[group_id])
        pool = self.pool_of[group_id]
        operation = self._operation(Operation(self._step_id, "forward", access.request_id, group_id))
        if self.is_state[group_id]:  # a state fills its page
            self._prints[pool][blocks] = EMPTY
        self._prints[pool][blocks, offsets] = self._salted(access)
        self._tokens[pool][blocks, offsets] = access.tokens
        self._writers[pool][blocks, offsets] = operation
        self._last[pool][blocks, offsets] = operation

    def read(self, access: Access, layer: int = 0) -> tuple[Array, ...]:
        blocks, offsets = self._places(access)
        self.num_reads += len(access.slots)
        pool = self.pool_of[access.group_id]
        wrong = (self._prints[pool][blocks, offsets] != self._salted(access)) | (blocks == 0)
        if wrong.any():
            at = int(np.argmax(wrong))
            place = int(blocks[at]), int(offsets[at])
            is_empty = self._prints[pool][place] == EMPTY
            raise ShadowError(
                access,
                int(access.tokens[at]),
                place[0],
                None if is_empty else int(self._tokens[pool][place]),
                None if is_empty else self._operations[int(self._writers[pool][place])],
                self._operations[int(self._last[pool][place])],
                self.is_state[access.group_id],
            )
        return ()

    def page_bytes(self, group_id: int) -> int:
        """16 bytes per slot: its print and its token."""
        must_be_group("page", group_id, len(self.pool_of))
        return 16 * self.block_sizes[group_id]

    def read_page(self, group_id: int, block_id: int, page: memoryview) -> None:
        """Copy a block's prints and tokens. Nothing is checked: what reads the copy is."""
        prints, tokens = self._page(group_id, block_id, page)
        pool, size = self.pool_of[group_id], self.block_sizes[group_id]
        prints[:] = self._prints[pool][block_id, :size]
        tokens[:] = self._tokens[pool][block_id, :size].view(np.uint64)

    def write_page(self, group_id: int, block_id: int, page: memoryview) -> None:
        """A block becomes what a page says. Raises StoreError for the null block and for one that is not there."""
        if block_id == 0:
            raise StoreError(f"group {group_id}: a page written to the null block")
        prints, tokens = self._page(group_id, block_id, page)
        pool, size = self.pool_of[group_id], self.block_sizes[group_id]
        with self._lock:
            operation = self._operation(Operation(self._step_id, "load", None, group_id))
            self._prints[pool][block_id] = EMPTY
            self._writers[pool][block_id, :size] = operation
            self._last[pool][block_id] = operation
            self._prints[pool][block_id, :size] = prints
            self._tokens[pool][block_id, :size] = tokens.view(np.int64)

    def _page(self, group_id: int, block_id: int, page: memoryview) -> tuple[Prints, Prints]:
        must_be_group("page", group_id, len(self.pool_of))
        must_be_blocks(group_id, [block_id], self.num_blocks[group_id])
        words = np.frombuffer(page, np.uint64)
        must_be_page(group_id, 8 * len(words), self.page_bytes(group_id))
        size = self.block_sizes[group_id]
        return words[:size], words[size:]

    def _places(self, access: Access) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The blocks of an access and the places in them: all are in the memory."""
        group_id = access.group_id
        must_be_group(f"request {access.request_id!r}", group_id, len(self.pool_of))
        block_size = self.block_sizes[group_id]
        must_be_slots(access, self.num_blocks[group_id], block_size)
        return access.slots // block_size, access.slots % block_size

    def _salted(self, access: Access) -> Prints:
        """The prints of the group: never EMPTY, but with the odds of equal prints."""
        return access.prints ^ self._salts[access.group_id]

    def _operation(self, operation: Operation) -> int:
        with self._lock:
            number = self._next_operation
            self._next_operation += 1
            self._operations[number] = operation
        return number

    def _forget_operations(self) -> None:
        """Those that no slot names any more."""
        named = {0}
        for memory in (*self._writers, *self._last):
            named.update(np.unique(memory).tolist())
        self._operations = {number: self._operations[number] for number in named}
        self._most_operations = 2 * len(named) + 1000
