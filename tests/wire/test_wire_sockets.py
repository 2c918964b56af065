"""Real sockets on loopback: scenario S9, and what else a publisher and a subscriber promise each other."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blockpool.cache import KVCacheConfig, KVCacheManager, Request
from blockpool.hashing import BlockHasher
from blockpool.managers import FullAttentionSpec, KVCacheGroupSpec
from blockpool.pool import AllBlocksCleared, BlockStored
from blockpool.wire import (
    BatchError,
    EndpointError,
    KVEventBatch,
    Mirror,
    Publisher,
    PublisherClosedError,
    PublisherStatus,
    Subscriber,
    WireError,
    decode_batch,
    encode_batch,
)
from blockpool.wire.desk import (
    MOST_ASKERS,
    MOST_QUESTIONS,
    MOST_SNAPSHOTS,
    PATIENCE_S,
    PIECE,
    Answers,
    Desk,
)
from blockpool.wire.protocol import (
    NO_MORE,
    SNAPSHOT,
    STATUS,
    decode_status,
    sequence_bytes,
    sequence_number,
    snapshot_end,
)
from tests.wire.sockets import LOOPBACK, Blocks, publisher, subscriber, until, up_to

zmq = pytest.importorskip("zmq")

HASHER = BlockHasher(hash_block_size=4, seed="scenarios")


def ask(to: Publisher, question: bytes) -> list[list[bytes]]:
    """As any client would: a DEALER that reads until the end."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.RCVTIMEO, 20_000)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(to.replay_endpoint)
        dealer.send_multipart((b"", question))
        out = [dealer.recv_multipart()]
        while question != STATUS and out[-1][2:] != [NO_MORE, b""]:
            out.append(dealer.recv_multipart())
        return out


class TestS8:
    def test_a_mirror_believes_what_the_index_has_after_every_operation(self) -> None:
        """Two copies of one key: one of them goes, and the key is still there."""
        config = KVCacheConfig(5, (KVCacheGroupSpec(("layer",), FullAttentionSpec(4)),), hash_block_size=4)
        manager = KVCacheManager(config, events="first_last")
        pool = manager.pool
        with publisher(convention="first_last") as one, subscriber(one) as reader:

            def agree() -> set[bytes]:
                events = manager.take_events()
                if events:
                    one.publish(events)
                until(up_to(reader.mirror, one.next_seq - 1), reader)
                keys = {key[:-4] for key in pool.cached_block_hash_to_block.keys()}  # noqa: SIM118
                assert reader.mirror.num_blocks == len(keys)
                assert all(key in reader.mirror for key in keys)
                return keys

            def admit(name: str) -> Request:
                request = Request(name, [ord(letter) for letter in "aaaabbbb"], hasher=HASHER)
                hit = manager.get_computed_blocks(request)
                assert manager.allocate_slots(request, 8 - hit.num_tokens, hit.num_tokens, hit) is not None
                request.num_computed_tokens = 8
                return request

            first = admit("r1")
            agree()
            manager.free(first)
            agree()
            again = admit("r2")
            agree()
            assert again.block_hashes is not None
            a, b = again.block_hashes[0], again.block_hashes[1]
            manager.free(again)
            assert agree() == {a, b}
            assert len(pool.cached_block_hash_to_block.get_blocks(b + bytes(4))) == 2
            for take, expected in ((2, {a, b}), (1, {a}), (1, set())):
                pool.get_new_blocks(take)
                assert agree() == expected


