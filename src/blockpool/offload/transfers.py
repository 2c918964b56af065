"""Pages between an engine's memory and its tiers, moved by threads: who asks never waits, and polls what is done."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from queue import SimpleQueue
from threading import Event, Lock, Thread, local

from blockpool.offload.memory import BlockMemory
from blockpool.offload.tier import Loaded, Stored, Tier
from blockpool.pool import BlockPool, Hold, ReuseHandle

PIECE_BYTES = 4 << 20  # what a thread moves at a time
MOST_PIECE_PAGES = 64


class LoadJob:
    """Pages to be written into the blocks of a request: parallel lists, one entry per page.

    `starts`: the token at which a block starts. `outcomes`: what came of the page, MISSING while nothing has.
    `sources`: the tier that gave it, or -1. `shared_by`: requests that wait for these pages too.
    """

    def __init__(self, request_id: str, load_id: int, first: int, last: int) -> None:
        self.request_id = request_id
        self.load_id = load_id
        self.first = first
        self.last = last
        self.group_ids: list[int] = []
        self.block_ids: list[int] = []
        self.keys: list[bytes] = []
        self.starts: list[int] = []
        self.outcomes: list[Loaded] = []
        self.sources: list[int] = []
        self.shared_by: set[str] = set()
        self.errors: list[str] = []  # what tiers raised, by name
        self.is_cancelled = False
        self.num_pieces = 0
        self._lock = Lock()

    def add(self, group_id: int, block_ids: list[int], keys: list[bytes], starts: Iterable[int]) -> None:
        """Pages of one group."""
        self.group_ids += [group_id] * len(keys)
        self.block_ids += block_ids
        self.keys += keys
        self.starts += starts

    def is_complete(self) -> None:
        """Nothing is added any more."""
        self.outcomes = [Loaded.MISSING] * len(self.keys)
        self.sources = [-1] * len(self.keys)

    def cancel(self) -> None:
        """No block of it is written from now on. Waits for one page at most, which is being written."""
        with self._lock:
            self.is_cancelled = True

    def write(self, memory: BlockMemory, at: int, page: memoryview) -> bool:
        """One page, unless the job was cancelled."""
        with self._lock:
            if self.is_cancelled:
                return False
            memory.write_page(self.group_ids[at], self.block_ids[at], page)
            return True

    def reached(self, num_groups: int) -> tuple[int, ...]:
        """As far as all is there, in tokens, group by group: where its first block that has failed starts."""
        reached = [self.last] * num_groups
        if self.outcomes.count(Loaded.OK) < len(self.outcomes):
            for group_id, start, outcome in zip(self.group_ids, self.starts, self.outcomes, strict=True):
                if outcome is not Loaded.OK and start < reached[group_id]:
                    reached[group_id] = start
        return tuple(reached)


class StoreJob:
    """Blocks to be copied into tiers: parallel lists, one entry per page. `targets`: tiers by number.

    `lost`: per group, blocks that were handed out before they were read. `losses`: pages that did not arrive, by why.
    """

    def __init__(self) -> None:
        self.group_ids: list[int] = []
        self.block_ids: list[int] = []
        self.keys: list[bytes] = []
        self.targets: list[tuple[int, ...]] = []
        self.guards: list[ReuseHandle] = []
        self.holds: list[tuple[BlockPool, Hold]] = []
        self.lost: list[set[int]] = []
        self.losses: Counter[str] | None = None
        self.num_pieces = 0
        self._lock = Lock()

    def add(self, group_id: int, block_ids: list[int], keys: list[bytes], targets: list[tuple[int, ...]]) -> None:
        """Pages of one group."""
        self.group_ids += [group_id] * len(keys)
        self.block_ids += block_ids
        self.keys += keys
        self.targets += targets

    def is_lost(self, at: int) -> bool:
        return self.block_ids[at] in self.lost[self.group_ids[at]]

    def count(self, losses: Counter[str]) -> None:
        """Of some of its pages."""
        if losses:
            with self._lock:
                self.losses = losses if self.losses is None else self.losses + losses


Job = LoadJob | StoreJob


class TransferEngine:
    """`num_threads` threads for loads and as many for stores, so that neither waits for the other; and one for
    questions to servers, which no transfer waits for.

    At most `most_pages` pages in each direction are queued or moved at a time: `room_to_store` and `can_load` say
    whether more may be submitted. What ends is in `take_done`.
    """

    def __init__(
        self,
        memory: BlockMemory,
        tiers: Sequence[Tier],
        num_groups: int,
        num_threads: int = 2,
        most_pages: int = 4096,
    ) -> None:
        self.memory = memory
        self.tiers = list(tiers)
        self.most_pages = most_pages
        self.num_loading = 0  # pages
        self.num_storing = 0
        self._sizes = [memory.page_bytes(group_id) for group_id in range(num_groups)]
        self._piece_pages = max(1, min(MOST_PIECE_PAGES, PIECE_BYTES // max(1, *self._sizes)))
        self._buffers = local()
        self._done: deque[Job] = deque()
        self._arrived = Event()
        self._lock = Lock()
        self._loads: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._stores: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._questions: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[tuple[Thread, SimpleQueue[Callable[[], None] | None]]] = []
        queues = [
            (self._loads, "load", num_threads),
            (self._stores, "store", num_threads),
            (self._questions, "question", min(1, num_threads)),
        ]
        for queue, name, count in queues:
            for number in range(count):
                thread = Thread(target=work, args=(queue,), name=f"blockpool-{name}-{number}", daemon=True)
                thread.start()
                self._threads.append((thread, queue))

    # -- asking: one thread, that of the steps ---------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Nothing is queued, moved, or to be taken."""
        return self.num_loading == 0 and self.num_storing == 0 and not self._done

    def room_to_store(self) -> int:
        """How many more pages may be submitted to be stored."""
        return max(0, self.most_pages - self.num_storing)

    def can_load(self, num_pages: int, num_to_come: int) -> bool:
        """Whether so many pages may be submitted, when others are to come before: a load larger than all that is
        allowed may, alone.
        """
        num_before = self.num_loading + num_to_come
        return num_before == 0 or num_before + num_pages <= self.most_pages

    def load(self, job: LoadJob) -> None:
        self.num_loading += len(job.keys)
        self._submit(job, self._loads, self._load_piece)

    def store(self, job: StoreJob) -> None:
        self.num_storing += len(job.keys)
        self._submit(job, self._stores, self._store_piece)

    def ask(self, question: Callable[[], None]) -> None:
        """Have something done by the thread that may wait for servers. It must not raise."""
        self._questions.put(question)

    def take_done(self) -> list[Job]:
        """The jobs that have ended since the last call."""
        done: list[Job] = []
        while self._done:
            job = self._done.popleft()
            if isinstance(job, LoadJob):
                self.num_loading -= len(job.keys)
            else:
                self.num_storing -= len(job.keys)
            done.append(job)
        return done

    def wait(self) -> None:
        """Return when something has ended that was not taken, or was answered."""
        if not self._done:
            self._arrived.wait()
        self._arrived.clear()  # what has arrived meanwhile is polled before the next wait

    def wake(self) -> None:
        """Let `wait` return."""
        self._arrived.set()

    def close(self) -> None:
        """What is queued is still done. Twice is once."""
        for _, queue in self._threads:
            queue.put(None)
        for thread, _ in self._threads:
            thread.join()
        self._threads = []

    def _submit(
        self, job: Job, queue: SimpleQueue[Callable[[], None] | None], move: Callable[[Job, range], None]
    ) -> None:
        count = len(job.keys)
        pieces = [range(at, min(at + self._piece_pages, count)) for at in range(0, count, self._piece_pages)]
        job.num_pieces = len(pieces)
        if not pieces:
            self._end(job)
        for piece in pieces:
            queue.put(partial(move, job, piece))

    # -- moving: in threads ----------------------------------------------------------------------------

    def _end(self, job: Job) -> None:
        self._done.append(job)
        self._arrived.set()

    def _piece_has_ended(self, job: Job) -> None:
        with self._lock:
            job.num_pieces -= 1
            is_last = job.num_pieces == 0
        if is_last:
            self._end(job)

    def _pages(self, job: Job, piece: range) -> list[memoryview]:
        """Room for the pages of a piece, the thread's own."""
        sizes = [self._sizes[job.group_ids[at]] for at in piece]
        room: memoryview | None = getattr(self._buffers, "room", None)
        if room is None or len(room) < sum(sizes):
            room = memoryview(bytearray(sum(sizes)))
            self._buffers.room = room
        pages: list[memoryview] = []
        first = 0
        for size in sizes:
            pages.append(room[first : first + size])
            first += size
        return pages

    def _load_piece(self, job: Job, piece: range) -> None:
        assert isinstance(job, LoadJob)
        try:
            pages = dict(zip(piece, self._pages(job, piece), strict=True))
            left = list(piece)
            for number, tier in enumerate(self.tiers):
                if not left or job.is_cancelled:
                    break
                left = self._load_from(tier, number, job, left, pages)
            if not job.is_cancelled:
                self._promote(job, piece, pages)
        except Exception as error:  # of a memory that breaks its promise: what is not there is not there
            job.errors.append(type(error).__name__)
        finally:
            self._piece_has_ended(job)

    def _load_from(
        self, tier: Tier, number: int, job: LoadJob, asked: list[int], pages: dict[int, memoryview]
    ) -> list[int]:
        """Those pages that this tier did not give."""
        try:
            outcomes = tier.load([job.keys[at] for at in asked], [pages[at] for at in asked])
        except Exception as error:  # a tier that breaks its promise: the others are asked all the same
            job.errors.append(type(error).__name__)
            outcomes = [Loaded.UNREACHABLE] * len(asked)
        left: list[int] = []
        for at, outcome in zip(asked, outcomes, strict=True):
            if outcome is Loaded.OK and job.write(self.memory, at, pages[at]):
                job.outcomes[at] = outcome
                job.sources[at] = number
                continue
            left.append(at)
            if outcome is not Loaded.MISSING and outcome is not Loaded.OK:
                job.outcomes[at] = outcome
        return left

    def _promote(self, job: LoadJob, piece: range, pages: dict[int, memoryview]) -> None:
        """What a slower tier gave goes into the faster ones too, but for those that others own."""
        for number, tier in enumerate(self.tiers):
            up = [at for at in piece if job.sources[at] > number]
            if up and not tier.is_remote:
                try:
                    tier.store([job.keys[at] for at in up], [pages[at] for at in up])
                except Exception as error:
                    job.errors.append(type(error).__name__)

    def _store_piece(self, job: Job, piece: range) -> None:
        assert isinstance(job, StoreJob)
        losses: Counter[str] = Counter()
        try:
            down = [self._lacking(number, tier, job, piece, losses) for number, tier in enumerate(self.tiers)]
            wanted = set().union(*down)
            pages: dict[int, memoryview] = {}
            for at, page in zip(piece, self._pages(job, piece), strict=True):
                if at in wanted and not job.is_lost(at):
                    self.memory.read_page(job.group_ids[at], job.block_ids[at], page)
                    if not job.is_lost(at):  # it was nobody else's until it was all read
                        pages[at] = page
            if len(pages) < len(wanted):
                losses["store: reused"] = len(wanted) - len(pages)
            for tier, places in zip(self.tiers, down, strict=True):
                read = [at for at in places if at in pages]
                if read:
                    losses.update(store_in(tier, [job.keys[at] for at in read], [pages[at] for at in read]))
        except Exception as error:  # of a memory that breaks its promise
            losses[f"store: {type(error).__name__}"] += len(piece)
        finally:
            job.count(losses)
            self._piece_has_ended(job)

    def _lacking(self, number: int, tier: Tier, job: StoreJob, piece: range, losses: Counter[str]) -> list[int]:
        """The pages that are to go into a tier. A server is asked first what it has: it is not read for nothing."""
        places = [at for at in piece if number in job.targets[at]]
        if not places or not tier.is_remote:
            return places
        try:
            there = tier.lookup([job.keys[at] for at in places])
        except Exception as error:  # a tier that breaks its promise
            losses[f"store: {type(error).__name__}"] += len(places)
            return []
        return [at for at, here in zip(places, there, strict=True) if not here]


def work(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    """What a thread does until it is told to end."""
    while True:
        task = queue.get()
        if task is None:
            return
        task()


def store_in(tier: Tier, keys: list[bytes], pages: list[memoryview]) -> Counter[str]:
    """Pages that did not arrive, by why."""
    try:
        outcomes = tier.store(keys, pages)
    except Exception as error:  # a tier that breaks its promise: what is there is there
        return Counter({f"store: {type(error).__name__}": len(keys)})
    return Counter(f"store: {one.value}" for one in outcomes if one is not Stored.OK and one is not Stored.PRESENT)
