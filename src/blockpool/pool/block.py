"""A block as people see it: a handle that reads the pool's arrays whenever it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, final

from mypy_extensions import i64, mypyc_attr

from blockpool.pool.errors import UnknownBlockError
from blockpool.pool.layout import FLAGS, HASHED, REF, TOKENS, TURN

if TYPE_CHECKING:
    from blockpool.pool.block_pool import BlockPool


@final
@mypyc_attr(acyclic=True, free_list_len=1)
class KVCacheBlock:
    """`pool.blocks[7]`: made on demand, equal by (pool, id), accepted wherever a block id is."""

    def __init__(self, pool: BlockPool, block_id: int) -> None:
        if block_id < 0 or block_id >= pool.num_gpu_blocks:
            raise UnknownBlockError(f"block {block_id} is unknown: ids run from 0 to {pool.num_gpu_blocks - 1}")
        self._pool = pool
        self._id: i64 = block_id

    @property
    def block_id(self) -> int:
        return self._id

    @property
    def pool(self) -> BlockPool:
        return self._pool

    @property
    def ref_cnt(self) -> int:
        """How many holders depend on the block's content."""
        return self._field(REF)

    @property
    def block_hash(self) -> bytes | None:
        """The primary key: digest, then the group id as 4 bytes, big endian. None without a hash."""
        if self._field(FLAGS) & HASHED == 0:
            return None
        return self._pool.index.key_of(self._id)

    @property
    def block_hash_num_tokens(self) -> int | None:
        """Length in tokens of the prefix that the primary hash covers, None without a hash."""
        if self._field(FLAGS) & HASHED == 0:
            return None
        return self._field(TOKENS)

    @property
    def incarnation(self) -> int:
        """How often the block was handed out, modulo 2**31."""
        return self._field(TURN)

    @property
    def prev_free_block(self) -> KVCacheBlock | None:
        """The neighbour that is handed out before this one; None at the head and outside the queue."""
        return self._neighbour(-1)

    @property
    def next_free_block(self) -> KVCacheBlock | None:
        """The neighbour that is handed out after this one; None at the tail and outside the queue."""
        return self._neighbour(1)

    @property
    def is_null(self) -> bool:
        return self._id == 0

    def _field(self, field: i64) -> int:
        return int(self._pool.records.get(self._id, field))

    def _neighbour(self, step: int) -> KVCacheBlock | None:
        block = self._pool.queue.neighbour(self._id, step)
        return None if block == 0 else KVCacheBlock(self._pool, block)

    def __index__(self) -> int:
        return self._id

    def __int__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KVCacheBlock) and self._id == other._id and self._pool is other._pool

    def __hash__(self) -> int:
        return hash((id(self._pool), int(self._id)))

    def __repr__(self) -> str:
        key = self.block_hash
        name = "None" if key is None else f"{key.hex()[:12]}…"
        return f"KVCacheBlock(block_id={self._id}, ref_cnt={self.ref_cnt}, block_hash={name})"


@final
class BlockSequence:
    """`pool.blocks`: every block of the pool, the null block included."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def __len__(self) -> int:
        return self._pool.num_gpu_blocks

    def __getitem__(self, at: int) -> KVCacheBlock:
        size = self._pool.num_gpu_blocks
        if at < -size or at >= size:
            raise IndexError(f"block {at} of a pool of {size}")
        return KVCacheBlock(self._pool, at % size)

    def __iter__(self) -> Iterator[KVCacheBlock]:
        for block_id in range(self._pool.num_gpu_blocks):
            yield KVCacheBlock(self._pool, block_id)
