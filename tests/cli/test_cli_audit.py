"""`blockpool audit`: clean books, broken books, and what is no dump at all."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from blockpool.cli import app
from blockpool.cli.audit import SMALL_POOL
from blockpool.pool import BlockPool

runner = CliRunner()


def pool_dump(num_blocks: int = 10) -> dict[str, Any]:
    """Four blocks were taken, three of them cached; all but the first were given back."""
    pool = BlockPool(num_blocks)
    blocks = pool.get_new_blocks(4)
    digests = b"".join(hashlib.sha256(bytes([number])).digest() for number in range(3))
    pool.cache_full_blocks(blocks, digests, 0, 3, 16, 0)
    pool.free_blocks(blocks[::-1])
    pool.touch(blocks[:1])
    dump: dict[str, Any] = json.loads(json.dumps(pool.dump()))
    return dump


def broken_dump(num_blocks: int = 10) -> dict[str, Any]:
    dump = pool_dump(num_blocks)
    dump["blocks"][5]["ref_cnt"] = -1
    return dump


def audit(document: Any, *options: str, code: int) -> Any:
    text = document if isinstance(document, str | bytes) else json.dumps(document)
    result = runner.invoke(app, ["audit", "-", *options], input=text)
    assert result.exit_code == code, result.output
    return result


def rows(output: str) -> list[list[str]]:
    """The cells of the lines that are about a block."""
    cells = [line.split() for line in output.splitlines()]
    return [row for row in cells if len(row) >= 5 and row[0].isdigit() and row[1].isdigit()]


def test_clean_books():
    output = audit(pool_dump(), code=0).stdout
    assert "pool 0 (GPU): 10 blocks with the null block, 8 free, 1 in use" in output
    assert "clean: every invariant holds" in output
    digest = hashlib.sha256(bytes([0])).hexdigest()[:16]
    table = rows(output)
    assert table[0] == ["0", "0", "0", "-", "-", "null", "block"]
    assert table[1] == ["0", "1", "1", "-", f"{digest}:0"]
    assert table[4] == ["0", "4", "0", "0", "-"], "freed without a hash: next in the queue"
    assert len(table) == 10


def test_broken_books_are_named():
    output = audit(broken_dump(), code=1).stdout
    assert "FAULT ref_cnt is not negative: block 5: ref_cnt -1" in output
    assert "clean" not in output
    assert rows(output)[5] == ["0", "5", "-1", "1", "-", "FAULT"]
    num_faults = sum(line.startswith("FAULT ") for line in output.splitlines())
    assert output.splitlines()[-1] == f"{num_faults} faults"


def test_a_block_that_is_queued_twice_has_its_first_place():
    dump = pool_dump(SMALL_POOL + 100)
    dump["queue"].append(dump["queue"][2])
    output = audit(dump, code=1).stdout
    block = dump["queue"][2]
    assert f"FAULT the queue holds each block at most once: block {block}: queued 2 times" in output
    assert [row for row in rows(output) if row[1] == str(block)] == [["0", str(block), "0", "2", "-", "FAULT"]]


def test_one_fault_is_singular():
    dump = pool_dump()
    dump["queue_backwards"][:2] = dump["queue_backwards"][1::-1]
    assert audit(dump, code=1).stdout.splitlines()[-1] == "1 fault"


def test_several_pools():
    output = audit({"pools": [pool_dump(), broken_dump() | {"medium": "CPU"}]}, code=1).stdout
    assert "pool 0 (GPU)" in output
    assert "pool 1 (CPU)" in output
    assert {row[0] for row in rows(output)} == {"0", "1"}
    assert audit({"pools": [pool_dump(), pool_dump()]}, code=0).stdout.count("clean") == 2


def test_a_large_pool_shows_what_is_in_use_or_faulty():
    size = SMALL_POOL + 100
    output = audit(pool_dump(size), code=0).stdout
    assert [row[1] for row in rows(output)] == ["1"]
    assert f"left out: {size - 1} blocks that are neither in use nor faulty (--all lists them)" in output
    assert [row[1] for row in rows(audit(broken_dump(size), code=1).stdout)] == ["1", "5"]
    assert len(rows(audit(pool_dump(size), "--all", code=0).stdout)) == size


def test_json():
    document = json.loads(audit({"pools": [pool_dump(), broken_dump(100)]}, "--json", code=1).stdout)
    assert document["clean"] is False
    clean, broken = document["pools"]
    assert (clean["num_gpu_blocks"], clean["num_free_blocks"], clean["faults"]) == (10, 8, [])
    assert clean["blocks"][2]["queue_place"] == 7
    assert clean["blocks"][1]["hashes"] == [hashlib.sha256(bytes([0])).hexdigest() + "00000000"]
    assert clean["blocks_left_out"] == 0
    assert {"invariant": "ref_cnt is not negative", "block_id": 5, "detail": "ref_cnt -1"} in broken["faults"]
    assert [block["block_id"] for block in broken["blocks"]] == [1, 5]
    assert broken["blocks_left_out"] == 98
    everything = json.loads(audit(broken_dump(100), "--json", "--all", code=1).stdout)
    assert len(everything["pools"][0]["blocks"]) == 100
    assert json.loads(audit(pool_dump(), "--json", code=0).stdout)["clean"] is True


def held_dump() -> dict[str, Any]:
    pool = BlockPool(4, clock=lambda: 0.0)
    blocks = pool.get_new_blocks(2)
    pool.hold(blocks, "peer\n7", until=5)
    pool.hold(blocks[:1], "step", after=3)
    pool.hold(blocks[:1], "peer\n7")
    pool.free_blocks(blocks)
    dump: dict[str, Any] = json.loads(json.dumps(pool.dump()))
    return dump


def test_holds_show_their_owners():
    lines = audit(held_dump(), code=0).stdout.splitlines()
    assert [line.split("  held by ")[1] for line in lines if "held by" in line] == [
        r"'peer\n7', 'step'",
        r"'peer\n7'",
    ]
    document = json.loads(audit(held_dump(), "--json", code=0).stdout)
    assert [block["holders"] for block in document["pools"][0]["blocks"]] == [
        [],
        ["peer\n7", "step"],
        ["peer\n7"],
        [],
    ]
    dump = held_dump()
    dump["blocks"][2]["ref_cnt"] = 0
    output = audit(dump, code=1).stdout
    assert "FAULT references of holds are references: block 2: 1 kept, ref_cnt 0" in output
    assert r"FAULT, held by 'peer\n7'" in output


def test_a_file(tmp_path: Path):
    path = tmp_path / "dump.json"
    path.write_text(json.dumps(pool_dump()))
    assert runner.invoke(app, ["audit", str(path)]).exit_code == 0


def test_a_key_that_is_no_hex_is_shown_as_it_is():
    dump = pool_dump()
    dump["blocks"][1]["hashes"][0]["key"] = "what?"
    output = audit(dump, code=1).stdout
    assert "'what?'" in output


def bad(document: Any) -> str:
    result = audit(document, code=2)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("blockpool: error: <stdin>: ")
    return str(line)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("", "empty file"),
        ("  \n", "empty file"),
        ("{", "not JSON"),
        (b"\xff\x00", "not JSON"),
        ('{"a": "\\ud800', "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ([], "expected an object"),
        (7, "expected an object"),
        ({}, "num_gpu_blocks"),
        ({"pools": []}, "pools: "),
        ({"pools": {}}, "pools: "),
        ({"pools": [7]}, "pools[0]: expected an object"),
        ({"pools": [pool_dump(), {}]}, "pools[1]: "),
        (pool_dump() | {"queue": "x"}, "queue"),
        (pool_dump() | {"num_gpu_blocks": 0}, "num_gpu_blocks"),
        (pool_dump() | {"num_gpu_blocks": 11}, "blocks"),
        (pool_dump() | {"format": "other/1"}, "format"),
        (pool_dump() | {"holds": [{"blocks": [1]}]}, "owner"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_dump(document: Any, said: str):
    assert said in bad(document)


def test_files_that_cannot_be_read(tmp_path: Path):
    for path, said in ((tmp_path / "absent", "No such file"), (tmp_path, "Is a directory")):
        result = runner.invoke(app, ["audit", str(path)])
        assert (result.exit_code, result.stdout) == (2, "")
        assert said in result.stderr
