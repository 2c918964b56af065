from collections.abc import Sequence

from blockpool.hashing.tokens import Ids

HAS_SHA_NI: bool

def chain(
    tokens: Ids,
    block_size: int,
    parent: bytes,
    extras: Sequence[bytes | None] | None,
    num_blocks: int,
    portable: bool,
    /,
) -> bytes: ...
