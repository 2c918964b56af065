"""Buffers as the tiers want them: one run of bytes, of a length that fits. All with the buffer protocol are taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blockpool.offload.errors import KeyLengthError, PageError


def as_bytes(page: Any, key: bytes) -> memoryview:
    view = page if type(page) is memoryview else memoryview(page)
    if not view.c_contiguous:
        raise PageError(f"the page of key {key.hex()} is not one run of bytes")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def pages_to_store(
    keys: Sequence[bytes], pages: Sequence[Any], page_bytes: int, max_key_bytes: int
) -> list[memoryview]:
    """Raises PageError and KeyLengthError."""
    _check_counts(keys, pages)
    views = []
    for key, page in zip(keys, pages, strict=True):
        view = as_bytes(page, key)
        if not 0 < len(key) <= max_key_bytes:
            raise KeyLengthError(f"a key of {len(key)} bytes; this tier takes 1 to {max_key_bytes}: {key.hex()}")
        if not 0 < len(view) <= page_bytes:
            raise PageError(f"the page of key {key.hex()} has {len(view)} bytes; this tier takes 1 to {page_bytes}")
        views.append(view)
    return views


def pages_to_fill(keys: Sequence[bytes], pages: Sequence[Any]) -> list[memoryview]:
    """Raises PageError."""
    _check_counts(keys, pages)
    views = []
    for key, page in zip(keys, pages, strict=True):
        view = as_bytes(page, key)
        if view.readonly:
            raise PageError(f"the buffer for key {key.hex()} cannot be written")
        views.append(view)
    return views


def _check_counts(keys: Sequence[bytes], pages: Sequence[Any]) -> None:
    if len(keys) != len(pages):
        raise PageError(f"{len(keys)} keys with {len(pages)} pages")
