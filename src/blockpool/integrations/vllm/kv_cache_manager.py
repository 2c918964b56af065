"""vLLM's KVCacheManager: its methods, its objects, our managers."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from librt.vecs import vec
from mypy_extensions import i32, i64, mypyc_attr

from blockpool.cache import Hit, Refusal, WhyNotMore
from blockpool.cache import KVCacheManager as Cache
from blockpool.integrations.vllm.block import KVCacheBlock
from blockpool.integrations.vllm.block_pool import (
    PoolOverBooks,
    measure_accessed,
    measure_handed_out,
    publish_removed,
)
from blockpool.integrations.vllm.demand import blocks_of, demand_of, hit_of
from blockpool.integrations.vllm.offering import Offering
from blockpool.integrations.vllm.translate import Translated, translate
from blockpool.integrations.vllm.twin import Twin
from blockpool.managers import (
    NOTHING_FOUND,
    CircularBufferManager,
    CommonHit,
    GroupHit,
    RetentionPolicy,
    SingleTypeKVCacheManager,
)
from blockpool.pool.layout import FLAGS, HASHED, TOKENS


@mypyc_attr(allow_interpreted_subclasses=True)
class ManagerOverBooks:
    """The blocks of all requests, group by group, as vLLM's scheduler and its connectors expect them.

    `block_pool` shows the same books with vLLM's block objects; `coordinator` is a view for those who look into
    vLLM's.
    """

    def __init__(
        self,
        kv_cache_config: Any,
        max_model_len: int,
        scheduler_block_size: int,
        hash_block_size: int,
        max_in_flight_tokens: int | None = None,
        enable_caching: bool = True,
        use_eagle: bool = False,
        num_hash_lookahead_tokens: int = 0,
        num_prefill_lookahead: int = 0,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        metrics_collector: Any = None,
        watermark: float = 0.0,
        enable_mamba_shared_prefix_checkpoint: bool = False,
    ) -> None:
        in_flight = max_model_len if max_in_flight_tokens is None else max_in_flight_tokens
        found: Translated = translate(
            kv_cache_config,
            max_model_len=max_model_len,
            max_in_flight_tokens=in_flight,
            scheduler_block_size=scheduler_block_size,
            hash_block_size=hash_block_size,
            enable_caching=enable_caching,
            use_eagle=use_eagle,
            num_prefill_lookahead=num_prefill_lookahead,
            dcp_world_size=dcp_world_size,
            pcp_world_size=pcp_world_size,
            shared_prefix_checkpoint=enable_mamba_shared_prefix_checkpoint,
        )
        self.kv_cache_config = kv_cache_config
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.enable_kv_cache_events = enable_kv_cache_events
        self.use_eagle = use_eagle
        self.log_stats = log_stats
        self.metrics_collector = metrics_collector
        self.mamba_shared_prefix_checkpoint = False
        self.retained_hit_group_ids: tuple[int, ...] = ()
        self.num_kv_cache_groups = len(kv_cache_config.kv_cache_groups)
        self.watermark_blocks = int(watermark * kv_cache_config.num_blocks)
        self.scheduler_block_size = scheduler_block_size
        self.hash_block_size = hash_block_size
        self.num_reprefillable_tokens = max(0, num_prefill_lookahead - 1)
        self.is_fine: bool = found.is_fine
        self.caps: list[int] = list(found.caps)
        make_pool: Any = import_module("blockpool.integrations.vllm.pools").BlockPool
        pool: PoolOverBooks = make_pool(
            kv_cache_config.num_blocks,
            enable_caching,
            found.config.unit,
            enable_kv_cache_events,
            metrics_collector,
            num_hash_lookahead_tokens,
        )
        pool.hash_block_size = hash_block_size
        self.block_pool = pool
        self.cache = Cache(
            found.config,
            max_model_len=max_model_len,
            max_in_flight_tokens=in_flight,
            enable_caching=enable_caching,
            pools=[pool.books],
        )
        align(self.cache, found.alignment)
        self.first_groups = first_groups(self)
        self._offering = Offering(self.cache.groups, pool, scheduler_block_size)
        self.cache.storing = self._offering
        self._theirs: Any = import_module("vllm.v1.core.kv_cache_manager")
        status: Any = import_module("vllm.v1.request").RequestStatus
        self._waiting: list[Any] = [status.WAITING, status.PREEMPTED]
        self._twins: dict[str, Twin] = {}
        #: What the last lookup has handed out, and what that was made of: mostly it comes back at once.
        self._found: Any = None
        self._found_hits: list[GroupHit] = []
        views: Any = import_module("blockpool.integrations.vllm.views")
        #: Which groups' new blocks the worker zeroes, and the blocks that it has not been told of.
        self._zeroed: list[bool] = views.zeroed_groups(kv_cache_config)
        self._to_zero: list[list[int]] = [[] for _ in self._zeroed]
        self.kv_cache_event_metadata: Any = views.event_metadata(kv_cache_config)
        self.empty_kv_cache_blocks: Any = self._theirs.KVCacheBlocks(tuple([() for _ in self._zeroed]))
        self.prefix_cache_stats: Any = self._theirs.PrefixCacheStats() if log_stats else None
        self.coordinator: Any = views.coordinator_of(self)

    # -- looking up ----------------------------------------------------------------------------------

    def prefix_cache_lookup_enabled(self, request: Any) -> bool:
        """Whether the prefix of the request may be looked up here."""
        return self.enable_caching and not request.skip_reading_prefix_cache

    def get_computed_blocks(self, request: Any, max_cache_hit_length: int | None = None) -> tuple[Any, int, int]:
        """The longest cached prefix of a request that all groups share: its blocks, its length, and the length of a
        longer prefix that a full-attention group knows already, 0 for none. Nothing is held yet.
        """
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0, 0
        twin = Twin(request, self.block_pool._keys)
        twin.look(request)
        most = twin.num_tokens - 1
        if max_cache_hit_length is not None:
            most = max_cache_hit_length
            twin.num_tokens = most + 1
        if self.num_kv_cache_groups == 1 and self.cache.managers[0].draft_margin:
            # One group alone drops its last block, which several together look beyond.
            size = self.cache.managers[0].block_size
            most = most // size * size - size
        hit = self.cache.get_computed_blocks(twin, max(0, most))
        junction = junction_of(self, twin, hit, most) if self.num_kv_cache_groups > 1 else 0
        if hit.num_tokens == 0:
            return self.empty_kv_cache_blocks, 0, junction
        if self.enable_kv_cache_events and getattr(request, "kv_cache_report_mode", "incremental") == "full":
            self.announce(request, hit)
        blocks = blocks_in_groups(self, hit.groups)
        self._found, self._found_hits = blocks, list(hit.groups)
        return blocks, hit.num_tokens, junction

    def get_computed_blocks_for_connector(
        self, request: Any, max_cache_hit_length: int | None = None
    ) -> tuple[Any, int, int, bool]:
        """The same for a connector that can bring what one group lacks.

        Where states lag behind full attention: the hit of full attention, and True.
        """
        whole, states = full_and_states(self.cache)
        if whole < 0 or not states or not self.prefix_cache_lookup_enabled(request):
            return (*self.get_computed_blocks(request, max_cache_hit_length), False)
        most = request.num_tokens - 1 if max_cache_hit_length is None else max_cache_hit_length
        hits = self.longest_hits(request.block_hashes, most)
        lengths = [
            hit.num_tokens for hit, manager in zip(hits, self.cache.managers, strict=True) if manager.prefix_cacheable
        ]
        longest = hits[whole].num_tokens
        if max(lengths) > longest:
            return (*self.get_computed_blocks(request, max_cache_hit_length), False)
        if longest == 0:
            return self.empty_kv_cache_blocks, 0, 0, False
        return blocks_in_groups(self, hits), longest, 0, min(lengths) < longest

    def longest_hits(self, block_hashes: list[bytes], max_length: int) -> tuple[GroupHit, ...]:
        """The longest cached prefix of each group by itself."""
        keys = self.block_pool._keys
        digests = b"".join([keys.digest(one) for one in block_hashes])
        alignment = self.cache.groups.alignment
        return tuple([manager.find_longest_hit(digests, max_length, alignment) for manager in self.cache.managers])

    def create_kv_cache_blocks(self, blocks: tuple[Any, ...]) -> Any:
        """vLLM's object for blocks per group; the shared empty one when there are none."""
        return self._theirs.KVCacheBlocks(blocks) if any(blocks) else self.empty_kv_cache_blocks

    def truncate_computed_blocks(self, blocks: Any, num_computed_tokens: int) -> Any:
        """The part of a hit up to an aligned end; what states lack of it a connector brings."""
        cut: list[Any] = []
        for manager, some in zip(self.cache.managers, blocks.blocks, strict=True):
            if not manager.prefix_cacheable:
                assert not some, "a group that is not cached has no hit"
                cut.append(some)
                continue
            assert num_computed_tokens % manager.block_size == 0, "a hit is cut at the end of a block"
            end = num_computed_tokens // manager.block_size
            assert manager.is_state or len(some) >= end, "a hit is cut where it reaches"
            cut.append(some[:end])
        return self.create_kv_cache_blocks(tuple(cut))

    # -- allocating ----------------------------------------------------------------------------------

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Any = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> Any:
        """Slots for `num_new_tokens` more tokens and the lookahead behind them. The new blocks, or None.

        A request that holds nothing yet adopts its hit first, and gets blocks for what a connector brings. What is
        not read any more is given back even when there is no room then. Full blocks of known tokens are registered,
        unless `delay_cache_blocks`.
        """
        request_id: str = request.request_id
        twin = self._twins.get(request_id)
        is_running = twin is not None
        if twin is None:
            twin = Twin(request, self.block_pool._keys)
        twin.look(request)
        cache = self.cache
        local = twin.num_computed_tokens + num_new_computed_tokens
        total = min(local + num_external_computed_tokens, self.max_model_len)
        elsewhere = num_external_computed_tokens
        known = 0
        if self.enable_caching and not delay_cache_blocks:
            known = min(total + num_new_tokens, twin.num_tokens)
        if is_running:
            main = min(total + num_new_tokens, self.max_model_len)
            slots = min(main + num_lookahead_tokens, self.max_model_len)
            settled = max(0, total - twin.num_in_flight_tokens)
            if num_new_tokens > 0 and is_at_rest(self, twin, main, slots, settled, num_encoder_tokens, known):
                return self.empty_kv_cache_blocks
        if num_new_tokens == 0 and num_new_computed_tokens == 0 and num_external_computed_tokens == 0:
            raise ValueError("num_new_tokens must be greater than 0 when there are no external computed tokens")
        hits = self.hits_of(new_computed_blocks, num_new_computed_tokens, total)
        if not is_running:  # tokens that are said to be computed, but for which no blocks are held, get new ones
            elsewhere += local - (num_new_computed_tokens if hits else 0)
            twin.num_computed_tokens = 0
        withheld = 0
        if self.watermark_blocks > 0 and has_scheduled_reqs and request.status in self._waiting:
            withheld = self.watermark_blocks
        if full_sequence_must_fit:
            whole = min(twin.num_tokens, self.max_model_len)
            prompt, cap = twin.num_prompt_tokens, self.caps
            needed = 0
            for at, manager in enumerate(cache.managers):
                hit = hits[at] if hits else NOTHING_FOUND
                needed += demand_of(
                    manager, request_id, whole, whole, hit, total, prompt, num_encoder_tokens, cap[at]
                )
            if needed + withheld > self.block_pool.books.queue.count:
                return None
        if is_running:
            cache.drop(twin, max(0, total - twin.num_in_flight_tokens))
        if hits and self.hits_new_state(new_computed_blocks):
            return None
        adopted = hit_in_groups(cache, request_id, hits, num_new_computed_tokens) if hits else None
        plan = cache.plan(
            twin,
            num_new_tokens,
            hit=adopted,
            num_lookahead_tokens=num_lookahead_tokens,
            num_external_computed_tokens=elsewhere,
            num_encoder_tokens=num_encoder_tokens,
            reserved_blocks=reserved_blocks + withheld,
            delay_cache_blocks=True,
        )
        if isinstance(plan, Refusal):
            return None
        if is_running and plan.num_copies == 0 and self._offering.must_copy(request_id):
            return None  # as vLLM: rather no step than a prompt's state that is not found again
        if num_external_computed_tokens > 0:
            main = min(total + num_new_tokens, self.max_model_len)
            slots = min(main + num_lookahead_tokens, self.max_model_len)
            loaded = load(self, twin, hits, total)
            for at, ids in enumerate(loaded):
                if at not in skip_zeroing_group_ids:
                    self.note_to_zero(at, blocks_of(self.block_pool.blocks, ids))
            appended = tuple([grow(manager, twin, main, slots, num_encoder_tokens) for manager in cache.managers])
        else:
            appended = cache.commit(plan)._groups
        new = self.new_blocks(request_id, appended, hits)
        self._twins[request_id] = twin
        if self.enable_kv_cache_events:
            publish_removed(self.block_pool)
        if known > 0:
            register(self, twin, known)
        if self.metrics_collector is not None:
            self.measure(hits, new)
        return self.create_kv_cache_blocks(tuple(new))

    def hits_of(self, computed: Any, num_tokens: int, num_computed_tokens: int) -> list[GroupHit]:
        """The hit that is handed over, per group; an empty list for none."""
        if computed is None or computed is self.empty_kv_cache_blocks:
            return []
        if computed is self._found and num_tokens == num_computed_tokens:
            hits, self._found = self._found_hits, None
            return hits
        home = self.block_pool._home
        hits = [
            hit_of(manager, home, some, num_tokens, num_computed_tokens)
            for manager, some in zip(self.cache.managers, computed.blocks, strict=True)
        ]
        return hits if has_blocks(hits) else []

    def hits_new_state(self, computed: Any) -> bool:
        """Whether the hit ends in a state that is only being written in this step."""
        if not self._offering.new_states:
            return False
        for manager, some in zip(self.cache.managers, computed.blocks, strict=True):
            if manager.is_state and len(some) > 0:
                last: KVCacheBlock = some[-1]
                if last._place != 0 and self._offering.is_new(last._place):
                    return True
        return False

    def new_blocks(
        self, request_id: str, appended: tuple[vec[i32], ...], hits: list[GroupHit]
    ) -> list[list[KVCacheBlock]]:
        """Per group: the copy of a hit's last block, then what was appended. Blocks to be zeroed are noted."""
        members = self.block_pool.blocks
        out: list[list[KVCacheBlock]] = []
        for at, manager in enumerate(self.cache.managers):
            blocks = blocks_of(members, appended[at]) if appended else []
            if hits and hits[at].num_tokens % manager.block_size != 0:
                table = manager.tables[request_id]
                copy = members[i64(table.blocks[hits[at].num_tokens // manager.block_size])]
                blocks.insert(0, copy)
                if not self._zeroed[at] and not manager.is_state:
                    self._to_zero[at].append(int(copy._place))
            self.note_to_zero(at, blocks)
            out.append(blocks)
        return out

    def note_to_zero(self, group_id: int, blocks: list[KVCacheBlock]) -> None:
        if self._zeroed[group_id]:
            self._to_zero[group_id].extend([int(block._place) for block in blocks if block._place != 0])

    def announce(self, request: Any, hit: Hit) -> None:
        """Say of the blocks of a hit that they are stored, for a request that wants all of its blocks reported."""
        for manager in self.cache.groups.cached:
            full = hit.num_tokens // manager.block_size
            self.block_pool.emit_cached_block_events(request, full, manager.block_size, manager.group_id)

    def measure(self, hits: list[GroupHit], new: list[list[KVCacheBlock]]) -> None:
        pool = self.block_pool
        for hit in hits:
            measure_accessed(pool, blocks_of(pool.blocks, hit.blocks))
        for blocks in new:
            measure_handed_out(pool, [block for block in blocks if block._place != 0])
        pool.books.watchers.raise_errors()

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """Register what is full at so many tokens, as `allocate_slots` does."""
        twin = self._twins.get(request.request_id)
        if twin is not None and self.enable_caching:
            twin.look(request)
            register(self, twin, num_computed_tokens)

    # -- giving back ---------------------------------------------------------------------------------

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Give back what no token behind the processed ones reads; the table shows null there."""
        for manager in self.cache.managers:
            if num_prompt_tokens is not None:
                manager.drop(request_id, processed_computed_tokens, num_prompt_tokens)
            elif manager.unread(1, 1)[0] == 0:  # only a gap behind the prompt depends on where that ends
                manager.drop(request_id, processed_computed_tokens)

    def free(self, request: Any) -> None:
        """Give all blocks of the request back, deepest first, group by group. An unknown request has none."""
        request_id: str = request.request_id
        self.cache.free(request_id)
        self._twins.pop(request_id, None)

    def pop_blocks_for_free(self, request: Any) -> list[KVCacheBlock]:
        """Forget the request. Its blocks, in the order of its tables, are the caller's to give back, reversed."""
        request_id: str = request.request_id
        members = self.block_pool.blocks
        out: list[KVCacheBlock] = []
        for manager in self.cache.managers:
            table = manager.tables.get(request_id)
            if table is not None:
                for b in table.blocks:
                    if b != 0:
                        out.append(members[i64(b)])
                del manager.tables[request_id]
        self._offering.forget(request_id)
        self._twins.pop(request_id, None)
        return out

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Nobody finds these blocks any more; who holds them goes on."""
        self.block_pool.evict_blocks(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Forget all hashes, if no block is in use."""
        if not self.block_pool.reset_prefix_cache():
            return False
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        return True

    # -- reading -------------------------------------------------------------------------------------

    @property
    def usage(self) -> float:
        """The part of the pool in use, from 0.0 to 1.0."""
        return self.block_pool.get_usage()

    def get_blocks(self, request_id: str) -> Any:
        """The tables of a request; empty for an unknown one."""
        members = self.block_pool.blocks
        tables: list[list[KVCacheBlock]] = []
        for manager in self.cache.managers:
            table = manager.tables.get(request_id)
            tables.append([] if table is None else blocks_of(members, table.blocks))
        return self.create_kv_cache_blocks(tuple(tables))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The block ids of a request's tables."""
        return tuple([manager.block_ids(request_id) for manager in self.cache.managers])

    def get_block_ids_for_computed_tokens(self, request_id: str, num_computed_tokens: int) -> tuple[list[int], ...]:
        """The same up to the computed tokens; states and encoder outputs whole."""
        ids = list(self.get_block_ids(request_id))
        for at, view in enumerate(self.coordinator.single_type_managers):
            size: int = view.num_tokens_per_id
            if size > 0:
                ids[at] = ids[at][: -(-num_computed_tokens // size)]
        return tuple(ids)

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """vLLM has no cascade attention any more: 0 for each group."""
        return [0] * self.num_kv_cache_groups

    def estimate_cached_tokens(self, request: Any) -> int:
        """How many of the request's tokens all cached groups have registered."""
        least = -1
        records = self.block_pool.books.records
        for manager in self.cache.managers:
            if not manager.prefix_cacheable:
                continue
            longest: i64 = 0
            table = manager.tables.get(request.request_id)
            if table is not None:
                for b in table.blocks:
                    if b != 0 and records.get(i64(b), FLAGS) & HASHED:
                        longest = max(longest, records.get(i64(b), TOKENS))
            least = int(longest) if least < 0 else min(least, int(longest))
        return max(0, least)

    # -- orders for the worker -------------------------------------------------------------------------

    def take_new_block_ids(self) -> list[int]:
        """The new blocks to be zeroed, each once."""
        taken: list[int] = []
        for at, some in enumerate(self._to_zero):
            if some:
                taken += some
                self._to_zero[at] = []
        return taken

    def record_blocks_for_zeroing(self, request_id: str, start_token: int) -> None:
        """The request's blocks from a token on are to be zeroed: what should have been loaded is not there."""
        for at, manager in enumerate(self.cache.managers):
            if self._zeroed[at]:
                assert start_token % manager.block_size == 0, "a block is zeroed whole"
                ids = manager.block_ids(request_id)[start_token // manager.block_size :]
                self._to_zero[at].extend([b for b in ids if b != 0])

    def take_kv_cache_block_copies(self) -> tuple[list[Any], list[KVCacheBlock]]:
        """The copies to make before the forward pass, and the blocks at their ends.

        One reference of each of these is the caller's, to be given back when the copies are made.
        """
        orders = self.cache.worker_lists.copies
        if not orders:
            return [], []
        members = self.block_pool.blocks
        make: Any = self._theirs.KVCacheBlockCopy
        copies: list[Any] = []
        ends: list[KVCacheBlock] = []
        for order in orders:
            copies.append(make(order.src_block_id, order.dst_block_id))
            ends += [members[order.src_block_id], members[order.dst_block_id]]
        for block in ends:  # not as a use: the reference of the order becomes the caller's
            block.ref_cnt = block.ref_cnt + 1
        self.cache.take_block_copies()
        return copies, ends

    def take_boundary_state_offloads(self) -> dict[str, list[tuple[int, int, int]]]:
        """The states at boundaries that were registered since the last call, for a connector to store: per request
        (group, block id, tokens).
        """
        return self._offering.take_offers() if self._offering.offers else {}

    def finalize_partial_tail_offloads(self, request: Any) -> list[tuple[int, int, int]]:
        """The states inside blocks at which an ending request has stopped."""
        return self._offering.take_tails(request)

    def new_step_starts(self) -> None:
        """What was registered so far is written before anything of this step is read."""
        self._offering.new_states.clear()

    # -- statistics and events -------------------------------------------------------------------------

    def make_prefix_cache_stats(self) -> Any:
        """The counts since the last call; None without statistics."""
        counted = self.prefix_cache_stats
        if counted is not None:
            self.prefix_cache_stats = self._theirs.PrefixCacheStats()
        return counted

    def record_prefix_cache_stats(self, request: Any, num_hits: int) -> None:
        """A request was admitted with so many tokens cached."""
        if self.prefix_cache_stats is not None and self.prefix_cache_lookup_enabled(request):
            self.prefix_cache_stats.record(
                num_tokens=request.num_tokens, num_hits=num_hits, preempted=request.num_preemptions > 0
            )

    def take_events(self) -> list[Any]:
        """The events since the last call; what is stored says of what kind its group is."""
        events = self.block_pool.take_events()
        for event in events:
            if isinstance(event, self._theirs.BlockStored):
                group: Any = event.group_idx
                if group is None or not 0 <= group < self.num_kv_cache_groups:
                    self._theirs.logger.warning("a BlockStored names the unknown KV cache group %s", group)
                    continue
                kind, window = self.kv_cache_event_metadata[group]
                event.kv_cache_spec_kind = kind
                event.kv_cache_spec_sliding_window = window
        return events


# Functions and not methods: on the class that vLLM instantiates, which is interpreted, methods are called as Python
# calls them.


def align(cache: Cache, alignment: int) -> None:
    """Hits end where vLLM's do, which has finer ones only for states."""
    groups = cache.groups
    groups.alignment = alignment
    groups.coordinator.alignment = alignment
    retain(cache, groups.policy.interval)
    for manager in groups.managers:
        manager.hits_end_inside = manager.supports_partial_boundaries and alignment % manager.block_size != 0


def first_groups(own: ManagerOverBooks) -> list[int]:
    """The groups that vLLM looks up first: of equal kind, and of full attention if there is any."""
    cache = own.cache
    cached = [manager.group_id for manager in cache.groups.cached]
    whole = cache.groups.coordinator.whole
    if not cached or not own.enable_caching:
        return []
    first = whole[0] if whole else cached[0]
    groups: Any = own.kv_cache_config.kv_cache_groups
    spec: Any = groups[first].kv_cache_spec
    return [at for at in cached if groups[at].kv_cache_spec == spec]


def retain(cache: Cache, interval: int | None) -> None:
    cache.groups.policy = RetentionPolicy(cache.groups.alignment, interval)


def full_and_states(cache: Cache) -> tuple[int, bool]:
    """The first group that reads the whole prefix, or -1; and whether there are states."""
    whole = cache.groups.coordinator.whole
    states = [manager for manager in cache.groups.cached if manager.is_state]
    return (whole[0] if whole else -1), len(states) > 0


def is_at_rest(
    own: ManagerOverBooks, twin: Twin, main: int, slots: int, settled: int, num_encoder_tokens: int, known: int
) -> bool:
    """Whether a running request takes, drops and registers nothing."""
    for at, manager in enumerate(own.cache.groups.managers):
        tokens = main if manager.is_state else slots
        upto = num_cacheable(own, at, known)
        prompt = twin.num_prompt_tokens
        if not manager.at_rest(twin.request_id, tokens, settled, prompt, num_encoder_tokens, 0):
            return False
        if not own._offering.has_nothing_new(manager, twin, upto):
            return False
    return True


def junction_of(own: ManagerOverBooks, twin: Twin, hit: Hit, max_length: int) -> int:
    """Where the groups that vLLM looks up first know a longer prefix than the hit; 0 where they do not."""
    first = own.first_groups
    length = max_length
    for at in first:
        known = hit.own_lengths[at]
        if known is None:
            length = -1
            break
        length = min(length, known)
    if length < 0:
        if len(first) == len(own.cache.groups.cached):
            return 0
        length = common_length(own, first, twin, max_length)
    return length if length > hit.num_tokens else 0


def common_length(own: ManagerOverBooks, group_ids: list[int], twin: Twin, max_length: int) -> int:
    """The longest prefix that all of these groups know."""
    digests = twin.digests(0, twin.num_hashes())
    length = max_length
    settled = False
    while not settled and length > 0:
        settled = True
        for at in group_ids:
            found = own.cache.managers[at].find_longest_hit(digests, length, own.cache.groups.alignment).num_tokens
            if found < length:
                length = found
                settled = False
    return length


def num_cacheable(own: ManagerOverBooks, group_id: int, num_tokens: int) -> int:
    """How far a group registers of so many computed tokens.

    A group alone and one of a draft model leave out the last tokens that drafting computes once more. With others a
    group registers as far as hits can end, that of a draft model a block more.
    """
    if num_tokens <= 0:
        return 0
    final = max(0, num_tokens - own.num_reprefillable_tokens)
    if own.num_kv_cache_groups == 1:
        return final
    size = own.scheduler_block_size
    manager = own.cache.groups.managers[group_id]
    if own.is_fine:
        return final if manager.draft_margin else num_tokens
    if not manager.draft_margin or num_tokens < size:
        return num_tokens - num_tokens % size
    return min(final, final - final % size + manager.block_size)


def register(own: ManagerOverBooks, twin: Twin, num_tokens: int) -> None:
    for manager in own.cache.groups.cached:
        upto = num_cacheable(own, manager.group_id, num_tokens)
        if upto > 0:
            own._offering.register_group(manager, twin, upto, 0, None)


def load(own: ManagerOverBooks, twin: Twin, hits: list[GroupHit], num_computed_tokens: int) -> list[vec[i32]]:
    """A request adopts its hit and gets blocks for what a connector brings; these, per group.

    That comes first in all groups: what is to be computed is told apart from it, and has other blocks to be zeroed.
    """
    request_id = twin.request_id
    managers = own.cache.groups.managers
    for at, manager in enumerate(managers):
        manager.adopt(request_id, hits[at] if hits else NOTHING_FOUND)
    own._offering.admitted(twin, 0)
    loaded: list[vec[i32]] = []
    for manager in managers:
        table = manager.tables[request_id]
        held = len(table)
        length = 0
        if isinstance(manager, CircularBufferManager):
            length = 1
        elif manager.prefix_cacheable or manager.is_state:
            length = -(-num_computed_tokens // manager.block_size)
        unread = min(length, manager.num_skipped_tokens(num_computed_tokens) // manager.block_size)
        table.extend_null(max(0, unread - held))
        ids = manager.pool.take(max(0, length - len(table)))
        table.extend(ids)
        table.num_registered = max(table.num_registered, i64(unread))
        loaded.append(ids)
    twin.num_computed_tokens = num_computed_tokens
    return loaded


def grow(
    manager: SingleTypeKVCacheManager, twin: Twin, num_main_tokens: int, num_tokens: int, num_encoder_tokens: int
) -> vec[i32]:
    """Blocks for what is to be computed behind that."""
    return manager.grow(
        twin.request_id,
        num_main_tokens if manager.is_state else num_tokens,
        twin.num_computed_tokens,
        twin.num_prompt_tokens,
        num_encoder_tokens,
    )


def has_blocks(hits: list[GroupHit]) -> bool:
    for hit in hits:
        if len(hit) > 0:
            return True
    return False


def hit_in_groups(cache: Cache, request_id: str, hits: list[GroupHit], num_tokens: int) -> Hit:
    own: list[int | None] = [None] * len(hits)
    common = CommonHit(num_tokens, tuple(hits), tuple(own), None)
    return Hit(request_id, common, WhyNotMore.MISS, num_tokens, cache, cache.version)


def blocks_in_groups(own: ManagerOverBooks, hits: tuple[GroupHit, ...]) -> Any:
    members = own.block_pool.blocks
    return own._theirs.KVCacheBlocks(tuple([blocks_of(members, hit.blocks) for hit in hits]))
