"""What a request leaves to be found: which blocks are offered to the prefix index, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from librt.vecs import append, vec
from mypy_extensions import i32, i64

from blockpool.cache.content import ContentBook
from blockpool.cache.errors import RequestError
from blockpool.cache.groups import Groups
from blockpool.cache.request import Request
from blockpool.cache.steps import Step
from blockpool.cache.stored import Span, StoredLog
from blockpool.cache.waiting import Waiting, WaitingList
from blockpool.hashing import BlockHashes
from blockpool.managers import SingleTypeKVCacheManager
from blockpool.managers.base import offer_blocks, skip_registered
from blockpool.pool import StorePayload
from blockpool.pool.layout import FLAGS, HASHED, REF, TOKENS


class Storing:
    """Full blocks are offered at once; states, loaded blocks and boundaries inside blocks when their step has run.

    `offer` and `offer_tail` are all that touches the index.
    """

    def __init__(
        self, groups: Groups, has_events: bool, contents: ContentBook | None, stored: StoredLog | None
    ) -> None:
        self.groups = groups
        self.has_events = has_events
        self.contents = contents
        self.stored = stored
        self.requests: dict[str, Request] = {}  # those that hold blocks
        self.waiting = WaitingList()
        self.boundaries: dict[str, list[int]] = {}  # that the request is to be resumed at, besides the policy's

    def admitted(self, request: Request, junction: int) -> None:
        """From now on its blocks are offered; `junction`: where it branches off from what others know, or 0."""
        self.requests[request.request_id] = request
        self.boundaries[request.request_id] = self.named_boundaries(request, junction)

    def named_boundaries(self, request: Request, junction: int) -> list[int]:
        boundaries = [self.groups.replay_boundary(request.num_prompt_tokens)]
        if junction:
            boundaries.append(junction)
        return boundaries

    def forget(self, request_id: str) -> None:
        self.boundaries.pop(request_id, None)
        self.requests.pop(request_id, None)

    # -- offering ------------------------------------------------------------------------------------

    def register(self, request: Request, num_tokens: int, num_loaded_tokens: int, step: Step | None) -> None:
        """Offer what is new up to `num_tokens`; up to `num_loaded_tokens` it comes from elsewhere, in this step."""
        for manager in self.groups.cached:
            self.register_group(manager, request, num_tokens, num_loaded_tokens, step)

    def register_each(self, request: Request, lengths: Sequence[int], step: Step | None) -> None:
        """Offer what is new, group by group up to a length of its own."""
        for manager in self.groups.cached:
            self.register_group(manager, request, lengths[manager.group_id], 0, step)

    def register_group(
        self,
        manager: SingleTypeKVCacheManager,
        request: Request,
        num_tokens: int,
        num_loaded_tokens: int,
        step: Step | None,
    ) -> None:
        request_id = request.request_id
        if not manager.is_registered(request_id, num_tokens):
            span = manager.unregistered(request_id, num_tokens, request.num_hashes())
            if len(span) > 0:
                self.register_full(manager, request, span.start, span.stop, num_loaded_tokens, step)
        if manager.hits_end_inside:
            boundary = manager.partial_boundary(request_id, request.num_prompt_tokens, num_tokens)
            if boundary > 0 and boundary // manager.pool.hash_block_size <= request.num_hashes():
                self.register_tail(manager, request, boundary, step)

    def register_full(
        self,
        manager: SingleTypeKVCacheManager,
        request: Request,
        first: int,
        last: int,
        num_loaded_tokens: int,
        step: Step | None,
    ) -> None:
        request_id = request.request_id
        blocks = manager.pick(request_id, first, last, self.boundaries.get(request_id, ()), self.groups.policy)
        manager.mark_registered(request_id, last)
        if not any_block(blocks):
            return
        factor = manager.factor
        first_digest = max(0, first * factor - 1)  # with the parent of the first block
        digests = request.digests(first_digest, last * factor)
        if step is None:
            self.offer(manager, request, blocks, first, digests, first_digest)
            if self.stored is not None:
                self.stored.spans.append(Span(manager, request, blocks, first, digests, first_digest))
        elif manager.findable_at_acknowledgement or first * manager.block_size < num_loaded_tokens:
            self.wait(Waiting(manager, request, blocks, first, digests, first_digest), step)
        else:
            self.offer(manager, request, blocks, first, digests, first_digest)
            span = Span(manager, request, blocks, first, digests, first_digest)
            step.registered.setdefault(request_id, []).append(span)
            if manager.hits_end_inside:
                step.written.setdefault(manager.group_id, set()).update([int(block) for block in blocks])

    def register_tail(
        self, manager: SingleTypeKVCacheManager, request: Request, boundary: int, step: Step | None
    ) -> None:
        block = manager.mark_tail(request.request_id, boundary)
        place = boundary // manager.pool.hash_block_size
        digest = request.digests(place - 1, place)
        if step is None:
            self.offer_tail(manager, request, block, boundary, digest)
        else:
            blocks = append(vec[i32](), i32(block))
            self.wait(Waiting(manager, request, blocks, 0, digest, place - 1, boundary), step)

    def wait(self, waiting: Waiting, step: Step) -> None:
        """Until then, one more reference keeps each block."""
        request_id = waiting.request.request_id
        step.waiting.setdefault(request_id, []).append(waiting)
        self.waiting.add(waiting)
        pool = waiting.manager.pool
        pool.hold_vec(without_null(waiting.blocks), request_id, None, step.step_id)

    def make_findable(self, step: Step) -> None:
        """The step has run."""
        stored = self.stored
        if stored is not None:
            stored.spans += step.all_registered()
        for waiting in step.all_waiting():
            self.waiting.remove(waiting)
            manager, request = waiting.manager, waiting.request
            if waiting.boundary:
                block = int(waiting.blocks[0])
                if not is_covered(manager, block, waiting.boundary):
                    self.offer_tail(manager, request, block, waiting.boundary, waiting.digests)
            else:
                skip_registered(manager, waiting.blocks, waiting.first)
                first, blocks = waiting.first, waiting.blocks
                self.offer(manager, request, blocks, first, waiting.digests, waiting.first_digest)
                if stored is not None:
                    stored.spans.append(Span(manager, request, blocks, first, waiting.digests, waiting.first_digest))

    def withdraw(self, step: Step, request_id: str) -> None:
        """A request will not be computed in the current step after all: nobody is to find what it would have written.

        Raises RequestError when somebody has already.
        """
        registered = step.registered.get(request_id, [])
        copied = {(copy.order.group_id, copy.order.dst_block_id) for copy in step.copies}
        for one in registered:
            manager = one.manager
            for b in one.blocks:
                own = 2 if (manager.group_id, int(b)) in copied else 1
                if b != 0 and manager.pool.records.get(i64(b), REF) > own:
                    raise RequestError(
                        f"request {request_id!r}: block {b}, which step {step.step_id} is to write for it, is shared"
                        f" already: free it after={step.step_id}, or cancel the step"
                    )
        for one in registered:
            one.manager.pool.evict_vec(one.blocks)
        step.registered.pop(request_id, None)
        for waiting in step.waiting.pop(request_id, []):
            self.waiting.remove(waiting)

    def revoke(self, step: Step, in_flight: Sequence[Step]) -> None:
        """The step will never run: what it registered goes, what waits is not offered, what moved goes back."""
        gone: list[set[int]] = [set() for _ in self.groups.managers]
        for one in step.all_registered():
            # A block that was handed out again within the step has no hash now, or one of this very step.
            one.manager.pool.evict_vec(one.blocks)
            gone[one.manager.group_id].update([int(b) for b in one.blocks if b != 0])
        for manager, revoked in zip(self.groups.managers, gone, strict=True):
            if revoked:
                manager.unregister(revoked)
        for moved in reversed(step.moved):
            self.move_tail(moved.manager, moved.target, moved.source, in_flight)
            if moved.manager.tables.get(moved.request_id) is moved.table:
                moved.table.tail_block = moved.source
        for waiting in step.all_waiting():
            self.waiting.remove(waiting)
            table = waiting.manager.tables.get(waiting.request.request_id)
            if table is None:
                continue
            if waiting.boundary:
                table.has_tail = False
                table.tail_block = 0
            else:
                table.num_registered = min(table.num_registered, i64(waiting.first))
                table.was_revoked = True

    def offer(
        self,
        manager: SingleTypeKVCacheManager,
        request: Request,
        blocks: vec[i32],
        first: int,
        digests: bytes,
        first_digest: int,
    ) -> None:
        """Register full blocks at first, first+1, … of the request's table; 0 is skipped."""
        payload = payload_of(request) if self.has_events else None
        offer_blocks(manager, blocks, first, digests, first_digest, payload)
        if self.contents is not None:
            end = first * manager.block_size
            for b in blocks:
                end += manager.block_size
                if b != 0:
                    self.contents.record(manager, request, int(b), end)

    def offer_tail(
        self, manager: SingleTypeKVCacheManager, request: Request, block: int, boundary: int, digest: bytes
    ) -> None:
        """Register a block as far as a boundary inside it."""
        payload: StorePayload | None = None
        if self.has_events:
            place = boundary // manager.pool.hash_block_size
            payload = payload_of(request, request.digests(place - 2, place - 1) if place > 1 else None)
        size = manager.block_size
        manager.pool.cache_partial_block(block, digest, boundary, manager.group_id, size, payload=payload)
        if self.contents is not None:
            self.contents.record(manager, request, block, boundary)

    # -- a state that was offered and is written on ---------------------------------------------------

    def tail_to_move(self, manager: SingleTypeKVCacheManager, request_id: str, in_flight: Sequence[Step]) -> int:
        """The block of a running request that the index names, or will, and its next token overwrites; else 0."""
        table = manager.tables.get(request_id)
        if table is None or table.tail_block == 0:
            return 0
        block = int(table.tail_block)
        if manager.pool.records.get(block, FLAGS) & HASHED or waiting_for(manager, block, in_flight) is not None:
            return block
        return 0

    def drop_tail(self, manager: SingleTypeKVCacheManager, block: int, in_flight: Sequence[Step]) -> None:
        """The index is to name the block no more."""
        waiting = waiting_for(manager, block, in_flight)
        if waiting is None:
            manager.pool.evict_vec(append(vec[i32](), i32(block)))
            return
        self.waiting.remove(waiting)
        for step in in_flight:
            for some in (step.waiting.get(waiting.request.request_id, []), step.kept_waiting):
                if waiting in some:
                    some.remove(waiting)

    def move_tail(
        self, manager: SingleTypeKVCacheManager, source: int, target: int, in_flight: Sequence[Step]
    ) -> None:
        """The index is to name a copy of the block."""
        waiting = waiting_for(manager, source, in_flight)
        if waiting is not None:
            waiting.blocks = append(vec[i32](), i32(target))
        else:
            manager.pool.move_block_hashes(source, target)
            if self.contents is not None:
                self.contents.moved(manager, source, target)