class TestS9:
    def test_a_gap_is_closed_by_a_replay_and_nothing_is_applied_twice(self) -> None:
        blocks = Blocks()
        lost: set[int] = {5, 6}
        with publisher() as one, subscriber(one) as reader, subscriber(one) as uninterrupted:
            lose(reader, lost)
            for seq in range(8):
                assert one.publish(blocks.one_more()) == seq
                if seq not in lost and seq < 5:
                    until(up_to(reader.mirror, seq), reader, uninterrupted)
            until(up_to(reader.mirror, 7), reader, uninterrupted)
            until(up_to(uninterrupted.mirror, 7), reader, uninterrupted)
            again = ask(one, sequence_bytes(7))[0]
            before = reader.mirror.counts
            reader.mirror.receive(7, again[3])
            assert reader.mirror.counts.duplicates == before.duplicates + 1
            assert reader.mirror.counts.batches == before.batches == 8
            assert reader.mirror.counts.gaps == 1
            assert blocks.holds(reader.mirror)
            assert blocks.holds(uninterrupted.mirror)
            assert reader.mirror.counts.repeated == 0

    def test_what_no_replay_holds_comes_from_a_snapshot(self) -> None:
        blocks = Blocks()
        lost = {5, 6, 7, 8}
        with publisher(buffer_steps=4) as one, subscriber(one) as reader:
            lose(reader, lost)
            for seq in range(5):
                one.publish(blocks.one_more())
                until(up_to(reader.mirror, seq), reader)
            for _ in range(5, 10):
                one.publish(blocks.one_more())
            until(up_to(reader.mirror, 9), reader)
            assert reader.mirror.counts.snapshots == 1
            assert blocks.holds(reader.mirror)
            one.publish(blocks.one_more())
            until(up_to(reader.mirror, 10), reader)
            assert blocks.holds(reader.mirror)

    def test_a_snapshot_says_its_number_and_gives_parents_before_children(self) -> None:
        blocks = Blocks()
        with publisher(buffer_steps=1) as one, subscriber(one) as reader:
            for _ in range(10):
                one.publish(blocks.one_more())
            blocks.pool.evict_blocks(blocks.table[:1])  # announced again, so its event is the youngest
            one.publish(blocks.pool.take_events())
            blocks.pool.cache_full_blocks(blocks.table, b"".join(blocks.digests), 0, 1, 4, 0, payload=blocks.payload)
            one.publish(blocks.pool.take_events())
            until(up_to(reader.mirror, 11), reader)
            *answers, end = ask(one, SNAPSHOT)
            assert tuple(end) == snapshot_end(len(answers))
            assert {sequence_number(answer[2]) for answer in answers} == {11}
            seen: set[object] = {None}
            for answer in answers:
                for event in decode_batch(answer[3]).events:
                    assert isinstance(event, BlockStored)
                    assert event.parent_block_hash in seen
                    assert event.token_ids == list(
                        range(
                            4 * blocks.digests.index(event.block_hashes[0]),
                            4 * (blocks.digests.index(event.block_hashes[-1]) + 1),
                        )
                    )
                    seen |= set(event.block_hashes)
            assert len(seen) == 11

    def test_a_restart_drops_the_old_state(self, tmp_path: Path) -> None:
        blocks, others = Blocks(), Blocks()
        endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
        with Publisher(endpoint, replay) as one:
            reader = subscriber(one, heartbeat_s=0.2)
            for _ in range(3):
                one.publish(blocks.one_more())
            until(up_to(reader.mirror, 2), reader)
            first_id = reader.mirror.publisher
        with Publisher(endpoint, replay) as second, reader:
            others.pool.get_new_blocks(1)
            second.publish(others.one_more())
            until(lambda: reader.mirror.publisher not in (None, first_id), reader)
            until(up_to(reader.mirror, 0), reader)
            assert others.holds(reader.mirror)
            assert reader.mirror.num_blocks == 1
            assert reader.mirror.counts.restarts >= 1

    @pytest.mark.parametrize("noticed_by", ["a heartbeat", "the old connection's end"])
    def test_a_bound_reader_follows_the_successor(self, noticed_by: str) -> None:
        """Publishers connect to it, and the successor had done so before the restart was noticed."""
        blocks, others = Blocks(), Blocks()
        mirror = Mirror()
        with Publisher(LOOPBACK, LOOPBACK) as somebody:
            replay = somebody.replay_endpoint
        with (
            Subscriber(mirror, LOOPBACK, replay, heartbeat_s=600) as reader,
            Publisher(reader.endpoint, replay) as one,
        ):
            for _ in range(3):
                one.publish(blocks.one_more())
            until(up_to(mirror, 2), reader)
            with Publisher(reader.endpoint, LOOPBACK) as second:
                others.pool.get_new_blocks(1)
                second.publish(others.one_more())
                until(lambda: "2 publishers are connected" in mirror.reason, reader)
                assert mirror.status == "catching_up"  # what both send could fit by chance
                reader.replay_endpoint = second.replay_endpoint
                if noticed_by == "a heartbeat":
                    mirror.heard(PublisherStatus(publisher=second.publisher_id, next_seq=1))
                    assert mirror.wants_reconnect
                    reader.poll()
                one.close()
                until(up_to(mirror, 0), reader)
                assert mirror.publisher == second.publisher_id
                assert others.holds(mirror)
                second.publish(others.one_more())
                until(up_to(mirror, 1), reader)
                assert others.holds(mirror)

    def test_an_intruder_ends_being_live_at_once(self) -> None:
        """Its batch would fit: nothing but its connection tells."""
        blocks = Blocks()
        mirror = Mirror()
        with Publisher(LOOPBACK, LOOPBACK) as somebody:
            replay = somebody.replay_endpoint
        with (
            Subscriber(mirror, LOOPBACK, replay, heartbeat_s=600) as reader,
            Publisher(reader.endpoint, replay) as one,
        ):
            until(lambda: mirror._connected is True, reader)
            one.publish(blocks.one_more())
            until(up_to(mirror, 0), reader)
            with Publisher(reader.endpoint) as intruder:
                intruder.publish([AllBlocksCleared(medium="CPU")])
                intruder.publish([AllBlocksCleared(medium="GPU")])
                until(lambda: "2 publishers" in mirror.reason, reader)
                one.publish(blocks.one_more())
                for _ in range(20):
                    reader.poll(0.01)
                    assert mirror.status != "live"
            until(up_to(mirror, 1), reader)
            assert blocks.holds(mirror)

    def test_no_socket_uses_the_heartbeats_that_abort_the_process(self) -> None:
        with publisher() as one, subscriber(one) as reader:
            for opened in reader.sockets:
                assert opened.getsockopt(zmq.HEARTBEAT_IVL) == 0
            assert reader._sub.getsockopt(zmq.TCP_KEEPALIVE) == 1

    def test_a_full_queue_never_makes_the_step_wait(self) -> None:
        blocks = Blocks()
        with publisher(max_queue_size=2, buffer_steps=100) as one, subscriber(one) as reader:
            one.publish(blocks.one_more())
            until(up_to(reader.mirror, 0), reader)
            stalled, goes_on = threading.Event(), threading.Event()
            send = one._desk.send_one

            def stall(over: Any) -> bool:
                stalled.set()
                assert goes_on.wait(20)
                return send(over)

            one._desk.send_one = stall  # type: ignore[method-assign]
            one.publish(blocks.one_more())
            assert stalled.wait(20)
            numbers = [one.publish(blocks.one_more()) for _ in range(5)]  # returns, though nothing is sent
            assert numbers == [2, 3, 4, 5, 6]
            assert (one.counts.dropped, one.counts.waiting) == (4, 2)
            goes_on.set()
            until(lambda: one.counts.waiting == 0, reader)
            one.publish(blocks.one_more())
            until(up_to(reader.mirror, 7), reader)
            assert blocks.holds(reader.mirror)  # by a snapshot: nobody was ever sent 3 to 6
            assert reader.mirror.counts.snapshots == 1
            assert reader.mirror.dropped_there == 4
            assert [sequence_number(answer[2]) for answer in ask(one, sequence_bytes(0))[:-1]] == [0, 1, 2, 7]


