"""Each format is read as its document says."""

import gzip
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blockpool.traces import TraceFormat, read_traces
from blockpool.traces.mooncake import UNIT_TOKENS


def jsonl(*lines: dict[str, Any]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def mooncake_line(
    timestamp: float = 0, length: int = 1000, output: int = 5, ids: tuple[int, ...] = (0, 1)
) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": length, "output_length": output, "hash_ids": list(ids)}


def session(*requests: dict[str, Any], scope: str = "local", block_size: int = 64) -> dict[str, Any]:
    return {"id": "s", "block_size": block_size, "hash_id_scope": scope, "requests": list(requests)}


def session_request(
    t: float = 0.0, length: int = 128, output: int = 3, ids: tuple[int, ...] = (1, 2)
) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": length, "out": output, "hash_ids": list(ids)}


@pytest.fixture
def write(tmp_path: Path):
    def write_file(content: str | bytes, name: str = "trace") -> str:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write_file


def test_a_mooncake_line_is_a_request(write):
    path = write(jsonl(mooncake_line(1500, 1025, 7, (4, 2**63 - 1, 9)), mooncake_line(2000, 600, 0, (4,))))
    trace = read_traces([path])
    first, second = trace.requests
    assert (first.arrival_s, first.num_prompt_tokens, first.num_output_tokens) == (1.5, 1025, 7)
    assert first.unit == UNIT_TOKENS == 512
    assert first.hash_ids.tolist() == [4, 2**63 - 1, 9]
    assert first.hash_ids.dtype == np.int64
    assert first.token_ids is None
    assert first.source == f"{path}:1"
    assert second.hash_ids.tolist() == [4], "ids may be missing at the end"
    assert trace.units() == (512,)
    assert trace.names == (path,)
    assert trace.skipped_bad_lines == 0


def test_a_token_line_is_a_request(write):
    path = write(jsonl({"tokens": [5, 0, 2**32 - 1], "output_length": 2}, {"tokens": [7]}))
    first, second = read_traces([path]).requests
    assert first.token_ids.tolist() == [5, 0, 2**32 - 1]
    assert first.token_ids.dtype == np.uint32
    assert (first.num_prompt_tokens, first.num_output_tokens, first.hash_ids) == (3, 2, None)
    assert second.num_output_tokens == 0
    assert read_traces([path]).units() == ()


def test_token_lines_without_a_timestamp_stay_behind_the_line_before(write):
    path = write(
        jsonl(
            {"tokens": [1]}, {"tokens": [2], "timestamp": 9000}, {"tokens": [3]}, {"tokens": [4], "timestamp": 5000}
        )
    )
    requests = read_traces([path]).requests
    assert [request.token_ids[0] for request in requests] == [1, 4, 2, 3]
    assert [request.arrival_s for request in requests] == [0.0, 5.0, 9.0, 9.0]


def test_a_session_is_a_document(write):
    path = write(json.dumps(session(session_request(0.5, 130, 4, (1, 2, 3)), session_request(2, 64, 0, (1,)))))
    trace = read_traces([path])
    first, second = trace.requests
    assert (first.arrival_s, first.num_prompt_tokens, first.num_output_tokens) == (0.5, 130, 4)
    assert first.hash_ids.tolist() == [1, 2, 3]
    assert first.scope == second.scope
    assert first.source == f"{path}:requests[0]"
    assert trace.units() == (64,)


def test_a_sub_agent_shares_ids_and_counts_time_from_its_start(write):
    inner = {"t": 3.0, "requests": [session_request(1.0, ids=(8, 9))]}
    agent = {"t": 10.0, "type": "subagent", "requests": [session_request(0.0, ids=(5, 6)), inner]}
    path = write(json.dumps(session(session_request(0.0), agent, session_request(12.0, ids=(1, 3)))))
    requests = read_traces([path]).requests
    assert [request.arrival_s for request in requests] == [0.0, 10.0, 12.0, 14.0]
    assert [request.hash_ids[0] for request in requests] == [1, 5, 1, 8]
    assert len({request.scope for request in requests}) == 1
    assert requests[3].source == f"{path}:requests[1].requests[1].requests[0]"


def test_requests_of_the_same_time_stay_in_the_order_of_the_document(write):
    agent = {"t": 1.0, "requests": [session_request(0.0, ids=(5,)), session_request(0.0, ids=(6,))]}
    document = session(session_request(1.0, ids=(4,)), agent, session_request(1.0, ids=(7,)))
    requests = read_traces([write(json.dumps(document))]).requests
    assert [request.hash_ids[0] for request in requests] == [4, 5, 6, 7]


def test_an_entry_may_be_a_request_and_have_sub_agents(write):
    both = session_request(4.0, ids=(1, 2)) | {"requests": [session_request(1.0, ids=(7,))]}
    requests = read_traces([write(json.dumps(session(both)))]).requests
    assert [(request.arrival_s, request.hash_ids[0]) for request in requests] == [(4.0, 1), (5.0, 7)]


def test_deep_nesting_is_read(write):
    entry = session_request(1.0)
    for _ in range(100):
        entry = {"t": 1.0, "requests": [entry]}
    (request,) = read_traces([write(json.dumps(session(entry)))]).requests
    assert request.arrival_s == 101.0


def test_local_ids_are_a_file_s_own_and_other_scopes_are_shared(write):
    document = json.dumps(session(session_request()))
    local = [write(document, "a"), write(document, "b")]
    assert len({request.scope for request in read_traces(local).requests}) == 2
    assert len({request.scope for request in read_traces([local[0], local[0]]).requests}) == 2
    shared_document = json.dumps(session(session_request(), scope="global"))
    shared = [write(shared_document, "c"), write(shared_document, "d")]
    assert len({request.scope for request in read_traces(shared).requests}) == 1


def test_a_session_without_a_scope_is_local(write):
    document = session(session_request())
    del document["hash_id_scope"]
    paths = [write(json.dumps(document), name) for name in "ab"]
    assert len({request.scope for request in read_traces(paths).requests}) == 2


def test_mooncake_files_share_their_ids(write):
    paths = [write(jsonl(mooncake_line()), name) for name in "ab"]
    assert len({request.scope for request in read_traces(paths).requests}) == 1


def test_files_are_merged_by_time_and_ties_keep_the_given_order(write):
    one = write(
        jsonl(mooncake_line(0, ids=(1,)), mooncake_line(5000, ids=(2,)), mooncake_line(5000, ids=(3,))), "one"
    )
    two = write(json.dumps(session(session_request(5.0, ids=(4,)), session_request(1.0, ids=(5,)))), "two")
    for paths, expected in (([one, two], [1, 5, 2, 3, 4]), ([two, one], [1, 5, 4, 2, 3])):
        trace = read_traces(paths)
        assert [request.hash_ids[0] for request in trace.requests] == expected
        assert trace.names == tuple(paths)
        assert trace.units() == (64, 512)


@pytest.mark.parametrize(
    ("content", "num_requests"),
    [
        (jsonl(mooncake_line(), mooncake_line()), 2),
        (jsonl({"tokens": [1, 2]}), 1),
        (json.dumps(session(session_request())), 1),
        (json.dumps(session(session_request(), session_request()), indent=2), 2),
    ],
)
def test_what_surrounds_the_values_does_not_matter(write, content: str, num_requests: int):
    plain = content.encode()
    for variant in (
        plain,
        b"\xef\xbb\xbf" + plain,
        b"\n\n  \n" + plain.replace(b"\n", b"\r\n") + b"\r\n \n",
        plain.rstrip(b"\n"),
        gzip.compress(plain),
        gzip.compress(plain[:7]) + gzip.compress(plain[7:]),
        gzip.compress(b"\xef\xbb\xbf" + plain),
    ):
        # The name says nothing: a gzip file need not end in .gz, and one that does need not be one.
        for name in ("trace", "trace.gz", "trace.json"):
            assert len(read_traces([write(variant, name)]).requests) == num_requests


def test_line_numbers_count_blank_lines(write):
    path = write("\n\r\n" + jsonl(mooncake_line()) + "\n" + jsonl(mooncake_line()))
    assert [request.source for request in read_traces([path]).requests] == [f"{path}:3", f"{path}:5"]


def test_unknown_fields_are_ignored(write):
    line = mooncake_line() | {"type": "text", "turns": {"deep": [1, {"x": None}]}, "t\u00e9": "\u00e9"}
    assert len(read_traces([write(json.dumps(line, ensure_ascii=False))]).requests) == 1


def test_dash_is_stdin(monkeypatch):
    data = gzip.compress(jsonl(mooncake_line()).encode())
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    trace = read_traces(["-"])
    assert trace.names == ("<stdin>",)
    assert trace.requests[0].source == "<stdin>:1"


def test_format_forces_a_reader(write):
    line = mooncake_line(ids=(1, 2)) | {"tokens": [1, 2, 3]}
    path = write(jsonl(line))
    assert read_traces([path]).requests[0].hash_ids is not None
    assert read_traces([path], format=TraceFormat.TOKENS).requests[0].token_ids is not None


@pytest.mark.parametrize(
    ("content", "unit"),
    [
        ("{broken\n" + jsonl(mooncake_line()), 512),
        (jsonl({"unrelated": 1}) + jsonl(mooncake_line()), 512),
        # A pretty-printed session whose last request stands on a line of its own looks like a line of JSONL.
        (json.dumps(session(session_request()))[:-2].replace('[{"t', '[\n{"t') + "\n]}", 64),
    ],
)
def test_the_format_is_found_behind_lines_that_do_not_tell(write, content: str, unit: int):
    assert read_traces([write(content)], skip_bad_lines=True).units() == (unit,)
