"""What one request takes of a cache, and so how many fit beside each other: by the books, not by a formula."""

from collections.abc import Sequence
from math import gcd
from random import Random

import msgspec

from blockpool.cache import KVCacheConfig, KVCacheManager, Request
from blockpool.hashing import BlockHashes
from blockpool.managers import KVCacheGroupSpec, SinkFullAttentionSpec

from .drive import DEFAULT_BATCHED_TOKENS, drive
from .errors import ReplayError
from .expand import DIGEST_BYTES

# 8 million blocks are more than any GPU has; the books of so many take a gigabyte.
MOST_BLOCKS = 2**23
# Ten or twenty seconds: a step in which groups drop something takes half a millisecond.
MOST_STEPS = 2**15
# Beside its tokens a request may have the state that it leaves and the one that it writes, and one copy.
SPARE_BLOCKS = 4


class PromptUse(msgspec.Struct, frozen=True, kw_only=True):
    """One request that found nothing in the cache, from its first chunk until it has left. Blocks are per group."""

    num_prompt_tokens: int
    num_output_tokens: int
    at_rest: tuple[int, ...]
    """Held when prompt and output are computed and what the next token does not read is given back."""
    peak: tuple[int, ...]
    """Held when it holds the most in all: while a chunk of the prompt is computed, for the most part."""
    peak_tokens: int
    """The tokens at which that chunk ends."""
    left: tuple[int, ...]
    """That can be found again when it has left."""
    num_hashed_tokens: int
    """The prompt without what is too short for a hash."""
    first_reusable: int | None
    """The shortest prefix of the prompt that the next one could find, in tokens; None when it could find nothing."""
    same_again: int
    """What the same prompt would find, in tokens."""

    @property
    def num_rest_blocks(self) -> int:
        """`at_rest` in all groups."""
        return sum(self.at_rest)

    @property
    def num_peak_blocks(self) -> int:
        """`peak` in all groups."""
        return sum(self.peak)

    @property
    def num_left_blocks(self) -> int:
        """`left` in all groups."""
        return sum(self.left)