def lose(reader: Subscriber, numbers: set[int]) -> None:
    """The mirror never receives these from the subscription."""
    receive = reader.mirror.receive

    def some(seq: int, payload: bytes) -> None:
        if seq not in numbers:
            receive(seq, payload)

    reader.mirror.receive = some  # type: ignore[method-assign]


class TestPublisher:
    def test_status_is_the_heartbeat(self) -> None:
        blocks = Blocks()
        with publisher(convention="first_last", buffer_steps=2, publisher_id="me") as one, subscriber(one) as reader:
            for _ in range(3):
                one.publish(blocks.one_more())
            until(up_to(reader.mirror, 2), reader)
            ((_, _, number, payload),) = ask(one, STATUS)
            status = decode_status(payload)
            assert status is not None
            assert (status.next_seq, status.oldest_seq, status.dropped) == (3, 1, 0)
            assert status.publisher == one.publisher_id
            assert status.publisher.startswith("me-")
            with publisher(publisher_id="me") as again:
                assert again.publisher_id != one.publisher_id  # a restart is seen, whatever name it is given
            assert (status.convention, status.snapshots, sequence_number(number)) == ("first_last", True, 3)
            assert reader.mirror.convention == "first_last"

    def test_an_empty_index_is_live(self) -> None:
        with publisher() as one, subscriber(one) as reader:
            assert reader.mirror.status == "never_fed"
            until(up_to(reader.mirror, -1), reader)
            assert reader.mirror.num_blocks == 0

    def test_who_comes_late_has_everything(self) -> None:
        blocks = Blocks()
        with publisher() as one:
            for _ in range(5):
                one.publish(blocks.one_more())
            with subscriber(one) as reader:
                until(up_to(reader.mirror, 4), reader)
                assert blocks.holds(reader.mirror)

    def test_topics_and_ranks_and_integers(self) -> None:
        blocks = Blocks()
        with publisher(topic="kv@pod", data_parallel_rank=3, hash_form="int") as one:
            assert one.publish([]) is None
            one.publish(blocks.one_more())
            with subscriber(one, topic="kv@") as reader, subscriber(one, topic="other") as deaf:
                until(up_to(reader.mirror, 0), reader, deaf)
                one.publish(blocks.one_more())
                until(up_to(reader.mirror, 1), reader, deaf)
                assert (reader.mirror.counts.batches, deaf.mirror.counts.gaps) == (2, 0)
            _, topic, _, payload = ask(one, sequence_bytes(0))[0]
            assert topic == b"kv@pod"
            batch = decode_batch(payload)
            assert batch.data_parallel_rank == 3
            assert isinstance(batch.events[0], BlockStored)
            assert batch.events[0].block_hashes == [0]
            assert blocks.digests[1] not in reader.mirror  # announced as integers, asked with a digest
            assert int.from_bytes(blocks.digests[1][-8:], "big") in reader.mirror

    def test_inside_the_process(self) -> None:
        blocks = Blocks()
        with (
            Publisher("inproc://events", "inproc://replay", data_parallel_rank=1) as one,
            Subscriber(Mirror(), "inproc://events_dp1", "inproc://replay_dp1") as reader,
        ):
            one.publish(blocks.one_more())
            until(up_to(reader.mirror, 0), reader)
            assert blocks.holds(reader.mirror)

    def test_closing_sends_what_waits(self) -> None:
        blocks = Blocks()
        one = publisher()
        with subscriber(one) as reader:
            until(up_to(reader.mirror, -1), reader)
            for _ in range(20):
                one.publish(blocks.one_more())
            one.close()
            assert one.counts.batches == 20
            one.close()
            with pytest.raises(PublisherClosedError):
                one.publish([AllBlocksCleared()])
            assert not one._thread.is_alive()

    def test_endpoints_that_cannot_be(self) -> None:
        with publisher() as one:
            with pytest.raises(EndpointError, match="cannot open"):
                Publisher(one.endpoint.replace("127.0.0.1", "*"))
            for wrong in ("5557", "http://*:5557", "tcp://"):
                with pytest.raises(EndpointError):
                    Publisher(wrong)
            with pytest.raises(EndpointError, match="rank 2"):
                Publisher("ipc:///nowhere/x", data_parallel_rank=2)
        with pytest.raises(ValueError, match="hash_form"):
            Publisher(LOOPBACK, hash_form="hex")  # type: ignore[arg-type]

    def test_a_batch_that_cannot_be_written_is_a_gap(self) -> None:
        blocks = Blocks()
        with publisher() as one, subscriber(one, heartbeat_s=0.1) as reader:
            one.publish(blocks.one_more())
            until(up_to(reader.mirror, 0), reader)
            events = blocks.one_more()
            events[0].extra_keys = [(object(),)]  # type: ignore[attr-defined]
            one.publish(events)
            one.publish(blocks.one_more())
            until(lambda: one.counts.failed == 1, reader)
            until(lambda: reader.mirror.status == "stale", reader)
            assert "no snapshots" in reader.mirror.reason
            assert one.counts.dropped == 1
            assert one.last_error is not None
            assert one.last_error.startswith("batch 1: ")

    def test_a_hash_without_an_integer_form_is_a_gap_and_the_thread_goes_on(self) -> None:
        blocks = Blocks()
        with publisher(hash_form="int") as one, subscriber(one, heartbeat_s=0.1) as reader:
            events = blocks.one_more()
            events[0].block_hashes = [b"short"]  # type: ignore[attr-defined]
            one.publish(events)
            one.publish(blocks.one_more())
            until(lambda: one.counts.batches == 1, reader)
            assert (one.counts.failed, one.last_error is not None) == (1, True)
            assert one._thread.is_alive()

    @pytest.mark.parametrize("refused", [SNAPSHOT, STATUS, sequence_bytes(0)])
    def test_an_answer_that_raises_is_refused_and_the_thread_goes_on(self, refused: bytes) -> None:
        blocks = Blocks()
        with publisher() as one:
            answers = one._desk.answers

            def raising(question: bytes) -> Any:
                yield from list(answers(question))[:1] if question == refused else answers(question)
                if question == refused:
                    raise RuntimeError("no answer")

            one._desk.answers = raising  # type: ignore[method-assign]
            one.publish(blocks.one_more())
            until(lambda: one.counts.batches == 1)
            ask(one, refused)
            until(lambda: one.counts.refused == 1)
            assert one.is_alive
            assert one.last_error == "an answer: no answer"
            one._desk.answers = answers  # type: ignore[method-assign]
            assert len(ask(one, SNAPSHOT)) == 2

    def test_a_thread_that_can_do_nothing_says_so(self) -> None:
        with publisher() as one:
            assert one.is_alive
            one._send_some = lambda: 1 // 0  # type: ignore[method-assign]
            one.publish([AllBlocksCleared()])
            until(lambda: not one.is_alive)
            assert one.last_error == "the thread gave up: ZeroDivisionError: integer division or modulo by zero"
            assert one.publish([AllBlocksCleared()]) == 1
        with publisher() as one:
            pass
        assert not one.is_alive

    def test_batches_are_sent_while_a_snapshot_is_made(self) -> None:
        """Its number is that of the moment when it began, and so is what it has."""
        blocks = [i.to_bytes(32, "big") for i in range(6000)]
        made = [
            BlockStored(
                block_hashes=[one],
                parent_block_hash=None,
                token_ids=[at],
                block_size=1,
                lora_id=None,
                medium="GPU",
                lora_name=None,
            )
            for at, one in enumerate(blocks)
        ]
        desk = Desk("me", clock=lambda: 0.0)
        desk.put(made[:4000])
        desk.send_one(lambda frames: None)
        answers = Answers(desk.answers)
        got: list[tuple[bytes, ...]] = []
        answers.ask([b"a", b"", SNAPSHOT])
        turns = 0
        while len(answers):
            answers.go_on(lambda frames: got.append(frames) is None)
            assert answers.is_working or not len(answers)
            desk.put([made[4000 + turns]])
            desk.send_one(lambda frames: None)
            turns += 1
        assert turns > 3
        assert desk.num_batches == turns + 1
        assert {sequence_number(frames[3]) for frames in got[:-1]} == {0}
        told = [one for frames in got[:-1] for event in decode_batch(frames[4]).events for one in event.block_hashes]  # type: ignore[union-attr]
        assert sorted(told) == blocks[:4000]  # type: ignore[type-var]

    def test_what_is_no_event_is_refused(self) -> None:
        with publisher() as one:
            with pytest.raises(BatchError, match="not an event: 'junk'"):
                one.publish(["junk"])  # type: ignore[list-item]
            assert one.next_seq == 0


