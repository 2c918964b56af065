"""A request's chain: append tokens, get digests. Only what became full is hashed, and nothing is read twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import overload

from blockpool.hashing.algorithms import hash_algorithm, none_hash
from blockpool.hashing.errors import BlockSizeError, DigestError, TokenCountError, TokenIdError, TokensUnknown
from blockpool.hashing.extra_keys import ExtraKeys, Key, untagged
from blockpool.hashing.kernel import plain_list
from blockpool.hashing.tokens import Ids, TokenIds, as_ids, join
from blockpool.hashing.view import BlockHashView


class BlockHasher:
    """How to hash: the algorithm, the unit and the seed that all chains of an engine share.

    With `num_hash_lookahead_tokens` = L > 0 a unit is hashed only when L further tokens exist, and its extra value
    becomes (extra or None, t1, ..., tL), the extra taken over the unit plus L.

    Raises UnknownAlgorithm, MissingDependency, SeedError, BlockSizeError.
    """

    __slots__ = ("_algorithm", "hash_block_size", "none_hash", "num_hash_lookahead_tokens")

    def __init__(
        self,
        algorithm: str = "sha256_cbor",
        *,
        hash_block_size: int = 16,
        seed: str | None = None,
        num_hash_lookahead_tokens: int = 0,
    ) -> None:
        if hash_block_size < 1:
            raise BlockSizeError(f"hash_block_size {hash_block_size}: must be at least 1")
        if num_hash_lookahead_tokens < 0:
            raise BlockSizeError(f"num_hash_lookahead_tokens {num_hash_lookahead_tokens}: must be at least 0")
        self._algorithm = hash_algorithm(algorithm)
        self.hash_block_size = hash_block_size
        self.num_hash_lookahead_tokens = num_hash_lookahead_tokens
        self.none_hash = none_hash(algorithm, seed)

    @property
    def algorithm(self) -> str:
        """Name of the hash algorithm."""
        return self._algorithm.name

    @property
    def digest_size(self) -> int:
        """Bytes per digest."""
        return self._algorithm.digest_size

    def __repr__(self) -> str:
        return f"<BlockHasher: {self.algorithm}, {self.hash_block_size} tokens per digest>"

    def start(self, tokens: TokenIds = (), extra_keys: ExtraKeys | None = None) -> BlockHashes:
        """A new chain over `tokens`. Raises what BlockHashes.append_tokens raises."""
        chain = BlockHashes(self, extra_keys)
        chain.append_tokens(tokens)
        return chain

    def hash_blocks(self, ids: Ids, parent: bytes, extras: list[Key | None] | None, num_blocks: int) -> bytes:
        """The digests of `num_blocks` consecutive blocks after `parent`; ids behind them are only checked."""
        return self._algorithm.chain(ids, self.hash_block_size, parent, extras, num_blocks)


class BlockHashes:
    """The digests of one token sequence, in order: a chain that only grows, or is cut back by truncate.

    Tokens are kept only until they are hashed (with lookahead, those that were looked at as well).
    """

    __slots__ = (
        "_digests",
        "_extra_keys",
        "_hasher",
        "_looked_at",
        "_num_tokens",
        "_tail",
        "digest_size",
        "hash_block_size",
    )

    def __init__(self, hasher: BlockHasher, extra_keys: ExtraKeys | None = None) -> None:
        self.digest_size = hasher.digest_size
        self.hash_block_size = hasher.hash_block_size
        self._hasher: BlockHasher | None = hasher
        self._extra_keys = extra_keys
        # One contiguous buffer. bytes while nothing is appended, so that raw() can hand it out as it is.
        self._digests: bytes | bytearray = b""
        self._num_tokens = 0
        self._tail: list[int] = []  # the tokens behind the last digest
        self._looked_at: list[tuple[int, ...]] = []  # per digest, with lookahead only

    @classmethod
    def from_digests(
        cls, buffer: bytes, *, digest_size: int = 32, hash_block_size: int = 16, num_tokens: int | None = None
    ) -> BlockHashes:
        """A chain whose digests are known and whose tokens are not; `buffer` holds the digests, concatenated.

        It can be read and truncated; nothing can be appended. `num_tokens` may name an incomplete last block.
        O(1); `buffer` is not copied. Raises DigestError, BlockSizeError, TokenCountError.
        """
        if digest_size < 1 or len(buffer) % digest_size:
            raise DigestError(f"{len(buffer)} bytes are no whole number of digests of {digest_size} bytes")
        if hash_block_size < 1:
            raise BlockSizeError(f"hash_block_size {hash_block_size}: must be at least 1")
        num_hashed = len(buffer) // digest_size * hash_block_size
        if num_tokens is None:
            num_tokens = num_hashed
        elif not num_hashed <= num_tokens < num_hashed + hash_block_size:
            raise TokenCountError(
                f"{num_tokens} tokens do not fit {num_hashed // hash_block_size} full blocks of {hash_block_size}"
            )
        chain = cls.__new__(cls)
        chain.digest_size = digest_size
        chain.hash_block_size = hash_block_size
        chain._hasher = None
        chain._extra_keys = None
        chain._digests = bytes(buffer)
        chain._num_tokens = num_tokens
        chain._tail = []
        chain._looked_at = []
        return chain

    @property
    def num_tokens(self) -> int:
        """How many tokens the chain covers, hashed or not."""
        return self._num_tokens

    @property
    def num_lookahead_tokens(self) -> int:
        """How many tokens behind a unit its digest depends on."""
        return 0 if self._hasher is None else self._hasher.num_hash_lookahead_tokens

    def append_tokens(self, tokens: TokenIds) -> int:
        """Append `tokens` (ids, 0 <= id < 2**32) and hash the blocks that became full. Returns how many did.

        Fastest for int32, uint32 and int64 arrays, then lists and tuples; any iterable of integers will do. Where
        the extra keys have a mask, ids at embedded positions are ignored.

        Raises TokenIdError, its index counting from the start of `tokens`, and TokensUnknown for a chain made
        from digests. What raises has changed nothing.
        """
        hasher = self._hasher
        if hasher is None:
            raise TokensUnknown("this chain was made from digests: its tokens are not known")
        ids = as_ids(tokens)
        if self._extra_keys is not None:
            ids = self._extra_keys.without_embedded(ids, self._num_tokens)
        num_lookahead = hasher.num_hash_lookahead_tokens
        num_blocks = (len(self._tail) + len(ids) - num_lookahead) // hasher.hash_block_size
        if num_blocks <= 0:
            self._tail.extend(plain_list(ids))
            self._num_tokens += len(ids)
            return 0
        if num_lookahead:
            ids = plain_list(ids)
        joined = join(self._tail, ids)
        looked_at = _tokens_behind(joined, num_blocks, hasher.hash_block_size, num_lookahead)
        extras = self._extra_values(num_blocks, looked_at)
        parent = self[-1] if self._digests else hasher.none_hash
        try:
            digests = hasher.hash_blocks(joined, parent, extras, num_blocks)
        except TokenIdError as bad:
            raise TokenIdError(bad.index - len(self._tail), bad.value) from None
        tail = plain_list(joined[num_blocks * hasher.hash_block_size :])
        if not self._digests:
            self._digests = digests
        else:
            if isinstance(self._digests, bytes):
                self._digests = bytearray(self._digests)
            self._digests += digests
        self._looked_at += looked_at
        self._tail = tail
        self._num_tokens += len(ids)
        return num_blocks

    def _extra_values(self, num_blocks: int, looked_at: list[tuple[int, ...]]) -> list[Key | None] | None:
        """The extra values of the next blocks."""
        extras = None
        if self._extra_keys is not None:
            extras = self._extra_keys.keys(len(self), num_blocks, self.hash_block_size, self.num_lookahead_tokens)
        if not looked_at:
            return extras
        return [(extra, *ids) for extra, ids in zip(extras or [None] * num_blocks, looked_at, strict=True)]

    def truncate(self, num_tokens: int) -> int:
        """Forget the tokens from position `num_tokens` on: a rejected draft, an edit. Returns what is covered now.

        That is `num_tokens` if no digest depends on a forgotten token. Otherwise those digests go, and because
        hashed tokens are not kept, the chain falls back to the end of the last untouched block (and of what that
        looked at): the next tokens to append are those from the returned position on.
        Raises TokenCountError unless 0 <= num_tokens <= self.num_tokens.
        """
        if not 0 <= num_tokens <= self._num_tokens:
            raise TokenCountError(f"cannot truncate a chain of {self._num_tokens} tokens to {num_tokens}")
        unit = self.hash_block_size
        if num_tokens == self._num_tokens:
            return num_tokens
        keep = min(len(self), max(0, num_tokens - self.num_lookahead_tokens) // unit)
        if keep == len(self):
            del self._tail[num_tokens - keep * unit :]
            self._num_tokens = num_tokens
            return num_tokens
        if isinstance(self._digests, bytearray):
            del self._digests[keep * self.digest_size :]
        else:
            self._digests = self._digests[: keep * self.digest_size]
        del self._looked_at[keep:]
        self._tail = list(self._looked_at[-1]) if self._looked_at else []
        self._num_tokens = keep * unit + len(self._tail)
        return self._num_tokens

    def __len__(self) -> int:
        return len(self._digests) // self.digest_size

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        size = self.digest_size
        at = self._position(index) * size
        return bytes(self._digests[at : at + size])

    def __iter__(self) -> Iterator[bytes]:
        i = 0
        while i < len(self):
            yield self[i]
            i += 1

    def __repr__(self) -> str:
        return f"<BlockHashes: {len(self)} digests, {self._num_tokens} tokens>"

    def raw(self, first: int = 0, last: int | None = None) -> bytes:
        """The digests [first, last), concatenated, `digest_size` bytes each. Raises IndexError outside of the chain.

        The whole chain is copied once after an append, then handed out as it is.
        """
        size = self.digest_size
        last = len(self) if last is None else last
        if not 0 <= first <= last <= len(self):
            raise IndexError(f"digests [{first}, {last}) of {len(self)}")
        if first == 0 and last == len(self):
            self._digests = bytes(self._digests)
            return self._digests
        return bytes(memoryview(self._digests)[first * size : last * size])

    def with_block_size(self, block_size: int) -> BlockHashView:
        """This chain in blocks of `block_size` tokens. Raises BlockSizeError if no multiple of hash_block_size."""
        return BlockHashView(self, block_size)

    def parent_of(self, index: int) -> bytes | None:
        """The digest before digest `index`; None for the first."""
        i = self._position(index)
        return None if i == 0 else self[i - 1]

    def extra_keys(self, index: int) -> Key | None:
        """The tagged extra keys that were hashed into block `index` (with lookahead, without its tokens).

        None if there are none, and for a chain made from digests, of which they are not known.
        """
        start = self._position(index) * self.hash_block_size
        return self.keys_of_span(start, start + self.hash_block_size)

    def event_extra_keys(self, index: int) -> Key | None:
        """The same without tags, as events publish them."""
        return untagged(self.extra_keys(index))

    def keys_of_span(self, start: int, end: int) -> Key | None:
        """The tagged extra keys of a block of tokens [start, end), with those of its lookahead."""
        if self._extra_keys is None:
            return None
        return self._extra_keys.key(start, end + self.num_lookahead_tokens)

    def lookahead_tokens(self, index: int) -> tuple[int, ...] | None:
        """The ids behind block `index` that went into its digest; None for a chain without lookahead."""
        i = self._position(index)
        return self._looked_at[i] if self._looked_at else None

    def _position(self, index: int) -> int:
        """A digest's index counted from the start. Raises IndexError."""
        count = len(self._digests) // self.digest_size
        i = index + count if index < 0 else index
        if not 0 <= i < count:
            raise IndexError(f"digest {index} of {count}")
        return i


def _tokens_behind(ids: Ids, num_blocks: int, block_size: int, count: int) -> list[tuple[int, ...]]:
    """The `count` ids behind each of the blocks; an empty list if count is 0."""
    if not count:
        return []
    ends = range(block_size, (num_blocks + 1) * block_size, block_size)
    return [tuple(ids[end : end + count]) for end in ends]