def waiting_for(manager: SingleTypeKVCacheManager, block: int, in_flight: Sequence[Step]) -> Waiting | None:
    for step in in_flight:
        for waiting in step.all_waiting():
            if waiting.boundary and waiting.manager is manager and int(waiting.blocks[0]) == block:
                return waiting
    return None


def is_covered(manager: SingleTypeKVCacheManager, block: int, boundary: int) -> bool:
    """Whether the block was registered further than that meanwhile."""
    records = manager.pool.records
    return records.get(block, FLAGS) & HASHED != 0 and records.get(block, TOKENS) > boundary


def without_null(blocks: vec[i32]) -> vec[i32]:
    out = vec[i32]()
    for b in blocks:
        if b != 0:
            out = append(out, b)
    return out


def any_block(blocks: vec[i32]) -> bool:
    return any(b != 0 for b in blocks)


def payload_of(request: Request, parent: bytes | None = None) -> StorePayload:
    keys = request.extra_keys
    chain = request.block_hashes
    tokens: Sequence[int] = () if request.all_token_ids is None else request.all_token_ids
    return StorePayload(
        token_ids=tokens,
        parent=parent,
        extra_keys=None if keys is None else keys.event_key,
        lora_id=request.lora_id,
        lora_name=None if keys is None or keys.lora is None else keys.lora[0],
        session_id=request.session_id,
        lookahead=None if chain is None or chain.num_lookahead_tokens == 0 else lookahead_of(chain),
    )


def lookahead_of(chain: BlockHashes) -> Callable[[int], list[int]]:
    """The tokens behind the block that ends at a token, which its hash covers too."""

    def behind(end: int) -> list[int]:
        return list(chain.lookahead_tokens(end // chain.hash_block_size - 1) or ())

    return behind
