"""The connector to lower tiers: it stores what is computed, finds what can be loaded, and tells the scheduler."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from blockpool.cache import CacheResetResult, KVCacheManager
from blockpool.engine import EngineRequest, LoadData, Scheduler, SchedulerOutput
from blockpool.offload.announcing import Announcer
from blockpool.offload.errors import OffloadError
from blockpool.offload.finding import Finder, Keys, Wanted, look_up_in
from blockpool.offload.memory import BlockMemory
from blockpool.offload.namespace import Namespace
from blockpool.offload.storing import Storer, StoreWhen
from blockpool.offload.tier import Loaded, Tier
from blockpool.offload.transfers import Job, LoadJob, StoreJob, TransferEngine
from blockpool.pool import KVCacheEvent

MOST_FAILURES = 100
MOST_ASKED = 64  # questions to servers at a time
NOTHING_HOLDS = 64  # steps
MOST_AT_ONCE = 8192  # blocks whose keys are made and looked up within a step
MOST_CLAIMED = 1024
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
    """What can be brought for one request that waits. The request keeps it: it must not keep the request.

    `furthest`: as far as it could go on, in tokens, None while that is not known; `near`: with what answers at once.
    `wanted`: the pages that takes. `waits_for`: a load of some of them for another.
    """

    def __init__(self, num_computed_tokens: int, num_polls: int) -> None:
        self.num_computed_tokens = num_computed_tokens
        self.made_at = num_polls
        self.near: int | None = None
        self.furthest: int | None = None
        self.is_asked = False  # a thread is to answer
        self.chain: list[Keys] = []  # until it is found
        self.wanted: list[Wanted] = []
        self.keys: list[bytes] = []
        self.waits_for: LoadJob | None = None
        self.claimed_at = -2  # the poll since which it may be loaded
        self.errors: list[str] = []  # what tiers raised, by name

    def is_outdated(self, num_computed_tokens: int, num_polls: int) -> bool:
        """That there is nothing is believed for a while: what there is, a load will show."""
        if self.num_computed_tokens != num_computed_tokens:
            return True
        return self.furthest == num_computed_tokens and num_polls > self.made_at + NOTHING_HOLDS

    def is_found(self, furthest: int, finder: Finder) -> None:
        """The last to be set is what others look at."""
        if furthest > self.num_computed_tokens:
            self.wanted = finder.wanted(self.chain, self.num_computed_tokens, furthest)
            self.keys = [key for wanted in self.wanted for key in wanted.keys]
        self.chain = []
        self.furthest = furthest


class Claim(NamedTuple):
    """A request that may be loaded in a step that is planned."""

    request: EngineRequest
    answer: Answer


class Offloader:
    """Lower tiers below one cache: hand it to the Scheduler as `connector` and to the Engine as `transfers`.

    `manager`: the cache, which tells it from now on what was computed. `memory`: the blocks, as bytes (a PagedStore,
    for one). `tiers`: the fastest first; they stay the caller's, who may share them between engines. `store_when`:
    when a block goes down, for all tiers or by their names: "completion" (its step has run), "eviction" (it is about
    to be handed out) or "hits=N" (it was hit N times). `guard`: "watch" gives the copy of a block up that is handed
    out before it was read; "hold" keeps the block until it is, but for "eviction". `evict_ahead`: for "eviction", how
    many blocks at the head of the free queue are kept stored. `num_threads`: for loads, and as many for stores; with
    0 nothing moves. `most_pages`: queued or moved at a time, in each direction. `events`: have `take_events` filled.

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
        starts = [
            namespace.start(one.block_size, memory.page_bytes(group_id))
            for group_id, one in enumerate(manager.managers)
        ]
        self._announcer = Announcer(manager, self.tiers, starts) if events else None
        self.transfers = TransferEngine(memory, tiers, num_groups, num_threads, most_pages)
        self._storer = Storer(
            manager,
            self.tiers,
            self.transfers,
            starts,
            whens,
            guard == "hold",
            evict_ahead,
            self.losses,
            self._announcer,
        )
        manager.stored_for = self
        manager.tells_stored = True
        self._finder = Finder(manager, starts)
        self._local = [tier for tier in tiers if not tier.is_remote]
        self._has_remote = len(self._local) < len(tiers)
        self._asked: deque[Answer] = deque()  # of remote tiers, that were not answered yet
        self._loads: dict[int, LoadJob] = {}  # by load id
        self._loading: dict[bytes, LoadJob] = {}  # by key
        self._claimed: dict[str, Claim] = {}  # who may be loaded in a step that is planned
        self._claimed_keys: set[bytes] = set()  # theirs
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
        if not isinstance(answer, Answer) or answer.is_outdated(num_computed_tokens, self._num_polls):
            answer = Answer(num_computed_tokens, self._num_polls)
            request.connector_answer = answer
        if answer.furthest is None and not answer.is_asked:
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
        for load in output.loads:
            claim = self._claimed.pop(load.request_id, None)
            if load.request_id in self._aborted or claim is None or self._is_closed:
                if load.request_id not in self._aborted:
                    self.losses["load: not begun"] += 1
                self._aborted.discard(load.request_id)
                self._failed.append((load.request_id, load.load_id))
            else:
                self._begin(load, *claim)

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
        if len(self._claimed) > MOST_CLAIMED:  # of requests that found no room, and never came again
            self._claimed = {one: claim for one, claim in self._claimed.items() if self._is_current(claim.answer)}
        if not self._claimed:
            self._claimed_keys.clear()
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
        self.manager.tells_stored = False
        if self._announcer is not None:
            self._announcer.close()

    # -- finding ---------------------------------------------------------------------------------------

    def _find(self, request: EngineRequest, answer: Answer) -> None:
        """At once, if it is little and no server is asked; else by a thread, when it is not busy."""
        start = answer.num_computed_tokens
        if self._finder.num_blocks(request, start) <= MOST_AT_ONCE:
            if answer.near is None:
                answer.chain = self._finder.keys(request, start)
                look_up = partial(look_up_in, self._local, answer.errors)
                answer.near = self._finder.furthest(request, start, look_up, answer.chain)
            if not self._has_remote or answer.near + self._finder.alignment > request.num_tokens - 1:
                answer.is_found(answer.near, self._finder)
                return
        if self._num_asked() < MOST_ASKED:
            answer.is_asked = True
            self._asked.append(answer)
            self.transfers.ask(partial(self._ask, request, answer))

    def _ask(self, request: EngineRequest, answer: Answer) -> None:
        """In a thread: with what servers have too."""
        start = answer.num_computed_tokens
        furthest = start if answer.near is None else answer.near
        try:
            answer.chain = answer.chain or self._finder.keys(request, start)
            look_up = partial(look_up_in, self.tiers, answer.errors)
            furthest = self._finder.furthest(request, start, look_up, answer.chain)
        finally:
            answer.is_found(furthest, self._finder)
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
        """Others load some of its pages, or may in the same step, or more are loaded already than may be.

        What it takes to see that is remembered: a step does not go through the pages of all who wait.
        """
        if answer.waits_for is not None:
            if answer.waits_for.load_id in self._loads:
                return True
            answer.waits_for = None
        waiting_id, since = self._waits_for_room
        is_first = waiting_id == request.request_id or since < self._num_polls - 1
        claims = [claim.answer for claim in self._claimed.values()]
        claimed = [other for other in claims if other is not answer and self._is_current(other)]
        num_pages = sum(len(other.keys) for other in claimed)
        if not is_first or not self.transfers.can_load(len(answer.keys), num_pages):
            if is_first:
                self._waits_for_room = request.request_id, self._num_polls
            return True
        if not self._loading.keys().isdisjoint(answer.keys):
            job = next(self._loading[key] for key in answer.keys if key in self._loading)
            job.shared_by.add(request.request_id)
            answer.waits_for = job
            return True
        if claimed and not self._claimed_keys.isdisjoint(answer.keys):
            return True
        self._waits_for_room = NOBODY
        if not claimed:
            self._claimed_keys.clear()
        self._claimed_keys.update(answer.keys)
        answer.claimed_at = self._num_polls
        self._claimed[request.request_id] = Claim(request, answer)
        return False

    def _is_current(self, answer: Answer) -> bool:
        """Whether a request that may be loaded may have been admitted since, and not begun."""
        return answer.claimed_at >= self._num_polls - 1

    # -- loading ---------------------------------------------------------------------------------------

    def _begin(self, load: LoadData, request: EngineRequest, answer: Answer) -> None:
        request.connector_answer = None  # it will ask anew, if ever
        job = LoadJob(load.request_id, load.load_id, load.first, load.last)
        all_wanted = answer.wanted
        if load.first != answer.num_computed_tokens or load.last != answer.furthest:
            all_wanted = self._finder.wanted(self._finder.keys(request, load.first), load.first, load.last)
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
        self._loading.update(dict.fromkeys(job.keys, job))
        self.transfers.load(job)

    def _load_has_ended(self, job: LoadJob, scheduler: Scheduler) -> None:
        request_id, load_id = job.request_id, job.load_id
        del self._loads[load_id]
        loading = self._loading
        for key in job.keys:
            if loading.get(key) is job:
                del loading[key]
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
