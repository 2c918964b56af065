"""The connector to lower tiers: it stores what is computed, finds what can be loaded, and tells the scheduler."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from blockpool.cache import CacheResetResult, KVCacheManager
from blockpool.engine import EngineRequest, LoadData, Scheduler, SchedulerOutput
from blockpool.offload.announcing import Announcer
from blockpool.offload.errors import OffloadError
from blockpool.offload.finding import Finder, Wanted, look_up_in
from blockpool.offload.memory import BlockMemory
from blockpool.offload.namespace import Namespace
from blockpool.offload.storing import Storer, StoreWhen
from blockpool.offload.tier import Loaded, Tier
from blockpool.offload.transfers import Job, LoadJob, StoreJob, TransferEngine
from blockpool.pool import KVCacheEvent

MOST_FAILURES = 100
MOST_ASKED = 64  # questions to servers at a time
ANSWERS_HOLD = 64  # steps
NOBODY = ("", -2)


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
        self.errors: list[str] = []  # what tiers raised, by name


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
        if manager.stored_for is not None:
            raise OffloadError("the cache has an Offloader already: each block that it stores is named to one")
        if guard not in ("watch", "hold"):
            raise OffloadError(f'guard must be "watch" or "hold", not {guard!r}')
        for name, count in (("evict_ahead", evict_ahead), ("most_pages", most_pages)):
            if count < 1:
                raise OffloadError(f"{name} must be at least 1, not {count}")
        if num_threads < 0:
            raise OffloadError(f"num_threads must not be negative, not {num_threads}")
        whens = [StoreWhen.parse(when_of(store_when, tier.name, names)) for tier in tiers]
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
        self._announcer = Announcer(manager, self.tiers, namespace.prefix) if events else None
        self.transfers = TransferEngine(memory, tiers, num_groups, num_threads, most_pages)
        self._storer = Storer(
            manager,
            self.tiers,
            self.transfers,
            namespace.prefix,
            whens,
            guard == "hold",
            evict_ahead,
            self.losses,
            self._announcer,
        )
        manager.stored_for = self
        self._finder = Finder(manager, namespace.prefix)
        self._has_remote = any(tier.is_remote for tier in tiers)
        self._asked: deque[Answer] = deque()  # of remote tiers, that were not answered yet
        self._loads: dict[int, LoadJob] = {}  # by load id
        self._claimed: dict[str, Answer] = {}  # of requests that may be loaded in the step that is planned
        self._aborted: set[str] = set()  # whose load was planned, and not begun
        self._ended: deque[Job] = deque()
        self._failed: list[tuple[str, int]] = []  # loads to be told with the next poll
        self._waits_for_room = NOBODY  # who is next when there is room to load, and the poll at which it asked
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
        self._note_errors(answer)
        external = answer.furthest - num_computed_tokens
        if external > 0 and self._must_wait(request, answer):
            return None
        return external

    def load_aborted(self, request_id: str) -> None:
        """See Connector: nothing is written into its blocks from now on."""
        jobs = [job for job in self._loads.values() if job.request_id == request_id and not job.is_cancelled]
        for job in jobs:
            job.cancel()
        if not jobs:
            self._aborted.add(request_id)

    # -- what an engine calls --------------------------------------------------------------------------

    def step_has_run(self, output: SchedulerOutput) -> None:
        """See Transfers."""
        claimed, self._claimed = self._claimed, {}
        for load in output.loads:
            answer = claimed.get(load.request_id)
            if load.request_id in self._aborted or answer is None or self._is_closed:
                self._aborted.discard(load.request_id)
                self._failed.append((load.request_id, load.load_id))
            else:
                self._begin(load, answer)

    def poll(self, scheduler: Scheduler) -> int:
        """See Transfers. What was computed since the last call goes on its way down."""
        self._num_polls += 1
        num_told = 0
        while self._failed:
            scheduler.failed_recving(*self._failed.pop())
            num_told += 1
        self._ended.extend(self.transfers.take_done())
        while self._ended:  # one by one: what a hook raises leaves the others for the next call
            job = self._ended.popleft()
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
        if not self.transfers.is_idle or self._num_asked():
            self.transfers.wait()

    # -- life cycle ------------------------------------------------------------------------------------

    def drain(self, scheduler: Scheduler) -> None:
        """Wait until all that is stored or loaded now has ended."""
        self.poll(scheduler)
        while not self.transfers.is_idle:
            self.transfers.wait()
            self.poll(scheduler)

    def sleep(self, scheduler: Scheduler, keep: Sequence[str] | None = None) -> CacheResetResult:
        """The engine's memory is about to lose its content: what is to go down at completion or eviction goes, the
        cache forgets, and tiers that are not in `keep` (None: all stay) are cleared. Refused while requests, pins or
        holds keep blocks, with nothing changed but copies made: the answer names them. After waking, prompts load
        what was kept. Raises OffloadError for tiers that are not there, and when all is done for those that cannot be
        cleared now.
        """
        known = {tier.name for tier in self.tiers}
        if keep is not None and not set(keep) <= known:
            raise OffloadError(f"tiers to keep are {sorted(keep)}, there are {sorted(known)}")
        self.drain(scheduler)
        while self._storer.gather(all_cached=True):
            self.drain(scheduler)
        result = self.manager.reset_prefix_cache()
        if result and keep is not None:
            cleared = [tier for tier in self.tiers if tier.name not in keep]
            for tier in cleared:
                tier.clear()
            left = [tier.name for tier in cleared if not getattr(tier, "is_reachable", True)]
            if left:
                raise OffloadError(f"tiers {left} cannot be reached, and may have pages still; all else is asleep")
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
        if self._is_closed:
            return
        self._is_closed = True
        self.transfers.close()
        self.manager.stored_for = None
        if self._announcer is not None:
            self._announcer.close()

    # -- finding ---------------------------------------------------------------------------------------

    def _find(self, request: EngineRequest, answer: Answer) -> None:
        start = answer.num_computed_tokens
        local = [tier for tier in self.tiers if not tier.is_remote]
        furthest = self._finder.furthest(request, start, partial(look_up_in, local, answer.errors))
        most = request.num_tokens - 1
        if not self._has_remote or furthest + self._finder.alignment > most:
            answer.furthest = furthest
        elif self._num_asked() < MOST_ASKED:
            self._asked.append(answer)
            self.transfers.ask(partial(self._ask, request, answer, furthest))
        else:
            request.connector_answer = None  # it is asked in a later step

    def _ask(self, request: EngineRequest, answer: Answer, furthest: int) -> None:
        """In a thread: with what servers have too. `furthest`: without them."""
        try:
            look_up = partial(look_up_in, self.tiers, answer.errors)
            furthest = self._finder.furthest(request, answer.num_computed_tokens, look_up)
        finally:
            answer.furthest = furthest
            self.transfers.wake()

    def _note_errors(self, answer: Answer) -> None:
        for name in answer.errors:
            self.losses[f"lookup: {name}"] += 1
        answer.errors = []

    def _num_asked(self) -> int:
        """Questions that were not answered yet: they are in their order."""
        while self._asked and self._asked[0].furthest is not None:
            self._asked.popleft()
        return len(self._asked)

    def _must_wait(self, request: EngineRequest, answer: Answer) -> bool:
        """Others load some of its pages, or may in the same step, or more are loaded already than may be."""
        if not answer.wanted:
            answer.wanted = self._finder.wanted(request, answer.num_computed_tokens, answer.furthest or 0)
        keys = answer.wanted[0].keys
        if len(answer.wanted) > 1:
            keys = [key for wanted in answer.wanted for key in wanted.keys]
        for job in self._loads.values():
            if not job.is_cancelled and not job.key_set.isdisjoint(keys):
                job.shared_by.add(request.request_id)
                return True
        for request_id, other in self._claimed.items():
            is_current = other.claimed_at == self._num_polls and request_id != request.request_id
            if is_current and not other.key_set.isdisjoint(keys):
                return True
        waiting_id, since = self._waits_for_room
        is_first = waiting_id == request.request_id or since < self._num_polls - 1
        if not is_first or not self.transfers.can_load(len(keys)):
            if is_first:
                self._waits_for_room = request.request_id, self._num_polls
            return True
        self._waits_for_room = NOBODY
        answer.key_set = frozenset(keys)
        answer.claimed_at = self._num_polls
        self._claimed[request.request_id] = answer
        return False

    # -- loading ---------------------------------------------------------------------------------------

    def _begin(self, load: LoadData, answer: Answer) -> None:
        answer.request.connector_answer = None  # it will ask anew, if ever
        job = LoadJob(load.request_id, load.load_id, load.first, load.last)
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
        self._loads[load.load_id] = job
        self.transfers.load(job)

    def _load_has_ended(self, job: LoadJob, scheduler: Scheduler) -> None:
        request_id, load_id = job.request_id, job.load_id
        del self._loads[load_id]
        for name in job.errors:
            self.losses[f"load: {name}"] += 1
        if job.is_cancelled:
            scheduler.failed_recving(request_id, load_id)
            return
        reached = job.reached(len(self.manager.managers))
        if min(reached) == job.last:
            self.num_loaded_tokens += job.last - job.first
            scheduler.finished_recving(request_id, load_id=load_id)
            return
        reasons = Counter(outcome.value for outcome in job.outcomes if outcome is not Loaded.OK)
        for reason, count in reasons.items():
            self.losses[f"load: {reason}"] += count
        failure = LoadFailure(request_id, job.first, job.last, reached, dict(reasons), tuple(sorted(job.shared_by)))
        self.load_failures = [*self.load_failures[1 - MOST_FAILURES :], failure]
        scheduler.finished_recving(request_id, reached, load_id)


def when_of(store_when: str | Mapping[str, str], name: str, names: Sequence[str]) -> str:
    """What is said of one tier."""
    if isinstance(store_when, str):
        return store_when
    unknown = set(store_when) - set(names)
    if unknown:
        raise OffloadError(f"store_when names {sorted(unknown)}, tiers are {sorted(names)}")
    return store_when.get(name, "completion")
