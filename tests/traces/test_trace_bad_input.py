"""Whatever is wrong with a file is said with its name, the line and the field, and never by another exception."""

import gzip
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpool.traces import TraceError, TraceFormat, read_traces
from tests.sizes import property_settings

GOOD = '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [0, 1]}'
GOOD_TOKENS = '{"tokens": [1, 2, 3]}'
BIG = 2**31


def mooncake(**changes: str) -> str:
    """A line in which some values are replaced by JSON text, or left out ("-")."""
    values = {"timestamp": "0", "input_length": "600", "output_length": "1", "hash_ids": "[0, 1]"} | changes
    return "{" + ", ".join(f'"{key}": {value}' for key, value in values.items() if value != "-") + "}"


def read_error(path: Path, **options: object) -> str:
    with pytest.raises(TraceError) as caught:
        read_traces([str(path)], **options)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("line", "field"),
    [
        (mooncake(input_length="-"), "input_length"),
        (mooncake(output_length="-"), "output_length"),
        (mooncake(hash_ids="-"), "hash_ids"),
        (mooncake(timestamp="-"), "timestamp"),
        (mooncake(input_length="0"), "input_length"),
        (mooncake(input_length="-5"), "input_length"),
        (mooncake(input_length="600.0"), "input_length"),
        (mooncake(input_length="6e2"), "input_length"),
        (mooncake(input_length="true"), "input_length"),
        (mooncake(input_length='"600"'), "input_length"),
        (mooncake(input_length="null"), "input_length"),
        (mooncake(input_length=str(BIG)), "input_length"),
        (mooncake(input_length="9" * 400), "input_length"),
        (mooncake(output_length="-1"), "output_length"),
        (mooncake(output_length="1.5"), "output_length"),
        (mooncake(output_length="false"), "output_length"),
        (mooncake(output_length=str(BIG)), "output_length"),
        (mooncake(timestamp='"now"'), "timestamp"),
        (mooncake(timestamp="1e999"), "timestamp"),
        (mooncake(timestamp="true"), "timestamp"),
        (mooncake(hash_ids="7"), "hash_ids"),
        (mooncake(hash_ids="[0, -1]"), "hash_ids[1]"),
        (mooncake(hash_ids="[0, 1.0]"), "hash_ids[1]"),
        (mooncake(hash_ids="[true]"), "hash_ids[0]"),
        (mooncake(hash_ids='["a"]'), "hash_ids[0]"),
        (mooncake(hash_ids=f"[{2**63}]"), "hash_ids[0]"),
        (mooncake(hash_ids="[0, 1, 2]"), "hash_ids"),
    ],
)
def test_a_bad_value_is_named_by_file_line_and_field(tmp_path: Path, line: str, field: str):
    path = tmp_path / "t.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n{GOOD}\n")
    assert read_error(path).startswith(f"{path}:3: {field}: ")
    trace = read_traces([str(path)], skip_bad_lines=True)
    assert len(trace.requests) == 2
    assert trace.skipped_bad_lines == 1
    assert trace.first_bad_line is not None
    assert trace.first_bad_line.startswith(f"{path}:3: {field}: ")


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b"7",
        b"null",
        b'"text"',
        b"{} {}",
        b"\x00\x01\x02",
        b"\xff\xfe",
        GOOD.encode()[:-1],
        GOOD.encode() + b"x",
        GOOD.replace("600", "NaN").encode(),
        GOOD.replace("600", "Infinity").encode(),
        GOOD.encode().replace(b"}", b', "note": "\xff"}'),
        pytest.param(GOOD.encode().replace(b"}", b', "deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"), id="deep"),
    ],
)
def test_a_line_that_is_no_object_is_named_by_file_and_line(tmp_path: Path, line: bytes):
    path = tmp_path / "t.jsonl"
    path.write_bytes(GOOD.encode() + b"\n" + line + b"\n" + GOOD.encode())
    assert read_error(path).startswith(f"{path}:2: ")
    assert read_traces([str(path)], skip_bad_lines=True).skipped_bad_lines == 1


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ('{"tokens": []}', "tokens"),
        ('{"tokens": [1, -1]}', "tokens[1]"),
        (f'{{"tokens": [{2**32}]}}', "tokens[0]"),
        ('{"tokens": [1.0]}', "tokens[0]"),
        ('{"tokens": "abc"}', "tokens"),
        ('{"output_length": 3}', "tokens"),
        ('{"tokens": [1], "output_length": -1}', "output_length"),
        ('{"tokens": [1], "output_length": null}', "output_length"),
        ('{"tokens": [1], "timestamp": "x"}', "timestamp"),
    ],
)
def test_a_bad_token_line(tmp_path: Path, line: str, field: str):
    path = tmp_path / "t.jsonl"
    path.write_text(f"{GOOD_TOKENS}\n{line}\n")
    assert read_error(path).startswith(f"{path}:2: {field}: ")
    assert read_traces([str(path)], skip_bad_lines=True).skipped_bad_lines == 1


