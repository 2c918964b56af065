"""`blockpool events`: what it prints, and what it exits with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from blockpool.cli import app
from blockpool.pool import AllBlocksCleared, BlockPool, BlockStored, StorePayload
from blockpool.wire import KVEventBatch, encode_batch
from blockpool.wire.player import Player
from blockpool.wire.recording import read_recording, record_line
from tests.wire.sockets import LOOPBACK, Blocks, publisher

pytest.importorskip("zmq")


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(app, ["events", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def stream(tmp_path: Path) -> tuple[Path, BlockPool]:
    """A recording of three batches, and the pool that it is of."""
    pool = BlockPool(5, hash_block_size=4, events="first_last")
    digests = b"".join(bytes([i]) * 32 for i in range(1, 5))
    payload = StorePayload(token_ids=range(16), kv_cache_spec_kind="full_attention")
    lines = []
    table = pool.get_new_blocks(3)
    pool.cache_full_blocks(table, digests, 0, 3, 4, 0, payload=payload)
    pool.free_blocks(table[::-1])
    lines.append(pool.take_events())
    pool.get_new_blocks(2)
    lines.append(pool.take_events())
    pool.evict_blocks([1])
    lines.append(pool.take_events())
    file = tmp_path / "events.jsonl"
    file.write_bytes(
        b"".join(record_line(seq, encode_batch(KVEventBatch(seq, events))) for seq, events in enumerate(lines))
    )
    return file, pool


def test_play_shows_a_recording(stream: tuple[Path, BlockPool]) -> None:
    result = run("play", stream[0])
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "       0 stored   GPU group 0  0101010101010101 0202020202020202 0303030303030303 after the start"
        " (12 tokens, full_attention)",
        "       1 removed  GPU group 0  0303030303030303",
        "       2 removed  GPU group 0  0101010101010101",
    ]
    assert [json.loads(line)["seq"] for line in run("play", stream[0], "--json").stdout.splitlines()] == [0, 1, 2]


def test_check_a_clean_recording(stream: tuple[Path, BlockPool]) -> None:
    result = run("check", stream[0], "--num-blocks", 4)
    assert (result.exit_code, result.stdout.splitlines()) == (
        0,
        ["3 batches, 3 events, 1 keys at the end", "clean: every rule is kept"],
    )
    assert json.loads(run("check", stream[0], "--json").stdout)["clean"] is True


def test_check_names_the_first_event(stream: tuple[Path, BlockPool], tmp_path: Path) -> None:
    lines = stream[0].read_bytes().splitlines(keepends=True)
    broken = tmp_path / "broken.jsonl"
    broken.write_bytes(lines[0] + lines[2] + lines[2])
    result = run("check", broken)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[1] == f"FAULT sequence: batch 2 ({broken}:2): batch 2 follows 0: 1 missing"
    assert "FAULT duplicate: batch 2" in result.stdout
    assert run("check", broken, "--allow", "sequence", "--allow", "duplicate").exit_code == 0
    document = json.loads(run("check", broken, "--json").stdout)
    assert [fault["rule"] for fault in document["faults"]] == ["sequence", "duplicate"]
    assert document["faults"][0]["why"]


def test_diff(stream: tuple[Path, BlockPool], tmp_path: Path) -> None:
    file, pool = stream
    dump = tmp_path / "dump.json"
    dump.write_text(json.dumps(pool.dump()))
    result = run("diff", file, dump)
    assert (result.exit_code, result.stdout) == (0, "the same: 1 keys\n")
    pool.evict_blocks([2])
    dump.write_text(json.dumps(pool.dump()))
    result = run("diff", file, dump)
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "group 0, GPU: 02020202020202020202020202020202 1 times in the events, 0 in the dump",
        "1 differences",
    ]
    document = json.loads(run("diff", file, dump, "--json").stdout)
    assert (document["same"], document["differences"][0]["in_dump"]) == (False, 0)


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "nowhere.jsonl"),
        ("check", "FILE", "--allow", "everything"),
        ("check", "FILE", "--convention", "none"),
        ("check", "EMPTY"),
        ("diff", "FILE", "nowhere.json"),
        ("diff", "FILE", "FILE"),
        ("diff", "nowhere.jsonl", "FILE"),
        ("play", "nowhere.jsonl"),
        ("play", "FILE", "nowhere"),
        ("play", "FILE", "tcp://*:99999"),
        ("play", "FILE", "tcp://127.0.0.1:\udcff"),
        ("play", "FILE", LOOPBACK, "--replay", "tcp://*:65536"),
        ("play", "FILE", LOOPBACK, "--topic", "\udcff"),
        ("play", "FILE", LOOPBACK, "--speed", "nan"),
        ("play", "FILE", LOOPBACK, "--linger", "nan"),
        ("play", "FILE", LOOPBACK, "--linger", "inf"),
        ("check", "HUGE_SEQ"),
        ("diff", "NO_BATCH", "FILE"),
        ("tail", "tcp://127.0.0.1:99999"),
        ("tail", "tcp://127.0.0.1:1", "--topic", "\udcff"),
        ("tail", "nowhere"),
        ("record", "tcp://127.0.0.1:1", "no/such/folder/file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], stream: tuple[Path, BlockPool], tmp_path: Path
) -> None:
    (tmp_path / "empty").write_text("")
    (tmp_path / "huge").write_text(f'{{"seq": {2**70}, "ts": 1, "events": []}}')
    (tmp_path / "none").write_bytes(record_line(0, b""))
    names = {
        "FILE": stream[0],
        "EMPTY": tmp_path / "empty",
        "HUGE_SEQ": tmp_path / "huge",
        "NO_BATCH": tmp_path / "none",
    }
    result = run(*(names.get(word, word) for word in arguments))
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("blockpool: error: ")


def test_tail_and_record_follow_a_publisher(tmp_path: Path) -> None:
    blocks = Blocks()
    with publisher() as one:
        for _ in range(3):
            one.publish(blocks.one_more())
        result = run("tail", one.endpoint, "--replay", one.replay_endpoint, "--count", 3)
        assert result.exit_code == 0
        assert [line.split()[:2] for line in result.stdout.splitlines()] == [[str(i), "stored"] for i in range(3)]
        file = tmp_path / "events.jsonl"
        result = run("record", one.endpoint, file, "--replay", one.replay_endpoint, "--count", 3)
        assert (result.exit_code, result.stdout) == (0, f"3 batches in {file}\n")
        checked = run("check", one.endpoint, "--replay", one.replay_endpoint, "--count", 3)
        assert (checked.exit_code, "clean" in checked.stdout) == (0, True)
    dump = tmp_path / "dump.json"
    dump.write_text(json.dumps(blocks.pool.dump()))
    assert run("diff", file, dump).exit_code == 0


def test_play_sends_the_same_bytes_again(stream: tuple[Path, BlockPool], tmp_path: Path) -> None:
    again = tmp_path / "again.jsonl"
    with Player(LOOPBACK, LOOPBACK, "kv") as player:
        assert player.play(read_recording(stream[0])) == 3
        answering = threading.Event()

        def serve() -> None:
            while not answering.is_set():
                player.serve(0.05)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            result = run(
                "record", player.endpoint, again, "--replay", player.replay_endpoint, "--topic", "kv", "--count", 3
            )
        finally:
            answering.set()
            thread.join()
    assert result.exit_code == 0
    assert again.read_bytes() == stream[0].read_bytes()
    sent = run("play", stream[0], LOOPBACK, "--speed", 0)
    assert (sent.exit_code, sent.stdout) == (0, "3 batches sent\n")


def test_a_pause_of_more_than_a_year_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    times = [float("nan"), 1.0, 1e300]
    file.write_bytes(b"".join(record_line(seq, encode_batch(KVEventBatch(ts, []))) for seq, ts in enumerate(times)))
    result = run("play", file, LOOPBACK)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith(f"blockpool: error: {file}:3: ts: ")
    assert run("play", file, LOOPBACK, "--speed", 0).exit_code == 0


@pytest.mark.parametrize("what", ["its tokens are none", "it is no batch", "it is empty", "it is nested too deeply"])
def test_a_payload_that_is_no_batch(tmp_path: Path, what: str) -> None:
    """The first is one that a mirror can follow."""
    event = {"type": "BlockStored", "block_hashes": [1], "block_size": 4, "token_ids": "?"}
    payload = {
        "its tokens are none": msgspec.msgpack.encode([1.0, [event]]),
        "it is no batch": b"?",
        "it is empty": b"",
        "it is nested too deeply": b"\x91" * 100_000,
    }[what]
    file, again = tmp_path / "events.jsonl", tmp_path / "again.jsonl"
    file.write_bytes(record_line(0, payload) + record_line(1, encode_batch(KVEventBatch(2.0, [AllBlocksCleared()]))))
    shown = run("play", file)
    assert (shown.exit_code, "       0 cannot be decoded: " in shown.stdout) == (0, True)
    assert run("check", file).exit_code == 1
    with Player(LOOPBACK, LOOPBACK) as player:
        assert player.play(read_recording(file)) == 2
        answering = threading.Event()

        def serve() -> None:
            while not answering.is_set():
                player.serve(0.05)

        thread = threading.Thread(target=serve)
        thread.start()
        live = (player.endpoint, "--replay", player.replay_endpoint, "--count", 2)
        try:
            assert run("tail", *live).stdout == shown.stdout
            assert run("tail", *live, "--json").stdout.encode() == file.read_bytes()
            checked = run("check", *live)
            assert run("record", live[0], again, *live[1:]).exit_code == 0
        finally:
            answering.set()
            thread.join()
    assert (checked.exit_code, "FAULT batch: batch 0: " in checked.stdout) == (1, True)
    assert again.read_bytes() == file.read_bytes()


def test_a_recording_is_a_trace(tmp_path: Path) -> None:
    blocks = Blocks()
    file = tmp_path / "events.jsonl"
    file.write_bytes(
        b"".join(record_line(seq, encode_batch(KVEventBatch(float(seq), blocks.one_more()))) for seq in range(4))
    )
    result = CliRunner().invoke(app, ["replay", str(file), "--json", "-"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)


def test_every_help_has_an_example() -> None:
    for command in ("tail", "record", "play", "check", "diff"):
        assert f"Example: blockpool events {command} " in run(command, "--help").stdout.replace("\n", " ")


def test_an_empty_recording_is_compared_with_nothing(stream: tuple[Path, BlockPool], tmp_path: Path) -> None:
    _, pool = stream
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "dump.json").write_text(json.dumps(pool.dump()))
    result = run("diff", tmp_path / "empty.jsonl", tmp_path / "dump.json")
    assert (result.exit_code, "no batches" in result.output) == (2, True)


def test_what_others_write_is_shown_without_what_terminals_obey(tmp_path: Path) -> None:
    event = BlockStored(
        block_hashes=[b"a" * 32],
        parent_block_hash=None,
        token_ids=[1],
        block_size=1,
        lora_id=None,
        medium="G\nPU",
        lora_name="\x1b[2J é",
    )
    (tmp_path / "x.jsonl").write_bytes(record_line(0, encode_batch(KVEventBatch(0.0, [event]))))
    result = run("play", tmp_path / "x.jsonl")
    assert "lora \\x1b[2J é" in result.output
    assert "G\\nPU group 0" in result.output
    assert "G\\nPU" in run("check", tmp_path / "x.jsonl").output


def test_a_live_check_sees_what_comes_twice_and_what_is_no_message(tmp_path: Path) -> None:
    zmq = pytest.importorskip("zmq")
    stop = threading.Event()
    with zmq.Context() as context, context.socket(zmq.XPUB) as pub:
        pub.setsockopt(zmq.LINGER, 0)
        port = pub.bind_to_random_port("tcp://127.0.0.1")

        def send() -> None:
            """To each who subscribes, the same."""
            payload = encode_batch(KVEventBatch(0.0, []))
            while not stop.is_set():
                if pub.poll(10):
                    pub.recv()
                    for number in (0, 1, 1, 2):
                        pub.send_multipart((b"", number.to_bytes(8, "big"), payload))
                    pub.send_multipart((b"", b"xx", payload))
                    pub.send_multipart((b"", (3).to_bytes(8, "big"), payload))

        thread = threading.Thread(target=send)
        thread.start()
        try:
            check = run("check", f"tcp://127.0.0.1:{port}", "--count", 6)
            record = run("record", f"tcp://127.0.0.1:{port}", tmp_path / "r.jsonl", "--count", 6)
        finally:
            stop.set()
            thread.join()
    assert (check.exit_code, record.exit_code) == (1, 0)
    assert "FAULT duplicate: batch 1" in check.output
    assert "FAULT frames: batch 3" in check.output
    assert "5 batches in" in record.output
    assert "1 messages left out" in record.output
    assert "FAULT duplicate: batch 1" in run("check", tmp_path / "r.jsonl").output


def test_a_closed_pipe_is_no_fault(stream: tuple[Path, BlockPool]) -> None:
    recording, _ = stream
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "blockpool.cli", "events", "play", str(recording)],
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")