class TestAnswers:
    @pytest.mark.parametrize("question", [sequence_bytes(0), SNAPSHOT])
    def test_for_who_asks_and_does_not_read_little_is_stored(self, question: bytes) -> None:
        """Others are answered meanwhile; who reads after all has everything, in order."""
        size, long = 600, bytes(65_536)
        with publisher(snapshots=False) as one, zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            desk, made = one._desk, 0
            desk.buffer.extend((seq, long) for seq in range(size))
            desk.last_settled = size - 1
            desk._snapshot = lambda: (  # type: ignore[method-assign]
                (b"", b"", sequence_bytes(seq), long) for seq in range(size)
            )
            answers = desk.answers

            def counted(asked: bytes) -> Iterator[tuple[bytes, ...]]:
                nonlocal made
                for frames in answers(asked):
                    assert frames is not None
                    made += asked == question
                    yield frames

            desk.answers = counted  # type: ignore[method-assign]
            for option, value in ((zmq.LINGER, 0), (zmq.RCVHWM, 1), (zmq.RCVBUF, 65_536), (zmq.RCVTIMEO, 20_000)):
                dealer.setsockopt(option, value)
            dealer.connect(one.replay_endpoint)
            dealer.send_multipart((b"", question))
            until(lambda: made > 0)
            for _ in range(20):
                assert len(ask(one, STATUS)) == 1
            assert made < size / 2
            got = []
            while (frames := dealer.recv_multipart())[3]:
                got.append(sequence_number(frames[2]))
            assert got == list(range(size))
            assert len(ask(one, question)) == size + 1

    def test_what_askers_may_cost(self) -> None:
        now, made, room = 0.0, Counter[bytes](), True
        got: list[tuple[bytes, ...]] = []

        def answer(question: bytes) -> Iterator[tuple[bytes, ...]]:
            for number in range(3):
                made[question] += 1
                yield question, b"%d" % number

        def send(frames: tuple[bytes, ...]) -> bool:
            if frames[0] == b"gone":
                raise ConnectionError
            if room:
                got.append(frames)
            return room

        answers = Answers(answer, clock=lambda: now)
        answers.ask([b"a", b"", b"x"])
        answers.ask([b"a", b"", b"y"])
        answers.ask([b"gone", b"", b"z"])
        for none in ([b"b", b"question", b"x"], [b"b", b""], [b"b", b"", b"x", b"x"]):
            answers.ask(none)
        assert len(answers) == 2
        answers.go_on(send)
        assert got == [(b"a", question, b"%d" % number) for question in (b"x", b"y") for number in range(3)]
        assert len(answers) == 0

        made.clear()
        room = False
        for number in range(MOST_ASKERS + 5):
            for _ in range(MOST_QUESTIONS + 5):
                answers.ask([b"%d" % number, b"", SNAPSHOT if number % 2 else b"x"])
        assert len(answers) == MOST_ASKERS
        for _ in range(10):
            answers.go_on(send)
        assert made == {b"x": MOST_ASKERS / 2, SNAPSHOT: MOST_SNAPSHOTS}  # the first message of each
        now = PATIENCE_S + 1
        answers.go_on(send)  # who had its turn is given up, and others have theirs
        assert len(answers) == MOST_ASKERS / 2 - MOST_SNAPSHOTS
        room = True
        got.clear()
        while len(answers):
            answers.go_on(send)
        assert len(got) == (MOST_ASKERS / 2 - MOST_SNAPSHOTS) * MOST_QUESTIONS * 3

    def test_a_replay_has_what_the_buffer_has_when_its_turn_comes(self) -> None:
        """It ends, though batches never do."""
        desk = Desk("me", buffer_steps=PIECE, clock=lambda: 0.0)

        def publish(count: int) -> None:
            for _ in range(count):
                desk.put([AllBlocksCleared()])
                desk.send_one(lambda frames: None)

        publish(2 * PIECE)
        answer = desk.answers(sequence_bytes(PIECE + 10))
        first = [sequence_number(next(answer)[2])]
        publish(PIECE - 20)
        assert first + [sequence_number(frames[2]) for frames in answer] == [*range(PIECE + 10, 2 * PIECE), -1]
        late = desk.answers(sequence_bytes(0))
        publish(3)
        assert [sequence_number(frames[2]) for frames in late][:2] == [2 * PIECE - 17, 2 * PIECE - 16]


