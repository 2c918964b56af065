"""What a model says about each kind of attention: the spec of a group of layers. Plain values, not compiled.

Every spec raises SpecError for a field that breaks its rule, and names both.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from blockpool.managers.errors import SpecError


class KVCacheSpec(msgspec.Struct, frozen=True):
    """Base of all specs. `block_size` in tokens, on one rank.

    `is_state`: its blocks hold the state at their end, not the keys and values of their tokens. `event_kind`: what
    events call it, None for a kind of one's own.
    """

    is_state: ClassVar[bool] = False
    event_kind: ClassVar[str | None] = None

    block_size: int

    def __post_init__(self) -> None:
        must_be_int("block_size", self.block_size, 1, "token")

    @property
    def prefix_cacheable(self) -> bool:
        """Whether its blocks can be found again by their hashes."""
        return True


class FullAttentionSpec(KVCacheSpec, frozen=True):
    """Every token reads all tokens before it (also MLA latents and indexer caches)."""

    event_kind: ClassVar[str | None] = "full_attention"


class SlidingWindowSpec(KVCacheSpec, frozen=True):
    """A token reads itself and the `sliding_window` - 1 tokens before it."""

    event_kind: ClassVar[str | None] = "sliding_window"

    sliding_window: int

    def __post_init__(self) -> None:
        super().__post_init__()
        must_be_int("sliding_window", self.sliding_window, 1, "token")


class ChunkedLocalAttentionSpec(KVCacheSpec, frozen=True):
    """A token reads itself and the tokens before it in its own chunk of `attention_chunk_size` tokens."""

    event_kind: ClassVar[str | None] = "chunked_local_attention"

    attention_chunk_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        must_be_int("attention_chunk_size", self.attention_chunk_size, 1, "token")


class ReferenceWindowSpec(KVCacheSpec, frozen=True):
    """A token reads the whole prompt, and of the output the `sliding_window` tokens before it."""

    event_kind: ClassVar[str | None] = "reference_window"

    sliding_window: int

    def __post_init__(self) -> None:
        super().__post_init__()
        must_be_int("sliding_window", self.sliding_window, 1, "token")


class MambaSpec(KVCacheSpec, frozen=True):
    """Linear attention: one state after each token, the newest alone is read.

    `mamba_cache_mode`: "none" keeps only the running state; "align" keeps states at block ends, which can be hit.
    `num_speculative_blocks`: states of drafts, beside the running one.
    """

    event_kind: ClassVar[str | None] = "mamba"

    is_state: ClassVar[bool] = True

    num_speculative_blocks: int = 0
    mamba_cache_mode: str = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        must_be_int("num_speculative_blocks", self.num_speculative_blocks, 0, "block")
        if self.mamba_cache_mode not in ("none", "align"):
            raise SpecError(f'mamba_cache_mode must be "none" or "align", not {self.mamba_cache_mode!r}')

    @property
    def prefix_cacheable(self) -> bool:
        return self.mamba_cache_mode == "align"


class CircularBufferSpec(KVCacheSpec, frozen=True):
    """A ring of `block_size` tokens that each request overwrites again and again."""

    event_kind: ClassVar[str | None] = "circular_buffer"

    @property
    def prefix_cacheable(self) -> bool:
        return False


class CrossAttentionSpec(KVCacheSpec, frozen=True):
    """Every token reads the output of an encoder, which is written once."""

    event_kind: ClassVar[str | None] = "cross_attention"

    @property
    def prefix_cacheable(self) -> bool:
        return False


class SinkFullAttentionSpec(KVCacheSpec, frozen=True):
    """Full attention, and `sink_len` tokens that all requests read: reserved at start-up, whole blocks."""

    event_kind: ClassVar[str | None] = "sink_full_attention"

    sink_len: int

    def __post_init__(self) -> None:
        super().__post_init__()
        must_be_int("sink_len", self.sink_len, 1, "token")
        if self.sink_len % self.block_size != 0:
            raise SpecError(f"sink_len must be a multiple of block_size {self.block_size}, not {self.sink_len}")


class KVCacheGroupSpec(msgspec.Struct, frozen=True):
    """The layers that share one kind of attention, and so one block table per request.

    `draft_margin`: drafting recomputes the tokens just before a resume point, so a hit keeps one unit of distance
    from the end of what is cached; not for state groups. `context_parallel_size`: ranks that share the tokens of one
    block. `pool`: which of the cache's pools its blocks come from. `clear_new_blocks`: its kernels read beyond what
    is written, so a new block has to be cleared before it is used.
    """

    layer_names: tuple[str, ...]
    kv_cache_spec: KVCacheSpec
    draft_margin: bool = False
    context_parallel_size: int = 1
    pool: int = 0
    clear_new_blocks: bool = False

    def __post_init__(self) -> None:
        names = self.layer_names
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            raise SpecError(f"layer_names must be a tuple of str, not {names!r}")
        if not isinstance(self.kv_cache_spec, KVCacheSpec):
            raise SpecError(f"kv_cache_spec must be a KVCacheSpec, not {self.kv_cache_spec!r}")
        if not isinstance(self.draft_margin, bool):
            raise SpecError(f"draft_margin must be True or False, not {self.draft_margin!r}")
        if not isinstance(self.clear_new_blocks, bool):
            raise SpecError(f"clear_new_blocks must be True or False, not {self.clear_new_blocks!r}")
        if self.draft_margin and self.kv_cache_spec.is_state:
            raise SpecError(
                f"draft_margin must be False for a state group: {type(self.kv_cache_spec).__name__} has no state"
                " before its boundary"
            )
        must_be_int("context_parallel_size", self.context_parallel_size, 1, "rank")
        must_be_int("pool", self.pool, 0)

    @property
    def block_size(self) -> int:
        """Tokens per position of the block table, the group's unit: those of all ranks that share a block.

        A state is not shared: each rank has its own.
        """
        spec = self.kv_cache_spec
        return spec.block_size if spec.is_state else spec.block_size * self.context_parallel_size


def must_be_int(field: str, value: object, least: int, unit: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SpecError(f"{field} must be an int of at least {least}{unit and ' ' + unit}, not {value!r}")
