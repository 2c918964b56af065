"""What our manager registers in vLLM's pool: with its events, its hashes of any width and its rules for states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from librt.vecs import vec
from mypy_extensions import i32, i64

from blockpool.cache.groups import Groups
from blockpool.cache.request import Request
from blockpool.cache.steps import Step
from blockpool.cache.storing import Storing
from blockpool.integrations.vllm.block_pool import PoolOverBooks, full_hashes, register_boundary, register_ids
from blockpool.integrations.vllm.keys import WIDTH
from blockpool.integrations.vllm.twin import Twin
from blockpool.managers import ChunkedLocalAttentionManager, SingleTypeKVCacheManager, SlidingWindowManager
from blockpool.managers.base import offer_blocks
from blockpool.pool.layout import FLAGS, HASHED, TOKENS


@final
class Offer:
    """A state at a boundary, in a block, for a connector to store."""

    def __init__(self, request_id: str, group_id: int, block: int, boundary: int) -> None:
        self.request_id = request_id
        self.group_id = group_id
        self.block = block
        self.boundary = boundary


@final
class Offering(Storing):
    """`new_states`: the keys of states that were registered since the last step began: their blocks are not written
    yet, so nobody reads them in this step. `offers`: states for connectors. `tails`: by block, the state of a prompt
    that its request holds and has not written on yet.
    """

    def __init__(self, groups: Groups, pool: PoolOverBooks, scheduler_block_size: int) -> None:
        super().__init__(groups, False, None, None)
        self.vllm_pool = pool
        self.scheduler_block_size = scheduler_block_size
        self.has_margin = len([manager for manager in groups.managers if manager.draft_margin]) > 0
        self.new_states: set[bytes] = set()
        self.offers: list[Offer] = []
        self.tails: dict[int, Offer] = {}

    def admitted(self, request: Request, junction: int) -> None:
        """Where it is to be resumed is asked when its blocks are full, and not before."""
        self.requests[request.request_id] = request

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        if self.offers:
            self.offers = [offer for offer in self.offers if offer.request_id != request_id]
        if self.tails:
            self.tails = {block: tail for block, tail in self.tails.items() if tail.request_id != request_id}

    def points_of(self, manager: SingleTypeKVCacheManager, request: Twin) -> list[int]:
        """Where later requests are to resume: at the end of the prompt, and where others share it no further."""
        end = request.num_prompt_tokens
        size = self.scheduler_block_size
        boundaries = [end - 1]
        if self.has_margin:
            boundaries = [(end - 1) // size * size - size, end // size * size - size]
        shared: int = request.source.shared_prefix_boundary
        if shared:
            boundaries.append(shared)
            if manager.draft_margin:
                boundaries.append(shared - manager.block_size)
        if manager.is_state:
            return [boundary - boundary % manager.block_size for boundary in boundaries]
        return boundaries

    def register_group(
        self,
        manager: SingleTypeKVCacheManager,
        request: Request,
        num_tokens: int,
        num_loaded_tokens: int,
        step: Step | None,
    ) -> None:
        """vLLM's workers keep the state at the end of every block, also where no step ends.

        A prompt's tail keeps its own key in the block that covers more by now.
        """
        assert isinstance(request, Twin)
        request_id = request.request_id
        table = manager.tables.get(request_id)
        if table is None or not manager.prefix_cacheable:
            return
        first = int(table.num_registered)
        last = min(num_tokens // manager.block_size, request.num_hashes() // manager.factor, len(table))
        if last > first:
            if manager.reads_whole_prefix() or isinstance(manager, ChunkedLocalAttentionManager):
                blocks = table.blocks[first:last]
            elif manager.draft_margin and isinstance(manager, SlidingWindowManager):
                blocks = self.windows_kept(manager, request, first, last)
            else:
                blocks = manager.pick(request_id, first, last, self.points_of(manager, request), self.groups.policy)
            manager.mark_registered(request_id, last)
            self.offer(manager, request, blocks, first, b"", 0)
        if not has_tails(manager):
            return
        if not table.has_tail:
            boundary = self.tail_to_register(manager, request, num_tokens)
            if boundary > 0 and boundary // manager.pool.hash_block_size <= request.num_hashes():
                self.register_tail(manager, request, boundary, None)
                return
        boundary = self.tail_of(manager, request)
        position = boundary // manager.block_size
        if manager.is_state:
            self.register_edge(manager, request, boundary, num_tokens)
        elif boundary % manager.block_size != 0 and first <= position < last:
            self.offer_tail(manager, request, int(table.blocks[position]), boundary, b"")

    def windows_kept(self, manager: SlidingWindowManager, request: Twin, first: int, last: int) -> vec[i32]:
        """The blocks first .. last-1 that vLLM keeps for drafts, 0 for the others: a window has one more behind it.

        Those at the beginning, which no hit needs, are kept as vLLM keeps them.
        """
        blocks = manager.tables[request.request_id].blocks[first:last]
        size = manager.block_size
        policy = self.groups.policy
        alignment = policy.alignment
        if alignment % size != 0:
            return blocks
        need = -(-(manager.sliding_window - 1) // size) + 1
        interval = alignment if policy.interval is None else policy.interval
        every = interval // size
        if every > 0 and need >= every:
            return blocks
        ends: list[int] = []
        if policy.interval is not None:
            ends = [boundary // alignment * alignment // size + 1 for boundary in self.points_of(manager, request)]
        for at in range(first, last):
            kept = every > 0 and at >= 1 and (at - 1) % every >= every - need
            for end in ends:
                kept = kept or end - need <= at < end
            if not kept:
                blocks[at - first] = 0
        return blocks

    def register_edge(
        self, manager: SingleTypeKVCacheManager, request: Request, boundary: int, num_tokens: int
    ) -> None:
        """A prompt's last state is kept although it stands at the end of a block that the policy leaves out."""
        if boundary == 0 or boundary != num_tokens or boundary % manager.block_size != 0:
            return
        block = i64(manager.tables[request.request_id].blocks[boundary // manager.block_size - 1])
        records = manager.pool.records
        if block == 0 or (records.get(block, FLAGS) & HASHED and records.get(block, TOKENS) == boundary):
            return
        assert isinstance(request, Twin)
        key = register_boundary(self.vllm_pool, request.source, int(block), boundary, manager.group_id, False)
        self.new_states.add(key)
        self.offers.append(Offer(request.request_id, manager.group_id, int(block), boundary))

    def tail_of(self, manager: SingleTypeKVCacheManager, request: Request) -> int:
        """The last boundary at which an equal prompt can resume: its hash depends on tokens of the prompt alone.

        A state has to be where drafting leaves it a unit of distance.
        """
        end = request.num_prompt_tokens
        unit = manager.pool.hash_block_size
        if manager.is_state and self.has_margin:
            return max(0, end - end % unit - unit)
        if not manager.draft_margin:
            end -= max(1, self.vllm_pool.num_hash_lookahead_tokens)
        return end - end % unit

    def tail_to_register(self, manager: SingleTypeKVCacheManager, request: Request, num_tokens: int) -> int:
        """That boundary, if it is reached, inside a block, and not registered; else 0."""
        boundary = self.tail_of(manager, request)
        if boundary == 0:
            return 0
        end = boundary if manager.draft_margin else boundary + 1
        return manager.partial_boundary(request.request_id, end, num_tokens)

    def has_nothing_new(self, manager: SingleTypeKVCacheManager, request: Request, num_tokens: int) -> bool:
        """Whether a running request has nothing to register."""
        if num_tokens <= 0 or not manager.prefix_cacheable:
            return True
        table = manager.tables[request.request_id]
        if table.num_registered < num_tokens // manager.block_size:
            return False
        if table.has_tail or not has_tails(manager):
            return True
        return self.tail_to_register(manager, request, num_tokens) == 0

    def offer(
        self,
        manager: SingleTypeKVCacheManager,
        request: Request,
        blocks: vec[i32],
        first: int,
        digests: bytes,
        first_digest: int,
    ) -> None:
        assert isinstance(request, Twin)
        pool = self.vllm_pool
        source = request.source
        hashes: list[bytes] = source.block_hashes
        last = first + len(blocks)
        if pool.enable_kv_cache_events or len(hashes[0]) != WIDTH:
            some = full_hashes(source, first, last, manager.factor)
            register_ids(pool, source, blocks, [], some, first, manager.block_size, manager.group_id)
        else:
            start = max(0, first * manager.factor - 1)
            offer_blocks(manager, blocks, first, request.digests(start, last * manager.factor), start, None)
        if manager.is_state:
            end = first * manager.block_size
            for b in blocks:
                end += manager.block_size
                if b != 0:
                    self.new_states.add(pool._keys.key_of(int(b)))
                    self.offers.append(Offer(request.request_id, manager.group_id, int(b), end))

    def offer_tail(
        self, manager: SingleTypeKVCacheManager, request: Request, block: int, boundary: int, digest: bytes
    ) -> None:
        assert isinstance(request, Twin)
        key = register_boundary(self.vllm_pool, request.source, block, boundary, manager.group_id, False)
        if manager.is_state:
            self.new_states.add(key)
            self.tails[block] = Offer(request.request_id, manager.group_id, block, boundary)

    def move_tail(
        self, manager: SingleTypeKVCacheManager, source: int, target: int, in_flight: Sequence[Step]
    ) -> None:
        super().move_tail(manager, source, target, in_flight)
        self.new_states.add(self.vllm_pool._keys.key_of(target))
        tail = self.tails.pop(source, None)
        if tail is not None:
            tail.block = target
            self.offers.append(tail)

    def must_copy(self, request_id: str) -> bool:
        """Whether a running request's next token overwrites a state that is registered."""
        for manager in self.groups.cached:
            if manager.is_state and self.tail_to_move(manager, request_id, ()) != 0:
                return True
        return False

    # -- what vLLM asks for ----------------------------------------------------------------------------

    def is_new(self, block: i64) -> bool:
        """Whether the block's state was registered in this step."""
        return len(self.new_states) > 0 and self.vllm_pool._keys.key_of(int(block)) in self.new_states

    def take_offers(self) -> dict[str, list[tuple[int, int, int]]]:
        taken: dict[str, list[tuple[int, int, int]]] = {}
        for manager in self.groups.managers:
            for offer in self.offers:
                if offer.group_id == manager.group_id:
                    taken.setdefault(offer.request_id, []).append((offer.group_id, offer.block, offer.boundary))
        self.offers = []
        return taken

    def take_tails(self, request: Any) -> list[tuple[int, int, int]]:
        """The prompt's states inside blocks that the ending request has left as they were."""
        request_id: str = request.request_id
        done = [tail for tail in self.tails.values() if tail.request_id == request_id]
        for tail in done:
            del self.tails[tail.block]
        is_settled = request.num_in_flight_tokens == 0
        computed: int = request.num_computed_tokens
        return [
            (tail.group_id, tail.block, tail.boundary) for tail in done if is_settled and tail.boundary == computed
        ]


def has_tails(manager: SingleTypeKVCacheManager) -> bool:
    """Whether the end of a prompt inside a block is registered: vLLM does so wherever a hash can say it."""
    return manager.supports_partial_boundaries and manager.factor > 1
