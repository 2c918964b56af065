"""Canonical CBOR of what a block hash is made of (RFC 8949, section 4.2.1: shortest heads, definite lengths).

Only the types that occur in parents, tokens and extra keys: None, bool, int, bytes, str, tuple and list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from blockpool.hashing.errors import CborError

UNSIGNED, NEGATIVE, BYTES, TEXT, ARRAY = range(5)  # major types


def head(major: int, argument: int) -> bytes:
    """The head of a data item: major type and argument (a value or a length), in the fewest bytes."""
    top = major << 5  # then a small argument, or how many bytes of it follow
    if argument < 24:
        return (top | argument).to_bytes(1, "big")
    if argument < 1 << 8:
        return ((top | 24) << 8 | argument).to_bytes(2, "big")
    if argument < 1 << 16:
        return ((top | 25) << 16 | argument).to_bytes(3, "big")
    if argument < 1 << 32:
        return ((top | 26) << 32 | argument).to_bytes(5, "big")
    if argument < 1 << 64:
        return ((top | 27) << 64 | argument).to_bytes(9, "big")
    raise CborError(f"{argument} needs more than 64 bits")


def encode(value: object) -> bytes:
    """The canonical encoding of `value`. Tuples and lists are both arrays.

    Raises CborError for other types (subclasses too), for integers outside -2**64 <= n < 2**64 and for text with
    lone surrogates.
    """
    encoder = _ENCODERS.get(type(value))
    if encoder is None:
        raise CborError(f"no CBOR form for {type(value).__name__}")
    return encoder(value)


def encode_each(values: Sequence[object]) -> list[bytes | None]:
    """The extra values of consecutive blocks, encoded, except for None. Raises CborError."""
    encoded: list[bytes | None] = []
    last: object = None
    last_encoded: bytes | None = None
    for value in values:
        if value is not last:  # an adapter's key is one object in all blocks
            last, last_encoded = value, None if value is None else encode(value)
        encoded.append(last_encoded)
    return encoded


def _integer(value: int) -> bytes:
    return head(UNSIGNED, value) if value >= 0 else head(NEGATIVE, -1 - value)


def _bytes(value: bytes) -> bytes:
    return head(BYTES, len(value)) + value


def _text(value: str) -> bytes:
    try:
        text = value.encode()
    except UnicodeEncodeError as why:
        raise CborError(f"text is not valid Unicode: {why}") from why
    return head(TEXT, len(text)) + text


def _array(value: Sequence[object]) -> bytes:
    return head(ARRAY, len(value)) + b"".join([encode(item) for item in value])


_ENCODERS: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda _: b"\xf6",
    bool: lambda value: b"\xf5" if value else b"\xf4",
    int: _integer,
    bytes: _bytes,
    str: _text,
    tuple: _array,
    list: _array,
}