def measure_prompt(
    groups: Sequence[KVCacheGroupSpec],
    *,
    num_prompt_tokens: int,
    num_output_tokens: int = 0,
    max_num_batched_tokens: int = DEFAULT_BATCHED_TOKENS,
    num_encoder_tokens: int = 0,
    retention_interval: int | None = None,
) -> PromptUse:
    """Run one request alone through a cache of these groups, all over one pool, and look at each commit.

    Raises ReplayError for a request that is too large for that, or takes too many steps.
    """
    kinds, kind_of = distinct_groups(groups)
    counts = [kind_of.count(kind) for kind in range(len(kinds))]
    num_tokens = num_prompt_tokens + num_output_tokens
    num_blocks = 1 + sum(_most_blocks(group, num_tokens, num_encoder_tokens) for group in kinds)
    if num_blocks > MOST_BLOCKS:
        raise ReplayError(
            f"a request of {num_tokens:,} tokens takes {num_blocks:,} blocks, more than the {MOST_BLOCKS:,} that are "
            "measured: take larger blocks or a shorter prompt"
        )
    config = _config(num_blocks, kinds, retention_interval)
    manager = KVCacheManager(config, max_in_flight_tokens=max_num_batched_tokens)
    _check_steps(manager, num_prompt_tokens, num_output_tokens, max_num_batched_tokens)
    chain = Random(0).randbytes(DIGEST_BYTES * (num_prompt_tokens // config.unit))
    # A group of chunks resumes at their ends though nothing is cached: here all of the prompt is computed.
    request = _request("measured", num_prompt_tokens, chain, config.unit, skip_reading_prefix_cache=True)
    most = -1
    peak: tuple[int, ...] = ()
    peak_tokens = 0

    def look() -> None:
        nonlocal most, peak, peak_tokens
        kept = [one.num_kept(request.request_id) for one in manager.managers]
        total = sum(count * blocks for count, blocks in zip(counts, kept, strict=True))
        if total > most:
            most, peak, peak_tokens = total, tuple(kept), request.num_computed_tokens

    refusal = drive(
        manager,
        request,
        manager.get_computed_blocks(request),
        num_output_tokens=num_output_tokens,
        max_num_batched_tokens=max_num_batched_tokens,
        num_encoder_tokens=num_encoder_tokens,
        on_commit=look,
    )
    assert refusal is None, refusal
    at_rest = [
        one.num_kept(request.request_id) - len(one.droppable(request.request_id, num_tokens, num_prompt_tokens))
        for one in manager.managers
    ]
    manager.free(request)
    left = manager.pool.get_cached_by_group()
    again = _request("again", num_prompt_tokens, chain, config.unit)
    longer = _request("longer", num_prompt_tokens + 1, chain, config.unit)
    return PromptUse(
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        at_rest=tuple(at_rest[kind] for kind in kind_of),
        peak=tuple(peak[kind] for kind in kind_of),
        peak_tokens=peak_tokens,
        left=tuple(left.get(kind, 0) for kind in kind_of),
        num_hashed_tokens=num_prompt_tokens - num_prompt_tokens % config.unit,
        first_reusable=_first_reusable(manager, longer),
        same_again=manager.get_computed_blocks(again).num_tokens,
    )


def distinct_groups(groups: Sequence[KVCacheGroupSpec]) -> tuple[tuple[KVCacheGroupSpec, ...], list[int]]:
    """One group of each kind, and for each group which of them is like it: such groups hold and drop the same."""
    kinds: list[KVCacheGroupSpec] = []
    keys: list[tuple[object, ...]] = []
    kind_of: list[int] = []
    for group in groups:
        key = (group.kv_cache_spec, group.draft_margin, group.context_parallel_size)
        if key not in keys:
            keys.append(key)
            kinds.append(group)
        kind_of.append(keys.index(key))
    return tuple(kinds), kind_of


def num_reserved_blocks(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Blocks that no request gets: the null block, and the sinks that all requests share."""
    return 1 + sum(_sink_blocks(group) for group in groups)


def most_concurrent(num_blocks: int, groups: Sequence[KVCacheGroupSpec], use: PromptUse) -> int | None:
    """How many such requests a pool of `num_blocks` blocks holds at once; None for any number.

    All but one are at rest at their full length, and one is at its peak; no two share a block.
    """
    room = num_blocks - num_reserved_blocks(groups) - use.num_peak_blocks
    if room < 0:
        return 0
    return None if use.num_rest_blocks == 0 else 1 + room // use.num_rest_blocks


def blocks_for(num_requests: int, groups: Sequence[KVCacheGroupSpec], use: PromptUse) -> int:
    """The smallest pool that holds so many such requests at once (at least one), the null block included."""
    return num_reserved_blocks(groups) + use.num_peak_blocks + (num_requests - 1) * use.num_rest_blocks


def findable_tokens(num_blocks: int, groups: Sequence[KVCacheGroupSpec], use: PromptUse) -> int | None:
    """Tokens of such prompts that can be found again at the same time, when all have left; None where none can.

    As many prompts, and a part of one, as their blocks fill the pool.
    """
    if use.num_left_blocks == 0:
        return None
    room = max(0, num_blocks - num_reserved_blocks(groups))
    return room * use.num_hashed_tokens // use.num_left_blocks


def common_unit(groups: Sequence[KVCacheGroupSpec], retention_interval: int | None = None) -> int:
    """The tokens at whose multiples hits end. Raises ConfigError for an interval that does not fit it."""
    kinds, _ = distinct_groups(groups)
    size = 1 + sum(_most_blocks(group, 0, 0) for group in kinds)
    return KVCacheManager(_config(size, kinds, retention_interval)).alignment


def _config(num_blocks: int, kinds: tuple[KVCacheGroupSpec, ...], retention_interval: int | None) -> KVCacheConfig:
    """Hits end where every group has a block's end, as in `replay`."""
    return KVCacheConfig(num_blocks, kinds, retention_interval=retention_interval, partial_hits=False)


def _check_steps(
    manager: KVCacheManager, num_prompt_tokens: int, num_output_tokens: int, max_num_batched_tokens: int
) -> None:
    """Refuse what would take minutes. Where nothing is dropped on the way, all is taken in one step."""
    bounds = [one.unread(num_prompt_tokens + num_output_tokens, num_prompt_tokens) for one in manager.managers]
    if all(first >= end for first, end in bounds):
        return
    stride = gcd(*(one.block_size for one in manager.managers))
    num_steps = -(-num_prompt_tokens // max_num_batched_tokens) - (-num_output_tokens // stride)
    if num_steps > MOST_STEPS:
        raise ReplayError(
            f"a prompt of {num_prompt_tokens:,} tokens in chunks of {max_num_batched_tokens:,} and "
            f"{num_output_tokens:,} tokens of output take {num_steps:,} steps, more than the {MOST_STEPS:,} that are "
            "measured: take longer chunks or a shorter request"
        )


def _most_blocks(group: KVCacheGroupSpec, num_tokens: int, num_encoder_tokens: int) -> int:
    """Enough for one request, if its group dropped nothing."""
    return -(-(num_tokens + num_encoder_tokens) // group.block_size) + SPARE_BLOCKS + _sink_blocks(group)


def _sink_blocks(group: KVCacheGroupSpec) -> int:
    spec = group.kv_cache_spec
    return spec.sink_len // spec.block_size if isinstance(spec, SinkFullAttentionSpec) else 0


def _request(
    request_id: str, num_prompt_tokens: int, chain: bytes, unit: int, *, skip_reading_prefix_cache: bool = False
) -> Request:
    return Request(
        request_id,
        num_prompt_tokens=num_prompt_tokens,
        block_hashes=BlockHashes.from_digests(chain, digest_size=DIGEST_BYTES, hash_block_size=unit),
        skip_reading_prefix_cache=skip_reading_prefix_cache,
    )


def _first_reusable(manager: KVCacheManager, request: Request) -> int | None:
    """By halving: whoever may find more, finds no less."""
    unit = manager.alignment
    low, high = 1, request.num_prompt_tokens // unit + 1
    if high > 1 and manager.get_computed_blocks(request, max_length=unit).num_tokens:
        return unit
    while low < high:
        middle = (low + high) // 2
        if manager.get_computed_blocks(request, max_length=middle * unit).num_tokens:
            high = middle
        else:
            low = middle + 1
    found = manager.get_computed_blocks(request, max_length=low * unit).num_tokens
    return found or None
