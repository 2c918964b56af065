"""The pure cache question: one request after the other through one pool, each ending before the next begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from blockpool.cache import Hit, KVCacheConfig, KVCacheManager, Refusal, RefusalReason, Request
from blockpool.hashing import BlockHashes
from blockpool.managers import FullAttentionSpec, KVCacheGroupSpec

from .digests import DigestedTrace
from .drive import DEFAULT_BATCHED_TOKENS, drive
from .errors import ReplayError, ReplayInterrupted
from .expand import DIGEST_BYTES
from .kinds import group_kinds
from .losses import LossBook, Lost
from .result import GroupRun, RunResult
from .seen import SeenPrefixes
from .tier_run import StackRun
from .tiers import TierStack

if TYPE_CHECKING:
    from .below import Below

# Often enough for a progress bar, rarely enough to cost nothing.
PROGRESS_EVERY = 256
_REFUSED = -1

Progress = Callable[[int], None]


def _no_progress(num_done: int) -> None:
    pass


def replay(
    digested: DigestedTrace,
    config: KVCacheConfig,
    *,
    max_num_batched_tokens: int = DEFAULT_BATCHED_TOKENS,
    num_encoder_tokens: int = 0,
    tiers: TierStack | None = None,
    on_progress: Progress = _no_progress,
) -> RunResult:
    """Replay the trace through the cache that `config` describes, in one pool.

    The config's hash unit is that of the trace's digests. Prompts are computed in chunks of at most
    `max_num_batched_tokens`, answers to their end: what a request generates is unknown to the trace, so those blocks
    come back without a hash. At least one token of a prompt is computed even if all of it is cached.
    `num_encoder_tokens`: what cross attention reads, of each request. `tiers`: what lies below the pool.
    `on_progress` is told now and then how many requests are done.

    Raises `ReplayError` when config and digests, or tiers and groups, do not fit, `ReplayInterrupted`, with what was
    measured so far, on Ctrl-C (or when `on_progress` raises `KeyboardInterrupt`).
    """
    if config.unit != digested.hash_block_size or config.digest_size != DIGEST_BYTES:
        raise ReplayError(
            f"the trace has digests of {DIGEST_BYTES} bytes per {digested.hash_block_size} tokens, the cache"
            f" {config.digest_size} bytes per {config.unit}"
        )
    if max_num_batched_tokens < 1:
        raise ReplayError(f"max_num_batched_tokens must be at least 1 token, not {max_num_batched_tokens}")
    run = _Run(digested, config, max_num_batched_tokens, num_encoder_tokens, tiers)
    try:
        for number in range(0, len(digested), PROGRESS_EVERY):
            on_progress(number)
            run.some(PROGRESS_EVERY)
        on_progress(len(digested))
    except KeyboardInterrupt:
        raise ReplayInterrupted(run.result()) from None
    return run.result()


class _Run:
    """One pass over a trace, as far as it has come."""

    def __init__(
        self,
        digested: DigestedTrace,
        config: KVCacheConfig,
        max_num_batched_tokens: int,
        num_encoder_tokens: int,
        tiers: TierStack | None,
    ) -> None:
        self._digested = digested
        self._requests = iter(digested)
        self._config = config
        events = "off" if tiers is None else "first_last"
        self._manager = KVCacheManager(config, max_in_flight_tokens=max_num_batched_tokens, events=events)
        self._below: Below | None = None
        if tiers is not None:
            from .below import Below  # for those only who ask for tiers

            self._below = Below(self._manager, tiers)
        self._has_states = any(one.is_state and one.prefix_cacheable for one in self._manager.managers)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._num_encoder_tokens = num_encoder_tokens
        self._losses = LossBook(self._manager)
        self._seen = SeenPrefixes(digested.hash_block_size)
        # One entry per request, appended when it is done: an interruption leaves no half-counted request.
        self._hits: list[int] = []
        self._tier_hits: list[list[int]] = []  # per replayed request, where there are tiers
        self._fewest_free = self._manager.pool.get_num_free_blocks()
        self._held_at_peak = [0] * len(self._manager.managers)
        self._request = Request("none", num_prompt_tokens=1)
        self._chain = b""

    def some(self, count: int) -> None:
        """Replay the next requests of the trace."""
        manager, below = self._manager, self._below
        hash_block_size = self._digested.hash_block_size
        for _, (traced, chain) in zip(range(count), self._requests, strict=False):
            hashes = BlockHashes.from_digests(chain, digest_size=DIGEST_BYTES, hash_block_size=hash_block_size)
            request = Request(str(len(self._hits)), num_prompt_tokens=traced.num_prompt_tokens, block_hashes=hashes)
            self._request, self._chain = request, chain
            hit = manager.get_computed_blocks(request)
            prompt = self._seen.look_up(traced, chain)
            reusable = min(prompt.num_tokens, traced.num_prompt_tokens - 1)
            found = hit.num_tokens
            if below is not None:
                found = below.look_up(hit, chain, traced.num_prompt_tokens - 1)
            lost = self._lost(hit, chain, found, reusable) if found < reusable else []
            refusal = self._drive(request, hit, found - hit.num_tokens, traced.num_output_tokens)
            if refusal is not None and found:
                wanted = found
                if found > hit.num_tokens:
                    found = hit.num_tokens
                    refusal = self._drive(request, hit, 0, traced.num_output_tokens)
                if refusal is not None and found:
                    found = 0
                    hit = manager.get_computed_blocks(request, 0)
                    refusal = self._drive(request, hit, 0, traced.num_output_tokens)
                lost.append(self._losses.no_room_for(wanted - found))
            if refusal is not None:
                # The pool is empty of requests, so only its size can be in the way.
                assert refusal.reason is RefusalReason.NEVER_FITS, refusal
                self._hits.append(_REFUSED)
                continue
            manager.free(request)
            if below is not None:
                self._tier_hits.append(below.tokens_by_tier(hit, chain, found))
                below.ended(hit, chain, found)
            prompt.add()
            if reusable:
                self._losses.add(reusable, lost)
            self._hits.append(hit.num_tokens)

    def _lost(self, hit: Hit, chain: bytes, found: int, reusable: int) -> list[Lost]:
        """Why no more than `found` tokens were: what is in a tier was not lost."""
        if self._below is None:
            return self._losses.found(hit, chain, reusable)
        with self._below.as_if_on_gpu(chain):
            there = self._manager.coordinator.longest_common_hit(chain, reusable)
            lost = self._losses.found(there, chain, reusable)
        if found < there.num_tokens:
            lost.append(self._losses.apart(there, there.num_tokens - found))
        return lost

    def _drive(self, request: Request, hit: Hit, num_external_tokens: int, num_output_tokens: int) -> Refusal | None:
        return drive(
            self._manager,
            request,
            hit,
            num_output_tokens=num_output_tokens,
            num_external_tokens=num_external_tokens,
            max_num_batched_tokens=self._max_num_batched_tokens,
            num_encoder_tokens=self._num_encoder_tokens,
            on_commit=self._committed,
        )

    def _committed(self) -> None:
        manager, request = self._manager, self._request
        free = manager.pool.get_num_free_blocks()
        if free < self._fewest_free:
            self._fewest_free = free
            self._held_at_peak = [one.num_kept(request.request_id) for one in manager.managers]
        if self._has_states:
            self._losses.step_ended(self._chain, min(request.num_computed_tokens, request.num_prompt_tokens))

    def result(self) -> RunResult:
        """The figures so far."""
        manager, hits = self._manager, self._hits
        pool = manager.pool
        counters = pool.counters
        done = list(zip(self._digested.trace.requests, hits, strict=False))
        return RunResult(
            num_blocks=pool.num_gpu_blocks,
            block_size=manager.alignment,
            requests=len(hits),
            refused_requests=hits.count(_REFUSED),
            prompt_tokens=sum(request.num_prompt_tokens for request, hit in done if hit != _REFUSED),
            hit_tokens=sum(hit for hit in hits if hit != _REFUSED),
            reusable_tokens=self._losses.reusable_tokens,
            evicted_blocks=counters.evicted_blocks,
            evicted_unused_blocks=counters.evicted_unused_blocks,
            peak_held_blocks=pool.num_gpu_blocks - 1 - self._fewest_free,
            trace_requests=len(self._digested),
            groups=self._groups(counters.evicted_by_group),
            losses=self._losses.losses(),
            shortened_hits=self._losses.shortened_hits,
            tiers=self._stack_run(),
        )

    def _stack_run(self) -> StackRun | None:
        if self._below is None:
            return None
        return self._below.result(self._tier_hits[: len(self._hits) - self._hits.count(_REFUSED)])

    def _groups(self, evicted: dict[int, int]) -> tuple[GroupRun, ...]:
        cached = self._manager.pool.get_cached_by_group()
        return tuple(
            GroupRun(
                kind=kind,
                block_size=group.block_size,
                held_at_peak=self._held_at_peak[at],
                evicted_blocks=evicted.get(at, 0),
                cached_blocks=cached.get(at, 0),
            )
            for at, (kind, group) in enumerate(
                zip(group_kinds(self._config.kv_cache_groups), self._config.kv_cache_groups, strict=True)
            )
        )


def full_attention(num_blocks: int, block_size: int, hash_block_size: int | None = None) -> KVCacheConfig:
    """The cache of a model in which every layer reads everything: one group."""
    group = KVCacheGroupSpec(layer_names=("kv",), kv_cache_spec=FullAttentionSpec(block_size=block_size))
    return KVCacheConfig(
        num_blocks=num_blocks, kv_cache_groups=(group,), hash_block_size=hash_block_size, partial_hits=False
    )
