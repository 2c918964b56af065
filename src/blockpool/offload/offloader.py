"""The connector to lower tiers: it stores what is computed, finds what can be loaded, and tells the scheduler."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

import msgspec

from blockpool.cache import CacheResetResult, KVCacheManager
from blockpool.engine import EngineRequest, LoadData, Scheduler, SchedulerOutput
from blockpool.offload.announcing import Announcer
from blockpool.offload.errors import OffloadError
from blockpool.offload.finding import Finder, Wanted
from blockpool.offload.memory import BlockMemory
from blockpool.offload.namespace import Namespace
from blockpool.offload.storing import Storer, StoreWhen
from blockpool.offload.tier import Loaded, Tier
from blockpool.offload.transfers import LoadJob, StoreJob, TransferEngine
from blockpool.pool import KVCacheEvent

MOST_FAILURES = 100
ANSWERS_HOLD = 64  # steps


class LoadFailure(msgspec.Struct, frozen=True):
    """A load that came to a part, or to nothing.

    `num_tokens`: as far as all was there, per group. `reasons`: how many pages failed, by why. `shared_by`: requests
    that waited for the same pages, and look again.
    """

    request_id: str
    first: int
    last: int
    num_tokens: tuple[int, ...]
    reasons: dict[str, int]
    shared_by: tuple[str, ...]


class Answer:
    """What can be brought for one request that waits."""

    def __init__(self, request: EngineRequest, num_computed_tokens: int, expires: int) -> None:
        self.request = request
        self.num_computed_tokens = num_computed_tokens
        self.expires = expires
        self.furthest: int | None = None  # not known yet
        self.wanted: list[Wanted] = []  # pages, once they are asked for
        self.key_set: frozenset[bytes] = frozenset()  # theirs, once they may be loaded
        self.claimed_at = -1  # the poll since which it may, for as long as there is no other
        self.absent: list[tuple[int, bytes]] = []  # remote tiers, by number, and what they have not


class Offloader:
    """Lower tiers below one cache: hand it to the Scheduler as `connector` and to the Engine as `transfers`.

    `manager`: made with `tells_stored=True`. `memory`: the blocks, as bytes (a PagedStore, for one). `tiers`: the
    fastest first; they stay the caller's, who may share them between engines. `store_when`: when a block goes down,
    for all tiers or by their names: "completion" (its step has run), "eviction" (it is about to be handed out) or
    "hits=N" (it was hit N times). `guard`: "watch" gives the copy of a block up that is handed out before it was
    read; "hold" keeps the block until it is, but for "eviction". `evict_ahead`: for "eviction", how many blocks at
    the head of the free queue are kept stored. `num_threads`: for loads, and as many for stores; with 0 nothing
    moves. `most_pages`: queued or moved at a time, in each direction. `events`: have `take_events` filled.

    All methods are for the thread of the steps, and none but `drain`, `sleep`, `wait` and `close` waits. Raises
    OffloadError.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        memory: BlockMemory,
        tiers: Sequence[Tier],
        *,
        namespace: Namespace,
        store_when: str | Mapping[str, str] = "completion",
        guard: str = "watch",
        evict_ahead: int = 64,
        num_threads: int = 2,
        most_pages: int = 4096,
        events: bool = False,
    ) -> None:
        names = [tier.name for tier in tiers]
        if len(set(names)) < len(names):
            raise OffloadError(f"tiers need names of their own, not {names}")
        if not manager.tells_stored:
            raise OffloadError("make the cache with tells_stored=True: it must say what can be stored")
        if guard not in ("watch", "hold"):
            raise OffloadError(f'guard must be "watch" or "hold", not {guard!r}')
        for name, count in (("evict_ahead", evict_ahead), ("most_pages", most_pages)):
            if count < 1:
                raise OffloadError(f"{name} must be at least 1, not {count}")
        if num_threads < 0:
            raise OffloadError(f"num_threads must not be negative, not {num_threads}")
        num_groups = len(manager.managers)
        for tier in tiers:
            for group_id, one in enumerate(manager.managers):
                if one.prefix_cacheable and memory.page_bytes(group_id) > tier.page_bytes:
                    raise OffloadError(
                        f"tier {tier.name!r}: pages of group {group_id} have {memory.page_bytes(group_id)} bytes, the"
                        f" tier has room for {tier.page_bytes}"
                    )
        self.manager = manager
        self.tiers = list(tiers)
        self.namespace = namespace
        self.losses: Counter[str] = Counter()  # pages that were not stored or not loaded, by why
        self.load_failures: list[LoadFailure] = []  # the newest hundred
        self.num_loaded_tokens = 0
        self.transfers = TransferEngine(memory, tiers, num_groups, num_threads, most_pages)
        self._announcer = Announcer(manager, self.tiers) if events else None
        self._storer = Storer(
            manager,
            self.tiers,
            self.transfers,
            namespace.prefix,
            [StoreWhen.parse(when_of(store_when, tier.name, names)) for tier in tiers],
            guard == "hold",
            evict_ahead,
            self.losses,
            self._announcer,
        )
        self._finder = Finder(manager, namespace.prefix)
        self._has_remote = any(tier.is_remote for tier in tiers)
        self._asked: deque[Answer] = deque()  # of remote tiers, that were not answered yet
        self._loads: dict[str, LoadJob] = {}
        self._claimed: dict[str, Answer] = {}  # of requests that may be loaded in the step that is planned
        self._aborted: set[str] = set()  # whose load was planned, and not begun
        self._failed: list[str] = []  # to be told with the next poll
        self._num_polls = 0
        self._is_closed = False

    # -- what a scheduler asks -------------------------------------------------------------------------

    def get_num_external_tokens(self, request: EngineRequest, num_computed_tokens: int) -> int | None:
        """See Connector. None also while another request loads some of the same pages."""
        if request.skip_reading_prefix_cache or not self._finder.managers or self._is_closed:
            return 0
        answer = request.connector_answer
        if (
            not isinstance(answer, Answer)
            or answer.num_computed_tokens != num_computed_tokens
            or (answer.expires < self._num_polls and answer.furthest is not None)
        ):
            answer = Answer(request, num_computed_tokens, self._num_polls + ANSWERS_HOLD)
            request.connector_answer = answer
            self._find(request, answer)
        if answer.furthest is None:
            return None
        self._storer.forget(answer.absent)
        answer.absent = []
        external = answer.furthest - num_computed_tokens
        if external > 0 and self._must_wait(request, answer):
            return None
        return external

    def load_aborted(self, request_id: str) -> None:
        """See Connector: nothing is written into its blocks from now on."""
        job = self._loads.get(request_id)
        if job is None:
            self._aborted.add(request_id)
        else:
            job.cancel()

    # -- what an engine calls --------------------------------------------------------------------------

    def step_has_run(self, output: SchedulerOutput) -> None:
        """See Transfers."""
        claimed, self._claimed = self._claimed, {}
        for load in output.loads:
            answer = claimed.get(load.request_id)
            if load.request_id in self._aborted or answer is None or self._is_closed:
                self._aborted.discard(load.request_id)
                self._failed.append(load.request_id)
            else:
                self._begin(load, answer)

    def poll(self, scheduler: Scheduler) -> int:
        """See Transfers. What was computed since the last call goes on its way down."""
        self._num_polls += 1
        num_told = 0
        for request_id in self._failed:
            scheduler.failed_recving(request_id)
            num_told += 1
        self._failed.clear()
        for job in self.transfers.take_done():
            if isinstance(job, StoreJob):
                self._storer.has_ended(job)
            else:
                self._load_has_ended(job, scheduler)
                num_told += 1
        if not self._is_closed:
            self._storer.gather()
        return num_told

    def wait(self) -> None:
        """See Transfers."""
        if not self.transfers.is_idle or self._awaits_answers():
            self.transfers.wait()

    # -- life cycle ------------------------------------------------------------------------------------

    def drain(self, scheduler: Scheduler) -> None:
        """Wait until all that is stored or loaded now has ended."""
        self.poll(scheduler)
        while not self.transfers.is_idle:
            self.transfers.wait()
            self.poll(scheduler)

    def sleep(self, scheduler: Scheduler, keep: Sequence[str] | None = None) -> CacheResetResult:
        """The engine's memory is about to lose its content: what is computed goes down, the cache forgets, and tiers
        that are not in `keep` (None: all stay) are cleared. Refused, with nothing changed but copies made, while
        requests, pins or holds keep blocks: the answer names them. After waking, prompts load what was kept.
        """
        known = {tier.name for tier in self.tiers}
        if keep is not None and not set(keep) <= known:
            raise OffloadError(f"tiers to keep are {sorted(keep)}, there are {sorted(known)}")
        self.drain(scheduler)
        result = self.manager.reset_prefix_cache()
        if result:
            for tier in self.tiers:
                if keep is not None and tier.name not in keep:
                    tier.clear()
        return result

    def take_events(self) -> list[KVCacheEvent]:
        """What came to and went from the tiers, each with its tier's medium, since the last call. Tiers that others
        own too do not know all that happens to them: nothing is said of those.
        """
        return [] if self._announcer is None else self._announcer.take()

    def close(self) -> None:
        """End the threads, when what is queued is done; nothing is stored or loaded from then on, and `poll` tells of
        the last loads. The tiers are the caller's to close. Twice is once.
        """
        self._is_closed = True
        self.transfers.close()

    # -- finding ---------------------------------------------------------------------------------------

    def _find(self, request: EngineRequest, answer: Answer) -> None:
        start = answer.num_computed_tokens
        furthest = self._finder.furthest(request, start, self._look_up)
        if not self._has_remote:
            answer.furthest = furthest
            return
        finder = self._finder
        remote = [(number, tier) for number, tier in enumerate(self.tiers) if tier.is_remote]

        def ask() -> None:
            def look_up(keys: Sequence[bytes]) -> list[bool]:
                found = self._look_up(keys)
                for number, tier in remote:
                    missing = [at for at, here in enumerate(found) if not here]
                    if missing:
                        there = tier.lookup([keys[at] for at in missing])
                        for at, here in zip(missing, there, strict=True):
                            found[at] = here
                        answer.absent += [(number, keys[at]) for at in missing if not found[at]]
                return found

            reached = furthest
            try:
                reached = finder.furthest(request, start, look_up)
            finally:
                answer.furthest = reached
                self.transfers.wake()

        self._asked.append(answer)
        self.transfers.ask(ask)

    def _look_up(self, keys: Sequence[bytes]) -> list[bool]:
        """In the tiers that answer at once."""
        found = [False] * len(keys)
        for tier in self.tiers:
            if tier.is_remote:
                continue
            if not any(found):
                found = tier.lookup(keys)
            elif not all(found):
                missing = [at for at, here in enumerate(found) if not here]
                for at, here in zip(missing, tier.lookup([keys[at] for at in missing]), strict=True):
                    found[at] = here
            else:
                break
        return found

    def _awaits_answers(self) -> bool:
        while self._asked and self._asked[0].furthest is not None:
            self._asked.popleft()
        return bool(self._asked)

    def _must_wait(self, request: EngineRequest, answer: Answer) -> bool:
        """Others load some of its pages, or may in the same step, or more are loaded already than may be."""
        if not answer.wanted:
            answer.wanted = self._finder.wanted(request, answer.num_computed_tokens, answer.furthest or 0)
        keys = answer.wanted[0].keys
        if len(answer.wanted) > 1:
            keys = [key for wanted in answer.wanted for key in wanted.keys]
        for job in self._loads.values():
            if not job.key_set.isdisjoint(keys):
                job.shared_by.add(request.request_id)
                return True
        for request_id, other in self._claimed.items():
            is_current = other.claimed_at == self._num_polls and request_id != request.request_id
            if is_current and not other.key_set.isdisjoint(keys):
                return True
        if not self.transfers.can_load(len(keys)):
            return True
        answer.key_set = frozenset(keys)
        answer.claimed_at = self._num_polls
        self._claimed[request.request_id] = answer
        return False

    # -- loading ---------------------------------------------------------------------------------------

    def _begin(self, load: LoadData, answer: Answer) -> None:
        answer.request.connector_answer = None  # it will ask anew, if ever
        job = LoadJob(load.request_id, load.first, load.last)
        all_wanted = answer.wanted
        if load.first != answer.num_computed_tokens or load.last != answer.furthest:
            all_wanted = self._finder.wanted(answer.request, load.first, load.last)
        for manager, first, keys in all_wanted:
            size = manager.block_size
            blocks = load.block_ids[manager.group_id][first : first + len(keys)]
            starts = range(first * size, (first + len(keys)) * size, size)
            if 0 in blocks:  # nothing is needed there
                places = [at for at, block in enumerate(blocks) if block]
                job.add(
                    manager.group_id,
                    [blocks[at] for at in places],
                    [keys[at] for at in places],
                    [starts[at] for at in places],
                )
            else:
                job.add(manager.group_id, blocks, keys, starts)
        job.is_complete()
        self._loads[load.request_id] = job
        self.transfers.load(job)

    def _load_has_ended(self, job: LoadJob, scheduler: Scheduler) -> None:
        request_id = job.request_id
        del self._loads[request_id]
        if job.is_cancelled:
            scheduler.failed_recving(request_id)
            return
        reached = job.reached(len(self.manager.managers))
        if min(reached) == job.last:
            self.num_loaded_tokens += job.last - job.first
            scheduler.finished_recving(request_id)
            return
        reasons = Counter(outcome.value for outcome in job.outcomes if outcome is not Loaded.OK)
        for reason, count in reasons.items():
            self.losses[f"load: {reason}"] += count
        if job.error is not None:
            self.losses[f"load: {type(job.error).__name__}"] += 1
        failure = LoadFailure(request_id, job.first, job.last, reached, dict(reasons), tuple(sorted(job.shared_by)))
        self.load_failures = [*self.load_failures[1 - MOST_FAILURES :], failure]
        scheduler.finished_recving(request_id, reached)


def when_of(store_when: str | Mapping[str, str], name: str, names: Sequence[str]) -> str:
    """What is said of one tier."""
    if isinstance(store_when, str):
        return store_when
    unknown = set(store_when) - set(names)
    if unknown:
        raise OffloadError(f"store_when names {sorted(unknown)}, tiers are {sorted(names)}")
    return store_when.get(name, "completion")
