"""The formats that came later: each is found by its content and read as its document says."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpool.traces import Trace, TraceError, TraceFormat, TraceRequest, read_traces
from tests.sizes import property_settings

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(*lines: Any, name: str = "trace") -> str:
        path = tmp_path / name
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return str(path)

    return write_file


def shared_units(one: TraceRequest, other: TraceRequest) -> int:
    """Ids that two prompts have in common from the beginning, which is what "equal prefix" promises."""
    assert one.scope == other.scope
    assert one.hash_ids is not None
    assert other.hash_ids is not None
    count = 0
    for mine, its in zip(one.hash_ids.tolist(), other.hash_ids.tolist(), strict=False):
        if mine != its:
            break
        count += 1
    return count


def check_prefixes(trace: Trace) -> None:
    """An id always has the same ids before it: that is what a trace promises of ids."""
    before: dict[tuple[str, int], int] = {}
    for request in trace.requests:
        assert request.hash_ids is not None
        ids = request.hash_ids.tolist()
        assert len(ids) <= -(-request.num_prompt_tokens // request.unit)
        for previous, own in zip([-1, *ids], ids, strict=False):
            assert before.setdefault((request.scope, own), previous) == previous


# -- kvcache-simulator -----------------------------------------------------------------------------------


def test_a_line_of_kvcache_simulator(write: Write) -> None:
    path = write(
        {"block_size": 64, "hash_ids": [2001, 2002], "input_length": 128},
        {"hash_ids": [2001, 7, 2002], "input_length": 150, "timestamp": 4000, "output_length": 9},
        {"hash_ids": [2001], "input_length": 64},
    )
    trace = read_traces([path])
    check_prefixes(trace)
    first, second, third = trace.requests
    assert [request.unit for request in trace.requests] == [64, 64, 64]
    assert [request.num_prompt_tokens for request in trace.requests] == [128, 150, 64]
    assert [request.num_output_tokens for request in trace.requests] == [0, 9, 0]
    assert [request.arrival_s for request in trace.requests] == [0.0, 4.0, 4.0]
    assert shared_units(first, second) == shared_units(first, third) == 1
    assert first.hash_ids is not None
    assert second.hash_ids is not None
    assert first.hash_ids[1] != second.hash_ids[2], "the same id behind another prefix is another prefix"


def test_the_newest_block_size_counts(write: Write) -> None:
    path = write(
        {"block_size": 64, "hash_ids": [1, 2], "input_length": 128},
        {"block_size": 32, "hash_ids": [1, 2], "input_length": 64},
        {"hash_ids": [1, 2, 3], "input_length": 90, "block_tokens": [32, 32, 26]},
    )
    first, second, third = read_traces([path]).requests
    assert [request.unit for request in (first, second, third)] == [64, 32, 32]
    assert first.scope != second.scope == third.scope
    assert shared_units(second, third) == 2


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"block_size": None}, "block_size: missing"),
        ({"block_size": 0}, "block_size: expected int >= 1"),
        ({"hash_ids": [1, 2, 3]}, "hash_ids: 3 ids, but 128 tokens have only 2 units of 64"),
        ({"input_length": 0}, "input_length: expected int >= 1"),
        ({"block_tokens": [64]}, "block_tokens: 1 lengths for 2 ids"),
        ({"block_tokens": [32, 64]}, "block_tokens: blocks of other than 64 tokens cannot be replayed"),
        ({"block_tokens": [64, 65]}, "block_tokens: blocks of other than 64 tokens cannot be replayed"),
    ],
)
def test_a_bad_line_of_kvcache_simulator(write: Write, fields: dict[str, Any], said: str) -> None:
    good = {"block_size": 64, "hash_ids": [1, 2], "input_length": 128, "block_tokens": [64, 64]}
    path = write(good | fields, good)
    with pytest.raises(TraceError) as caught:
        read_traces([path], format=TraceFormat.KVCACHE_SIMULATOR)
    assert str(caught.value).startswith(f"{path}:1: {said}")
    trace = read_traces([path], format=TraceFormat.KVCACHE_SIMULATOR, skip_bad_lines=True)
    assert (len(trace.requests), trace.skipped_bad_lines) == (1, 1)


# -- Bailian ---------------------------------------------------------------------------------------------


def bailian(chat: int, parent: int, ids: list[int], length: int, **fields: Any) -> dict[str, Any]:
    return {
        "chat_id": chat,
        "parent_chat_id": parent,
        "timestamp": 61.114,
        "input_length": length,
        "output_length": 32,
        "type": "text",
        "turn": 1,
        "hash_ids": ids,
    } | fields


def test_a_line_of_bailian(write: Write) -> None:
    path = write(
        bailian(159, -1, [10, 11, 12], 40),
        bailian(160, 159, [10, 11, 30, 31, 32], 80, timestamp=90.5, turn=2),
        bailian(161, -1, [99, 11, 12], 48, timestamp=91),
    )
    trace = read_traces([path])
    check_prefixes(trace)
    first, second, third = trace.requests
    assert (first.arrival_s, first.num_prompt_tokens, first.num_output_tokens) == (61.114, 40, 32)
    assert trace.units() == (16,)
    assert shared_units(first, second) == 2
    assert shared_units(first, third) == 0, "equal contents behind another beginning are not a prefix"


def test_a_bad_line_of_bailian(write: Write) -> None:
    path = write(bailian(1, -1, [1, 2], 32), bailian(2, -1, [1, 2, 3], 32))
    with pytest.raises(TraceError, match=r":2: hash_ids: 3 ids, but 32 tokens have only 2 units of 16$"):
        read_traces([path])


# -- sessions by turns (agentic) -------------------------------------------------------------------------


def turn(session: str, length: int, output: int, ids: list[int], **fields: Any) -> dict[str, Any]:
    return {
        "session_id": session,
        "input_length": length,
        "output_length": output,
        "hash_ids": ids,
    } | fields


def test_turns_add_up(write: Write) -> None:
    path = write(
        turn("a", 1536, 320, [0, 1, 2], timestamp=1000.0, group_id=4),
        turn("b", 1536, 10, [0, 1, 9], timestamp=1500.0, group_id=4),
        turn("a", 768, 180, [1000, 1001], delay=2450.0),
        turn("a", 100, 1, [2000], delay=50.0),
    )
    trace = read_traces([path])
    check_prefixes(trace)
    first, other, second, third = trace.requests
    assert [request.num_prompt_tokens for request in trace.requests] == [
        1536,
        1536,
        1536 + 320 + 768,
        1536 + 320 + 768 + 180 + 100,
    ]
    assert [request.num_output_tokens for request in trace.requests] == [320, 10, 180, 1]
    assert [request.arrival_s for request in trace.requests] == [1.0, 1.5, pytest.approx(3.45), pytest.approx(3.5)]
    assert shared_units(first, other) == 2
    assert shared_units(first, second) == 3  # the whole first prompt
    assert second.num_prompt_tokens // 512 == 5
    assert shared_units(second, third) == 5  # what is full of the second
    assert trace.units() == (512,)


def test_an_answer_is_known_to_its_own_session_only(write: Write) -> None:
    path = write(
        turn("a", 512, 512, [0], timestamp=0),
        turn("a", 512, 512, [5], delay=1),
        turn("b", 512, 512, [0], timestamp=10),
        turn("b", 512, 512, [5], delay=1),
        turn("b", 512, 512, [6], delay=1),
    )
    trace = read_traces([path])
    check_prefixes(trace)
    _, a, b_first, b, b_last = trace.requests
    assert shared_units(a, b) == shared_units(a, b_first) == 1
    assert shared_units(b, b_last) == 3


def test_the_same_tokens_elsewhere_in_a_unit_are_another_unit(write: Write) -> None:
    """Id 1 begins at token 0 of a unit, or at token 12."""
    path = write(
        turn("a", 1024, 0, [0, 1], timestamp=0),
        turn("b", 500, 0, [0], timestamp=1),
        turn("b", 512, 0, [1], delay=1),
        turn("c", 500, 0, [0], timestamp=5),
        turn("c", 512, 0, [1], delay=1),
    )
    _, _, b, _, c = read_traces([path]).requests
    a = read_traces([path]).requests[0]
    assert shared_units(a, b) == 0
    assert shared_units(b, c) == 2, "no answer between, and the same pieces"


def test_the_rest_of_a_text_is_not_its_beginning(write: Write) -> None:
    path = write(
        turn("a", 312, 0, [0]),
        turn("a", 512, 0, [7]),  # 200 tokens of it end the first unit, 312 are in the second
        turn("a", 200, 0, [8]),
        turn("b", 312, 0, [0]),
        turn("b", 200, 0, [7]),
        turn("b", 312, 0, [7]),  # the first 312 tokens of the same text
        turn("b", 200, 0, [8]),
    )
    requests = read_traces([path]).requests
    assert [request.num_prompt_tokens for request in (requests[2], requests[6])] == [1024, 1024]
    assert shared_units(requests[2], requests[6]) == 1


def test_tokens_without_an_id_are_the_sessions_own(write: Write) -> None:
    path = write(turn("a", 1024, 0, [0]), turn("a", 512, 0, [1]), turn("b", 1024, 0, [0]), turn("b", 512, 0, [1]))
    first, second, other, _ = read_traces([path]).requests
    assert (shared_units(first, second), shared_units(first, other)) == (2, 1)


def test_a_restart_carries_the_ids_of_several_turns(write: Write) -> None:
    ids = {"timestamp": 0, "is_restart": True}
    path = write(turn("a", 700, 0, [0, 1, 2], **ids))
    (request,) = read_traces([path]).requests
    assert request.hash_ids is not None
    assert (request.num_prompt_tokens, len(request.hash_ids)) == (700, 2)
    with pytest.raises(TraceError, match=":1: hash_ids: 3 ids, but 700 tokens have only 2 units"):
        read_traces([write(turn("a", 700, 0, [0, 1, 2]))])


def test_a_session_grows_beyond_what_a_prompt_may_have(write: Write) -> None:
    path = write(
        turn("a", 2**23, 2**23, []), turn("a", 1, 0, []), turn("b", 2**24, 0, []), turn("c", 2**31 - 1, 0, [])
    )
    with pytest.raises(TraceError, match=r":2: input_length: the session's prompt has more than 16777216 tokens$"):
        read_traces([path])
    trace = read_traces([path], skip_bad_lines=True)
    assert [request.num_prompt_tokens for request in trace.requests] == [2**23, 2**24]


@property_settings(60)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 1600), st.integers(0, 700), st.integers(0, 3)),
        min_size=1,
        max_size=12,
    )
)
def test_a_later_prompt_begins_with_the_earlier_one(tmp_path: Path, turns: list[tuple[str, int, int, int]]) -> None:
    """The same as lists of tokens: an id's tokens are its own, an answer's are its session's and turn's."""
    lines, prompts = [], []
    texts: dict[str, list[object]] = {}
    for at, (session, length, output, start) in enumerate(turns):
        ids = [start + block for block in range(-(-length // 512))]
        text = texts.setdefault(session, [])
        text += [(ids[token // 512], token % 512) for token in range(length)]
        prompts.append(list(text))
        text += [("answer", session, at, token) for token in range(output)]
        lines.append(turn(session, length, output, ids))
    path = tmp_path / "t"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    requests = read_traces([str(path)], format=TraceFormat.AGENTIC).requests
    assert [request.num_prompt_tokens for request in requests] == [len(prompt) for prompt in prompts]
    for one, mine in zip(requests, prompts, strict=True):
        for other, its in zip(requests, prompts, strict=True):
            full = min(len(mine), len(its)) // 512
            equal = next((at for at in range(full) if mine[at * 512 :][:512] != its[at * 512 :][:512]), full)
            assert min(shared_units(one, other), full) == equal


# -- Azure -----------------------------------------------------------------------------------------------

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


def test_a_line_of_azure(write: Write) -> None:
    path = write(AZURE, "2023-11-16 18:17:03.9799600,4808,10", "", "2024-05-10 00:00:01.5+00:00,7,0\r")
    trace = read_traces([path])
    first, second = trace.requests
    assert (first.num_prompt_tokens, first.num_output_tokens) == (4808, 10)
    assert first.arrival_s == pytest.approx(1_700_158_623.97996)
    assert second.arrival_s == 1_715_299_201.5
    assert first.source == f"{path}:2"
    assert second.source == f"{path}:4"
    assert first.hash_ids is not None
    assert len(first.hash_ids) == 0
    assert trace.units() == (), "lengths alone suggest no block size"


@pytest.mark.skipif(not hasattr(time, "tzset"), reason="the time zone cannot be set here")
def test_a_time_without_a_zone_is_utc_wherever_it_is_read(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(AZURE, "1970-01-02 00:00:00,5,6")
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "XYZ-9")
        time.tzset()
        (request,) = read_traces([path]).requests
    time.tzset()
    assert request.arrival_s == 86_400


def test_columns_of_azure_may_be_in_another_order_and_quoted(write: Write) -> None:
    path = write('"GeneratedTokens","TIMESTAMP","Model","ContextTokens"', '5,"2024-05-10 00:00:00","a, b",77')
    (request,) = read_traces([path]).requests
    assert (request.num_prompt_tokens, request.num_output_tokens) == (77, 5)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("2023-11-16 18:17:03,0,10", "ContextTokens: expected an int from 1 to"),
        ("2023-11-16 18:17:03,-5,10", "ContextTokens: expected an int"),
        ("2023-11-16 18:17:03,5.0,10", "ContextTokens: expected an int"),
        ("2023-11-16 18:17:03,\u0665,10", "ContextTokens: expected an int"),
        (f"2023-11-16 18:17:03,{2**31},10", "ContextTokens: expected an int"),
        ("2023-11-16 18:17:03,5,", "GeneratedTokens: expected an int from 0 to"),
        ("yesterday,5,10", "TIMESTAMP: 'yesterday' is not a date and time"),
        ("2023-11-16 18:17:03,5", "2 values for 3 columns"),
        ("2023-11-16 18:17:03,5,6,7", "4 values for 3 columns"),
        ('"2023-11-16 18:17:03,5,6', "unexpected end of data"),
    ],
)
def test_a_bad_line_of_azure(write: Write, line: str, said: str) -> None:
    path = write(AZURE, line, "2023-11-16 18:17:03,5,6")
    with pytest.raises(TraceError) as caught:
        read_traces([path])
    assert str(caught.value).startswith(f"{path}:2: {said}")
    trace = read_traces([path], skip_bad_lines=True)
    assert (len(trace.requests), trace.skipped_bad_lines) == (1, 1)


def test_a_header_of_azure_is_never_skipped(write: Write) -> None:
    missing = write("TIME,ContextTokens,GeneratedTokens", "2023-11-16 18:17:03,5,6", name="missing")
    broken = write('"TIMESTAMP,ContextTokens,GeneratedTokens', AZURE, "2023-11-16 18:17:03,5,6", name="broken")
    for path, said in ((missing, "TIMESTAMP: missing in the header"), (broken, "unexpected end of data")):
        for skip_bad_lines in (False, True):
            with pytest.raises(TraceError, match=f":1: {said}"):
                read_traces([path], format=TraceFormat.AZURE, skip_bad_lines=skip_bad_lines)


# -- events ----------------------------------------------------------------------------------------------


def stored(
    *hashes: int | str, parent: int | str | None = None, block_size: int = 16, **fields: Any
) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(range(block_size * len(hashes))),
        "block_size": block_size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    } | fields


def figures(trace: Trace) -> list[tuple[float, int, int]]:
    return [(request.arrival_s, request.num_prompt_tokens, request.num_output_tokens) for request in trace.requests]


def test_chains_become_requests(write: Write) -> None:
    path = write(
        [100.0, [stored(1, 2, 3)], None],
        [100.5, [stored(4, parent=3)], None],  # one block at the end: the answer
        [101.0, [stored(20, 21, parent=2)], None],  # out of the middle: another request
        [101.1, [stored(22, 23, parent=21)], None],  # several at the end: its prompt in parts
        [102.0, [stored(5, 6, parent=4)], None],  # several behind an answer: the next turn
    )
    trace = read_traces([path])
    check_prefixes(trace)
    assert figures(trace) == [(100.0, 48, 16), (101.0, 96, 0), (102.0, 96, 0)]
    first, second, third = trace.requests
    assert (shared_units(first, second), shared_units(first, third)) == (2, 3)
    assert [request.source for request in trace.requests] == [f"{path}:1", f"{path}:3", f"{path}:5"]
    assert trace.units() == (16,)


def test_a_pause_ends_a_request(write: Write) -> None:
    path = write(
        [0.0, [stored(1, 2)]],
        [10.0, [stored(3, parent=2)]],
        [20.0, [stored(4, parent=3)]],  # 10 s after the last growth: still the answer
        [30.1, [stored(5, parent=4)]],
    )
    assert figures(read_traces([path])) == [(0.0, 32, 32), (30.1, 80, 0)]


def test_blocks_stored_again_are_another_request(write: Write) -> None:
    path = write([0.0, [stored(1, 2, 3)]], [1.0, [{"type": "BlockRemoved", "block_hashes": [2, 3], "medium": "GPU"}]])
    lines = Path(path).read_text() + json.dumps([2.0, [stored(2, 3, parent=1)], 0]) + "\n"
    Path(path).write_text(lines)
    trace = read_traces([path])
    assert figures(trace) == [(0.0, 48, 0), (2.0, 48, 0)]
    assert shared_units(*trace.requests) == 3


def test_ranks_do_not_continue_each_other(write: Write) -> None:
    path = write([0.0, [stored(1, 2)], 0], [0.1, [stored(1, 2)], 1], [0.2, [stored(3, parent=2)], 1])
    assert figures(read_traces([path])) == [(0.0, 32, 0), (0.1, 32, 16)]


def test_only_blocks_of_one_whole_group_in_gpu_memory_count(write: Write) -> None:
    path = write(
        [
            0.0,
            [
                stored(1, medium="CPU"),
                stored(2, group_idx=0, kv_cache_spec_kind="sliding_window"),
                stored(3, 4, group_idx=1, kv_cache_spec_kind="full_attention"),
                stored(5, 6, group_idx=2, kv_cache_spec_kind="full_attention"),
                stored(7, parent=4, group_idx=1, block_size=8),
                {"type": "AllBlocksCleared"},
                stored(group_idx=1),
            ],
        ]
    )
    assert figures(read_traces([path])) == [(0.0, 32, 0)]


def test_events_in_the_form_of_arrays_and_batches_in_that_of_objects(write: Write) -> None:
    path = write(
        {"ts": 1, "events": [["BlockStored", ["aa", "bb"], None, [], 16, None], ["BlockRemoved", ["aa"]]]},
        {"ts": 2, "events": [["BlockStored", [-7], "bb", [], 16, None, "GPU"]], "data_parallel_rank": 0},
        {"ts": 3, "events": [["AllBlocksCleared"]]},
    )
    assert figures(read_traces([path])) == [(1.0, 32, 16)]


def test_an_unknown_parent_counts_as_the_beginning(write: Write) -> None:
    path = write([0.0, [stored(11, 12, parent=10)]], [1.0, [stored(13, 14, parent=10)]])
    trace = read_traces([path])
    assert figures(trace) == [(0.0, 32, 0), (1.0, 32, 0)]
    assert shared_units(*trace.requests) == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("7", "expected a batch of events"),
        ("[]", "ts: expected a number"),
        ('["now", []]', "ts: expected a number"),
        ("[true, []]", "ts: expected a number"),
        ("[1.0, 5]", "events: expected an array"),
        ('{"ts": 1.0}', "events: expected an array"),
        ('[1.0, [], "a"]', "data_parallel_rank: expected an int or null"),
        ("[1.0, [5]]", "events[0]: expected an event"),
        ("[1.0, [[]]]", "events[0]: expected an event"),
        ("[1.0, [{}]]", "events[0]: expected an event"),
        ('[1.0, [{"type": "BlockStored"}]]', "events[0]: "),
        ('[1.0, [["BlockStored", [1.5], null, [], 16]]]', "events[0]: "),
        ('[1.0, [["BlockStored", [1], null, [], 0]]]', "events[0]: "),
    ],
)
def test_a_bad_line_of_events(write: Write, line: str, said: str) -> None:
    path = write([0.0, [stored(1)]], line, [1.0, [stored(2)]])
    with pytest.raises(TraceError) as caught:
        read_traces([path])
    assert str(caught.value).startswith(f"{path}:2: {said}")
    assert "\n" not in str(caught.value)
    trace = read_traces([path], skip_bad_lines=True)
    assert (len(trace.requests), trace.skipped_bad_lines) == (2, 1)


def test_a_recording_without_a_stored_block_has_no_requests(write: Write) -> None:
    path = write([0.0, []], [1.0, [["AllBlocksCleared"]]])
    with pytest.raises(TraceError, match=r"no requests$"):
        read_traces([path])


# -- which format it is ----------------------------------------------------------------------------------

SAMPLES: list[tuple[TraceFormat, Any]] = [
    (TraceFormat.KVCACHE_SIMULATOR, {"block_size": 64, "hash_ids": [1], "input_length": 64}),
    (TraceFormat.BAILIAN, bailian(1, -1, [1], 16)),
    (TraceFormat.AGENTIC, turn("a", 16, 1, [1], timestamp=0)),
    (TraceFormat.AZURE, f"{AZURE}\n2023-11-16 18:17:03,5,6"),
    (TraceFormat.KV_EVENTS, [0.0, [stored(1)]]),
    (TraceFormat.KV_EVENTS, {"ts": 0.0, "events": [stored(1)]}),
]


@pytest.mark.parametrize(("format", "sample"), SAMPLES)
def test_the_format_is_found(write: Write, format: TraceFormat, sample: Any) -> None:
    path = write(sample)
    found, forced = read_traces([path]), read_traces([path], format=format)
    for one, other in zip(found.requests, forced.requests, strict=True):
        assert (one.unit, one.scope, figures(found)) == (other.unit, other.scope, figures(forced))


@pytest.mark.parametrize(("format", "sample"), [(f, s) for f, s in SAMPLES if f != TraceFormat.AZURE])
def test_the_format_is_found_behind_a_damaged_line(write: Write, format: TraceFormat, sample: Any) -> None:
    path = write("{broken", sample)
    (request,) = read_traces([path], skip_bad_lines=True).requests
    assert request.unit == read_traces([write(sample, name="whole")], format=format).requests[0].unit


def test_a_file_that_begins_with_many_blank_lines(write: Write) -> None:
    path = write(*[""] * 150, {"block_size": 64, "hash_ids": [1], "input_length": 64})
    assert len(read_traces([path], format=TraceFormat.KVCACHE_SIMULATOR).requests) == 1
    assert len(read_traces([path]).requests) == 1


def test_compressed(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv.gz"
    path.write_bytes(gzip.compress(f"{AZURE}\n2023-11-16 18:17:03,5,6\n".encode(), mtime=0))
    assert len(read_traces([str(path)]).requests) == 1


@property_settings(300)
@given(
    sample=st.sampled_from([sample for _, sample in SAMPLES]),
    cut=st.integers(0, 200),
    junk=st.binary(max_size=12),
    skip=st.booleans(),
    forced=st.sampled_from([None, *TraceFormat]),
)
def test_damage_never_escapes_as_another_exception(tmp_path: Path, sample, cut, junk, skip, forced) -> None:
    data = (sample if isinstance(sample, str) else json.dumps(sample)).encode()
    path = tmp_path / "t"
    path.write_bytes(data[:cut] + junk + data[cut:] + b"\n" + data)
    try:
        trace = read_traces([str(path)], format=forced, skip_bad_lines=skip)
    except TraceError as error:
        message = str(error)
    else:
        message = str(path)
        assert trace.requests
    assert message.startswith(str(path))
    assert "\n" not in message
