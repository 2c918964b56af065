"""A random engine: it runs random requests through a KVCacheManager, its model and a memory, and compares them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from blockpool.cache import (
    EMPTY_PLAN,
    AllocationPlan,
    KVCacheConfig,
    KVCacheManager,
    Refusal,
    RefusalReason,
    Request,
    RequestError,
)
from blockpool.hashing import BlockHasher
from blockpool.managers import CircularBufferSpec, CrossAttentionSpec, KVCacheGroupSpec, MambaSpec
from blockpool.pool import BlockRemoved, BlockStored, audit_dump
from tests.cache.many_memory import Memory, Work
from tests.cache.many_model import ModelCache, ModelGroup, ModelHit, ModelRequest
from tests.managers.rules import Rule, chunked, full, reference, sink, state, window

UNIT = 2
HASHER = BlockHasher(hash_block_size=UNIT, seed="many")
NO_LIMIT = 1 << 62
KINDS = ("full", "window", "chunked", "reference", "state", "none", "ring", "cross", "sink")
FINE_KINDS = ("full", "state", "state", "full", "sink", "window", "chunked", "reference", "ring")
T = TypeVar("T")


class Choices:
    """A byte string as a sequence of decisions; at its end every decision is the first."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    @property
    def left(self) -> bool:
        return self.at < len(self.data)

    def below(self, n: int) -> int:
        if not self.left:
            return 0
        self.at += 1
        return self.data[self.at - 1] % n

    def between(self, low: int, high: int) -> int:
        return low + self.below(high - low + 1)

    def of(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def once_in(self, n: int) -> bool:
        return self.below(n) == n - 1


@dataclass
class Live:
    """`prints[n]` names the first n tokens, those to come included; `sampled`: tokens that steps in flight give."""

    request: Request
    model: ModelRequest
    stream: list[int]
    prints: list[int]
    epoch: int = 0
    sampled: int = 0
    frozen: bool = False  # drafts are being verified


@dataclass
class Step:
    number: int
    works: list[Work] = field(default_factory=list)
    executed: bool = False


class Engine:
    def __init__(self, data: bytes) -> None:
        self.c = Choices(data)
        self.configure()
        self.live: dict[str, Live] = {}
        self.steps: list[Step] = []
        self.newest = -1
        self.count = 0
        self.mirror: set[tuple[int, bytes]] = set()
        self.seen = [-1] * len(self.model.pools)
        self.refs: list[list[int]] = [[] for _ in self.model.pools]
        self.keys: list[list[list[str]]] = [[] for _ in self.model.pools]
        self.old: tuple[Live, Any, ModelHit] | None = None

    # -- what is tried --------------------------------------------------------------------------------

    def configure(self) -> None:
        c = self.c
        self.in_steps = c.below(4) > 0
        num_pools = c.between(1, 3)
        # Hits end inside blocks only if every group allows it: so that is half of the cases.
        fine = c.below(2) == 0
        size = c.of([4, 8, 6])
        sizes = c.of([(2, 4), (4, 4), (2, 2), (8, 4), (4, 6)])
        groups: list[ModelGroup] = []
        specs: list[KVCacheGroupSpec] = []
        for number in range(c.between(2, 5)):
            kind = c.of(FINE_KINDS if fine else KINDS)
            pool = number if number < num_pools else c.below(num_pools)
            if fine:
                groups.append(self.group(number, kind, size if kind in ("full", "state", "sink") else UNIT, pool))
            else:
                groups.append(self.group(number, kind, c.of(sizes), pool))
        used = sorted({g.pool for g in groups})
        for g in groups:
            g.pool = used.index(g.pool)
            spec: Any = g.rule.spec if g.rule is not None else None
            if g.kind == "none":
                spec = MambaSpec(g.size, g.drafts, "none")
            elif g.kind == "ring":
                spec = CircularBufferSpec(g.size)
            elif g.kind == "cross":
                spec = CrossAttentionSpec(g.size)
            specs.append(
                KVCacheGroupSpec(
                    (str(g.number),),
                    spec,
                    draft_margin=g.rule is not None and g.rule.margin,
                    pool=g.pool,
                    clear_new_blocks=g.clear,
                )
            )
        rules = [g.rule for g in groups if g.rule is not None]
        alignment = math.lcm(*[rule.size for rule in rules]) if rules else 1
        partial_hits = not c.once_in(4)
        if rules and partial_hits and all(rule.partial or rule.size == UNIT for rule in rules):
            alignment = UNIT
        interval = c.of([None, None, 0, alignment, 2 * alignment])
        small = c.below(4) == 3
        num_blocks = []
        for p in range(len(used)):
            sinks = sum(g.sinks for g in groups if g.pool == p)
            num_blocks.append(1 + sinks + (c.between(4, 14) if small else c.between(16, 36)))
        watermark = c.of([0.0, 0.0, 0.0, 0.2])
        max_model_len = c.of([None, None, 40])
        self.config = KVCacheConfig(
            tuple(num_blocks) if len(num_blocks) > 1 or c.below(2) else num_blocks[0],
            tuple(specs),
            hash_block_size=UNIT,
            retention_interval=interval,
            partial_hits=partial_hits,
        )
        self.manager = KVCacheManager(
            self.config,
            max_model_len=max_model_len,
            max_in_flight_tokens=c.of([None, 8]),
            events="first_last",
            watermark=watermark,
            verify_hashes=c.once_in(4),
        )
        assert self.manager.alignment == alignment or not rules
        self.max_model_len = max_model_len or NO_LIMIT
        self.groups = groups
        watermarks = [int(watermark * n) for n in num_blocks]
        self.model = ModelCache(groups, num_blocks, UNIT, alignment, interval, watermarks, self.max_model_len)
        self.memory = Memory(groups, num_blocks)
        self.has_states = any(g.is_state for g in groups)
        self.can_store = bool(rules)

    def group(self, number: int, kind: str, size: int, pool: int) -> ModelGroup:
        c = self.c
        g = ModelGroup(number, kind, size, pool, clear=c.once_in(4))
        width = c.between(1, 14)
        makers: dict[str, Rule] = {
            "full": full(size),
            "sink": sink(size),
            "window": window(size, width),
            "chunked": chunked(size, width),
            "reference": reference(size, width),
        }
        if kind == "state":
            g.drafts = c.of([0, 0, 1, 2])
            g.rule = state(size, g.drafts)
        elif kind == "none":
            g.drafts = c.of([0, 2])
        elif kind in makers:
            g.rule = makers[kind]
            g.rule.margin = c.once_in(5)
            g.sinks = 2 if kind == "sink" else 0
        return g

    def run(self) -> None:
        operations = [
            *[self.go_on] * 8,
            *[self.admit] * 6,
            *[self.arrive] * 2,
            self.finish,
            self.preempt,
            self.register_late,
            self.look_and_wait,
            self.reset,
            *[self.next_step] * 4,
            *[self.acknowledge] * 3,
            *[self.cancel] * 2,
            self.old_hit,
            self.pin,
        ]
        self.same()
        while self.c.left:
            self.c.of(operations)()
            self.same()
        self.end()

    # -- requests ------------------------------------------------------------------------------------

    def arrive(self) -> Live | None:
        """Prompts share prefixes of every length with one another."""
        c = self.c
        if len(self.live) >= 5:
            return None
        name = f"r{self.count}"
        self.count += 1
        shared = c.of([12, 16, 8, 11, 20, 4, 17, 24, 30, 0])
        own = c.between(1, 12)
        variant = c.below(2)
        stream = [*range(shared), *[100 * (variant + 1) + i for i in range(own)]]
        if self.max_model_len < NO_LIMIT:
            stream = stream[: self.max_model_len - 2]
        skip, no_store = c.once_in(12), c.once_in(12)
        request = Request(name, stream, hasher=HASHER, skip_reading_prefix_cache=skip, no_store=no_store)
        model = ModelRequest(name, list(stream), len(stream), c.below(9), skip=skip, no_store=no_store)
        assert request.block_hashes is not None
        model.chain = list(request.block_hashes)
        self.model.requests[name] = model
        stream = stream + [1000 + i % 3 for i in range(len(stream), 120)]
        prints = [0]
        for token in stream:
            prints.append(hash((prints[-1], token)))
        self.live[name] = Live(request, model, stream, prints)
        return self.live[name]

    def pick(self, *, holding: bool, once: bool = False) -> Live | None:
        """A request that holds blocks or none; `once`: that has no part in the step that is planned now."""
        busy = {work.name for work in self.steps[-1].works} if self.steps and not self.steps[-1].executed else set()
        options = [
            live
            for name, live in self.live.items()
            if (live.model.tables is not None) == holding and (name not in busy or not once)
        ]
        return self.c.of(options) if options else None

    def look(self, live: Live) -> tuple[Any, ModelHit]:
        hit = self.manager.get_computed_blocks(live.request)
        expected = self.model.lookup(live.model)
        assert (hit.num_tokens, hit.ready_length) == (expected.length, expected.ready)
        if hit.num_tokens:
            assert list(hit.blocks) == expected.blocks
        if expected.shortened:
            expected.junction = hit.junction
        elif expected.own:
            assert hit.junction == expected.junction
            for own, real in zip(expected.own, hit.own_lengths, strict=True):
                assert own is None or own == real
        return hit, expected

    def work_step(self) -> Step | None:
        """The step that what is planned now belongs to; None without steps."""
        if not self.in_steps:
            return None
        if not self.steps or self.steps[-1].executed:
            self.begin()
        return self.steps[-1]

    def admit(self) -> None:
        live = self.pick(holding=False, once=True)
        if live is None:
            live = self.arrive()
        if live is None:
            return
        c = self.c
        self.work_step()
        hit: Any
        expected: ModelHit | None
        hit, expected = self.look(live)
        if c.once_in(8) or (expected.ready > expected.length and c.below(2)):
            if c.below(2):
                hit = expected = None
        external: int | None = None
        local = expected.length if expected else 0
        if c.once_in(5):
            external = min(c.of([0, 4, 7, 12, 20]), len(live.model.tokens) - 1 - local)
        total = local + (external or 0)
        new = min(c.of([100, 1, 3, 4, 8, 16]), len(live.model.tokens) - total)
        delay = c.once_in(8)
        if external and c.below(2):
            new, delay = 0, True
        self.allocate(live, new, hit, expected, external, delay)

    def go_on(self) -> None:
        live = self.pick(holding=True, once=True)
        if live is None or live.frozen:
            self.admit()
            return
        c, m = self.c, live.model
        self.work_step()
        known = len(m.tokens) + live.sampled - m.computed
        most = self.max_model_len - m.computed
        if known < 1 or most < 1:
            return
        new = min(c.of([100, 1, 2, 3, 4, 8]), known, most)
        if m.prompt > m.computed and c.below(2):  # an engine ends a chunk where the prompt can be resumed
            new = max(1, min(known, self.model.replay(m.prompt) - m.computed))
        drafts = 0
        if new == known and m.in_flight == 0 and not self.has_states and c.once_in(3):
            drafts = min(c.between(1, 5), most - new)
        self.allocate(live, new + drafts, None, None, None, c.once_in(10), drafts)

    def allocate(
        self,
        live: Live,
        new: int,
        hit: Any,
        expected: ModelHit | None,
        external: int | None,
        delay: bool,
        drafts: int = 0,
    ) -> None:
        c, m, r, model = self.c, live.model, live.request, self.model
        lookahead = c.of([0, 0, 0, 1, 5])
        one = c.below(2)
        reserved = [c.of([0, 0, 0, 0, 0, 0, 0, 4])] * len(model.pools)
        if not one:
            reserved = [c.of([0, 0, 0, 0, 0, 0, 0, 3]) for _ in model.pools]
        scheduled = c.below(2) == 0
        admitting = m.tables is None
        if new == 0 and not (expected and expected.length) and not external:
            return
        local = m.computed + (expected.length if expected else 0)
        total = local + (external or 0)
        to = min(total + new, len(m.tokens))
        registers = not delay and not m.no_store
        planned = model.plan(
            m,
            new,
            expected,
            lookahead,
            external or 0,
            reserved,
            scheduled,
            registers and (admitting or model.due(m, to)),
        )
        options: dict[str, Any] = {
            "hit": hit,
            "num_lookahead_tokens": lookahead,
            "num_external_computed_tokens": external,
            "num_encoder_tokens": m.encoder,
            "reserved_blocks": reserved[0] if one else tuple(reserved),
            "delay_cache_blocks": delay,
            "has_scheduled_reqs": scheduled,
        }
        plan = self.manager.plan(r, new, **options)
        whole = self.manager.plan(r, new, full_sequence_must_fit=True, **options)
        assert plan or not whole or (isinstance(plan, Refusal) and plan.reason.value != "never_fits")
        if planned.refusal is not None:
            assert isinstance(plan, Refusal), (planned, plan)
            assert plan.reason.value == planned.refusal, (planned, plan)
            if planned.refusal in ("no_room", "wait_for_fence"):
                assert [room.needed for room in plan.pools] == planned.needed
                assert [room.free for room in plan.pools] == planned.free
                assert any(room.needed + room.withheld > room.free for room in plan.pools)
            assert not whole
            return
        assert isinstance(plan, AllocationPlan), (planned, plan)
        assert (plan is EMPTY_PLAN) == planned.empty
        if plan is not EMPTY_PLAN:
            assert list(plan.num_new_blocks) == planned.new
            assert list(plan.num_dropped_blocks) == [len(gone) for gone in planned.dropped]
            assert plan.num_copies == len(planned.consumers) + len(planned.producers)
        blocks = self.manager.commit(plan)
        tables = self.manager.get_block_ids(r)
        appended = model.commit(
            m, planned, new, expected, lookahead, external or 0, external is not None, registers, tables
        )
        if blocks.num_blocks or any(appended):
            assert list(blocks.get_block_ids()) == appended
        # -- the engine's side
        rejected = c.between(0, drafts) if drafts else 0
        samples = int(total + new - drafts >= len(m.tokens) + live.sampled)
        work = Work(
            m.name,
            live.epoch,
            local,
            total,
            total + new,
            total + new - rejected,
            m.prompt,
            live.prints,
            tables,
            samples,
            (expected.length if expected else 0) if admitting else -1,
        )
        live.sampled += samples
        r.num_computed_tokens = m.computed = total + new
        if self.in_steps:
            r.num_in_flight_tokens = m.in_flight = m.in_flight + new + (total - local)
            live.frozen = drafts > 0 or new == 0
            self.steps[-1].works.append(work)
        else:
            self.make_copies()
            self.memory.forward(work)
            self.result(work)

    def result(self, work: Work) -> None:
        """A step has run: tokens were accepted, drafts rejected."""
        live = self.live.get(work.name)
        if live is None or live.epoch != work.epoch:
            return
        m, r = live.model, live.request
        if self.in_steps:
            r.num_in_flight_tokens = m.in_flight = m.in_flight - (work.last - work.loaded)
        live.frozen = False
        if work.true_until < work.last:
            r.num_computed_tokens = m.computed = m.computed - (work.last - work.true_until)
        grown = max(0, work.true_until - len(m.tokens)) + work.samples
        if work.samples:
            live.sampled -= 1
            new = live.stream[len(m.tokens) : len(m.tokens) + grown]
            if len(m.tokens) + len(new) <= min(100, self.max_model_len):
                r.append_output_tokens(new)
                m.tokens += new
                assert r.block_hashes is not None
                m.chain = list(r.block_hashes)

    def forget(self, live: Live) -> None:
        """Blocks that a step in flight writes are given back when it has run; or the request leaves that step."""
        m = live.model
        fence: int | None = None
        planned = self.steps[-1] if self.steps and not self.steps[-1].executed else None
        mine = [work for work in planned.works if work.name == m.name and work.epoch == live.epoch] if planned else []
        if m.in_flight or (self.in_steps and self.newest >= 0 and self.c.once_in(4)):
            fence = self.newest
        if mine and planned and m.in_flight == sum(w.last - w.loaded for w in mine) and self.c.below(2):
            if self.model.is_shared(m):
                assert self.is_refused(live.request)
            else:
                fence = None
                planned.works.remove(mine[0])
        had = m.tables is not None
        assert self.manager.free(live.request, after=fence) is self.model.free(m, fence) is had
        assert self.manager.free(m.name) is False
        live.epoch += 1
        live.sampled = 0
        live.frozen = False
        live.request.num_computed_tokens = live.request.num_in_flight_tokens = 0

    def is_refused(self, request: Request) -> bool:
        """Whether the request cannot be given back now."""
        try:
            self.manager.free(request)
        except RequestError:
            return True
        return False

    def finish(self) -> None:
        if self.live:
            live = self.c.of(list(self.live.values()))
            self.forget(live)
            del self.live[live.model.name]
            del self.model.requests[live.model.name]

    def preempt(self) -> None:
        live = self.pick(holding=True)
        if live is not None:
            self.forget(live)
            live.request.num_preemptions += 1
            live.model.preempted = True

    def register_late(self) -> None:
        live = self.pick(holding=True)
        if live is not None and live.model.in_flight == 0:
            m = live.model
            self.manager.cache_blocks(live.request, m.computed)
            step = self.model.steps[-1] if self.model.steps else None
            registered, waiting = (len(step.registrars), list(step.waiting)) if step else (0, [])
            self.model.register(m, min(m.computed, len(m.tokens)), 0, 0)
            if step:  # computed already: not to be taken back when the request leaves
                step.registrars[registered:] = [owner + "'" for owner in step.registrars[registered:]]
                for entry in step.waiting:
                    if not any(entry is known for known in waiting):
                        entry.owner += "'"

    def look_and_wait(self) -> None:
        """What a lookup promises for the time when the steps in flight have run."""
        live = self.pick(holding=False)
        if live is None or not self.in_steps:
            return
        hit, _ = self.look(live)
        if self.steps and not self.steps[-1].executed:
            self.execute()
        if self.newest >= 0:
            self.acknowledge_until(self.newest)
        ready = self.manager.get_computed_blocks(live.request).num_tokens
        assert max(ready, hit.num_tokens) == hit.ready_length  # a tail may be gone with the steps

    def old_hit(self) -> None:
        """A hit that was found a while ago."""
        if self.old is None:
            live = self.pick(holding=False, once=True)
            if live is not None:
                self.old = (live, *self.look(live))
            return
        live, hit, expected = self.old
        self.old = None
        name = live.model.name
        if self.live.get(name) is live and live.model.tables is None and expected.length < len(live.model.tokens):
            self.work_step()
            self.allocate(live, len(live.model.tokens) - expected.length, hit, expected, None, delay=False)

    def pin(self) -> None:
        owner = self.c.of(["a", "b"])
        before = [list(pool.queue) for pool in self.model.pools]
        if self.c.below(2) or not self.live or self.has_states:
            assert self.manager.unpin(owner) == self.model.unpin(owner)
            self.model.adopt_queues(self.queues(), before)
            return
        live = self.c.of(list(self.live.values()))
        answer = self.manager.pin(live.request, owner)
        length, counts, too_much = self.model.pin(live.model, owner)
        assert (answer.num_tokens, list(answer.num_blocks)) == (length, counts)
        assert (answer.reason is RefusalReason.PIN_CAP) == too_much

    def reset(self) -> None:
        idle = all(len(pool.queue) == self.model.capacity[p] for p, pool in enumerate(self.model.pools))
        answer = self.manager.reset_prefix_cache()
        assert bool(answer) == idle
        if idle:
            for pool in self.model.pools:
                pool.index = {}
                pool.hashes = [[] for _ in range(pool.n)]
        else:
            tables = {m.name: m.tables for m in self.model.requests.values() if m.tables is not None}
            held = {name: sum(1 for t in all_ for b in t.blocks if b) for name, all_ in tables.items()}
            assert answer.requests == held
            assert set(answer.pins) == set(self.model.pins)

    # -- steps ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.newest += 1
        self.manager.begin_step(self.newest)
        self.model.begin(self.newest)
        self.steps.append(Step(self.newest))

    def make_copies(self) -> None:
        """The worker's lists: clears, then copies; each once."""
        cleared = self.manager.take_blocks_to_clear()
        for g, blocks in zip(self.groups, cleared, strict=True):
            assert len(blocks) == len(set(blocks))
            # Those of a cancelled step may have gone to others: then they are new there too.
            assert set(self.model.to_clear[g.number]) <= set(blocks)
            for block in blocks:
                self.memory.clear(g.number, block)
        self.model.to_clear = [[] for _ in self.groups]
        copies = self.manager.take_block_copies()
        expected = self.model.take_copies()
        found = [(copy.group_id, copy.src_block_id, copy.dst_block_id) for copy in copies]
        assert found == [(copy.group, copy.src, copy.dst) for copy in expected]
        for copy in copies:
            self.memory.copy(copy.group_id, copy.src_block_id, copy.dst_block_id)
        assert self.manager.take_block_copies() == []
        assert not any(self.manager.take_blocks_to_clear())

    def execute(self) -> None:
        step = self.steps[-1]
        self.make_copies()
        for work in step.works:
            self.memory.forward(work)
        step.executed = True

    def next_step(self) -> None:
        if self.in_steps:
            if self.steps and not self.steps[-1].executed:
                self.execute()
            else:
                self.begin()

    def acknowledge(self) -> None:
        done = [step.number for step in self.steps if step.executed]
        if done:
            self.acknowledge_until(self.c.of([done[0], done[-1]]))

    def acknowledge_until(self, number: int) -> None:
        before = [list(pool.queue) for pool in self.model.pools]
        self.manager.acknowledge(number)
        self.model.acknowledge(number)
        self.model.adopt_queues(self.queues(), before)
        self.adopt_first_copies()
        self.manager.acknowledge(number)
        while self.steps and self.steps[0].number <= number:
            for work in self.steps.pop(0).works:
                self.result(work)

    def adopt_first_copies(self) -> None:
        """Which of several blocks that become findable together is found: no rule says."""
        for pool, books in zip(self.manager.pools, self.model.pools, strict=True):
            for (digest, group), blocks in books.index.items():
                if len(blocks) > 1:
                    found = pool.get_cached_block(digest, [group])
                    assert found is not None
                    blocks.remove(found[0])
                    blocks.insert(0, found[0])

    def cancel(self) -> None:
        if not self.steps or self.steps[-1].executed:
            return
        step = self.steps[-1]
        before = [list(pool.queue) for pool in self.model.pools]
        known = {(g, block) for g, block, _ in self.model.steps[-1].registered}
        self.manager.cancel_step(step.number)
        self.model.cancel()
        self.model.adopt_queues(self.queues(), before)
        self.steps.pop()
        self.newest = self.steps[-1].number if self.steps else self.model.acknowledged
        for work in step.works[::-1]:
            live = self.live.get(work.name)
            if live is None or live.epoch != work.epoch or live.model.tables is None:
                continue
            m, r = live.model, live.request
            live.sampled -= work.samples
            live.frozen = False
            r.num_in_flight_tokens = m.in_flight = m.in_flight - (work.last - work.loaded)
            r.num_computed_tokens = m.computed = work.first
            table = [(g.number, b) for g in self.groups for b in work.tables[g.number]]
            if work.admitted_with == 0 or work.first > work.loaded or known & set(table):
                if work.admitted_with >= 0:
                    self.forget(live)  # what it would start from was never there

    def queues(self) -> list[list[int]]:
        return [pool.free_block_queue.get_all_free_blocks() for pool in self.manager.pools]

    # -- what must be equal ---------------------------------------------------------------------------

    def same(self) -> None:
        manager, model = self.manager, self.model
        for p, (pool, books) in enumerate(zip(manager.pools, model.pools, strict=True)):
            if pool.version != self.seen[p]:
                self.seen[p] = pool.version
                dump = pool.dump()
                assert audit_dump(dump) == []
                assert dump["queue"] == books.queue
                self.refs[p] = [row["ref_cnt"] for row in dump["blocks"]]
                self.keys[p] = [[key["key"] for key in row["hashes"]] for row in dump["blocks"]]
            else:
                assert pool.free_block_queue.get_all_free_blocks() == books.queue
            assert self.refs[p] == books.ref
            assert self.keys[p] == [[(d + n.to_bytes(4)).hex() for (d, n), _ in hashes] for hashes in books.hashes]
        for name, live in self.live.items():
            tables = live.model.tables
            expected = tuple([] for _ in self.groups) if tables is None else tuple(t.blocks for t in tables)
            assert manager.get_block_ids(name) == expected
        total = manager.stats.total
        assert list(total.fields) == model.stats
        assert manager.num_collisions == 0
        self.follow(manager.take_events())
        if not model.steps:
            assert self.mirror == {(group, digest) for pool in model.pools for digest, group in pool.index}

    def follow(self, events: list[Any]) -> None:
        """A reader of the events: every key is stored once before it is removed once."""
        for event in events:
            if isinstance(event, BlockStored):
                keys = {(event.group_idx, digest) for digest in event.block_hashes}
                assert not keys & self.mirror
                self.mirror |= keys  # type: ignore[arg-type]
            elif isinstance(event, BlockRemoved):
                keys = {(event.group_idx, digest) for digest in event.block_hashes}
                assert keys <= self.mirror
                self.mirror -= keys  # type: ignore[arg-type]
            else:
                self.mirror.clear()

    def end(self) -> None:
        """All are gone and all steps have run: every block is free, but for the sinks."""
        if self.in_steps and self.steps and not self.steps[-1].executed:
            self.execute()
        for live in list(self.live.values()):
            self.forget(live)
        for owner in ("a", "b"):
            before = [list(pool.queue) for pool in self.model.pools]
            assert self.manager.unpin(owner) == self.model.unpin(owner)
            self.model.adopt_queues(self.queues(), before)
        if self.in_steps:
            self.begin()  # a fence may be that of a step that was cancelled
            self.execute()
            self.acknowledge_until(self.newest)
        self.same()
        for p, pool in enumerate(self.manager.pools):
            assert pool.get_num_free_blocks() == self.model.capacity[p]
