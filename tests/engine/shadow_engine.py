"""A random engine over a memory of fingerprints: random models, requests, pools, steps in flight and disturbances."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from blockpool.cache import KVCacheConfig, KVCacheManager
from blockpool.engine import (
    Access,
    Connector,
    EngineRequest,
    Fingerprints,
    FinishedRequest,
    FinishReason,
    LoadData,
    Scheduler,
    SchedulerOutput,
    ShadowModel,
    ShadowStore,
    Worker,
    slots_of,
)
from blockpool.hashing import BlockHasher
from blockpool.managers import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    ReferenceWindowSpec,
    SinkFullAttentionManager,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

UNIT = 2
VOCABULARY = 5
HASHER = BlockHasher(hash_block_size=UNIT, seed="shadow")
KINDS = ("full", "window", "chunk", "reference", "sink", "state", "ring", "cross", "none")
#: These can be hit inside blocks, if all groups of a model are of them or have blocks of one unit.
FINE_KINDS = ("full", "state", "sink")


@dataclass(frozen=True)
class Case:
    """What is tried. `pools`: blocks of each, without the null block and the sinks."""

    groups: tuple[KVCacheGroupSpec, ...]
    pools: tuple[int, ...]
    steps_in_flight: int
    num_drafts: int
    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str
    max_model_len: int | None
    watermark: float
    retention_interval: int | None
    partial_hits: bool
    enable_caching: bool
    abort_rate: float


@dataclass(frozen=True)
class Wanted:
    """A request to be: `stream`: its prompt and all that the model would say."""

    name: str
    stream: list[int]
    num_prompt_tokens: int
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    num_encoder_tokens: int
    priority: int
    skip_reading: bool
    no_store: bool

    def request(self) -> EngineRequest:
        return EngineRequest(
            self.name,
            self.stream[: self.num_prompt_tokens],
            max_tokens=self.max_tokens,
            stop_token_ids=self.stop_token_ids,
            priority=self.priority,
            hasher=HASHER,
            num_encoder_tokens=self.num_encoder_tokens,
            skip_reading_prefix_cache=self.skip_reading,
            no_store=self.no_store,
        )


def spec_of(c: random.Random, kind: str, size: int, num_drafts: int) -> KVCacheSpec:
    width = c.randint(1, 14)
    if kind == "window":
        return SlidingWindowSpec(size, width)
    if kind == "chunk":
        return ChunkedLocalAttentionSpec(size, width)
    if kind == "reference":
        return ReferenceWindowSpec(size, width)
    if kind == "sink":
        return SinkFullAttentionSpec(size, size * c.randint(1, 2))
    if kind in ("state", "none"):
        return MambaSpec(size, num_drafts, "align" if kind == "state" else "none")
    if kind == "ring":
        return CircularBufferSpec(size + num_drafts)
    return CrossAttentionSpec(size) if kind == "cross" else FullAttentionSpec(size)


def random_case(c: random.Random) -> Case:
    fine = c.random() < 0.5
    num_drafts = c.choice([0, 0, 1, 2, 3])
    num_pools = c.choice([1, 1, 1, 2])
    size = c.choice([4, 8, 6])
    groups = []
    for number in range(c.randint(max(1, num_pools), 4)):
        if fine:
            kind = c.choice((*FINE_KINDS, *FINE_KINDS, "window", "chunk", "reference", "ring", "cross"))
            own = size if kind in FINE_KINDS or c.random() < 0.3 else UNIT
        else:
            kind = c.choice(KINDS)
            own = c.choice([2, 4, 4, 6, 8])
        spec = spec_of(c, kind, own, num_drafts)
        margin = not spec.is_state and spec.prefix_cacheable and c.random() < 0.15
        pool = number if number < num_pools else c.randrange(num_pools)
        groups.append(
            KVCacheGroupSpec((str(number),), spec, draft_margin=margin, pool=pool, clear_new_blocks=c.random() < 0.3)
        )
    most = c.choice([6, 12, 24, 60])
    batched = c.choice([3, 8, 20, 64])
    return Case(
        tuple(groups),
        tuple([c.randint(2, most) for _ in range(num_pools)]),
        steps_in_flight=c.randint(1, 4),
        num_drafts=num_drafts,
        max_num_seqs=c.randint(1, 6),
        max_num_batched_tokens=batched,
        policy=c.choice(["fcfs", "fcfs", "priority"]),
        max_model_len=c.choice([None, None, 30]),
        watermark=c.choice([0.0, 0.0, 0.1]),
        retention_interval=c.choice([None, None, 0]),
        partial_hits=c.random() < 0.8,
        # A running state alone is nothing that a hit could start from.
        enable_caching=not any(is_running_state_only(group.kv_cache_spec) for group in groups) and c.random() < 0.95,
        abort_rate=c.choice([0.0, 0.0, 0.004, 0.02]),
    )


def is_running_state_only(spec: KVCacheSpec) -> bool:
    return isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "none"


def random_requests(c: random.Random, model: ShadowModel, count: int, max_model_len: int | None) -> list[Wanted]:
    """Prompts share prefixes of every length with one another; some go on where others have ended."""
    bases = [[c.randrange(VOCABULARY) for _ in range(40)] for _ in range(2)]
    wanted: list[Wanted] = []
    for number in range(count):
        if wanted and c.random() < 0.3:
            before = c.choice(wanted)
            end = before.num_prompt_tokens + c.randint(0, before.max_tokens)
            prompt = before.stream[:end] + [c.randrange(VOCABULARY) for _ in range(c.randint(0, 4))]
        else:
            own = [c.randrange(VOCABULARY) for _ in range(c.randint(1, 9))]
            prompt = c.choice(bases)[: c.choice([0, 3, 4, 8, 11, 16, 17, 24, 32])] + own
        if max_model_len is not None:
            prompt = prompt[: max_model_len - 1]
        max_tokens = c.choice([1, 2, 5, 9, 16])
        stream = list(prompt)
        prints = Fingerprints(prompt)
        for _ in range(max_tokens + 4):
            stream.append(model.token_after(int(prints.with_more([])[-1])))
            prints.extend(stream[-1:])
        wanted.append(
            Wanted(
                f"r{number}",
                stream,
                len(prompt),
                max_tokens,
                stop_token_ids=(c.randrange(VOCABULARY),) if c.random() < 0.2 else (),
                num_encoder_tokens=c.randint(1, 12),
                priority=c.randrange(3),
                skip_reading=c.random() < 0.05,
                no_store=c.random() < 0.05,
            )
        )
    return wanted


def expected_outputs(case: Case, wanted: Wanted) -> list[int]:
    """What the request gives if nothing goes wrong."""
    outputs = []
    for token in wanted.stream[wanted.num_prompt_tokens :][: wanted.max_tokens]:
        if case.max_model_len is not None and wanted.num_prompt_tokens + len(outputs) >= case.max_model_len:
            break
        outputs.append(token)
        if token in wanted.stop_token_ids:
            break
    return outputs


class Connection:
    """What brings KV from elsewhere while an engine runs: none does."""

    connector: Connector | None = None

    def ran(self, output: SchedulerOutput) -> None:
        """A step has run."""

    @property
    def is_busy(self) -> bool:
        return False

    def carry_out(self, scheduler: Scheduler) -> None:
        """Something of what is to be done is done; the scheduler hears of it."""


class Loads(Connection):
    """A connector that brings the KV of some prompts some time later: it writes the fingerprints that they need."""

    def __init__(self, c: random.Random, config: KVCacheConfig, store: ShadowStore, alignment: int) -> None:
        self.connector = self
        self.c = c
        self.config = config
        self.store = store
        self.alignment = alignment
        self.most: dict[str, int] = {}
        self.ordered: list[LoadData] = []

    def get_num_external_tokens(self, request: EngineRequest, num_computed_tokens: int) -> int | None:
        if self.c.random() < 0.1:
            return None
        if request.request_id not in self.most:
            self.most[request.request_id] = self.c.choice([0, 0, 4, 8, 12, 24])
        most = min(self.most[request.request_id], request.num_tokens - 1) - num_computed_tokens
        return max(0, most - most % self.alignment)

    def load_aborted(self, request_id: str) -> None:
        """It is carried out all the same, and reported late."""

    def ran(self, output: SchedulerOutput) -> None:
        self.ordered += output.loads

    @property
    def is_busy(self) -> bool:
        return bool(self.ordered)

    def carry_out(self, scheduler: Scheduler) -> None:
        """One of the loads is done, or broken off anywhere; the scheduler hears of it."""
        load = self.ordered.pop(self.c.randrange(len(self.ordered)))
        if self.c.random() < 0.8:
            self._write(load, load.last)
            scheduler.finished_recving(load.request_id)
        else:
            self._write(load, self.c.randint(load.first, load.last))
            scheduler.failed_recving(load.request_id)

    def _write(self, load: LoadData, last: int) -> None:
        prints = Fingerprints(load.token_ids[:last]).with_more([])
        for group_id, (group, table) in enumerate(zip(self.config.kv_cache_groups, load.block_ids, strict=True)):
            spec = group.kv_cache_spec
            if not spec.prefix_cacheable or last == load.first:
                continue
            row = np.array(table, np.int32)
            if spec.is_state:
                tokens = np.array([load.last - 1])
                slots = row[tokens // spec.block_size].astype(np.int64)
                if last < load.last:
                    continue
            else:
                tokens = np.arange(load.first, last)
                slots = slots_of(row, group.block_size, tokens)
                kept = slots >= group.block_size
                tokens, slots = tokens[kept], slots[kept]
            if len(tokens):
                self.store.write(Access(load.request_id, group_id, tokens, slots, prints[tokens]))


class LateReads(ShadowStore):
    """What a step in flight reads may be read at any time until it is acknowledged: it is checked once more then.

    Not states and rings, which the next step overwrites in place.
    """

    def __init__(self, config: KVCacheConfig) -> None:
        super().__init__(config)
        self.now = -1
        self.reads: dict[int, list[Access]] = {}
        self.stays = [
            not (group.kv_cache_spec.is_state or isinstance(group.kv_cache_spec, CircularBufferSpec))
            for group in config.kv_cache_groups
        ]

    def begin_step(self, step_id: int) -> None:
        super().begin_step(step_id)
        self.now = step_id
        self.reads[step_id] = []

    def read(self, access: Access, layer: int = 0) -> tuple[()]:
        super().read(access, layer)
        if self.stays[access.group_id]:
            self.reads[self.now].append(access)
        return ()

    def acknowledge(self, step_id: int) -> None:
        for access in self.reads.pop(step_id):
            super().read(access)


class ShadowEngine:
    """Scheduler, worker and memory for one case; `run` disturbs them in every way that is allowed."""

    tells_stored = False

    def __init__(self, case: Case, c: random.Random, *, with_loads: bool = False) -> None:
        self.case = case
        self.c = c
        self.has_drafts = case.num_drafts > 0
        sinks = [0] * len(case.pools)
        for group in case.groups:
            if isinstance(group.kv_cache_spec, SinkFullAttentionSpec):
                sinks[group.pool] += group.kv_cache_spec.sink_len // group.block_size
        self.config = KVCacheConfig(
            tuple([1 + sink + blocks for sink, blocks in zip(sinks, case.pools, strict=True)]),
            case.groups,
            hash_block_size=UNIT,
            retention_interval=case.retention_interval,
            partial_hits=case.partial_hits,
        )
        self.manager = KVCacheManager(
            self.config,
            max_model_len=case.max_model_len,
            max_steps_in_flight=case.steps_in_flight,
            enable_caching=case.enable_caching,
            watermark=case.watermark,
            tells_stored=self.tells_stored,
        )
        self.free_at_first = [pool.get_num_free_blocks() for pool in self.manager.pools]
        self.store = LateReads(self.config)
        self.model = ShadowModel(self.config, VOCABULARY, case.num_drafts)
        sink_ids = [
            m.sink_block_ids if isinstance(m, SinkFullAttentionManager) else [] for m in self.manager.managers
        ]
        self.store.begin_step(-1)
        self.model.write_sinks(self.store, sink_ids)
        self.worker = Worker(self.config, self.store, self.model, sink_ids)
        self.loads = self.connect() if with_loads else Connection()
        self.scheduler = Scheduler(
            self.manager,
            max_num_seqs=case.max_num_seqs,
            max_num_batched_tokens=case.max_num_batched_tokens,
            policy=case.policy,
            connector=self.loads.connector,
        )
        self.pending: list[tuple[int, dict[str, list[int]]]] = []
        self.requests: dict[str, EngineRequest] = {}
        self.wanted: dict[str, Wanted] = {}
        self.ended: dict[str, FinishedRequest] = {}
        self.seen: Counter[str] = Counter()

    def connect(self) -> Connection:
        return Loads(self.c, self.config, self.store, self.manager.alignment)

    def add(self, wanted: Wanted) -> None:
        request = wanted.request()
        self.requests[wanted.name] = request
        self.wanted[wanted.name] = wanted
        self.scheduler.add_request(request)

    # -- what may happen -----------------------------------------------------------------------------

    def schedule(self) -> bool:
        """Plan a step and run it; False when there is none."""
        output = self.scheduler.schedule()
        if output.step_id < 0:
            return False
        results = self.worker.execute(output)
        self.count(output, results)
        self.pending.append((output.step_id, results))
        self.loads.ran(output)
        self.check_tables(output)
        return True

    def count(self, output: SchedulerOutput, results: dict[str, list[int]]) -> None:
        """What has happened, so that a test can say that it does happen."""
        self.seen["steps"] += 1
        self.seen["preempted"] += len(output.preempted_ids)
        self.seen["copies"] += len(output.copies)
        self.seen["cleared"] += sum(map(len, output.clears))
        self.seen["loads"] += len(output.loads)
        self.seen["hits"] += sum(new.num_computed_tokens > 0 for new in output.new_requests)
        self.seen["hits inside blocks"] += sum(
            any(new.num_computed_tokens % group.block_size for group in self.case.groups)
            for new in output.new_requests
        )
        self.seen["nulled"] += sum(sum(map(len, data.nulled)) for data in output.running)
        self.seen["three in flight"] += len(self.pending) >= 2
        for request_id, drafts in output.draft_token_ids.items():
            self.seen["accepted drafts"] += len(results[request_id]) - 1
            self.seen["rejected drafts"] += len(drafts) + 1 - len(results[request_id])

    def check_tables(self, output: SchedulerOutput) -> None:
        for request_id in output.num_scheduled_tokens:
            tables = self.manager.get_block_ids(request_id)
            row = self.worker.requests[request_id].row
            assert [table.row(row).tolist() for table in self.worker.tables] == list(tables), request_id

    def tell(self, at: int) -> None:
        """The result of a step, early or late; the scheduler brings them in order."""
        step_id, results = self.pending.pop(at)
        self.store.acknowledge(step_id)
        self.scheduler.update(step_id, results)
        self.take()
        if self.has_drafts and self.c.random() < 0.8:
            self.draft()

    def take(self) -> None:
        for ended in self.scheduler.take_finished():
            assert ended.request_id not in self.ended
            self.seen[ended.reason.value] += 1
            self.ended[ended.request_id] = ended

    def draft(self) -> None:
        """Drafts for many: the first of them are right, and sometimes all."""
        for request in self.requests.values():
            if self.c.random() < 0.7:
                self.draft_for(request)

    def draft_for(self, request: EngineRequest) -> None:
        c = self.c
        stream = self.wanted[request.request_id].stream
        drafts = stream[request.num_tokens : request.num_tokens + c.randint(1, self.case.num_drafts)]
        if drafts and c.random() < 0.6:
            at = c.randrange(len(drafts))
            drafts[at] = (drafts[at] + 1) % VOCABULARY
        if drafts:
            self.scheduler.set_drafts(request.request_id, drafts)

    def load(self) -> None:
        if self.loads.is_busy:
            self.loads.carry_out(self.scheduler)

    def run(self, wanted: Iterable[Wanted]) -> None:
        c = self.c
        coming = list(wanted)
        idle = 0
        while coming or self.scheduler.has_work or self.pending:
            what = c.random()
            if self.requests and c.random() < self.case.abort_rate:
                self.scheduler.abort([c.choice(list(self.requests))])
            elif coming and what < 0.3:
                for _ in range(c.randint(1, 3)):
                    if coming:
                        self.add(coming.pop(0))
            elif what < 0.4 and self.loads.connector is not None:
                self.load()
            elif what < 0.8:
                if self.schedule():
                    idle = 0
                    continue
                self.load()
                if self.pending:
                    self.tell(c.randrange(len(self.pending)))
            elif self.pending:
                self.tell(c.randrange(len(self.pending)))
            self.take()
            idle += 1
            assert idle < 300, "the engine stands still"
            if c.random() < 0.03:
                self.sound()
        while self.loads.is_busy:
            self.load()  # of requests that were aborted
        self.take()

    # -- what must be so -----------------------------------------------------------------------------

    def sound(self) -> None:
        for pool in self.manager.pools:
            assert pool.audit() == []

    def check(self) -> None:
        """All have ended as they should, and nothing is held."""
        for name, wanted in self.wanted.items():
            ended = self.ended[name]
            outputs = self.requests[name].output_token_ids
            expected = expected_outputs(self.case, wanted)
            if ended.reason is FinishReason.ABORT:
                assert outputs == expected[: len(outputs)], name
            elif ended.reason is not FinishReason.ERROR:
                assert outputs == expected, name
        self.sound()
        for pool, free in zip(self.manager.pools, self.free_at_first, strict=True):
            parts = pool.get_usage_parts()
            assert (parts.held, parts.deferred) == (pool.num_gpu_blocks - 1 - free, 0)
            assert pool.get_num_free_blocks() == free


def run_alone(case: Case, wanted: Wanted) -> FinishedRequest:
    """One request in an engine of its own. Without drafts, which may spread its growth over steps with more room."""
    engine = ShadowEngine(case, random.Random(0))
    engine.has_drafts = False
    engine.add(wanted)
    while engine.scheduler.has_work or engine.pending:
        if not engine.schedule() and engine.pending:
            engine.tell(0)
    engine.take()
    engine.check()
    return engine.ended[wanted.name]


def smallest_pools(case: Case, wanted: Wanted) -> tuple[int, ...]:
    """With one block less in any pool, the request would not end by itself."""

    def works(pools: tuple[int, ...]) -> bool:
        return run_alone(replace(case, pools=pools), wanted).reason is not FinishReason.ERROR

    pools = [80] * len(case.pools)
    for at in range(len(pools)):
        low, high = 0, 80
        while high - low > 1:
            middle = (low + high) // 2
            if works((*pools[:at], middle, *pools[at + 1 :])):
                high = middle
            else:
                low = middle
        pools[at] = high
    return tuple(pools)


def random_workload(c: random.Random, most_requests: int = 14) -> tuple[Case, list[Wanted]]:
    case = random_case(c)
    model = ShadowModel(KVCacheConfig(case.pools, case.groups, hash_block_size=UNIT), VOCABULARY)
    wanted = random_requests(c, model, c.randint(3, most_requests), case.max_model_len)
    if c.random() < 0.8:
        # Pools that hold the longest request and nothing beside it, or little, or much.
        longest = max(wanted, key=lambda one: one.num_prompt_tokens + one.max_tokens)
        more = c.choice([0, 0, 1, 2, 4, 8, 16])
        case = replace(case, pools=tuple([blocks + more for blocks in smallest_pools(case, longest)]))
    return case, wanted


def run_workload(seed: int) -> ShadowEngine:
    """One random workload, checked; the seed says all of it."""
    c = random.Random(seed)
    case, wanted = random_workload(c)
    engine = ShadowEngine(case, c, with_loads=case.enable_caching and c.random() < 0.25)
    engine.run(wanted)
    engine.check()
    for name, ended in engine.ended.items():
        if ended.reason is FinishReason.ERROR:
            assert run_alone(case, engine.wanted[name]).reason is FinishReason.ERROR, (name, ended.message)
    return engine
