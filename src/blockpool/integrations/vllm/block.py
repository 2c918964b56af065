"""A block as vLLM handles it: an object that stays the same, whose facts lie in the books of its pool."""

from __future__ import annotations

from typing import Any, final

from mypy_extensions import i64, mypyc_attr

from blockpool.integrations.vllm.errors import HashSetError, NullGivenError, RangeError, StrangerError
from blockpool.integrations.vllm.home import Home
from blockpool.pool.block_pool import MOST_TOKENS
from blockpool.pool.layout import FLAGS, HASHED, REF, TOKENS


@final
class Loose:
    """What a block that belongs to no pool knows by itself."""

    def __init__(self, ref_cnt: int, block_hash: Any, num_tokens: int | None) -> None:
        self.ref_cnt = ref_cnt
        self.block_hash: Any = block_hash  # tests put in what is at hand
        self.num_tokens = num_tokens
        self.home: Home | None = None  # of the stand-alone queue that it is in
        self.place: i64 = 0


@final
@mypyc_attr(acyclic=True)
class KVCacheBlock:
    """A block of a pool, made by the pool once and for all, or a stand-alone one, made by hand.

    A pool's block reads the pool's books whenever it is asked, and writes them: a hash that is set on it is listed in
    the pool's index; the count of a block that is held can be set, but not to 0.
    """

    def __init__(
        self,
        block_id: int,
        ref_cnt: int = 0,
        _block_hash: Any = None,
        _block_hash_num_tokens: int | None = None,
        prev_free_block: KVCacheBlock | None = None,
        next_free_block: KVCacheBlock | None = None,
        is_null: bool = False,
        *,
        pool: Any = None,
    ) -> None:
        self.block_id: object = block_id
        self.is_null = is_null
        self._home: Home | None = None
        self._place: i64 = 0
        self._loose: Loose | None = None
        if prev_free_block is not None or next_free_block is not None:
            raise StrangerError("a block is linked by a queue, not by hand")
        if isinstance(pool, Home):  # a pool makes its blocks
            self._home = pool
            self._place = block_id
        elif pool is not None:
            raise StrangerError("a pool makes its blocks itself: they are in pool.blocks")
        else:
            self._loose = Loose(ref_cnt, _block_hash, _block_hash_num_tokens)

    @property
    def pool(self) -> Any:
        """The pool that the block belongs to, None for a stand-alone one."""
        return None if self._home is None else self._home.owner()

    # -- references ----------------------------------------------------------------------------------

    @property
    def ref_cnt(self) -> int:
        """How many holders depend on the block's content."""
        home = self._home
        if home is None:
            return loose(self).ref_cnt
        return int(home.ring.records.get(self._place, REF))

    @ref_cnt.setter
    def ref_cnt(self, value: int) -> None:
        home = self._home
        if home is None:
            loose(self).ref_cnt = value
            return
        # vLLM's managers count a second holder of a copied block like this; what they must not do is queue or unqueue
        most: int = MOST_TOKENS
        if value > most:
            raise AttributeError(f"block {self.block_id}: ref_cnt {value} is beyond {MOST_TOKENS}")
        if value < 1 or home.ring.records.get(self._place, REF) < 1:
            raise AttributeError(f"block {self.block_id}: only touch and free_blocks lead to or from ref_cnt 0")
        home.ring.records.set(self._place, REF, value)

    # -- hash ----------------------------------------------------------------------------------------

    @property
    def block_hash(self) -> Any:
        """The primary key: hash, then the group id as 4 bytes, big endian. None without a hash."""
        home = self._home
        if home is None:
            return loose(self).block_hash
        if home.ring.records.get(self._place, FLAGS) & HASHED == 0 or home.keys is None:
            return None
        return home.keys.key_of(self._place)

    @property
    def block_hash_num_tokens(self) -> int | None:
        """Length in tokens of the prefix that the primary key stands for, None when it was set without one."""
        home = self._home
        if home is None:
            return loose(self).num_tokens
        tokens = home.ring.records.get(self._place, TOKENS)
        return None if tokens == 0 else int(tokens)

    @property
    def _block_hash(self) -> Any:
        return self.block_hash

    @_block_hash.setter
    def _block_hash(self, key: Any) -> None:
        self.reset_hash()
        if key is not None:
            self.set_block_hash(key)

    @property
    def _block_hash_num_tokens(self) -> int | None:
        return self.block_hash_num_tokens

    def set_block_hash(self, block_hash: Any, num_tokens: int | None = None) -> None:
        """Give a block that has none its primary key; a pool's block is listed under it."""
        if self.block_hash is not None:
            raise HashSetError(f"block {self.block_id} has a hash already")
        home = self._home
        if home is None:
            own = loose(self)
            own.block_hash = block_hash
            own.num_tokens = num_tokens
        else:
            register_key(home, self._place, block_hash, num_tokens)

    def reset_hash(self) -> None:
        """Take every key off the block; a pool's block leaves the index, without an event."""
        home = self._home
        if home is None:
            own = loose(self)
            own.block_hash = None
            own.num_tokens = None
        elif home.books is not None:
            index = home.books.index
            for entry in reversed(index.entries_of(self._place)):
                index.take_off(self._place, entry)

    # -- the free queue ------------------------------------------------------------------------------

    @property
    def prev_free_block(self) -> KVCacheBlock | None:
        """The neighbour that is handed out before this one, the queue's sentinel at its head, None outside it."""
        return self._neighbour(-1)

    @property
    def next_free_block(self) -> KVCacheBlock | None:
        """The neighbour that is handed out after this one, the queue's sentinel at its tail, None outside it."""
        return self._neighbour(1)

    def _neighbour(self, step: i64) -> KVCacheBlock | None:
        home = self._home
        if home is not None:
            return home.neighbour(self._place, step)
        own = loose(self)
        return None if own.home is None else own.home.neighbour(own.place, step)

    def __index__(self) -> int:
        number: int = self.block_id  # type: ignore[assignment]
        return number

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, KVCacheBlock)
            and self.block_id == other.block_id
            and self.ref_cnt == other.ref_cnt
            and self.block_hash == other.block_hash
            and self.block_hash_num_tokens == other.block_hash_num_tokens
            and self.is_null == other.is_null
        )

    def __hash__(self) -> int:
        return hash(self.block_id)

    def __repr__(self) -> str:
        before, after = self.prev_free_block, self.next_free_block
        return (
            f"KVCacheBlock(block_id={self.block_id}, ref_cnt={self.ref_cnt}, _block_hash={self.block_hash!r}, "
            f"prev_free_block={None if before is None else before.block_id}, "
            f"next_free_block={None if after is None else after.block_id})"
        )


def loose(block: KVCacheBlock) -> Loose:
    own = block._loose
    if own is None:
        raise StrangerError(f"block {block.block_id} belongs to a pool")
    return own


def register_key(home: Home, place: i64, key: bytes, num_tokens: int | None) -> bool:
    """List a pool's block under a key: as its primary one if it has none, else as an additional one.

    False when it was listed there already.
    """
    books, keys = home.books, home.keys
    if books is None or keys is None:
        raise StrangerError("a queue's block has no index")
    books.must_not_be_busy()  # a reuse callback would write into what the pool is just changing
    if place == 0:
        raise NullGivenError("the null block has no hash")
    most: int = MOST_TOKENS
    if num_tokens is not None and (num_tokens < 0 or num_tokens > most):
        raise RangeError(f"a prefix of {num_tokens} tokens is not from 0 to {MOST_TOKENS}")
    block_hash, group = keys.split(key)
    keys.tidy()
    digest = keys.keep(block_hash)
    if books.index.entry_of(place, digest, 0, group) != 0:
        return False
    books.index.put(place, digest, 0, group, 0 if num_tokens is None else num_tokens)
    books.changes += 1
    return True