GOOD_REQUEST = '{"t": 0, "in": 100, "out": 1, "hash_ids": [1, 2]}'


@pytest.mark.parametrize(
    ("request_text", "field"),
    [
        ('{"in": 100, "out": 1, "hash_ids": [1]}', "t"),
        ('{"t": 0, "out": 1, "hash_ids": [1]}', "in"),
        ('{"t": 0, "in": 100, "hash_ids": [1]}', "out"),
        ('{"t": 0, "in": 100, "out": 1}', "hash_ids"),
        ('{"t": 0, "in": 0, "out": 1, "hash_ids": []}', "in"),
        ('{"t": 0, "in": 100, "out": 1.0, "hash_ids": []}', "out"),
        ('{"t": "x", "in": 100, "out": 1, "hash_ids": []}', "t"),
        ('{"t": 0, "in": 100, "out": 1, "hash_ids": [1, 2, 3]}', "hash_ids"),
        ('{"t": 0, "in": 100, "out": 1, "hash_ids": [1, -2]}', "hash_ids[1]"),
        ('{"t": 0, "requests": 5}', "requests"),
    ],
)
def test_a_bad_request_of_a_session_is_named_by_line_and_path(tmp_path: Path, request_text: str, field: str):
    path = tmp_path / "s.json"
    path.write_text(
        '{"block_size": 64, "hash_id_scope": "local",\n"requests": [\n'
        f'{GOOD_REQUEST},\n{{"t": 1, "requests": [{GOOD_REQUEST},\n{request_text}]}}]}}'
    )
    assert read_error(path).startswith(f"{path}:5: requests[1].requests[1].{field}: ")
    trace = read_traces([str(path)], skip_bad_lines=True)
    assert (len(trace.requests), trace.skipped_bad_lines) == (2, 1)


@pytest.mark.parametrize("entry", ["7", "null", "[]"])
def test_a_session_entry_that_is_no_object(tmp_path: Path, entry: str):
    path = tmp_path / "s.json"
    path.write_text(f'{{"block_size": 64, "requests": [{GOOD_REQUEST}, {entry}]}}')
    assert read_error(path).startswith(f"{path}:1: requests[1]: expected object")


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ('{"requests": [' + GOOD_REQUEST + "]}", "block_size: missing"),
        ('{"block_size": 0, "requests": [' + GOOD_REQUEST + "]}", "block_size: "),
        ('{"block_size": 64.0, "requests": []}', "block_size: "),
        ('{"block_size": 64}', "requests: missing"),
        ('{"block_size": 64, "requests": {}}', "requests: "),
        ('{"block_size": 64, "hash_id_scope": 3, "requests": []}', "hash_id_scope: "),
        ('{"block_size": 64, "requests": [' + GOOD_REQUEST, "truncated"),
        ('{"block_size": 64,\n "requests": [,]}', ":2: JSON is malformed"),
        ('{"block_size": 64, "requests": []}', "no requests"),
    ],
)
def test_a_bad_session_document_is_never_skipped(tmp_path: Path, document: str, said: str):
    path = tmp_path / "s.json"
    path.write_text(document)
    for skip_bad_lines in (False, True):
        message = read_error(path, skip_bad_lines=skip_bad_lines)
        assert message.startswith(f"{path}:")
        assert said in message


