"""The worker: it keeps what it was told, in the order that a step has, and refuses what does not follow."""

from __future__ import annotations

import numpy as np
import pytest

from blockpool.cache import BlockCopy, KVCacheConfig
from blockpool.engine import (
    Access,
    CachedRequestData,
    NewRequestData,
    RequestStep,
    ShadowError,
    ShadowModel,
    ShadowStore,
    Store,
    Worker,
    WorkerError,
)
from blockpool.managers import (
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from tests.engine.hand_made import alone, same_table, step


def config(*specs: KVCacheSpec) -> KVCacheConfig:
    return KVCacheConfig(40, tuple(KVCacheGroupSpec((str(at),), spec) for at, spec in enumerate(specs)))


FULL = config(FullAttentionSpec(4))
NONE: tuple[list[int], ...] = ([],)


def new(name: str, tokens: list[int], *blocks: list[int], computed: int = 0) -> NewRequestData:
    return NewRequestData(name, tokens, len(tokens), computed, blocks)


def on(name: str, computed: int, *blocks: list[int], nulled: tuple[list[int], ...] = NONE) -> CachedRequestData:
    return CachedRequestData(name, computed, [], blocks or NONE, nulled)


class Recorder:
    """A store and a model that write down what they are asked for."""

    def __init__(self, sampled: list[list[int]] | None = None) -> None:
        self.log: list[object] = []
        self.steps: list[RequestStep] = []
        self.sampled = sampled

    def begin_step(self, step_id: int) -> None:
        self.log.append(("begin", step_id))

    def clear(self, group_id: int, block_ids: list[int]) -> None:
        self.log.append(("clear", group_id, block_ids))

    def copy(self, order: BlockCopy) -> None:
        self.log.append(("copy", *order))

    def write(self, access: Access, layer: int, *values: object) -> None: ...

    def read(self, access: Access, layer: int) -> tuple[()]:
        return ()

    def forward(self, steps: list[RequestStep], store: Store) -> list[list[int]]:
        self.log.append("forward")
        self.steps = steps
        if self.sampled is not None:
            return self.sampled
        return [[1] * (step.num_drafts + 1) if step.wants_token else [] for step in steps]


def recording(c: KVCacheConfig = FULL, sampled: list[list[int]] | None = None) -> tuple[Worker, Recorder]:
    recorder = Recorder(sampled)
    return Worker(c, recorder, recorder), recorder


def test_clears_then_copies_then_the_forward_pass() -> None:
    worker, recorder = recording()
    worker.execute(
        step(
            7,
            new=[new("a", [1, 2], [3])],
            tokens={"a": 2},
            copies=[BlockCopy(0, 1, 3), BlockCopy(0, 3, 4)],
            clears=([5, 3],),
        )
    )
    assert recorder.log == [("begin", 7), ("clear", 0, [5, 3]), ("copy", 0, 1, 3), ("copy", 0, 3, 4), "forward"]


def test_a_chunk_gives_no_token_and_the_last_one_gives_one() -> None:
    worker, recorder = recording()
    assert worker.execute(step(0, new=[new("a", [1, 2, 3, 4, 5], [3, 4])], tokens={"a": 3})) == {}
    assert not recorder.steps[0].wants_token
    assert worker.execute(step(1, running=[on("a", 3)], tokens={"a": 2})) == {"a": [1]}
    assert (recorder.steps[0].first, recorder.steps[0].last) == (3, 5)
    # the token that it sampled is the next to compute, told or not
    worker.execute(step(2, running=[on("a", 5)], tokens={"a": 1}))
    assert recorder.steps[0].token_ids == [1, 2, 3, 4, 5, 1]


def test_rows_follow_what_changes_and_move_when_others_end() -> None:
    worker, recorder = recording()
    worker.execute(
        step(
            0,
            new=[new("a", [1], [3]), new("b", [2], [4]), new("c", [3], [5, 6])],
            tokens={"a": 1, "b": 1, "c": 1},
        )
    )
    worker.execute(
        step(1, running=[on("c", 1, [7, 0, 8], nulled=([0, 1],))], tokens={"c": 1}, finished=["a", "never seen"])
    )
    assert recorder.steps[0].rows[0].tolist() == [0, 0, 7, 0, 8]
    assert sorted(worker.requests) == ["b", "c"]
    assert sorted(request.row for request in worker.requests.values()) == [0, 1]
    assert worker.tables[0].row(worker.requests["b"].row).tolist() == [4]
    worker.execute(step(2, preempted=["b"], new=[new("b", [2, 1], [9])], tokens={"b": 2}))
    assert recorder.steps[0].rows[0].tolist() == [9]
    worker.execute(step(3, finished=["b", "c"]))
    assert worker.requests == {}
    assert not worker.tables[0].ids.any()


def test_drafts_are_accepted_as_far_as_they_are_what_the_model_says() -> None:
    for drafts, said, accepted in (
        ([7, 8], [7, 8, 9], [7, 8, 9]),
        ([7, 8], [7, 5, 9], [7, 5]),
        ([7, 8], [6, 8, 9], [6]),
        ([], [4], [4]),
    ):
        worker, _ = recording(sampled=[said])
        result = worker.execute(
            step(0, new=[new("a", [1, 2, 3], [3, 4])], tokens={"a": 3 + len(drafts)}, drafts={"a": drafts})
        )
        assert result == {"a": accepted}
        assert worker.requests["a"].token_ids == [1, 2, 3, *accepted]


def test_what_does_not_follow_is_refused() -> None:
    worker, _ = recording()
    with pytest.raises(WorkerError, match="request 'a' is not running here"):
        worker.execute(step(0, running=[on("a", 0)]))
    with pytest.raises(WorkerError, match="request 'a' is not running here"):
        worker.execute(step(0, tokens={"a": 1}))
    worker.execute(step(0, new=[new("a", [1, 2], [3])], tokens={"a": 2}))
    with pytest.raises(WorkerError, match="request 'a' runs already"):
        worker.execute(step(1, new=[new("a", [1, 2], [3])]))
    with pytest.raises(WorkerError, match="tokens 2 to 4 with 0 drafts are to be computed, 3 are known"):
        worker.execute(step(1, tokens={"a": 2}, running=[on("a", 2)]))
    with pytest.raises(WorkerError, match="tokens 1 to 3 with 1 drafts are to be computed, 3 are known"):
        worker.execute(step(1, tokens={"a": 2}, running=[on("a", 1)], drafts={"a": [5]}))


def test_a_request_known_by_its_hashes_alone_is_refused() -> None:
    worker, recorder = recording()
    for tokens in ([], [1, 2, 3]):
        with pytest.raises(WorkerError, match=f"request 'a': {len(tokens)} of 8 tokens of its prompt are known"):
            worker.execute(step(0, new=[NewRequestData("a", tokens, 8, 0, ([3, 4],))], tokens={"a": 8}))
    assert worker.requests == {}
    assert not worker.tables[0].ids.any()
    assert recorder.log == []


# -- states ------------------------------------------------------------------------------------------

STATES = config(MambaSpec(4, 2, "align"))


def test_where_states_stand() -> None:
    worker, recorder = recording(STATES)
    worker.execute(step(0, new=[new("a", [1] * 6, [0, 5, 6, 7])], tokens={"a": 6}))
    assert recorder.steps[0].states[0] == (0, [6], [5])
    # a hit: the state of 4 tokens stands at the end of the first block
    worker.execute(step(1, new=[new("b", [1] * 6, [8, 9, 10, 11], computed=4)], tokens={"b": 2}))
    assert recorder.steps[0].states[0] == (8, [6], [9])


def test_a_step_starts_from_the_state_of_the_last_draft_that_was_accepted() -> None:
    worker, recorder = recording(STATES, [[4, 5, 6]])
    drafts = {"a": [4, 5]}
    worker.execute(step(0, new=[new("a", [1] * 4, [5, 6, 7])], tokens={"a": 6}, drafts=drafts))
    assert recorder.steps[0].states[0] == (0, [4, 5, 6], [5, 6, 7])
    # both were right: 6 tokens are computed, and their state stands in block 7, wherever that moves
    worker.execute(step(1, running=[on("a", 6, [8])], tokens={"a": 3}, drafts={"a": [4, 5]}))
    assert recorder.steps[0].states[0] == (7, [7, 8, 9], [6, 7, 8])


def test_draft_states_without_room() -> None:
    worker, _ = recording(STATES)
    with pytest.raises(
        WorkerError, match="group 0: 2 positions, the states of 2 drafts behind position 0 have no room"
    ):
        worker.execute(step(0, new=[new("a", [1] * 4, [5, 6])], tokens={"a": 6}, drafts={"a": [4, 5]}))


# -- every kind over a shadow ------------------------------------------------------------------------

KINDS = config(
    FullAttentionSpec(4),
    SlidingWindowSpec(2, 5),
    MambaSpec(4, 1, "align"),
    MambaSpec(64, 1, "none"),
    CircularBufferSpec(4),
    CrossAttentionSpec(4),
)


def test_a_request_alone_reads_what_it_wrote() -> None:
    shadow = ShadowStore(KVCacheConfig(200, KINDS.kv_cache_groups))
    model = ShadowModel(KINDS)
    outputs = alone(KINDS, model, shadow, [3, 1, 4, 1, 5, 9, 2, 6], 20, [3, 1, 2])
    assert outputs == alone(
        KINDS, model, ShadowStore(KVCacheConfig(200, KINDS.kv_cache_groups)), [3, 1, 4, 1, 5, 9, 2, 6], 20
    )
    assert len(set(outputs)) > 2
    assert shadow.num_reads > 500


@pytest.mark.parametrize("group", range(6))
def test_no_kind_reads_what_another_wrote(group: int) -> None:
    """The block of a group that the next token reads is overwritten by somebody else."""
    shadow = ShadowStore(KVCacheConfig(200, KINDS.kv_cache_groups))
    worker = Worker(KINDS, shadow, ShadowModel(KINDS))
    tables = same_table(KINDS, 30)
    worker.execute(step(0, new=[NewRequestData("a", [1] * 9, 9, 0, tables)], tokens={"a": 7}))
    at = 6 // (2 if group == 1 else 4) if group < 3 else 0
    block = tables[group][at]
    size = shadow.block_sizes[group]
    places = np.arange(block * size, (block + 1) * size)
    shadow.begin_step(1)
    shadow.write(Access("b", group, places, places, np.arange(1, size + 1, dtype=np.uint64)))
    with pytest.raises(ShadowError) as caught:
        worker.execute(step(2, running=[CachedRequestData("a", 7, [], ([],) * 6, ([],) * 6)], tokens={"a": 1}))
    assert (caught.value.request_id, caught.value.group_id, caught.value.writer) == ("a", group, "b")
    assert caught.value.block_id == block


def test_sinks_are_read_by_all() -> None:
    sinks = config(SinkFullAttentionSpec(4, 4))
    shadow = ShadowStore(sinks)
    worker = Worker(sinks, shadow, ShadowModel(sinks), [[9]])
    with pytest.raises(ShadowError, match="block 9"):
        worker.execute(step(0, new=[new("a", [1, 2], [3])], tokens={"a": 2}))
    worker = Worker(sinks, shadow, ShadowModel(sinks), [[9]])
    ShadowModel(sinks).write_sinks(shadow, [[9]])
    worker.execute(step(1, new=[new("a", [1, 2], [3])], tokens={"a": 2}))
