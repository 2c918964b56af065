"""One request at a time through all groups: look up, plan, commit, register, release."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import SupportsIndex

from blockpool.cache.blocks import KVCacheBlocks
from blockpool.cache.config import KVCacheConfig
from blockpool.cache.content import ContentBook
from blockpool.cache.errors import ConfigError, RequestError, StalePlan
from blockpool.cache.hit import Hit, WhyNotMore
from blockpool.cache.plan import EMPTY_PLAN, AllocationPlan, PoolRoom, Refusal, RefusalReason
from blockpool.cache.request import Request
from blockpool.cache.stats import StatsBook
from blockpool.cache.steps import StepLog, without_revoked
from blockpool.hashing import BlockHashes
from blockpool.managers import NOTHING_FOUND, FullAttentionManager, FullAttentionSpec, SingleTypeKVCacheManager
from blockpool.pool import BlockPool, KVCacheEvent, PoolMetrics, StorePayload

UNLIMITED = 1 << 62
NO_BLOCKS = KVCacheBlocks(())


class CacheResetResult:
    """True when the prefix cache was emptied; else who stands in the way, with the blocks each holds."""

    def __init__(self, num_blocks_in_use: int, num_blocks_deferred: int, requests: dict[str, int]) -> None:
        self.num_blocks_in_use = num_blocks_in_use
        self.num_blocks_deferred = num_blocks_deferred
        self.requests = requests

    def __bool__(self) -> bool:
        return self.num_blocks_in_use == 0

    def __repr__(self) -> str:
        if self:
            return "CacheResetResult(done)"
        return (
            f"CacheResetResult({self.num_blocks_in_use} blocks in use, {self.num_blocks_deferred} of them deferred,"
            f" requests={self.requests})"
        )


class KVCacheManager:
    """The KV cache of one engine.

    `max_model_len`: tokens a request may reach, None for no limit. `watermark`: part of the pool, 0.0 to 1.0,
    that stays free when a waiting request is admitted beside others. `events`, `metrics`: see BlockPool.
    `verify_hashes`: keep and compare what each registered block holds, so that equal digests of different content
    are a miss and a count (`num_collisions`), never another prompt's block.

    `last_refusal`: why the last `allocate_slots` returned None.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        max_model_len: int | None = None,
        enable_caching: bool = True,
        events: str = "off",
        medium: str = "GPU",
        metrics: PoolMetrics | None = None,
        watermark: float = 0.0,
        verify_hashes: bool = False,
    ) -> None:
        if len(config.kv_cache_groups) != 1:
            raise ConfigError(f"one full-attention group is what there is yet, not {len(config.kv_cache_groups)}")
        spec = config.kv_cache_groups[0].kv_cache_spec
        if not isinstance(spec, FullAttentionSpec):
            raise ConfigError(f"one full-attention group is what there is yet, not a {type(spec).__name__}")
        if max_model_len is not None and max_model_len < 1:
            raise ConfigError(f"max_model_len must be at least 1 token, not {max_model_len}")
        if not 0.0 <= watermark <= 1.0:
            raise ConfigError(f"watermark is a part of the pool, 0.0 to 1.0, not {watermark}")
        self.config = config
        self.max_model_len = UNLIMITED if max_model_len is None else max_model_len
        self.enable_caching = enable_caching
        self.pool = BlockPool(
            config.num_blocks,
            enable_caching=enable_caching,
            hash_block_size=config.unit,
            digest_size=config.digest_size,
            events=events,
            medium=medium,
            metrics=metrics,
        )
        self.managers: tuple[SingleTypeKVCacheManager, ...] = tuple(
            FullAttentionManager(self.pool, group_id, group) for group_id, group in enumerate(config.kv_cache_groups)
        )
        self.num_watermark_blocks = int(watermark * config.num_blocks)
        self.stats = StatsBook()
        self.last_refusal: Refusal | None = None
        self._events_on = events != "off"
        self._steps = StepLog()
        self._contents = ContentBook() if verify_hashes else None

    # -- looking up ----------------------------------------------------------------------------------

    def get_computed_blocks(self, request: Request) -> Hit:
        """The longest cached prefix of a request, at most all but its last token. Read only, counts nothing."""
        version = self.pool.version
        chain = request.block_hashes
        if not self.enable_caching:
            return self._no_hit(request, WhyNotMore.CACHING_OFF)
        if request.skip_reading_prefix_cache:
            return self._no_hit(request, WhyNotMore.SKIP_READING)
        if chain is None:
            return self._no_hit(request, WhyNotMore.NO_HASH)
        self._check_chain(request, chain)
        manager = self.managers[0]
        size = manager.block_size
        max_length = request.num_tokens - 1
        most = max_length // size
        found = manager.find_longest_hit(chain.raw(), max_length, size)
        num_blocks = len(found)
        if num_blocks >= most:
            why = WhyNotMore.PROMPT_END
        elif (num_blocks + 1) * manager.factor > len(chain):
            why = WhyNotMore.NO_HASH
        else:
            why = WhyNotMore.MISS
        if self._contents is not None and num_blocks:
            before = self._contents.num_collisions
            true = self._contents.num_true(manager, request, found.block_ids())
            if true < num_blocks:
                collided = self._contents.num_collisions > before
                why = WhyNotMore.COLLISION if collided else WhyNotMore.MISS
                found = manager.shortened(found, true)
                num_blocks = true
        return Hit(request.request_id, num_blocks * size, (found,), why, self.pool, version)

    def _no_hit(self, request: Request, why: WhyNotMore) -> Hit:
        return Hit(request.request_id, 0, (), why, self.pool, self.pool.version)

    def _check_chain(self, request: Request, chain: BlockHashes) -> None:
        if chain.hash_block_size != self.pool.hash_block_size or chain.digest_size != self.pool.digest_size:
            raise RequestError(
                f"request {request.request_id!r}: its chain has digests of {chain.digest_size} bytes per"
                f" {chain.hash_block_size} tokens, this cache {self.pool.digest_size} bytes per"
                f" {self.pool.hash_block_size}"
            )

    # -- planning ------------------------------------------------------------------------------------

    def plan(
        self,
        request: Request,
        num_new_tokens: int,
        *,
        hit: Hit | None = None,
        num_lookahead_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        delay_cache_blocks: bool = False,
        has_scheduled_reqs: bool = True,
    ) -> AllocationPlan | Refusal:
        """What it takes to compute `num_new_tokens` more tokens of a request. Read only.

        `hit`: what `get_computed_blocks` found, for a request that holds no blocks yet. `num_lookahead_tokens`:
        slots for tokens that may come (drafts, or a whole answer to be). `reserved_blocks`: free blocks that this
        request may not take. `full_sequence_must_fit`: refuse unless all its known tokens would fit.
        `has_scheduled_reqs`: others run already, so that the watermark counts for a request that is to be admitted.
        `delay_cache_blocks`: register nothing at commit; `cache_blocks` will.
        """
        if num_new_tokens < 0 or num_lookahead_tokens < 0 or reserved_blocks < 0:
            raise RequestError(
                f"request {request.request_id!r}: num_new_tokens {num_new_tokens}, num_lookahead_tokens"
                f" {num_lookahead_tokens} and reserved_blocks {reserved_blocks} must not be negative"
            )
        if request.block_hashes is not None:
            self._check_chain(request, request.block_hashes)
        manager = self.managers[0]
        held = manager.num_held(request.request_id)
        if hit is not None:
            self._check_hit(request, hit, held)
            if hit.num_tokens == 0:
                hit = None
        hit_tokens = 0 if hit is None else hit.num_tokens
        if num_new_tokens == 0 and hit_tokens == 0:
            raise RequestError(f"request {request.request_id!r}: nothing to compute and no hit to adopt")
        if held == 0 and request.num_computed_tokens:
            raise RequestError(
                f"request {request.request_id!r} holds no blocks, but num_computed_tokens is"
                f" {request.num_computed_tokens}"
            )
        total = min(request.num_computed_tokens + hit_tokens, self.max_model_len)
        slots = min(total + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        adopted = 0 if hit is None else len(hit.groups[0])
        num_new = max(0, manager.num_blocks(slots) - held - adopted)
        to_register = 0
        if self.enable_caching and not delay_cache_blocks and not request.no_store:
            to_register = min(total + num_new_tokens, request.num_tokens)
        if num_new == 0 and hit is None and held:
            if to_register == 0 or manager.is_registered(request.request_id, to_register):
                return EMPTY_PLAN
            return AllocationPlan(request, self.pool, self.pool.version, None, (0,), to_register)
        evictable = 0
        if hit is not None:
            if hit.pool_version != self.pool.version and not manager.holds_still(hit.groups[0]):
                return self._refusal(request, RefusalReason.STALE_HIT, num_new, 0)
            evictable = manager.num_evictable(hit.groups[0])
        needed = num_new + evictable
        withheld = reserved_blocks
        if held == 0 and has_scheduled_reqs:
            withheld += self.num_watermark_blocks
        whole = manager.num_blocks(min(request.num_tokens, self.max_model_len)) if full_sequence_must_fit else 0
        most = max(manager.num_blocks(slots), whole)
        if most > self.config.num_blocks - 1:
            return self._refusal(request, RefusalReason.NEVER_FITS, most, 0)
        if full_sequence_must_fit:
            needed = max(needed, whole - held - adopted + evictable)
        if needed + withheld > self.pool.get_num_free_blocks():
            return self._refusal(request, None, needed, withheld, hit)
        return AllocationPlan(request, self.pool, self.pool.version, hit, (num_new,), to_register)

    def _check_hit(self, request: Request, hit: Hit, held: int) -> None:
        if hit.request_id != request.request_id:
            raise RequestError(f"request {request.request_id!r}: this hit is of request {hit.request_id!r}")
        if hit.pool is not self.pool:
            raise RequestError(f"request {request.request_id!r}: this hit is of another cache")
        if (hit.num_tokens or not request.num_computed_tokens) and (held or request.num_computed_tokens):
            raise RequestError(
                f"request {request.request_id!r}: a hit is for a request without blocks and computed tokens,"
                f" this one has {held} blocks and {request.num_computed_tokens} tokens"
            )
        if hit.num_tokens >= request.num_tokens:
            raise RequestError(
                f"request {request.request_id!r}: a hit of {hit.num_tokens} tokens leaves none of its"
                f" {request.num_tokens} to compute"
            )

    def _refusal(
        self, request: Request, reason: RefusalReason | None, needed: int, withheld: int, hit: Hit | None = None
    ) -> Refusal:
        usage = self.pool.get_usage_parts()
        helps = self.pool.next_fence
        if reason is None:
            reason = RefusalReason.NO_ROOM
            until = self.pool.get_deferred_blocks()
            if hit is not None:  # what the request would adopt is not given back to it
                for block in hit.groups[0].block_ids():
                    until.pop(block, None)
            missing = needed + withheld - usage.free
            if missing <= len(until):
                reason = RefusalReason.WAIT_FOR_FENCE
                helps = sorted(until.values())[missing - 1]
        room = PoolRoom(needed, withheld, usage.free, usage.deferred, usage.held, helps)
        return Refusal(request.request_id, reason, (room,))

    # -- committing ----------------------------------------------------------------------------------

    def commit(self, plan: AllocationPlan | Refusal) -> KVCacheBlocks:
        """Do exactly what the plan says; the new blocks per group (without the hit's).

        Raises StalePlan when the pool has changed since the plan was made.
        """
        if isinstance(plan, Refusal):
            raise RequestError(f"a refusal cannot be committed: {plan}")
        request = plan.request
        if request is None:
            return NO_BLOCKS
        if plan.pool is not self.pool:
            raise RequestError(f"request {request.request_id!r}: this plan is of another cache")
        if plan.pool_version != self.pool.version:
            raise StalePlan(
                f"request {request.request_id!r}: planned on pool version {plan.pool_version}, it is at"
                f" {self.pool.version} now: plan again"
            )
        hit = plan.hit
        request_id = request.request_id
        managers = self.managers
        admitted = managers[0].num_held(request_id) == 0
        if admitted:
            for at, manager in enumerate(managers):
                manager.adopt(request_id, NOTHING_FOUND if hit is None else hit.groups[at])
        blocks = tuple(
            [
                manager.allocate(request_id, count)
                for manager, count in zip(managers, plan.num_new_blocks, strict=True)
            ]
        )
        if plan.num_tokens_to_register:
            self._register(request, plan.num_tokens_to_register)
        if admitted and not request.skip_reading_prefix_cache:
            hit_tokens = 0 if hit is None else hit.num_tokens
            self.stats.admitted(request.num_tokens, hit_tokens, resumed=request.num_preemptions > 0)
        self.pool.watchers.raise_errors()
        return KVCacheBlocks(blocks)

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Hit | None = None,
        num_lookahead_tokens: int = 0,
        delay_cache_blocks: bool = False,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
    ) -> KVCacheBlocks | None:
        """`plan` and `commit` in one: the new blocks, or None when refused (`last_refusal` says why)."""
        hit_tokens = 0 if new_computed_blocks is None else new_computed_blocks.num_tokens
        if num_new_computed_tokens not in (0, hit_tokens):
            raise RequestError(
                f"request {request.request_id!r}: num_new_computed_tokens {num_new_computed_tokens}, the hit has"
                f" {hit_tokens}"
            )
        plan = self.plan(
            request,
            num_new_tokens,
            hit=new_computed_blocks,
            num_lookahead_tokens=num_lookahead_tokens,
            full_sequence_must_fit=full_sequence_must_fit,
            reserved_blocks=reserved_blocks,
            delay_cache_blocks=delay_cache_blocks,
            has_scheduled_reqs=has_scheduled_reqs,
        )
        if isinstance(plan, Refusal):
            self.last_refusal = plan
            return None
        return self.commit(plan)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Register every block of the request that is full at `num_computed_tokens` and was not registered yet."""
        if num_computed_tokens < 0:
            raise RequestError(f"request {request.request_id!r}: {num_computed_tokens} computed tokens")
        if self.enable_caching and not request.no_store:
            self._register(request, min(num_computed_tokens, request.num_tokens))

    def _register(self, request: Request, num_tokens: int) -> None:
        chain = request.block_hashes
        if chain is None:
            return
        self._check_chain(request, chain)
        payload: StorePayload | None = None
        for manager in self.managers:
            span = manager.unregistered(request.request_id, num_tokens, len(chain))
            if not span:
                continue
            factor = manager.factor
            first_digest = max(0, span.start * factor - 1)  # with the parent of the first block
            digests = chain.raw(first_digest, span.stop * factor)
            if self._events_on and payload is None:
                payload = self._payload(request, chain)
            blocks = manager.register(request.request_id, span.start, span.stop, digests, first_digest, payload)
            step = self._steps.current
            if step is not None:
                step.registered.append((manager, [int(block) for block in blocks]))
            if self._contents is not None:
                for position, block in zip(span, blocks, strict=True):
                    self._contents.record(manager, request, position, int(block))

    def _payload(self, request: Request, chain: BlockHashes) -> StorePayload:
        keys = request.extra_keys
        tokens: Sequence[int] = () if request.all_token_ids is None else request.all_token_ids
        return StorePayload(
            token_ids=tokens,
            extra_keys=None if keys is None else keys.event_key,
            lora_id=request.lora_id,
            lora_name=None if keys is None or keys.lora is None else keys.lora[0],
            session_id=request.session_id,
            lookahead=None if chain.num_lookahead_tokens == 0 else lookahead_of(chain),
        )

    # -- releasing -----------------------------------------------------------------------------------

    def free(self, request: Request | str, after: SupportsIndex | None = None) -> bool:
        """Give a request's blocks back, deepest first; with `after`, when that step is acknowledged.

        False, and nothing happens, for a request that holds nothing: unknown, or freed already.
        """
        request_id = request if isinstance(request, str) else request.request_id
        holding = [manager for manager in self.managers if request_id in manager.tables]
        for manager in holding:
            self.pool.free_vec(manager.tables[request_id].deepest_first(), after)
            del manager.tables[request_id]  # only now: a refused call has changed nothing
        return bool(holding)

    def get_block_ids(self, request: Request | str) -> tuple[list[int], ...]:
        """The request's table per group; empty ones for an unknown request."""
        request_id = request if isinstance(request, str) else request.request_id
        return tuple(manager.block_ids(request_id) for manager in self.managers)

    def reset_prefix_cache(self) -> CacheResetResult:
        """Forget every hash. Refused while any block is held: the answer names the requests that hold some."""
        done = self.pool.reset_prefix_cache()
        if done:
            return CacheResetResult(0, 0, {})
        held: dict[str, int] = {}
        for manager in self.managers:
            for request_id in manager.tables:
                held[request_id] = held.get(request_id, 0) + manager.num_held(request_id)
        return CacheResetResult(done.num_blocks_in_use, done.num_blocks_deferred, held)

    # -- steps and events ----------------------------------------------------------------------------

    def begin_step(self, step_id: int) -> None:
        """What happens from now on belongs to this step: its events are held back until `acknowledge`.

        Step ids rise from 0. An engine that never calls this sees everything at once.
        """
        self._steps.collect(self.pool.take_events())
        self._steps.begin(step_id)

    def acknowledge(self, step_id: int) -> None:
        """The step ran: its events may be seen, then the blocks that waited for it are free. Twice is once."""
        self._steps.collect(self.pool.take_events())
        self._steps.acknowledge(step_id)
        self.pool.advance(step_id)

    def cancel_step(self, step_id: int) -> None:
        """The newest step was planned, but never ran: what it registered is revoked, its events were never.

        The engine puts its requests' `num_computed_tokens` back; blocks stay with the requests that got them, also
        those that a request got as a hit on another's, and are registered when they are computed after all. An
        admission stays counted.
        """
        self._steps.collect(self.pool.take_events())
        step = self._steps.cancel(step_id)
        pool = self.pool
        for manager, blocks in step.registered:
            # A block that was handed out again within the step has no hash now, or one of this very step.
            pool.evict_blocks(blocks)
            manager.unregister(blocks)
        self._steps.collect(without_revoked(step.events + pool.take_events()))

    def take_events(self) -> list[KVCacheEvent]:
        """The events of acknowledged steps since the last call, in order."""
        self._steps.collect(self.pool.take_events())
        return self._steps.take()

    # -- answers about the cache ---------------------------------------------------------------------

    @property
    def usage(self) -> float:
        """The part of the pool in use, 0.0 to 1.0; cached blocks that nobody holds are free."""
        return self.pool.get_usage()

    @property
    def num_collisions(self) -> int:
        """Lookups that met an equal digest of other content (0 unless verify_hashes)."""
        return 0 if self._contents is None else self._contents.num_collisions


def lookahead_of(chain: BlockHashes) -> Callable[[int], list[int]]:
    """The tokens behind the block that ends at a token, which its hash covers too."""

    def behind(end: int) -> list[int]:
        return list(chain.lookahead_tokens(end // chain.hash_block_size - 1) or ())

    return behind
