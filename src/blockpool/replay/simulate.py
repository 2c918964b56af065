"""The pure cache question: one request after the other through one pool, each ending before the next begins."""

from collections.abc import Callable

from blockpool.cache import KVCacheConfig, KVCacheManager, Refusal, RefusalReason, Request
from blockpool.hashing import BlockHashes
from blockpool.managers import FullAttentionSpec, KVCacheGroupSpec

from .digests import DigestedTrace
from .errors import ReplayInterrupted
from .expand import DIGEST_BYTES
from .result import RunResult

# Often enough for a progress bar, rarely enough to cost nothing.
PROGRESS_EVERY = 256
_REFUSED = -1

Progress = Callable[[int], None]


def _no_progress(num_done: int) -> None:
    pass


def replay(
    digested: DigestedTrace, *, num_blocks: int, block_size: int, on_progress: Progress = _no_progress
) -> RunResult:
    """Replay the trace through a pool of `num_blocks` blocks (the null block included) of `block_size` tokens.

    `block_size` is a multiple of the trace's hash block size. A request takes blocks for its prompt and its output;
    what it generates is unknown to the trace, so those blocks come back without a hash. At least one token of a
    prompt is computed even if all of it is cached. `on_progress` is told now and then how many requests are done.

    Raises `ReplayInterrupted`, with what was measured so far, on Ctrl-C (or when `on_progress` raises
    `KeyboardInterrupt`).
    """
    manager = _new_manager(num_blocks, block_size, digested.hash_block_size)
    pool = manager.pool
    hash_block_size = digested.hash_block_size
    # One entry per request, appended when it is done: an interruption leaves no half-counted request.
    hits: list[int] = []
    fewest_free = num_blocks - 1
    try:
        for number, (traced, chain) in enumerate(digested):
            if number % PROGRESS_EVERY == 0:
                on_progress(number)
            num_prompt_tokens = traced.num_prompt_tokens
            hashes = BlockHashes.from_digests(chain, digest_size=DIGEST_BYTES, hash_block_size=hash_block_size)
            request = Request(str(number), num_prompt_tokens=num_prompt_tokens, block_hashes=hashes)
            hit = manager.get_computed_blocks(request)
            num_hit_tokens = hit.num_tokens
            plan = manager.plan(
                request,
                num_new_tokens=num_prompt_tokens - num_hit_tokens,
                hit=hit,
                num_lookahead_tokens=traced.num_output_tokens,
            )
            if isinstance(plan, Refusal):
                # The pool is empty of requests, so only its size can be in the way.
                assert plan.reason is RefusalReason.NEVER_FITS, plan
                hits.append(_REFUSED)
                continue
            manager.commit(plan)
            fewest_free = min(fewest_free, pool.get_num_free_blocks())
            manager.free(request)
            hits.append(num_hit_tokens)
        on_progress(len(hits))
    except KeyboardInterrupt:
        raise ReplayInterrupted(_result(digested, manager, block_size, hits, fewest_free)) from None
    return _result(digested, manager, block_size, hits, fewest_free)


def _new_manager(num_blocks: int, block_size: int, hash_block_size: int) -> KVCacheManager:
    group = KVCacheGroupSpec(layer_names=("kv",), kv_cache_spec=FullAttentionSpec(block_size=block_size))
    config = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_groups=(group,), hash_block_size=hash_block_size, partial_hits=False
    )
    return KVCacheManager(config, max_model_len=None)


def _result(
    digested: DigestedTrace, manager: KVCacheManager, block_size: int, hits: list[int], fewest_free: int
) -> RunResult:
    counters = manager.pool.counters
    num_blocks = manager.pool.num_gpu_blocks
    done = zip(digested.trace.requests, hits, strict=False)
    return RunResult(
        num_blocks=num_blocks,
        block_size=block_size,
        requests=len(hits),
        refused_requests=hits.count(_REFUSED),
        prompt_tokens=sum(request.num_prompt_tokens for request, hit in done if hit != _REFUSED),
        hit_tokens=sum(hit for hit in hits if hit != _REFUSED),
        evicted_blocks=counters.evicted_blocks,
        evicted_unused_blocks=counters.evicted_unused_blocks,
        peak_held_blocks=num_blocks - 1 - fewest_free,
        trace_requests=len(digested),
    )
