"""One request at a time through all groups: look up, plan, commit, register, release."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, SupportsIndex

from librt.vecs import append, vec
from mypy_extensions import i32

from blockpool.cache.block_copy import BlockCopy
from blockpool.cache.blocks import KVCacheBlocks
from blockpool.cache.config import KVCacheConfig
from blockpool.cache.content import ContentBook
from blockpool.cache.errors import ConfigError, RequestError, StalePlan
from blockpool.cache.groups import Groups
from blockpool.cache.hit import Hit, WhyNotMore
from blockpool.cache.pins import PinBook, PinResult
from blockpool.cache.plan import EMPTY_PLAN, AllocationPlan, Refusal, RefusalReason
from blockpool.cache.planning import Ask, Demand, refusal
from blockpool.cache.request import Request
from blockpool.cache.reset import CacheResetResult
from blockpool.cache.state_table import StateTable
from blockpool.cache.stats import StatsBook
from blockpool.cache.steps import Moved, StepLog, without_revoked
from blockpool.cache.stored import StoredBlocks, StoredLog
from blockpool.cache.storing import Storing
from blockpool.cache.worker_lists import WorkerLists
from blockpool.managers import NOTHING_FOUND, CommonHit, Coordinator, SingleTypeKVCacheManager, SlidingWindowSpec
from blockpool.pool import BlockPool, BlockStored, KVCacheEvent, PoolMetrics

UNLIMITED = 1 << 60  # compiled code computes with 62 bits
AT_REST: Final = EMPTY_PLAN  # no lookup of a name in the hottest path
NO_BLOCKS = KVCacheBlocks(())
NO_SCRATCH: list[int] = []


class KVCacheManager:
    """The KV cache of one engine.

    `max_model_len`: tokens a request may reach, None for no limit. `max_in_flight_tokens`: tokens of one request that
    are computed at a time at most, which bounds what windows hold; by default `max_model_len`.
    `max_steps_in_flight`: steps that are planned before the first of them is acknowledged. `watermark`: part of each
    pool, 0.0 to 1.0, that stays free when a waiting request is admitted beside others. `events`, `metrics`,
    `clock`: see BlockPool. `pin_cap`: part of each pool that pins may keep. `pools`: pools that exist already, one
    per number of blocks in the config, in place of new ones; no other manager may use them.
    `verify_hashes`: keep and compare what each registered block holds, so that equal digests of different content
    are a miss and a count (`num_collisions`), never another prompt's block. `tells_stored`: keep what `take_stored`
    and `take_hits` say until they are called; whoever sets it calls both after each step.

    `managers`: one per group. `alignment`: hits end at its multiples, in tokens. `last_refusal`: why the last
    `allocate_slots` returned None.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        max_model_len: int | None = None,
        max_in_flight_tokens: int | None = None,
        max_steps_in_flight: int = 1,
        enable_caching: bool = True,
        events: str = "off",
        medium: str = "GPU",
        metrics: PoolMetrics | None = None,
        watermark: float = 0.0,
        verify_hashes: bool = False,
        tells_stored: bool = False,
        pin_cap: float = 0.5,
        clock: Callable[[], float] | None = None,
        pools: Sequence[BlockPool] | None = None,
    ) -> None:
        if max_model_len is not None and max_model_len < 1:
            raise ConfigError(f"max_model_len must be at least 1 token, not {max_model_len}")
        if max_in_flight_tokens is not None and max_in_flight_tokens < 1:
            raise ConfigError(f"max_in_flight_tokens must be at least 1 token, not {max_in_flight_tokens}")
        if max_steps_in_flight < 1:
            raise ConfigError(f"max_steps_in_flight must be at least 1 step, not {max_steps_in_flight}")
        if not 0.0 <= watermark <= 1.0:
            raise ConfigError(f"watermark is a part of the pool, 0.0 to 1.0, not {watermark}")
        if not 0.0 <= pin_cap <= 1.0:
            raise ConfigError(f"pin_cap is a part of the pool, 0.0 to 1.0, not {pin_cap}")
        self.config = config
        self.max_model_len = UNLIMITED if max_model_len is None else max_model_len
        self.max_in_flight_tokens = self.max_model_len if max_in_flight_tokens is None else max_in_flight_tokens
        self.enable_caching = enable_caching
        if pools is None:
            pools = [
                BlockPool(
                    size,
                    enable_caching=enable_caching,
                    hash_block_size=config.unit,
                    digest_size=config.digest_size,
                    events=events,
                    medium=medium,
                    metrics=metrics,
                    clock=clock,
                )
                for size in config.pool_sizes
            ]
        else:
            check_pools(config, pools, enable_caching)
        self.pools: tuple[BlockPool, ...] = tuple(pools)
        self.pool: BlockPool = self.pools[0]
        self.groups = Groups(config, self.pools)
        self.managers: tuple[SingleTypeKVCacheManager, ...] = tuple(self.groups.managers)
        for manager in self.managers:
            manager.max_steps_in_flight = max_steps_in_flight
        self.num_watermark_blocks: list[int] = [int(watermark * size) for size in config.pool_sizes]
        self.stats = StatsBook()
        self.last_refusal: Refusal | None = None
        self._events_on = events != "off"
        self._steps = StepLog()
        self._contents = ContentBook() if verify_hashes else None
        self._stored = StoredLog() if tells_stored else None
        self.stored_for: object = None  # who takes what is stored: each block is named once
        self.storing = Storing(self.groups, self._events_on, self._contents, self._stored)
        self.worker_lists = WorkerLists(self.groups)
        self._pins = PinBook(self.pools, pin_cap)

    @property
    def coordinator(self) -> Coordinator:
        return self.groups.coordinator

    @property
    def alignment(self) -> int:
        return self.groups.alignment

    @property
    def version(self) -> int:
        """Grows with every change of any pool."""
        return self.groups.version()

    @property
    def tells_stored(self) -> bool:
        return self._stored is not None

    @tells_stored.setter
    def tells_stored(self, wanted: bool) -> None:
        if wanted != self.tells_stored:
            self._stored = StoredLog() if wanted else None
            self.storing.stored = self._stored

    # -- looking up ----------------------------------------------------------------------------------

    def get_computed_blocks(self, request: Request, max_length: int | None = None) -> Hit:
        """The longest cached prefix of a request that every group can resume from. Read only, counts nothing.

        At most `max_length` tokens, and at most all but the request's last token.
        """
        if not self.enable_caching:
            return self._no_hit(request, WhyNotMore.CACHING_OFF)
        if request.skip_reading_prefix_cache:
            return self._no_hit(request, WhyNotMore.SKIP_READING)
        request.must_fit(self.pool)
        most = request.num_tokens - 1
        if max_length is not None:
            if max_length < 0:
                raise RequestError(f"request {request.request_id!r}: max_length {max_length} must not be negative")
            most = min(most, max_length)
        num_hashes = request.num_hashes()
        digests = request.digests(0, num_hashes)
        num_collisions = self.num_collisions
        common, is_true = self._longest_true(request, digests, most)
        if not is_true:
            why = WhyNotMore.COLLISION if self.num_collisions > num_collisions else WhyNotMore.MISS
        else:
            following = common.num_tokens + self.groups.alignment
            if following > most:
                why = WhyNotMore.PROMPT_END
            elif following > num_hashes * self.pool.hash_block_size:
                why = WhyNotMore.NO_HASH
            else:
                why = WhyNotMore.MISS
        length = common.num_tokens
        while common.num_tokens and self._would_copy_unwritten(common):
            common = self.groups.coordinator.longest_common_hit(digests, common.num_tokens - 1)
            why = WhyNotMore.MISS
        ready = self._ready_length(digests, most, length)
        return Hit(request.request_id, common, why, ready, self, self.version)

    def _longest_true(self, request: Request, digests: bytes, most: int) -> tuple[CommonHit, bool]:
        """The longest hit whose content is the request's, and whether that is the longest of all."""
        common = self.groups.coordinator.longest_common_hit(digests, most)
        contents = self._contents
        if contents is None:
            return common, True
        longest = common.num_tokens
        while common.num_tokens:
            length = contents.true_length(self.groups.managers, request, common)
            if length == common.num_tokens:
                break
            common = self.groups.coordinator.longest_common_hit(digests, length)
        return common, common.num_tokens == longest

    def _no_hit(self, request: Request, why: WhyNotMore) -> Hit:
        count = len(self.managers)
        nothing = CommonHit(0, tuple([NOTHING_FOUND] * count), tuple([None] * count), None)
        return Hit(request.request_id, nothing, why, 0, self, self.version)

    def _would_copy_unwritten(self, common: CommonHit) -> bool:
        """Whether the hit ends inside a block that the current step itself writes, after it has made its copies."""
        step = self._steps.current
        if step is None:
            return False
        for manager, hit in zip(self.managers, common.groups, strict=True):
            if hit.num_tokens % manager.block_size != 0:
                written = step.written.get(manager.group_id)
                if written is not None and int(hit.blocks[len(hit) - 1]) in written:
                    return True
        return False

    def _ready_length(self, digests: bytes, most: int, num_tokens: int) -> int:
        """How long the hit will be when the steps in flight have run, as far as the index goes, if that is more."""
        waits = self.storing.waiting.of_chain(digests, self.pool.digest_size)
        if not waits:
            return num_tokens
        awaited: list[dict[bytes, int] | None] = [None] * len(self.managers)
        for waiting in waits:
            if waiting.boundary and self.storing.waiting.is_replaced(waiting):
                continue
            known = awaited[waiting.manager.group_id]
            if known is None:
                known = {}
                awaited[waiting.manager.group_id] = known
            known.update(waiting.entries())
        try:
            for manager, known in zip(self.managers, awaited, strict=True):
                manager.awaited = known
            return max(num_tokens, self.groups.coordinator.longest_common_hit(digests, most).num_tokens)
        finally:
            for manager in self.managers:
                manager.awaited = None

    # -- planning ------------------------------------------------------------------------------------

    def plan(
        self,
        request: Request,
        num_new_tokens: int,
        *,
        hit: Hit | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int | None = None,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int | tuple[int, ...] = 0,
        delay_cache_blocks: bool = False,
        has_scheduled_reqs: bool = True,
    ) -> AllocationPlan | Refusal:
        """What it takes to compute `num_new_tokens` more tokens of a request. Read only.

        `hit`: what `get_computed_blocks` found, for a request that holds no blocks yet. `num_lookahead_tokens`:
        slots for tokens that may come (drafts, or a whole answer to be). `num_external_computed_tokens`: tokens
        behind the hit that a connector brings; None when none was asked. `num_encoder_tokens`: for cross attention.
        `reserved_blocks`: free blocks that this request may not take, in every pool or pool by pool.
        `full_sequence_must_fit`: refuse unless all its known tokens would fit.
        `has_scheduled_reqs`: others run already, so that the watermark counts for a request that is to be admitted.
        `delay_cache_blocks`: register nothing at commit; `cache_blocks` will.
        """
        external = 0 if num_external_computed_tokens is None else num_external_computed_tokens
        if num_new_tokens < 0 or num_lookahead_tokens < 0 or external < 0 or num_encoder_tokens < 0:
            raise RequestError(
                f"request {request.request_id!r}: num_new_tokens {num_new_tokens}, num_lookahead_tokens"
                f" {num_lookahead_tokens}, num_external_computed_tokens {external} and num_encoder_tokens"
                f" {num_encoder_tokens} must not be negative"
            )
        is_running = request.request_id in self.managers[0].tables
        hit_tokens = 0
        if hit is not None:
            self._check_hit(request, hit, is_running)
            hit_tokens = hit.num_tokens
        if num_new_tokens == 0 and hit_tokens == 0 and external == 0:
            raise RequestError(f"request {request.request_id!r}: nothing to compute and no hit to adopt")
        if not is_running:
            self._check_admission(request, hit_tokens, external, num_new_tokens)
        elif external:
            raise RequestError(f"request {request.request_id!r} holds blocks: external tokens come before that")
        elif self.storing.requests.get(request.request_id, request) is not request:
            raise RequestError(f"request {request.request_id!r}: another request of that id holds blocks")
        computed = min(request.num_computed_tokens + hit_tokens + external, self.max_model_len)
        main = min(computed + num_new_tokens, self.max_model_len)
        slots = min(main + num_lookahead_tokens, self.max_model_len)
        settled = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
        to_register = 0
        if self.enable_caching and not delay_cache_blocks and not request.no_store:
            to_register = min(main, request.num_tokens)
        if is_running:
            if self._is_at_rest(request, main, slots, settled, num_encoder_tokens, to_register):
                return AT_REST
            self._check_readable(request, computed, main)
        version = self.groups.version()
        moves = self._moves(request.request_id, is_running and num_new_tokens > 0)
        adopted = hit if hit_tokens else None
        ask = Ask(request, adopted, is_running, computed, main, slots, settled, num_encoder_tokens, moves)
        demand = Demand(self.groups, ask)
        if demand.num_copies and is_running and demand.fits_never():
            ask.moves = [0] * len(moves)  # nobody is to find what the request would not get past
            demand = Demand(self.groups, ask)
        if hit is not None and not is_running:
            if hit.version != version and not self._holds_still(hit):
                return self._refused(request, RefusalReason.STALE_HIT, demand.needed, demand)
            if hit.ready_length > hit.num_tokens:
                return self._refused(request, RefusalReason.STATE_NOT_READY, demand.needed, demand)
        new = demand.new
        whole = min(request.num_tokens, self.max_model_len)
        if full_sequence_must_fit and whole > slots:
            new = demand.whole(whole, self.max_model_len, self.max_in_flight_tokens)
        needed = demand.with_more(new)
        withheld = self._withheld(reserved_blocks, not is_running and has_scheduled_reqs)
        for at, pool in enumerate(self.pools):
            if needed[at] + withheld[at] > pool.get_num_free_blocks() + demand.freed[at]:
                reason = RefusalReason.NEVER_FITS if demand.fits_never() else None
                return self._refused(request, reason, needed, demand, withheld, adopted)
        return AllocationPlan(
            request,
            self,
            version,
            hit,
            tuple(demand.new),
            tuple(demand.dropped),
            demand.num_copies,
            slots,
            main,
            computed,
            num_external_computed_tokens,
            num_encoder_tokens,
            settled,
            to_register,
        )

    def _check_hit(self, request: Request, hit: Hit, is_running: bool) -> None:
        if hit.request_id != request.request_id:
            raise RequestError(f"request {request.request_id!r}: this hit is of request {hit.request_id!r}")
        if hit.manager is not self:
            raise RequestError(f"request {request.request_id!r}: this hit is of another cache")
        if (hit.num_tokens or not request.num_computed_tokens) and (is_running or request.num_computed_tokens):
            raise RequestError(
                f"request {request.request_id!r}: a hit is for a request without blocks and computed tokens,"
                f" this one has {self.managers[0].num_held(request.request_id)} blocks and"
                f" {request.num_computed_tokens} tokens"
            )

    def _check_readable(self, request: Request, computed: int, main: int) -> None:
        for manager in self.groups.managers:
            if not manager.can_read(request.request_id, computed, main, request.num_prompt_tokens):
                raise RequestError(
                    f"request {request.request_id!r}: group {manager.group_id} lacks blocks for a step from token"
                    f" {computed} to {main}: num_computed_tokens fell behind what was dropped or never adopted, or"
                    " drafts of a state group were not given as num_lookahead_tokens"
                )

    def _check_admission(self, request: Request, hit_tokens: int, external: int, num_new_tokens: int) -> None:
        request.must_fit(self.pool)
        if request.num_computed_tokens:
            raise RequestError(
                f"request {request.request_id!r} holds no blocks, but num_computed_tokens is"
                f" {request.num_computed_tokens}"
            )
        found = hit_tokens + external
        if found > request.num_tokens or (found == request.num_tokens and num_new_tokens):
            raise RequestError(
                f"request {request.request_id!r}: a hit of {hit_tokens} tokens and {external} from elsewhere leave"
                f" none of its {request.num_tokens} to compute"
            )

    def _is_at_rest(
        self, request: Request, main: int, slots: int, settled: int, num_encoder_tokens: int, to_register: int
    ) -> bool:
        request_id = request.request_id
        prompt = request.num_prompt_tokens
        hashed = request.num_hashes() * self.pool.hash_block_size if to_register else 0
        for manager in self.groups.managers:
            tokens = main if manager.is_state else slots
            if not manager.at_rest(
                request_id,
                tokens,
                settled,
                prompt,
                num_encoder_tokens,
                to_register,
                hashed,
                request.num_computed_tokens,
            ):
                return False
        return True

    def _moves(self, request_id: str, computes: bool) -> list[int]:
        in_flight = list(self._steps.in_flight)
        return [
            self.storing.tail_to_move(manager, request_id, in_flight) if computes else 0
            for manager in self.groups.managers
        ]

    def _holds_still(self, hit: Hit) -> bool:
        for manager, group in zip(self.groups.managers, hit.groups, strict=True):
            if not manager.holds_still(group):
                return False
        return True

    def _withheld(self, reserved_blocks: int | tuple[int, ...], is_admission: bool) -> list[int]:
        if isinstance(reserved_blocks, tuple):
            withheld = list(reserved_blocks)
            if len(withheld) != len(self.pools):
                raise RequestError(f"reserved_blocks {reserved_blocks} for {len(self.pools)} pools")
        else:
            withheld = [reserved_blocks] * len(self.pools)
        if any(blocks < 0 for blocks in withheld):
            raise RequestError(f"reserved_blocks must not be negative, not {reserved_blocks}")
        if is_admission:
            for at in range(len(withheld)):
                withheld[at] += self.num_watermark_blocks[at]
        return withheld

    def _refused(
        self,
        request: Request,
        reason: RefusalReason | None,
        needed: list[int],
        demand: Demand,
        withheld: list[int] | None = None,
        hit: Hit | None = None,
    ) -> Refusal:
        kept = [0] * len(self.pools) if withheld is None else withheld
        return refusal(self.groups, request.request_id, reason, needed, kept, demand.freed, hit)

    # -- committing ----------------------------------------------------------------------------------

    def commit(self, plan: AllocationPlan | Refusal) -> KVCacheBlocks:
        """Do exactly what the plan says; the blocks that were appended per group (without the hit's).

        First what is no longer read is dropped and all hits are taken, in all groups; only then new blocks, so that
        none of them can be somebody's hit. Raises StalePlan when a pool has changed since the plan was made.
        """
        if isinstance(plan, Refusal):
            raise RequestError(f"a refusal cannot be committed: {plan}")
        request = plan.request
        if request is None:
            return NO_BLOCKS
        if plan.manager is not self:
            raise RequestError(f"request {request.request_id!r}: this plan is of another cache")
        version = self.groups.version()
        if plan.version != version:
            raise StalePlan(
                f"request {request.request_id!r}: planned on pool version {plan.version}, it is at"
                f" {version} now: plan again"
            )
        request_id = request.request_id
        managers = self.groups.managers
        admitted = request_id not in managers[0].tables
        hit = plan.hit
        external = 0 if plan.num_external_tokens is None else plan.num_external_tokens
        moves: list[int] = []
        if admitted:
            for at, manager in enumerate(managers):
                manager.adopt(request_id, NOTHING_FOUND if hit is None else hit.groups[at])
            self.storing.admitted(request, 0 if hit is None else hit.junction)
        else:
            moves = self._moves(request_id, plan.num_copies > 0)
            if plan.num_copies == 0:
                self._drop_tails(request_id)
            for manager in managers:
                manager.drop(request_id, plan.num_settled_tokens, request.num_prompt_tokens)
        appended: list[vec[i32]] = []
        for at, manager in enumerate(managers):
            if not admitted:
                self._move_tail(manager, request_id, moves[at])
            elif hit is not None and hit.groups[at].num_tokens % manager.block_size != 0:
                self._copy_last(manager, request_id)
            if manager.is_state and self._steps.current is not None:
                self._steps.current.states.append(StateTable(manager, request_id))
            scratch = manager.scratch_of(request_id) if self.groups.clears[at] else NO_SCRATCH
            blocks = manager.grow(
                request_id,
                plan.num_tokens_without_lookahead if manager.is_state else plan.num_tokens,
                plan.num_computed_tokens,
                request.num_prompt_tokens,
                plan.num_encoder_tokens,
            )
            if self.groups.clears[at]:
                self._clear(manager, request_id, blocks, plan.num_computed_tokens if external else 0, scratch)
            appended.append(blocks)
        if plan.num_tokens_to_register:
            loaded = plan.num_computed_tokens if external else 0
            if 0 < loaded < plan.num_tokens_without_lookahead:
                self._register_loaded_states(request, loaded)
            self.storing.register(request, plan.num_tokens_to_register, loaded, self._steps.current)
        if admitted and hit is not None and self._stored is not None and request.num_preemptions == 0:
            self._stored.hits.append(hit)
        if admitted and not request.skip_reading_prefix_cache:
            self.stats.admitted(
                request.num_tokens,
                0 if hit is None else hit.num_tokens,
                resumed=request.num_preemptions > 0,
                external=plan.num_external_tokens,
            )
        raise_errors(self.pools)
        return KVCacheBlocks(tuple(appended))

    def _copy_last(self, manager: SingleTypeKVCacheManager, request_id: str) -> None:
        """The hit ends inside a block that others may hold: the request goes on in a copy of it."""
        fresh = manager.pool.take(1)
        position = manager.num_held(request_id) - 1
        source = manager.swap_block(request_id, position, int(fresh[0]))
        self.worker_lists.copy(manager, source, int(fresh[0]), self._steps.current)
        manager.pool.free_vec(append(vec[i32](), i32(source)), None)

    def _move_tail(self, manager: SingleTypeKVCacheManager, request_id: str, source: int) -> None:
        """What the index says of a state goes to a copy; the request goes on in the block that it has."""
        if source:
            fresh = manager.pool.take(1)
            target = int(fresh[0])
            step = self._steps.current
            self.storing.move_tail(manager, source, target, list(self._steps.in_flight))
            self._pins.moved(manager.pool, source, target)
            self.worker_lists.copy(manager, source, target, step)
            manager.pool.free_vec(fresh, None)
            if step is not None:
                step.moved.append(Moved(manager, request_id, source, target))
        manager.tables[request_id].tail_block = 0

    def _register_loaded_states(self, request: Request, loaded: int) -> None:
        """A state that came from elsewhere stands in a block of its own when it ends one."""
        for manager in self.groups.cached:
            if manager.is_state and loaded % manager.block_size == 0:
                self.storing.register_group(manager, request, loaded, loaded, self._steps.current)

    def _drop_tails(self, request_id: str) -> None:
        """States that the index names, and that are written on without a copy, are to be found no more."""
        for manager in self.groups.managers:
            source = self.storing.tail_to_move(manager, request_id, list(self._steps.in_flight))
            if source:
                self.storing.drop_tail(manager, source, list(self._steps.in_flight))

    def _clear(
        self,
        manager: SingleTypeKVCacheManager,
        request_id: str,
        blocks: vec[i32],
        num_loaded_tokens: int,
        scratch: list[int],
    ) -> None:
        """New blocks are to be cleared, but for those that are filled from elsewhere; draft states only moved."""
        first = manager.num_held(request_id) - len(blocks)
        size = manager.block_size
        new = vec[i32]()
        for at, b in enumerate(blocks):
            end = (first + at + 1) * size
            filled = end - size < num_loaded_tokens <= end if manager.is_state else end <= num_loaded_tokens
            if not (filled and manager.prefix_cacheable) and int(b) not in scratch:
                new = append(new, b)
        self.worker_lists.clear(manager.group_id, new, self._steps.current)

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Hit | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int | None = None,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int | tuple[int, ...] = 0,
        has_scheduled_reqs: bool = True,
    ) -> KVCacheBlocks | None:
        """`plan` and `commit` in one: the appended blocks, or None when refused (`last_refusal` says why)."""
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
            num_external_computed_tokens=num_external_computed_tokens,
            num_encoder_tokens=num_encoder_tokens,
            full_sequence_must_fit=full_sequence_must_fit,
            reserved_blocks=reserved_blocks,
            delay_cache_blocks=delay_cache_blocks,
            has_scheduled_reqs=has_scheduled_reqs,
        )
        if isinstance(plan, Refusal):
            self.last_refusal = plan
            return None
        return self.commit(plan)

    def cache_blocks(self, request: Request, num_computed_tokens: int | tuple[int, ...]) -> None:
        """Register every block of the request that is full at `num_computed_tokens` and was not registered yet.

        `num_computed_tokens`: one number, or one per group, where what is there differs from group to group.
        """
        if isinstance(num_computed_tokens, tuple):
            lengths = list(num_computed_tokens)
            if len(lengths) != len(self.managers):
                raise RequestError(
                    f"request {request.request_id!r}: {len(lengths)} lengths for {len(self.managers)} groups"
                )
        else:
            lengths = [num_computed_tokens] * len(self.managers)
        if min(lengths) < 0:
            raise RequestError(f"request {request.request_id!r}: {min(lengths)} computed tokens")
        if self.enable_caching and not request.no_store and request.request_id in self.managers[0].tables:
            request.must_fit(self.pool)
            step = self._steps.current
            planned = None if step is None else step.take(request.request_id)
            self.storing.register_each(request, [min(length, request.num_tokens) for length in lengths], step)
            if step is not None and planned is not None:  # what is computed already stays when the request leaves
                step.keep(request.request_id)
                step.registered[request.request_id], step.waiting[request.request_id] = planned

    def next_checkpoint(self, request: Request, hit: Hit | None = None) -> int | None:
        """The next token at which a step should end, so that states are there for those who come later: the prompt's
        replay boundary, a junction, each retention interval. None: no group keeps states, or there is none ahead.

        `hit`: of a request that is about to be admitted with it. A state is only kept where a step has ended.
        """
        start = request.num_computed_tokens + (0 if hit is None else hit.num_tokens)
        named = self.storing.boundaries.get(request.request_id)
        if named is None:
            named = self.storing.named_boundaries(request, 0 if hit is None else hit.junction)
        ahead = [
            stop
            for manager in self.groups.cached
            if manager.is_state
            for stop in self.groups.policy.stops(manager, start, named)
            if stop <= request.num_tokens
        ]
        return min(ahead, default=None)

    def drop(self, request: Request, settled_tokens: int) -> None:
        """Give back now what no token behind `settled_tokens` reads; a commit does so by itself."""
        for manager in self.groups.managers:
            manager.drop(request.request_id, settled_tokens, request.num_prompt_tokens)

    # -- orders for the worker -----------------------------------------------------------------------

    def take_block_copies(self) -> list[BlockCopy]:
        """The copies to make before the next forward pass, in this order, after the clears. Each is named once."""
        return self.worker_lists.take_copies()

    def take_blocks_to_clear(self) -> tuple[list[int], ...]:
        """New blocks per group that are to be cleared before they are used (`clear_new_blocks`), each once."""
        return self.worker_lists.take_clears()

    # -- releasing -----------------------------------------------------------------------------------

    def free(self, request: Request | str, after: SupportsIndex | None = None) -> bool:
        """Give a request's blocks back, deepest first, group by group; with `after`, when that step is acknowledged.

        False, and nothing happens, for a request that holds nothing: unknown, or freed already. Freed at once within
        the step that was to compute it, it is not computed, and what it registered in that step is revoked. Raises
        RequestError when somebody shares that already: the step has to compute it, so free it `after` the step.
        """
        request_id = request if isinstance(request, str) else request.request_id
        holding = [manager for manager in self.managers if request_id in manager.tables]
        step = self._steps.current
        if holding and step is not None:
            if after is None:
                self.storing.withdraw(step, request_id)
            for earlier in self._steps.in_flight:
                earlier.keep(request_id)
        for manager in holding:
            blocks = manager.tables[request_id].deepest_first()
            manager.pool.free_vec(blocks, after)
            if after is None:
                self.worker_lists.given_back(manager.group_id, blocks)
            del manager.tables[request_id]  # only now: a refused call has changed nothing
        self.storing.forget(request_id)
        return bool(holding)

    def get_block_ids(self, request: Request | str) -> tuple[list[int], ...]:
        """The request's table per group; empty ones for an unknown request."""
        request_id = request if isinstance(request, str) else request.request_id
        return tuple(manager.block_ids(request_id) for manager in self.managers)

    def reset_prefix_cache(self) -> CacheResetResult:
        """Forget every hash. Refused while any block is held: the answer names those that hold some."""
        num_in_use = 0
        num_deferred = 0
        for at, pool in enumerate(self.pools):
            num_in_use += self.groups.capacity(at) - pool.get_num_free_blocks()
            num_deferred += pool.get_usage_parts().deferred
        if num_in_use:
            pins, holds = self._pins.holders()
            return CacheResetResult(num_in_use, num_deferred, self._holders(), pins, holds)
        for manager in self.managers:
            manager.unreserve()
        for pool in self.pools:
            pool.reset_prefix_cache()
        for manager in self.managers:
            manager.reserve()
        return CacheResetResult(0, 0, {}, {}, {})

    def _holders(self) -> dict[str, int]:
        held: dict[str, int] = {}
        for manager in self.managers:
            for request_id in manager.tables:
                held[request_id] = held.get(request_id, 0) + manager.num_kept(request_id)
        return held

    # -- pins ----------------------------------------------------------------------------------------

    def pin(self, request: Request, owner: str, until: float | None = None) -> PinResult:
        """Keep what is cached of a request's tokens: no request can take those blocks until `unpin(owner)`, or until
        that time by the clock. The answer says how much; nothing is pinned that would exceed the cap of a pool.
        """
        most = request.num_tokens
        digests = request.digests(0, request.num_hashes())
        request.must_fit(self.pool)
        common, _ = self._longest_true(request, digests, most if self.enable_caching else 0)
        return self._pins.pin(self.groups, common, owner, until)

    def unpin(self, owner: str) -> int:
        """End all pins of an owner; how many blocks were pinned by them."""
        return self._pins.unpin(owner)

    def expire_pins(self) -> int:
        """End the pins whose time has come, by the clock; how many blocks were pinned by them."""
        return self._pins.expire()

    # -- steps and events ----------------------------------------------------------------------------

    def begin_step(self, step_id: int) -> None:
        """What happens from now on belongs to this step: its events are held back until `acknowledge`.

        Step ids rise from 0. An engine that never calls this sees everything at once.
        """
        self._collect()
        self.worker_lists.begin(self._steps.begin(step_id))

    def acknowledge(self, step_id: int) -> None:
        """The step ran: states and loaded blocks can be found, its events may be seen, and the blocks that waited for
        it are free. Twice is once; a step that was not acknowledged before is with it.
        """
        self._collect()
        self._steps.acknowledge(step_id)
        while True:
            step = self._steps.next_done()
            if step is None:
                break
            self.storing.make_findable(step)
            self._steps.released.extend(step.events)
            for pool in self.pools:
                self._steps.announce(pool.take_events())
        for pool in self.pools:
            pool.advance(step_id)
        raise_errors(self.pools)

    def cancel_step(self, step_id: int) -> None:
        """The newest step was planned, but never ran: what it registered is revoked, its events were never.

        The engine puts its requests' `num_computed_tokens` back; blocks stay with the requests that got them, also
        those that a request got as a hit on another's, and are registered when they are computed after all. Its
        copies and blocks to clear are in the lists again, for the step that runs next. An admission stays counted.
        """
        self._collect()
        step = self._steps.cancel(step_id)
        for moved in reversed(step.moved):
            self._pins.moved(moved.manager.pool, moved.target, moved.source)
        self.storing.revoke(step, list(self._steps.in_flight))
        for state in reversed(step.states):
            state.restore()
        events = step.events
        for pool in self.pools:
            events = events + pool.take_events()
        self._steps.collect(without_revoked(events, self._is_cached))
        self.worker_lists.again(step)
        earlier = self._steps.current
        for pool in self.pools:
            pool.withdraw_fence(step_id, None if earlier is None else earlier.step_id)
        raise_errors(self.pools)

    def _collect(self) -> None:
        if self._events_on:
            for pool in self.pools:
                self._steps.collect(pool.take_events())

    def _is_cached(self, digest: bytes | int, group_id: int | None) -> bool:
        if not isinstance(digest, bytes) or group_id is None:
            return False
        return self.managers[group_id].pool.get_cached_block(digest, [group_id]) is not None

    def take_events(self) -> list[KVCacheEvent]:
        """The events of acknowledged steps since the last call, in order; stores say the kind of their group."""
        self._collect()
        events = self._steps.take()
        for event in events:
            if isinstance(event, BlockStored) and event.group_idx is not None:
                spec = self.config.kv_cache_groups[event.group_idx].kv_cache_spec
                event.kv_cache_spec_kind = spec.event_kind
                if isinstance(spec, SlidingWindowSpec):
                    event.kv_cache_spec_sliding_window = spec.sliding_window
        return events

    # -- copies that others keep ---------------------------------------------------------------------

    def take_stored(self) -> list[StoredBlocks]:
        """Full blocks that were registered and computed since the last call: of acknowledged steps, and loaded ones.

        A block that has lost its hash meanwhile is left out; one may be named twice. Empty without `tells_stored`.
        """
        return [] if self._stored is None else self._stored.take()

    def take_hits(self) -> list[Hit]:
        """The hits of requests that were admitted for the first time since the last call (with `tells_stored`)."""
        return [] if self._stored is None else self._stored.take_hits()

    # -- answers about the cache ---------------------------------------------------------------------

    @property
    def usage(self) -> float:
        """The part of the fullest pool in use, 0.0 to 1.0; cached blocks that nobody holds are free."""
        return max([pool.get_usage() for pool in self.pools])

    @property
    def num_collisions(self) -> int:
        """Lookups that met an equal digest of other content (0 unless verify_hashes)."""
        return 0 if self._contents is None else self._contents.num_collisions


def raise_errors(pools: Sequence[BlockPool]) -> None:
    """Raise what callbacks and hooks of any pool raised: one error as it is, several as a group."""
    errors: list[BaseException] = []
    for pool in pools:
        errors += pool.watchers.errors
        pool.watchers.errors = []
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise BaseExceptionGroup("callbacks of the pools failed", errors)


def check_pools(config: KVCacheConfig, pools: Sequence[BlockPool], enable_caching: bool) -> None:
    sizes = tuple([pool.num_gpu_blocks for pool in pools])
    if sizes != config.pool_sizes:
        raise ConfigError(f"pools of {sizes} blocks, the config says {config.pool_sizes}")
    for pool in pools:
        if pool.hash_block_size != config.unit or pool.digest_size != config.digest_size:
            raise ConfigError(
                f"a pool has digests of {pool.digest_size} bytes per {pool.hash_block_size} tokens, the config"
                f" {config.digest_size} bytes per {config.unit}"
            )
        if pool.enable_caching != enable_caching:
            raise ConfigError(f"a pool has enable_caching={pool.enable_caching}, the cache {enable_caching}")