class TestSubscriber:
    def test_a_part_of_a_snapshot_is_not_taken_for_the_whole(self) -> None:
        blocks = Blocks()
        with publisher(buffer_steps=1) as one:
            answers = one._desk.answers
            asked = []

            def first_in_part(question: bytes) -> Any:
                frames = [one for one in answers(question) if one is not None]
                if question == SNAPSHOT:
                    asked.append(len(frames))
                    if len(asked) == 1:
                        frames[0:0] = frames[:-1]  # as many as there are not
                return frames

            one._desk.answers = first_in_part  # type: ignore[method-assign, assignment]
            for _ in range(3):
                one.publish(blocks.one_more())
            until(lambda: one.counts.batches == 3)
            with subscriber(one) as reader:
                until(up_to(reader.mirror, 2), reader)
                assert (len(asked), reader.mirror.counts.snapshots) == (2, 1)
                assert blocks.holds(reader.mirror)

    @pytest.mark.parametrize("cut", [SNAPSHOT, sequence_bytes(0)])
    def test_an_answer_of_two_publishers_is_of_none(self, cut: bytes) -> None:
        """The connection was cut in the middle of it: what came first is the old one's."""
        blocks = Blocks()
        with publisher(buffer_steps=1) as one:
            answers, asked = one._desk.answers, []

            def restart(question: bytes) -> Any:
                yield from answers(question)
                if question != STATUS:
                    asked.append(question)
                    if question == cut:
                        one._desk.publisher_id = "the next one"

            one._desk.answers = restart  # type: ignore[method-assign]
            for _ in range(3):
                one.publish(blocks.one_more())
            until(lambda: one.counts.batches == 3)
            with subscriber(one) as reader:
                until(up_to(reader.mirror, 2), reader)
                assert reader.mirror.publisher == "the next one"
                counts = reader.mirror.counts
                assert counts.replays + counts.snapshots == len(asked) - 1

    def test_an_answer_without_end_does_not_hold_a_poll(self) -> None:
        """Nor the memory: it is given up with the message that is one too many."""
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.PUB) as pub:
            ports = [one.bind_to_random_port("tcp://127.0.0.1") for one in (pub, router)]
            router.setsockopt(zmq.LINGER, 0)
            stop, questions = threading.Event(), []

            def answer() -> None:
                who: bytes | None = None
                while not stop.is_set():
                    if router.poll(1 if who is None else 0):
                        who, _, question = router.recv_multipart()
                        questions.append(question)
                        if question == STATUS:
                            router.send_multipart((who, b"", b"", sequence_bytes(0), b"\x80"))
                    elif who is not None and len(questions) > 1:
                        router.send_multipart((who, b"", b"", sequence_bytes(7), b"x"))

            thread = threading.Thread(target=answer)
            thread.start()
            mirror = Mirror(max_pending=2000)
            try:
                with Subscriber(mirror, *(f"tcp://127.0.0.1:{port}" for port in ports)) as reader:
                    until(lambda: reader._question is not None and len(reader._question.answers) > 0, reader)
                    before = len(reader._question.answers)  # type: ignore[union-attr]
                    reader.poll()
                    assert len(reader._question.answers) <= before + 256  # type: ignore[union-attr]
                    until(lambda: "more than 2000 messages" in mirror.reason, reader)
            finally:
                stop.set()
                thread.join()

    def test_what_is_no_message_and_what_comes_twice_is_told(self) -> None:
        told: list[tuple[str, int]] = []
        with zmq.Context() as context, context.socket(zmq.PUB) as pub:
            port = pub.bind_to_random_port("tcp://127.0.0.1")
            mirror = Mirror()
            with Subscriber(
                mirror, f"tcp://127.0.0.1:{port}", on_fault=lambda rule, seq, _: told.append((rule, seq))
            ) as reader:
                until(lambda: mirror._connected is True, reader)
                payload = encode_batch(KVEventBatch(0.0, []))

                def heard() -> bool:  # who has just connected may not be heard by the publisher yet
                    pub.send_multipart((b"", b""))
                    return bool(told)

                until(heard, reader)
                for number in (0, 1, 1, 0, 2):
                    pub.send_multipart((b"", sequence_bytes(number), payload + b""))
                pub.send_multipart((b"", b"xx", payload))
                pub.send_multipart((b"", sequence_bytes(3), payload, b"more"))
                pub.send_multipart((b"", NO_MORE, payload))
                pub.send_multipart((b"", sequence_bytes(3), payload))
                until(up_to(mirror, 3), reader)
                while told[1] == ("frames", -1):
                    del told[0]
                assert told[1:] == [("duplicate", 1), ("duplicate", 0), *[("frames", -1)] * 3]

    def test_inside_the_process_there_must_be_somebody_to_ask(self) -> None:
        with pytest.raises(EndpointError, match="needs a replay endpoint"):
            Subscriber(Mirror(), "inproc://events")

    def test_a_port_that_is_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        closed = []
        close = Subscriber.close
        monkeypatch.setattr(Subscriber, "close", lambda self: closed.append(close(self)))  # type: ignore[func-returns-value]
        with publisher() as one, pytest.raises(EndpointError, match="cannot open"):
            Subscriber(Mirror(), one.endpoint.replace("127.0.0.1", "*"), one.replay_endpoint)
        assert len(closed) == 1  # no socket is left open

    def test_polling_after_closing_is_refused(self) -> None:
        with publisher() as one:
            reader = subscriber(one)
            reader.close()
            with pytest.raises(WireError, match="closed"):
                reader.poll()

    def test_a_heartbeat_that_is_not_answered_ends_being_live(self) -> None:
        now = 0.0
        with publisher() as one, subscriber(one, clock=lambda: now) as reader:
            until(up_to(reader.mirror, -1), reader)
            goes_on = threading.Event()
            answers = one._desk.answers

            def hang(question: bytes) -> Any:
                goes_on.wait(20)
                return answers(question)

            one._desk.answers = hang  # type: ignore[method-assign]
            now = 6.0
            reader.poll()  # asks
            now = 12.0
            reader.poll()
            assert reader.mirror.status == "catching_up"
            assert "5 s" in reader.mirror.reason
            goes_on.set()
            until(up_to(reader.mirror, -1), reader)

    def test_inside_the_process_a_closed_publishers_names_are_free_at_once(self) -> None:
        for _ in range(50):
            with Publisher("inproc://again", "inproc://again-replay") as one:
                reader = Subscriber(Mirror(), one.endpoint, one.replay_endpoint)
                reader.poll()
            Publisher("inproc://again", "inproc://again-replay").close()
            reader.close()

    def test_inside_the_process_a_publisher_that_has_closed_holds_nobody(self) -> None:
        """What it was asked cannot go: no heartbeat is answered, it is not live, and its successor is found."""
        now = 0.0
        first = Publisher("inproc://gone", "inproc://gone-replay")
        with Subscriber(Mirror(), "inproc://gone", "inproc://gone-replay", clock=lambda: now) as reader:
            first.publish(Blocks().one_more())
            until(up_to(reader.mirror, 0), reader)
            first.close()
            # libzmq takes its sockets apart on a thread of its own: until then they take a question, and lose it
            for what_passes in (reader.heartbeat_s, reader.reply_timeout_s):
                now += what_passes + 1
                asking = threading.Thread(target=lambda: [reader.poll() for _ in range(10)], daemon=True)
                asking.start()
                asking.join(10)
                assert not asking.is_alive()
            assert reader.mirror.status == "catching_up"
            assert reader.mirror.reason in (
                "the publisher cannot be asked",
                "the publisher has not answered for 5 s",
            )
            now += 61
            reader.poll()
            assert reader.mirror.status == "stale"
            with Publisher("inproc://gone", "inproc://gone-replay") as second:
                blocks = Blocks()
                blocks.one_more()
                second.publish(blocks.one_more())
                now += 6
                until(up_to(reader.mirror, 0), reader)
                assert [one in reader.mirror for one in blocks.digests[:2]] == [False, True]

    def test_what_waits_in_its_own_socket_is_not_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("blockpool.wire.subscriber.READ_IN_A_ROW", 1)
        now = 0.0
        event = BlockStored(
            block_hashes=[b"x" * 32],
            parent_block_hash=None,
            token_ids=[1],
            block_size=1,
            lora_id=None,
            medium="GPU",
            lora_name=None,
        )
        with publisher(convention="per_copy") as one, subscriber(one, clock=lambda: now) as reader:
            until(up_to(reader.mirror, -1), reader)
            for _ in range(3000):
                one.publish([event])
            until(lambda: one.counts.batches == 3000)
            for _ in range(3):  # heartbeats
                now += 6
                reader.poll()
                until(lambda: reader._question is None, reader)
                assert (reader.mirror.status, reader.mirror.counts.gaps) == ("live", 0)
            until(up_to(reader.mirror, 2999), reader)
            assert (reader.mirror.counts.gaps, reader.mirror.counts.restarts) == (0, 0)
            assert reader.mirror.copies(b"x" * 32) == 3000

    def test_without_a_replay_socket_a_gap_stays(self) -> None:
        blocks = Blocks()
        with Publisher(LOOPBACK) as one, Subscriber(Mirror(), one.endpoint) as reader:
            seq = 0

            def first_heard() -> bool:
                nonlocal seq
                seq = one.publish(blocks.one_more()) or 0
                return reader.mirror.sequence >= 0

            until(first_heard, reader)
            until(lambda: reader.mirror.sequence == seq, reader)
            # The first batches went out before anybody listened.
            assert reader.mirror.status in ("live", "stale")
            assert (reader.mirror.status == "live") == blocks.holds(reader.mirror)

    def test_nobody_there(self) -> None:
        now = 0.0
        with publisher() as one:
            endpoint, replay = one.endpoint, one.replay_endpoint
        reader = Subscriber(Mirror(), endpoint, replay, clock=lambda: now)
        with reader:
            for _ in range(20):
                now += 30
                assert reader.poll() == 0
            assert reader.mirror.status == "never_fed"

    def test_a_publisher_that_goes_is_noticed(self) -> None:
        blocks = Blocks()
        now = 0.0
        one = publisher()
        with subscriber(one, clock=lambda: now, give_up_s=60) as reader:
            one.publish(blocks.one_more())
            until(up_to(reader.mirror, 0), reader)
            one.close()
            until(lambda: reader.mirror.status == "catching_up", reader)
            now = 61.0
            until(lambda: reader.mirror.status == "stale", reader)
            assert "60 s" in reader.mirror.reason
        assert reader.mirror.status == "stale"
