"""What besides its tokens makes a block's content: adapter, media, salt, embeddings, generation.

The keys of a block are one tuple of tagged tuples, so that a salt "x" can never equal an adapter "x". Tags are
constants because the pickle of a tuple depends on which of its strings are the same object.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from blockpool.hashing.errors import ExtraKeysError
from blockpool.hashing.tokens import Ids

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

Key: TypeAlias = tuple[object, ...]
"""The extra value of a block: tagged tuples in the order of ExtraKeys' fields."""

LORA = "lora"
MEDIA = "mm"
CACHE_SALT = "cache_salt"
PROMPT_EMBEDS = "prompt_embeds"
EMBEDS_MASK = "embeds_mask"
GENERATION = "generation"
SALT_FROM = "salt_from"


class MediaItem(msgspec.Struct, frozen=True):
    """An image, a sound, ...: a content `identifier`, its first token's position and its number of tokens."""

    identifier: str
    offset: int
    length: int

    def __post_init__(self) -> None:
        _check_text("media identifier", self.identifier)
        _check_integer("media offset", self.offset, at_least=0)
        _check_integer("media length", self.length, at_least=1)

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ExtraKeys:
    """The extra keys of one request. Positions are token counts from the start of the sequence.

    lora            (name, path) of the adapter: in every block
    media           sorted by offset: each in every block that it overlaps
    cache_salt      in the first block; all others inherit it by chaining. An empty salt is none
    prompt_embeds   a C-contiguous array [num_prompt_tokens, width] or any object with such a buffer: the SHA-256
                    of the block's rows, in every block; past the prompt, of no bytes. It is read when blocks are
                    hashed and must not change
    embeds_mask     one bool per prompt token, True where the prompt is an embedding rather than a token: one byte
                    per position, in the blocks of the prompt. Token ids at True positions are hashed as 0. Without
                    a mask all token ids are hashed as they are given (zeros, for a prompt of embeddings alone)
    generation      version of the weights or adapter: in the first block
    salt_from       (token_index, salt), ascending: in the block that holds token_index, where a salted region
                    begins; what precedes it stays shared

    Raises ExtraKeysError for values of another type, shape or order.
    """

    lora: tuple[str, str] | None = None
    media: Sequence[MediaItem] = ()
    cache_salt: str | None = None
    prompt_embeds: ReadableBuffer | NDArray[Any] | None = field(default=None, repr=False)
    embeds_mask: Sequence[bool] | NDArray[np.bool_] | None = field(default=None, repr=False)
    generation: int | None = None
    salt_from: Sequence[tuple[int, str]] = ()

    _everywhere: Key | None = field(init=False, repr=False)
    _offsets: list[int] = field(init=False, repr=False)
    # _reach[i]: the largest end of media[: i + 1]. Ascending even if items lie inside others, so it can be bisected.
    _reach: list[int] = field(init=False, repr=False)
    _rows: NDArray[np.uint8] | None = field(init=False, repr=False)
    _mask: NDArray[np.bool_] | None = field(init=False, repr=False)
    _row_digests: dict[tuple[int, int], bytes] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        def derive(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        if self.cache_salt is not None:
            _check_text("cache_salt", self.cache_salt)
        if self.generation is not None:
            _check_integer("generation", self.generation, at_least=0)
        derive("media", _checked_media(self.media))
        derive("salt_from", _checked_salts(self.salt_from))
        derive("_everywhere", _lora_key(self.lora))
        derive("_offsets", [item.offset for item in self.media])
        derive("_reach", list(accumulate((item.end for item in self.media), max)))
        derive("_rows", None if self.prompt_embeds is None else _as_rows(self.prompt_embeds))
        derive("_mask", None if self.embeds_mask is None else _as_mask(self.embeds_mask, self._rows))
        derive("_row_digests", {})

    def key(self, start: int, end: int) -> Key | None:
        """The extra value of the block of tokens [start, end), as it is hashed; None if it has none."""
        if not 0 <= start < end:
            raise ExtraKeysError(f"no block has the tokens [{start}, {end})")
        keys: list[Key] = list(cast(tuple[Key, ...], self._everywhere or ()))
        if self.media:
            keys += [(MEDIA, item.identifier, item.offset - start) for item in self._media_in(start, end)]
        if start == 0 and self.cache_salt:
            keys.append((CACHE_SALT, self.cache_salt))
        if self._rows is not None:
            keys.append((PROMPT_EMBEDS, self._digest_of_rows(start, end)))
        if self._mask is not None and start < len(self._mask):
            keys.append((EMBEDS_MASK, self._mask[start:end].tobytes()))
        if start == 0 and self.generation is not None:
            keys.append((GENERATION, self.generation))
        if self.salt_from:
            keys += [(SALT_FROM, at, salt) for at, salt in self.salt_from if start <= at < end]
        return tuple(keys) or None

    def event_key(self, start: int, end: int) -> Key | None:
        """The same without tags, as events publish it: a name; (identifier, offset); a salt; a digest; ..."""
        return untagged(self.key(start, end))

    def keys(
        self, first_block: int, num_blocks: int, block_size: int, num_lookahead_tokens: int = 0
    ) -> list[Key | None] | None:
        """The extra values of consecutive blocks, each taken over the block and its lookahead tokens.

        None if no block has any. Costs nothing for blocks that no media item, salt or embedding touches.
        """

        def key_of(block: int) -> Key | None:
            start = block * block_size
            return self.key(start, start + block_size + num_lookahead_tokens)

        blocks = range(first_block, first_block + num_blocks)
        if self._rows is not None:
            return [key_of(block) for block in blocks]
        keys: list[Key | None] = [self._everywhere] * num_blocks
        for block in self._touched(blocks, block_size, num_lookahead_tokens):
            keys[block - first_block] = key_of(block)
        return keys if any(keys) else None

    def without_embedded(self, ids: Ids, start: int) -> Ids:
        """`ids`, of the tokens from `start` on, with 0 at the positions that are embeddings."""
        if self._mask is None:
            return ids
        embedded = np.flatnonzero(self._mask[start : start + len(ids)])
        if not embedded.size:
            return ids
        if isinstance(ids, np.ndarray):
            array = ids.copy()
            array[embedded] = 0
            return array
        plain = list(ids)
        for i in embedded.tolist():
            plain[i] = 0
        return plain

    def _media_in(self, start: int, end: int) -> list[MediaItem]:
        """The items that overlap [start, end), by offset."""
        items = self.media[bisect_right(self._reach, start) : bisect_left(self._offsets, end)]
        return [item for item in items if item.end > start]

    def _touched(self, blocks: range, block_size: int, num_lookahead_tokens: int) -> set[int]:
        """The blocks whose key is not the one that all blocks have."""
        spans = [(at, at + 1) for at, _ in self.salt_from]
        if self.cache_salt or self.generation is not None:
            spans.append((0, 1))
        if blocks:
            end = (blocks[-1] + 1) * block_size + num_lookahead_tokens
            spans.extend((item.offset, item.end) for item in self._media_in(blocks[0] * block_size, end))
        touched: set[int] = set()
        for start, end in spans:
            # the first block whose lookahead reaches `start`, to the one that holds the last token
            first = max((start - num_lookahead_tokens) // block_size, blocks.start)
            touched.update(range(first, min((end - 1) // block_size + 1, blocks.stop)))
        return touched

    def _digest_of_rows(self, start: int, end: int) -> bytes:
        assert self._rows is not None
        span = (min(start, len(self._rows)), min(end, len(self._rows)))
        digest = self._row_digests.get(span)
        if digest is None:
            digest = self._row_digests[span] = hashlib.sha256(self._rows[slice(*span)].data).digest()
        return digest


def untagged(key: Key | None) -> Key | None:
    """The form of an extra value in events: ("lora", name, path) as name, other tags just dropped."""
    if key is None:
        return None
    entries = cast(tuple[Key, ...], key)
    return tuple(
        entry[1] if entry[0] == LORA or len(entry) == 2 else entry[1:]  # (identifier, offset), (index, salt)
        for entry in entries
    )


def _check_text(what: str, value: object) -> None:
    if type(value) is not str:
        raise ExtraKeysError(f"{what} must be a str, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as why:
        raise ExtraKeysError(f"{what} is not valid Unicode: {why}") from why


def _check_integer(what: str, value: object, *, at_least: int) -> None:
    if type(value) is not int:
        raise ExtraKeysError(f"{what} must be an int, not {type(value).__name__}")
    if not at_least <= value < 1 << 63:
        raise ExtraKeysError(f"{what} is {value}: must be at least {at_least} and below 2**63")


def _lora_key(lora: object) -> Key | None:
    if lora is None:
        return None
    if not isinstance(lora, (tuple, list)) or len(lora) != 2:
        raise ExtraKeysError(f"lora must be (name, path), not {lora!r}")
    _check_text("lora name", lora[0])
    _check_text("lora path", lora[1])
    return ((LORA, *lora),)


def _checked_media(media: Sequence[MediaItem]) -> tuple[MediaItem, ...]:
    items = tuple(media)
    for item in items:
        if not isinstance(item, MediaItem):
            raise ExtraKeysError(f"media must be MediaItems, not {type(item).__name__}")
    for before, item in pairwise(items):
        if item.offset < before.offset:
            raise ExtraKeysError(f"media must be sorted by offset: {item.offset} follows {before.offset}")
    return items


def _checked_salts(salt_from: Sequence[tuple[int, str]]) -> tuple[tuple[int, str], ...]:
    salts: list[tuple[int, str]] = []
    for entry in salt_from:
        if not isinstance(entry, (tuple, list)) or len(entry) != 2:
            raise ExtraKeysError(f"salt_from must hold (token_index, salt), not {entry!r}")
        _check_integer("salt_from token_index", entry[0], at_least=0)
        _check_text("salt_from salt", entry[1])
        if not entry[1]:
            raise ExtraKeysError(f"salt_from at {entry[0]} has an empty salt")
        if salts and entry[0] <= salts[-1][0]:
            raise ExtraKeysError(f"salt_from must ascend: {entry[0]} follows {salts[-1][0]}")
        salts.append((entry[0], entry[1]))
    return tuple(salts)


def _as_rows(embeds: ReadableBuffer | NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of the embeddings, [num_tokens, bytes per token], not copied."""
    try:
        source = embeds if isinstance(embeds, np.ndarray) else memoryview(embeds)
    except TypeError:
        kind = type(embeds).__name__
        raise ExtraKeysError(f"prompt_embeds must be an array or have a buffer, not be a {kind}") from None
    contiguous = source.flags.c_contiguous if isinstance(source, np.ndarray) else source.c_contiguous
    shape = source.shape or ()
    if len(shape) != 2 or shape[1] == 0 or not contiguous:
        raise ExtraKeysError(f"prompt_embeds must be a C-contiguous array [num_tokens, width], not of shape {shape}")
    if shape[0] == 0:
        return np.empty((0, 1), np.uint8)
    if isinstance(source, np.ndarray):
        return source.view(np.uint8)  # also for element types that no buffer can describe, such as bfloat16
    return np.frombuffer(source, np.uint8).reshape(shape[0], -1)


def _as_mask(mask: Sequence[bool] | NDArray[np.bool_], rows: NDArray[np.uint8] | None) -> NDArray[np.bool_]:
    array = np.array(mask)  # a copy: the caller's list or array may change
    if array.ndim != 1 or (array.size and array.dtype != np.bool_):
        raise ExtraKeysError("embeds_mask must be a sequence of bools")
    if rows is None:
        raise ExtraKeysError("embeds_mask without prompt_embeds")
    if len(array) != len(rows):
        raise ExtraKeysError(f"embeds_mask covers {len(array)} tokens, prompt_embeds {len(rows)}")
    return array.astype(np.bool_)
