"""A cache of several groups and pools so simple that it is obviously right: lists, dicts, and every boundary tried.

It says what a lookup finds, what a plan costs or why it is refused, what tables, references and the index are
afterwards. Which of the free blocks goes to which group is read from the real tables; that they are the first of the
queue is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from blockpool.managers import RetentionPolicy
from tests.managers.rules import Rule, ends_needed, step_of, up, worth
from tests.pool.model import ModelPool

NEW = -1  # a block to be taken


@dataclass
class ModelGroup:
    """`rule`: for kinds that are cached. `kind` is the name of the kind, `drafts` the blocks for states of drafts."""

    number: int
    kind: str
    size: int
    pool: int
    rule: Rule | None = None
    drafts: int = 0
    clear: bool = False
    sinks: int = 0

    @property
    def is_state(self) -> bool:
        return self.kind == "state"


@dataclass
class ModelTable:
    blocks: list[int]
    registered: int = 0
    scratch: int = 0
    has_tail: bool = False


@dataclass
class ModelRequest:
    name: str
    tokens: list[int]
    prompt: int
    encoder: int
    skip: bool = False
    no_store: bool = False
    chain: list[bytes] = field(default_factory=list)
    computed: int = 0
    in_flight: int = 0
    preempted: bool = False
    junctions: set[int] = field(default_factory=set)
    tables: list[ModelTable] | None = None


@dataclass
class Entry:
    """What becomes findable when its step is acknowledged."""

    group: int
    block: int
    digest: bytes
    end: int
    owner: str
    held: int = 0  # the block with the reference that waits for the step


@dataclass
class Copy:
    group: int
    src: int
    dst: int
    step: int | None
    moved: bool = False  # the source's entries moved along


@dataclass
class ModelStep:
    number: int
    waiting: list[Entry] = field(default_factory=list)
    registered: list[tuple[int, int, int]] = field(default_factory=list)  # group, block, turn
    registrars: list[str] = field(default_factory=list)  # of each
    grown: dict[tuple[str, int], tuple[list[int], int, int]] = field(
        default_factory=dict
    )  # tables of states before it
    copies: list[Copy] = field(default_factory=list)


@dataclass
class ModelHit:
    length: int
    blocks: list[list[int]]
    own: list[int | None]
    ready: int
    shortened: bool = False  # more is there, but not written yet
    junction: int = 0
    keys: list[tuple[int, int, int, bytes]] = field(default_factory=list)  # group, block, turn, digest

    def __post_init__(self) -> None:
        self.junction = max([0, *[n for n in self.own if n is not None and n > self.length]])


@dataclass
class ModelPlan:
    new: list[int]  # per group, copies included
    dropped: list[list[int]]
    consumers: list[int]  # groups whose hit ends inside a block
    producers: list[int]  # state groups that go on from their own tail
    forgone: list[int] = field(default_factory=list)  # those whose copy would never fit: the entry goes
    refusal: str | None = None
    needed: list[int] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    empty: bool = False


class ModelCache:
    def __init__(
        self,
        groups: list[ModelGroup],
        num_blocks: list[int],
        unit: int,
        alignment: int,
        interval: int | None,
        watermarks: list[int],
        max_model_len: int,
    ) -> None:
        self.groups = groups
        self.caches = any(g.rule is not None for g in groups)
        self.unit = unit
        self.alignment = alignment
        self.policy = RetentionPolicy(alignment, interval)
        self.watermarks = watermarks
        self.max_model_len = max_model_len
        self.pools = [ModelPool(n, unit, "first_last") for n in num_blocks]
        self.capacity = [n - 1 - sum(g.sinks for g in groups if g.pool == p) for p, n in enumerate(num_blocks)]
        for g in groups:
            self.pools[g.pool].get_new_blocks(g.sinks)
        self.requests: dict[str, ModelRequest] = {}
        self.pins: dict[str, list[tuple[int, list[int]]]] = {}  # owner -> group and blocks, per pin and group
        self.steps: list[ModelStep] = []
        self.acknowledged = -1
        self.to_copy: list[Copy] = []  # queued for the worker
        self.loose: list[Copy] = []  # of no step: their ends are kept until the worker has them
        self.to_clear: list[list[int]] = [[] for _ in groups]
        self.stats = [0] * 8

    # -- looking up ----------------------------------------------------------------------------------

    def cached(self, g: ModelGroup, chain: list[bytes], *, ready: bool = False) -> Callable[[int], int]:
        pool = self.pools[g.pool]
        coming = {(e.digest, e.group): e.block for e in self.will_be_found()} if ready else {}

        def block_of(end: int) -> int:
            key = (chain[end // self.unit - 1], g.number)
            found = pool.index.get(key)
            return found[0] if found else coming.get(key, 0)

        return block_of

    def will_be_found(self) -> list[Entry]:
        """What the steps in flight will make findable; a tail is not, when its block is there as a whole by then."""
        entries = [e for step in self.steps for e in step.waiting]
        whole = {(e.group, e.block) for e in entries if e.end % self.groups[e.group].size == 0}
        return [
            e
            for e in entries
            if e.end % self.groups[e.group].size == 0
            or not ((e.group, e.block) in whole or self.has(self.groups[e.group], e.block, e.end))
        ]

    def alone(self, g: ModelGroup, r: ModelRequest, boundary: int, *, ready: bool) -> bool:
        """Whether all that the boundary needs is cached under keys of its own."""
        rule = g.rule
        assert rule is not None
        step = step_of(rule, self.alignment, self.unit)
        if boundary % step or boundary + (min(step, rule.size) if rule.margin else 0) > len(r.chain) * self.unit:
            return False
        cached = self.cached(g, r.chain, ready=ready)
        return all(cached(end) for end in ends_needed(rule, boundary, step).values())

    def own_lengths(self, r: ModelRequest, most: int, *, ready: bool = False) -> list[int | None]:
        """Of the groups that read the whole prefix: their longest hit, were they alone."""
        return [
            self.own_length(g, r, most, ready=ready) if g.rule is not None and g.rule.whole else None
            for g in self.groups
        ]

    def own_length(self, g: ModelGroup, r: ModelRequest, most: int, *, ready: bool) -> int:
        most = min(most, len(r.chain) * self.unit)
        boundaries = range(most - most % self.alignment, 0, -self.alignment)
        return next((b for b in boundaries if self.alone(g, r, b, ready=ready)), 0)

    def longest(self, r: ModelRequest, own: list[int | None], most: int, *, ready: bool = False) -> int:
        """The greatest boundary that every group can resume at.

        For those that read the whole prefix, that is all up to their own longest: a block that is cached beyond a
        boundary inside it holds the keys and values before it.
        """
        most = min(most, len(r.chain) * self.unit)
        for boundary in range(most - most % self.alignment, 0, -self.alignment):
            for g in self.groups:
                length = own[g.number]
                if length is None and g.rule is not None and not self.alone(g, r, boundary, ready=ready):
                    break
                if length is not None and boundary > length:
                    break
            else:
                return boundary
        return 0

    def blocks_at(self, g: ModelGroup, r: ModelRequest, boundary: int, own: int | None) -> list[tuple[int, bytes]]:
        """Block and digest per position, (0, b"") where nothing is needed."""
        assert g.rule is not None
        ends = ends_needed(g.rule, own or boundary, step_of(g.rule, self.alignment, self.unit))
        shown = g.rule.needed(boundary)
        cached = self.cached(g, r.chain)
        return [
            (cached(ends[p]), r.chain[ends[p] // self.unit - 1]) if p in shown else (0, b"")
            for p in range(up(boundary, g.size))
        ]

    def unwritten(self, g: ModelGroup, r: ModelRequest, boundary: int, own: int | None) -> bool:
        """Whether a hit would copy what the step that is planned now writes, after it has made its copies."""
        if g.rule is None or not self.steps or boundary % g.size == 0:
            return False
        last, _ = self.blocks_at(g, r, boundary, own)[-1]
        return last > 0 and (g.number, last, self.pools[g.pool].turn[last]) in self.steps[-1].registered

    def lookup(self, r: ModelRequest) -> ModelHit:
        nothing: list[list[int]] = [[] for _ in self.groups]
        if r.skip or not self.caches:
            return ModelHit(0, nothing, [], 0)
        most = len(r.tokens) - 1
        ready = self.longest(r, self.own_lengths(r, most, ready=True), most, ready=True)
        own = self.own_lengths(r, most)
        length = self.longest(r, own, most)
        shortened = False
        # What would be copied from a block that is being written is left out, and the next shorter hit looked for.
        while length and any(self.unwritten(g, r, length, own[g.number]) for g in self.groups):
            shortened = True
            own = self.own_lengths(r, length - 1)
            length = self.longest(r, own, length - 1)
        hit = ModelHit(length, nothing, own, ready, shortened)
        for g in self.groups if length else []:
            if g.rule is not None:
                blocks = self.blocks_at(g, r, length, own[g.number])
                hit.blocks[g.number] = [block for block, _ in blocks]
                turn = self.pools[g.pool].turn
                hit.keys += [(g.number, block, turn[block], digest) for block, digest in blocks if block]
        return hit

    def is_stale(self, hit: ModelHit) -> bool:
        """Keys and values stay true while their block is not handed out; a state is true under its own key only."""
        for number, block, turn, digest in hit.keys:
            g = self.groups[number]
            pool = self.pools[g.pool]
            keys = [key for key, _ in pool.hashes[block]]
            if pool.turn[block] != turn or not keys or (g.is_state and (digest, number) not in keys):
                return True
        return False

    # -- pins ----------------------------------------------------------------------------------------

    def pin(self, r: ModelRequest, owner: str) -> tuple[int, list[int], bool]:
        """Tokens, blocks per pool, and whether the cap of a pool, half of it, forbids it."""
        own = self.own_lengths(r, len(r.tokens))
        length = self.longest(r, own, len(r.tokens)) if self.caches else 0
        wanted: list[tuple[int, list[int]]] = []
        for g in self.groups if length else []:
            if g.rule is not None:
                blocks = [block for block, _ in self.blocks_at(g, r, length, own[g.number]) if block]
                wanted.append((g.number, blocks[::-1]))
        counts = [sum(len(b) for n, b in wanted if self.groups[n].pool == p) for p in range(len(self.pools))]
        for p, pool in enumerate(self.pools):
            held = self.pinned(p) | {block for n, b in wanted if self.groups[n].pool == p for block in b}
            if counts[p] and len(held) > (pool.n - 1) // 2:
                return 0, [0] * len(self.pools), True
        for number, blocks in wanted:
            self.pools[self.groups[number].pool].touch(blocks)
        if any(counts):
            self.pins.setdefault(owner, []).extend(wanted)
        return length, counts, False

    def pinned(self, p: int) -> set[int]:
        return {
            block
            for pins in self.pins.values()
            for number, blocks in pins
            if self.groups[number].pool == p
            for block in blocks
        }

    def unpin(self, owner: str) -> int:
        pins = self.pins.pop(owner, [])
        for number, blocks in pins:
            self.pools[self.groups[number].pool].free(blocks)
        return sum(len(blocks) for _, blocks in pins)

    # -- planning ------------------------------------------------------------------------------------

    def dropped(self, r: ModelRequest) -> list[list[int]]:
        """Positions per group, deepest first."""
        out: list[list[int]] = [[] for _ in self.groups]
        for g in self.groups if r.tables is not None else []:
            if g.rule is not None:
                table = r.tables[g.number].blocks  # type: ignore[index]
                gone = g.rule.dropped(r.computed - r.in_flight, r.prompt)
                out[g.number] = [p for p in range(len(table) - 1, -1, -1) if p in gone and table[p]]
        return out

    def layout(
        self, g: ModelGroup, r: ModelRequest, hit: ModelHit | None, total: int, new: int, slots: int
    ) -> tuple[list[int], list[int]]:
        """What is appended to the table, NEW where a block is to be taken; and the positions that are moved from."""
        running = r.tables is not None
        held = len(r.tables[g.number].blocks) if r.tables is not None else len(hit.blocks[g.number]) if hit else 0
        if g.kind in ("ring", "none", "cross"):
            length = {"ring": 1, "none": 1 + g.drafts, "cross": up(r.encoder, g.size)}[g.kind]
            return [NEW] * (length - held), []
        assert g.rule is not None
        if not g.is_state:
            unread = set() if running else g.rule.dropped(total, r.prompt)
            return [0 if p in unread else NEW for p in range(held, up(slots, g.size))], []
        end = min(total + new, self.max_model_len)
        last = up(end, g.size) - 1
        if last + 1 + g.drafts <= held:
            return [], []
        added = [0] * max(0, last - held)
        at = (total - 1) // g.size
        if not running and total > held * g.size and at < last:
            added[at - held] = NEW  # a state from elsewhere
        scratch: list[int] = []
        if r.tables is not None:
            table = r.tables[g.number]
            pool = self.pools[g.pool]
            left_behind = range(held - table.scratch, min(held, last))
            scratch += [p for p in left_behind if pool.ref[table.blocks[p]] == 1 and not pool.hashes[table.blocks[p]]]
            added += [table.blocks[p] for p in scratch]
        return added + [NEW] * (last + 1 + g.drafts - held - len(added)), scratch

    def own_tail(self, g: ModelGroup, r: ModelRequest) -> int:
        """The position of the block that the request's state stands in and that an entry inside the block names."""
        if not g.is_state or r.tables is None or r.computed % g.size == 0:
            return -1
        position = r.computed // g.size
        block = r.tables[g.number].blocks[position] if position < len(r.tables[g.number].blocks) else 0
        named = {end for _, end in self.pools[g.pool].hashes[block]}
        named |= {e.end for s in self.steps for e in s.waiting if e.group == g.number and e.block == block}
        return position if block and r.computed in named else -1

    def plan(
        self,
        r: ModelRequest,
        new: int,
        hit: ModelHit | None,
        lookahead: int,
        external: int,
        reserved: list[int],
        has_scheduled: bool,
        registers: bool,
    ) -> ModelPlan:
        total = min(r.computed + (hit.length if hit else 0) + external, self.max_model_len)
        slots = min(total + new + lookahead, self.max_model_len)
        pools = range(len(self.pools))
        plan = ModelPlan([], self.dropped(r), [], [])
        taking, adopting, freeing, keeping = ([0] * len(self.pools) for _ in range(4))
        for g in self.groups:
            pool = self.pools[g.pool]
            added, _ = self.layout(g, r, hit, total, new, slots)
            count = added.count(NEW)
            if hit is not None and hit.length % g.size and hit.blocks[g.number] and hit.blocks[g.number][-1]:
                plan.consumers.append(g.number)
                count += 1
            if r.tables is not None and new > 0 and self.own_tail(g, r) >= 0:
                plan.producers.append(g.number)
                count += 1
            plan.new.append(count)
            taking[g.pool] += count
            for block in hit.blocks[g.number] if hit else []:
                adopting[g.pool] += block > 0 and pool.ref[block] == 0
                keeping[g.pool] += block > 0
            if r.tables is not None:
                table = r.tables[g.number].blocks
                freeing[g.pool] += sum(pool.ref[table[p]] == 1 for p in plan.dropped[g.number])
                unread = g.rule.dropped(r.computed, r.prompt) if g.rule is not None else set()
                keeping[g.pool] += sum(1 for p, block in enumerate(table) if block and p not in unread)
        never = any(keeping[p] + taking[p] > self.capacity[p] for p in pools)
        if never and plan.producers:
            plan.forgone, plan.producers = plan.producers, []
            for number in plan.forgone:
                plan.new[number] -= 1
                taking[self.groups[number].pool] -= 1
            never = any(keeping[p] + taking[p] > self.capacity[p] for p in pools)
        plan.empty = (
            r.tables is not None
            and not any(plan.new)
            and not any(plan.dropped)
            and not registers
            and not plan.forgone
        )
        plan.needed = [taking[p] + adopting[p] for p in pools]
        plan.free = [len(self.pools[p].queue) + freeing[p] for p in pools]
        kept = [reserved[p] + (self.watermarks[p] if r.tables is None and has_scheduled else 0) for p in pools]
        if hit is not None and self.is_stale(hit):
            plan.refusal = "stale_hit"
        elif hit is not None and hit.ready > hit.length:
            plan.refusal = "state_not_ready"
        elif never:
            plan.refusal = "never_fits"
        elif not plan.empty and any(plan.needed[p] + kept[p] > plan.free[p] for p in pools):
            enough = all(plan.needed[p] + kept[p] <= plan.free[p] + self.coming(p, hit) for p in pools)
            plan.refusal = "wait_for_fence" if enough else "no_room"
        return plan

    def coming(self, p: int, hit: ModelHit | None) -> int:
        """Blocks that fences alone keep, but for those that the request would adopt."""
        adopted = {b for g in self.groups if g.pool == p and hit is not None for b in hit.blocks[g.number]}
        pool = self.pools[p]
        return sum(
            1 for b in range(1, pool.n) if b not in adopted and 0 < pool.ref[b] == pool.waiting(b) + self.kept(p, b)
        )

    def kept(self, p: int, block: int) -> int:
        """References that the steps in flight keep: of blocks that become findable, and of copies."""
        count = 0
        for step in self.steps:
            count += sum(e.held == block for e in step.waiting if self.groups[e.group].pool == p)
            for c in step.copies:
                if self.groups[c.group].pool == p:
                    count += (c.src == block) + (c.dst == block)
        return count

    # -- committing ----------------------------------------------------------------------------------

    def commit(
        self,
        r: ModelRequest,
        plan: ModelPlan,
        new: int,
        hit: ModelHit | None,
        lookahead: int,
        external: int,
        asked: bool,
        registers: bool,
        real: tuple[list[int], ...],
    ) -> list[list[int]]:
        """The ids that were appended, per group. `real`: the tables afterwards."""
        base = r.computed + (hit.length if hit else 0)
        total = min(base + external, self.max_model_len)
        slots = min(total + new + lookahead, self.max_model_len)
        layouts = [self.layout(g, r, hit, total, new, slots) for g in self.groups]
        admitted = r.tables is None
        for g in self.groups if r.tables is not None else []:
            table = r.tables[g.number]  # type: ignore[index]
            self.pools[g.pool].free([table.blocks[p] for p in plan.dropped[g.number]])
            for p in plan.dropped[g.number]:
                table.blocks[p] = 0
        if admitted:
            r.tables = []
            for g in self.groups:
                blocks = list(hit.blocks[g.number]) if hit else []
                self.pools[g.pool].touch(blocks)
                r.tables.append(ModelTable(blocks, registered=(hit.length if hit else 0) // g.size))
        assert r.tables is not None
        appended: list[list[int]] = []
        before = [(list(table.blocks), table.scratch, table.registered) for table in r.tables]
        taken: list[list[int]] = [[] for _ in self.pools]
        for g, (added, moved) in zip(self.groups, layouts, strict=True):
            table = r.tables[g.number]
            held = len(table.blocks)
            for p in moved:
                table.blocks[p] = 0
            table.blocks += added
            if added and g.is_state:
                table.scratch = g.drafts
            if g.number in plan.consumers:
                table.blocks[up(hit.length, g.size) - 1] = NEW  # type: ignore[union-attr]
            assert len(real[g.number]) == len(table.blocks), (g, table.blocks, real[g.number])
            for p, block in enumerate(table.blocks):
                if block == NEW:
                    table.blocks[p] = real[g.number][p]
                    taken[g.pool].append(table.blocks[p])
            assert real[g.number] == table.blocks, g
            appended.append(table.blocks[held:])
            if g.clear:
                fresh = [p for p, a in enumerate(added, held) if a == NEW and not self.loads(g, p, total, external)]
                self.to_clear[g.number] += [table.blocks[p] for p in fresh]
        kept: dict[int, int] = {}
        for p, pool in enumerate(self.pools):
            producers = [n for n in plan.producers if self.groups[n].pool == p]
            count = sum(n for g, n in zip(self.groups, plan.new, strict=True) if g.pool == p)
            first = pool.queue[:count]
            assert set(taken[p]) <= set(first), "only the first of the queue are handed out"
            assert len(taken[p]) == len(set(taken[p])) == count - len(producers)
            rest = [block for block in first if block not in taken[p]]
            kept.update(zip(producers, rest, strict=True))
            pool.get_new_blocks(count)
        for g in self.groups:
            if g.number in plan.consumers:
                assert hit is not None
                at = up(hit.length, g.size) - 1
                # the hit's own reference becomes the copy's
                self.order_copy(Copy(g.number, hit.blocks[g.number][at], r.tables[g.number].blocks[at], None), (0, 1))
            if g.number in plan.producers:
                src = r.tables[g.number].blocks[r.computed // g.size]
                self.order_copy(Copy(g.number, src, kept[g.number], None, moved=True), (1, 0))
                self.pools[g.pool].move(src, kept[g.number])
                for step in self.steps:
                    for entry in step.waiting:
                        if entry.group == g.number and entry.block == src:
                            entry.block = kept[g.number]  # the copy's reference lasts at least as long
        for g in self.groups if self.steps else []:
            if g.kind in ("state", "none"):
                blocks, scratch, registered = before[g.number]
                if g.number in plan.consumers:
                    blocks[-1] = r.tables[g.number].blocks[len(blocks) - 1]
                self.steps[-1].grown.setdefault((r.name, g.number), (blocks, scratch, registered))
        for number in plan.forgone:
            block = r.tables[number].blocks[r.computed // self.groups[number].size]
            self.pools[self.groups[number].pool].drop(block)
            for step in self.steps:
                for entry in [e for e in step.waiting if e.group == number and e.block == block]:
                    step.waiting.remove(entry)
                    self.pools[self.groups[number].pool].pending.append((step.number, [entry.held], None))
        if admitted:
            r.junctions = {hit.junction} - {0} if hit is not None else set()
        if registers:
            self.register(r, min(total + new, len(r.tokens)), base, total)
        if admitted and not r.skip:
            at = 3 if r.preempted else 0
            length = hit.length if hit else 0
            for i, amount in enumerate((1, len(r.tokens), length)):
                self.stats[at + i] += amount
            if asked:
                for i, amount in enumerate((len(r.tokens) - length, external)):
                    self.stats[6 + i] += amount
        return appended

    def loads(self, g: ModelGroup, position: int, total: int, external: int) -> bool:
        """Whether a block is filled from elsewhere: then it is not cleared."""
        if g.rule is None or not external:
            return False
        return position == (total - 1) // g.size if g.is_state else (position + 1) * g.size <= total

    def order_copy(self, copy: Copy, more: tuple[int, int]) -> None:
        """Both ends hold a reference until the copy is made: `more` of them beyond those that are there."""
        pool = self.pools[self.groups[copy.group].pool]
        pool.ref[copy.src] += more[0]
        pool.ref[copy.dst] += more[1]
        self.to_copy.append(copy)
        if self.steps:
            copy.step = self.steps[-1].number
            self.steps[-1].copies.append(copy)
        else:
            self.loose.append(copy)

    def named(self, r: ModelRequest) -> set[int]:
        """The boundaries that are kept whatever the policy: the replay of the prompt, junctions."""
        return r.junctions | {self.replay(r.prompt)}

    def replay(self, prompt: int) -> int:
        """The least of all groups' answers: all but the last token, and what the margin needs is hashed."""
        hashed = prompt - prompt % self.unit
        answers = []
        for g in self.groups:
            if g.rule is not None:
                step = step_of(g.rule, self.alignment, self.unit)
                most = min(prompt - 1, hashed - (min(step, g.size) if g.rule.margin else 0))
                answers.append(max(0, most - most % step))
        return min(answers, default=0)

    def register(self, r: ModelRequest, to: int, local: int, total: int) -> None:
        """`local` .. `total`: tokens that were loaded, not computed; what was computed after them waits with them."""
        if r.tables is None or r.no_store:
            return
        for g in self.groups:
            if g.rule is None:
                continue
            table = r.tables[g.number]
            last = min(to // g.size, len(r.chain) * self.unit // g.size, len(table.blocks))
            first = table.registered
            if g.is_state:
                first = max(first, last - 1)
                last = last if last * g.size == to else first
            if g.is_state and local < total < to and total % g.size == 0:  # a state from elsewhere
                (kept,) = worth(g.rule, self.policy, self.unit, self.named(r), total // g.size - 1, total // g.size)
                if kept:
                    self.offer(r, g, table.blocks[total // g.size - 1], total, at_once=False)
            if last > first:
                keep = worth(g.rule, self.policy, self.unit, self.named(r), first, last)
                for p, kept in zip(range(first, last), keep, strict=True):
                    block = table.blocks[p]
                    if kept and block and not self.has(g, block, (p + 1) * g.size):
                        self.offer(r, g, block, (p + 1) * g.size, at_once=not g.is_state and local == total)
                table.registered = last
            p, end = self.tail(g, r)
            if end and not table.has_tail and p < len(table.blocks) and (to == end if g.is_state else to >= end):
                if table.blocks[p] and not self.has(g, table.blocks[p], end):
                    self.offer(r, g, table.blocks[p], end, at_once=False)
                    table.has_tail = True

    def due(self, r: ModelRequest, to: int) -> bool:
        """Whether `register` has anything to look at."""
        if r.tables is None or r.no_store:
            return False
        for g in self.groups if r.chain else []:
            if g.rule is None:
                continue
            table = r.tables[g.number]
            last = min(to // g.size, len(r.chain) * self.unit // g.size, len(table.blocks))
            if last > table.registered and (not g.is_state or last * g.size == to):
                return True
            p, end = self.tail(g, r)
            if end and not table.has_tail and p < len(table.blocks) and table.blocks[p]:
                if (to == end if g.is_state else to >= end) and not self.has(g, table.blocks[p], end):
                    return True
        return False

    def tail(self, g: ModelGroup, r: ModelRequest) -> tuple[int, int]:
        """Position and end of the prompt's tail; zeros where it does not lie inside a block or no hit ends there."""
        if g.rule is None or not g.rule.partial or self.alignment >= g.size:
            return 0, 0
        end = r.prompt if g.rule.margin else r.prompt - 1
        end -= end % self.unit
        return (end // g.size, end) if end % g.size else (0, 0)

    def has(self, g: ModelGroup, block: int, end: int) -> bool:
        """Whether the block is registered as far as that."""
        return any(tokens >= end for _, tokens in self.pools[g.pool].hashes[block])

    def offer(self, r: ModelRequest, g: ModelGroup, block: int, end: int, *, at_once: bool) -> None:
        entry = Entry(g.number, block, r.chain[end // self.unit - 1], end, r.name)
        if self.steps and not at_once:
            self.steps[-1].waiting.append(entry)
            entry.held = block
            self.pools[g.pool].ref[block] += 1
            return
        self.add(entry)
        if self.steps:
            self.steps[-1].registered.append((g.number, block, self.pools[g.pool].turn[block]))
            self.steps[-1].registrars.append(r.name)

    def add(self, entry: Entry) -> None:
        """A longer prefix replaces a shorter one; a shorter one adds nothing."""
        g = self.groups[entry.group]
        pool = self.pools[g.pool]
        if not self.has(g, entry.block, entry.end):
            pool.drop(entry.block)
            pool.add(entry.block, (entry.digest, g.number), entry.end, None)

    # -- steps ---------------------------------------------------------------------------------------

    def is_shared(self, r: ModelRequest) -> bool:
        """Whether others hold what the step that is planned now has registered for the request."""
        if not self.steps:
            return False
        step = self.steps[-1]
        copied = [(copy.group, copy.dst) for copy in step.copies]  # a copy to it is no sharer
        return any(
            owner == r.name and self.pools[self.groups[number].pool].ref[block] > 1 + ((number, block) in copied)
            for (number, block, _), owner in zip(step.registered, step.registrars, strict=True)
        )

    def begin(self, number: int) -> None:
        self.steps.append(ModelStep(number, copies=self.loose))
        for copy in self.loose:
            copy.step = number
        self.loose = []

    def cancel(self) -> None:
        """What the newest step registered is revoked, what states got is given back; copies are left to the next.

        References that the step kept last until the newest step that is left has run.
        """
        step = self.steps.pop()
        back = {(copy.group, copy.dst): copy.src for copy in step.copies if copy.moved}
        for copy in step.copies[::-1]:
            pool = self.pools[self.groups[copy.group].pool]
            pool.pending.append((step.number, [copy.src, copy.dst], None))
            if copy.moved:
                self.move_back(copy)
            elif pool.ref[copy.dst] > 1:
                copy.step = None
                copy.src = back.get((copy.group, copy.src), copy.src)  # what would have been copied there first
                self.loose.insert(0, copy)
                pool.touch([copy.src, copy.dst])
        self.to_copy = list(self.loose)
        self.revoke(step, [entry.owner for entry in step.waiting], step.registrars)
        for (name, number), (blocks, scratch, registered) in step.grown.items():
            r = self.requests.get(name)
            if r is not None and r.tables is not None:
                table = r.tables[number]
                gone = [block for block in table.blocks if block and block not in blocks]
                self.pools[self.groups[number].pool].free(gone[::-1])
                kept = {block for block in table.blocks if block}
                table.blocks = [block if block in kept else 0 for block in blocks]
                table.scratch = scratch
                table.registered = min(table.registered, registered)
        for pool in self.pools:
            due = [release for release in pool.pending if release[0] == step.number]
            pool.pending = [release for release in pool.pending if release[0] != step.number]
            for _, blocks, hold in due:
                if self.steps:
                    pool.pending.append((self.steps[-1].number, blocks, hold))
                else:
                    pool.free(blocks)

    def revoke(self, step: ModelStep, waiting: list[str], registered: list[str]) -> None:
        """Entries of these owners, from a step that will not compute them."""
        revoked = set()
        for entry in [entry for entry in step.waiting if entry.owner in waiting]:
            step.waiting.remove(entry)
            revoked.add((entry.group, entry.block))
            self.pools[self.groups[entry.group].pool].pending.append((step.number, [entry.held], None))
        left = [(one, owner) for one, owner in zip(step.registered, step.registrars, strict=True)]
        for (number, block, turn), owner in left:
            if owner in registered:
                revoked.add((number, block))
                if self.pools[self.groups[number].pool].turn[block] == turn:
                    self.pools[self.groups[number].pool].drop(block)
        kept = [(one, owner) for one, owner in left if owner not in registered]
        step.registered = [one for one, _ in kept]
        step.registrars = [owner for _, owner in kept]
        for r in self.requests.values():
            for g in self.groups if r.tables is not None else []:
                table = r.tables[g.number]  # type: ignore[index]
                lost = [p for p, block in enumerate(table.blocks) if (g.number, block) in revoked]
                if lost:
                    table.registered = min(table.registered, *lost)
                    table.has_tail = False

    def move_back(self, copy: Copy) -> None:
        pool = self.pools[self.groups[copy.group].pool]
        pool.move(copy.dst, copy.src)
        for step in self.steps:
            for entry in step.waiting:
                if entry.group == copy.group and entry.block == copy.dst:
                    entry.block = copy.src

    def acknowledge(self, number: int) -> None:
        """The order in which the blocks join the queue is adopted: see `adopt_queues`."""
        gone: list[tuple[int, int]] = []
        while self.steps and self.steps[0].number <= number:
            step = self.steps.pop(0)
            for entry in step.waiting:
                self.add(entry)
                gone.append((self.groups[entry.group].pool, entry.held))
            for copy in step.copies:
                gone += [(self.groups[copy.group].pool, end) for end in (copy.src, copy.dst)]
        for p, block in gone:
            self.pools[p].free([block])
        self.acknowledged = max(self.acknowledged, number)
        for pool in self.pools:
            pool.advance(number)

    def take_copies(self) -> list[Copy]:
        out = self.to_copy
        self.to_copy = []
        for copy in self.loose:
            for end in (copy.src, copy.dst):
                self.pools[self.groups[copy.group].pool].free([end])
        self.loose = []
        return out

    def free(self, r: ModelRequest, after: int | None) -> bool:
        if r.tables is None:
            return False
        if after is None and self.steps:  # what the step that is planned now has for it will not be computed
            self.revoke(self.steps[-1], [r.name], [r.name])
        for step in self.steps:  # what it has in steps that run is no longer in its name
            step.registrars = [owner + "'" if owner == r.name else owner for owner in step.registrars]
            for entry in step.waiting:
                entry.owner += "'" if entry.owner == r.name else ""
            for g in self.groups:
                step.grown.pop((r.name, g.number), None)
        for g in self.groups:
            blocks = r.tables[g.number].blocks
            self.pools[g.pool].free(blocks[::-1], after)
            if after is None:
                self.to_clear[g.number] = [b for b in self.to_clear[g.number] if b not in blocks]
        r.tables = None
        r.computed = r.in_flight = 0
        return True

    def adopt_queues(self, queues: Iterable[list[int]], before: list[list[int]]) -> None:
        """Blocks joined the queues in an order that no rule fixes: plain ones in front, cached ones behind."""
        for pool, real, old in zip(self.pools, queues, before, strict=True):
            assert sorted(real) == sorted(pool.queue)
            stayed = [block for block in old if block in pool.queue]
            joined = [block for block in real if block not in stayed]
            plain = [block for block in joined if not pool.hashes[block]]
            at = len(plain)
            assert set(real[:at]) == set(plain)
            assert real[at : at + len(stayed)] == stayed
            pool.queue = list(real)
