from collections.abc import Sequence
from typing import Literal, overload

from blockpool.hashing.tokens import Ids

HAS_SHA_NI: bool

@overload
def chain(
    form: Literal["cbor"],
    tokens: Ids,
    block_size: int,
    parent: bytes,
    extras: Sequence[bytes | None] | None,
    num_blocks: int,
    portable: bool,
    /,
) -> bytes: ...
@overload
def chain(
    form: Literal["cbor", "pickle"],
    tokens: Ids,
    block_size: int,
    parent: bytes,
    extras: Sequence[bytes | None] | None,
    num_blocks: int,
    portable: bool,
    /,
) -> bytes | None: ...
def chain_list(
    form: Literal["cbor", "pickle"],
    tokens: Ids,
    first: int,
    block_size: int,
    parent: bytes,
    extras: Sequence[bytes | None] | None,
    num_blocks: int,
    portable: bool,
    /,
) -> list[bytes] | None: ...