@pytest.mark.parametrize("content", [b"", b" \n\r\n ", b"\xef\xbb\xbf", gzip.compress(b"", mtime=0)])
def test_an_empty_file(tmp_path: Path, content: bytes):
    path = tmp_path / "t"
    path.write_bytes(content)
    assert read_error(path) == f"{path}: empty file"


def test_an_absent_file_and_a_directory(tmp_path: Path):
    assert read_error(tmp_path / "absent") == f"{tmp_path / 'absent'}: cannot be read: No such file or directory"
    assert read_error(tmp_path) == f"{tmp_path}: cannot be read: Is a directory"


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path):
    path = tmp_path / "t"
    path.write_text(GOOD)
    path.chmod(0)
    assert "Permission denied" in read_error(path)


def test_a_path_that_cannot_be_one():
    with pytest.raises(TraceError, match="cannot be read"):
        read_traces(["a\0b"])


def test_damaged_gzip(tmp_path: Path):
    path = tmp_path / "t.gz"
    packed = gzip.compress(GOOD.encode() * 50)
    path.write_bytes(packed[: len(packed) // 2])
    assert read_error(path) == f"{path}: truncated gzip data"
    path.write_bytes(packed[:12] + b"\xff\xff\xff\xff" + packed[16:])
    assert read_error(path).startswith(f"{path}: damaged gzip data")
    path.write_bytes(packed[:-8] + b"\0" * 8)
    assert read_error(path).startswith(f"{path}: damaged gzip data")


@pytest.mark.parametrize("content", [b"hello\nworld\n", b"\x7fELF\x00\x01", b"a,b,c\n1,2,3\n", b"{}", b"[1, 2]"])
def test_a_file_of_another_kind(tmp_path: Path, content: bytes):
    path = tmp_path / "t"
    path.write_bytes(content)
    assert read_error(path).startswith(f"{path}: not a trace of a known format (mooncake, sessions, tokens,")


def test_nothing_left_after_skipping(tmp_path: Path):
    path = tmp_path / "t"
    path.write_text(mooncake(input_length="0") + "\n" + mooncake(output_length="-1"))
    message = read_error(path, skip_bad_lines=True)
    assert message == f"{path}: no requests that could be read, bad lines skipped: 2"


def test_skipped_lines_add_up_over_files(tmp_path: Path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text(f"{GOOD}\n{{}}\n")
    two.write_text(f'{{"block_size": 64, "requests": [{GOOD_REQUEST}, {{}}, {{}}]}}')
    trace = read_traces([str(one), str(two)], skip_bad_lines=True)
    assert (len(trace.requests), trace.skipped_bad_lines) == (2, 3)


def test_stdin_twice():
    with pytest.raises(TraceError, match="only once"):
        read_traces(["-", "-"])


def test_no_file_at_all():
    with pytest.raises(TraceError, match="no trace"):
        read_traces([])


def test_a_name_that_would_break_the_line(tmp_path: Path):
    path = tmp_path / "a\nb\x1b[31m"
    path.write_text("")
    assert "a\\nb\\x1b[31m: empty file" in read_error(path)


@property_settings(300)
@given(
    base=st.sampled_from([GOOD, GOOD_TOKENS, f'{{"block_size": 64, "requests": [{GOOD_REQUEST}]}}']),
    cut=st.integers(0, 200),
    junk=st.binary(max_size=12),
    skip=st.booleans(),
    forced=st.sampled_from([None, *TraceFormat]),
)
def test_damage_never_escapes_as_another_exception(tmp_path: Path, base, cut, junk, skip, forced):
    path = tmp_path / "t"
    data = base.encode()
    path.write_bytes(data[:cut] + junk + data[cut:] + b"\n" + data)
    try:
        trace = read_traces([str(path)], format=forced, skip_bad_lines=skip)
    except TraceError as error:
        message = str(error)
    else:
        message = str(path)
        assert trace.requests
    assert message.startswith(str(path))
