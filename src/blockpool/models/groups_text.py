"""Groups as people write them: `full:16,window=1024:16*5,mamba:256`.

One item per group, separated by commas: the kind, where it has one its size after `=`, the tokens per block after
`:`, and after `*` how often this group is repeated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from blockpool.managers import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    ReferenceWindowSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    SpecError,
)

from .errors import ModelError

# The kinds without a size, and those whose size is a field of their spec.
PLAIN: Final[dict[str, KVCacheSpec]] = {
    "full": FullAttentionSpec(1),
    "mamba": MambaSpec(1, mamba_cache_mode="align"),
    "running-mamba": MambaSpec(1),
    "ring": CircularBufferSpec(1),
    "cross": CrossAttentionSpec(1),
}
SIZED: Final[dict[str, tuple[type[KVCacheSpec], str]]] = {
    "window": (SlidingWindowSpec, "sliding_window"),
    "chunk": (ChunkedLocalAttentionSpec, "attention_chunk_size"),
    "reference": (ReferenceWindowSpec, "sliding_window"),
    "sink": (SinkFullAttentionSpec, "sink_len"),
}
MAX_GROUPS: Final = 1_000
NUMBER: Final = r"([0-9]{1,9})"
ITEM: Final = re.compile(rf"([a-z-]+)(?:={NUMBER})?:{NUMBER}(?:\*{NUMBER})?", re.ASCII)


def parse_groups(text: str) -> tuple[KVCacheGroupSpec, ...]:
    """The groups that `text` describes. Their layers have no names but the text's.

    Raises ModelError, which names the item and what is wrong with it.
    """
    groups: list[KVCacheGroupSpec] = []
    for item in text.split(","):
        item = item.strip()
        found = ITEM.fullmatch(item)
        if found is None:
            raise ModelError(
                f"groups: {item!r} is not a group such as full:16, window=1024:16 or chunk=8192:16*3 (kind, its size "
                "where it has one, tokens per block, how often)"
            )
        spec = _spec(item, found[1], found[2], int(found[3]))
        repeat = 1 if found[4] is None else int(found[4])
        if repeat < 1 or len(groups) + repeat > MAX_GROUPS:
            raise ModelError(f"groups: {item!r}: a cache has between 1 and {MAX_GROUPS} groups")
        name = item.partition("*")[0]
        groups += [KVCacheGroupSpec((f"{name} #{len(groups) + at}",), spec) for at in range(repeat)]
    return tuple(groups)


def _spec(item: str, kind: str, size: str | None, block_size: int) -> KVCacheSpec:
    try:
        if kind in PLAIN:
            if size is not None:
                raise ModelError(f"groups: {item!r}: {kind} has no size: write {kind}:{block_size}")
            return _with_block_size(PLAIN[kind], block_size)
        if kind in SIZED:
            if size is None:
                raise ModelError(f"groups: {item!r}: {kind} needs its size in tokens: {kind}=1024:{block_size}")
            spec_class, field = SIZED[kind]
            return spec_class(block_size=block_size, **{field: int(size)})
    except SpecError as error:
        raise ModelError(f"groups: {item!r}: {error}") from error
    raise ModelError(f"groups: {item!r}: {kind!r} is none of {', '.join([*PLAIN, *SIZED])}")


def groups_as_text(groups: Sequence[KVCacheGroupSpec]) -> str:
    """What `parse_groups` reads as the same specs. Names, margins, pools and ranks are not part of the text.

    Raises ModelError for a kind without a name here.
    """
    items: list[tuple[str, int]] = []
    for group in groups:
        item = _item(group.kv_cache_spec)
        if items and items[-1][0] == item:
            items[-1] = (item, items[-1][1] + 1)
        else:
            items.append((item, 1))
    return ",".join(item if repeat == 1 else f"{item}*{repeat}" for item, repeat in items)


def _item(spec: KVCacheSpec) -> str:
    for kind, plain in PLAIN.items():
        if spec == _with_block_size(plain, spec.block_size):
            return f"{kind}:{spec.block_size}"
    for kind, (spec_class, field) in SIZED.items():
        if type(spec) is spec_class:
            return f"{kind}={getattr(spec, field)}:{spec.block_size}"
    raise ModelError(f"{spec!r} has no name in text")


def _with_block_size(spec: KVCacheSpec, block_size: int) -> KVCacheSpec:
    if isinstance(spec, MambaSpec):
        return MambaSpec(block_size, mamba_cache_mode=spec.mamba_cache_mode)
    return type(spec)(block_size)
