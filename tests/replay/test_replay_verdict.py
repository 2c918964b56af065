"""The verdict says what was measured, in grammatical sentences, and no more."""

import json
from typing import Any

from blockpool.replay import HEADINGS, ReplayReport, RunResult, report_as_json, report_rows, verdict


def run(num_blocks: int = 100, **changes: int) -> RunResult:
    figures: dict[str, Any] = {
        "block_size": 16,
        "requests": 10,
        "refused_requests": 0,
        "prompt_tokens": 1000,
        "hit_tokens": 500,
        "reusable_tokens": changes.get("hit_tokens", 500),
        "evicted_blocks": 0,
        "evicted_unused_blocks": 0,
        "peak_held_blocks": 9,
        "trace_requests": 10,
        "groups": (),
        "losses": (),
        "shortened_hits": {},
    }
    return RunResult(num_blocks=num_blocks, **(figures | changes))


def test_one_run_without_evictions():
    assert verdict([run()]) == [
        "At 100 blocks of 16 tokens, 50.0% of the prompt tokens were found in the cache (500 of 1,000).",
        "At 100 blocks nothing was evicted: for this trace a larger pool can bring no more hits.",
    ]


def test_what_the_larger_size_brought():
    smaller = run(100, hit_tokens=300, evicted_blocks=40, evicted_unused_blocks=30)
    larger = run(2000, hit_tokens=500, evicted_blocks=20, evicted_unused_blocks=5)
    assert verdict([larger, smaller]) == [
        "At 100 blocks of 16 tokens, 30.0% of the prompt tokens were found in the cache (300 of 1,000).",
        "From 100 to 2,000 blocks the hit rate rose from 30.0% to 50.0% (200 more hit tokens).",
        "At 100 blocks 40 blocks were evicted; 75.0% of them had not been hit since cached.",
        "At 2,000 blocks 20 blocks were evicted; 25.0% of them had not been hit since cached.",
    ]


def test_no_change_and_a_fall():
    assert "From 100 to 200 blocks the hit rate did not change." in verdict([run(100), run(200)])
    assert "From 100 to 200 blocks the hit rate fell from 50.0% to 49.9% (1 fewer hit token)." in verdict(
        [run(100), run(200, hit_tokens=499)]
    )


def test_one_of_each():
    sentences = verdict(
        [
            run(
                2,
                block_size=1,
                requests=2,
                refused_requests=1,
                evicted_blocks=1,
                evicted_unused_blocks=1,
                trace_requests=2,
            )
        ]
    )
    assert sentences == [
        "At 2 blocks 1 request of 2 was refused, needing more than the whole pool; "
        "the hit rate is that of the others.",
        "At 2 blocks of 1 token, 50.0% of the prompt tokens were found in the cache (500 of 1,000).",
        "At 2 blocks 1 block was evicted; it had not been hit since it was cached.",
    ]
    assert "At 100 blocks 1 block was evicted; it had been hit since it was cached." in verdict(
        [run(evicted_blocks=1)]
    )


def test_refusals_make_rates_incomparable():
    sentences = verdict([run(50, refused_requests=4, hit_tokens=0), run(100)])
    assert sentences[0].startswith("At 50 blocks 4 requests of 10 were refused")
    assert (
        "From 50 to 100 blocks the hit rate went from 0.0% to 50.0%, but not over the same requests: "
        "fewer were refused." in sentences
    )
    assert (
        "At 50 blocks nothing was evicted: a larger pool can bring more hits only by replaying what this one refused."
        in sentences
    )


def test_nothing_replayed():
    nothing = run(2, refused_requests=10, prompt_tokens=0, hit_tokens=0)
    assert verdict([nothing]) == ["At 2 blocks nothing was replayed: every request needs more than the whole pool."]
    assert not any("to 100 blocks" in sentence for sentence in verdict([nothing, run(100)]))


def test_no_evictions_is_said_of_the_smallest_such_pool_only():
    sentences = [sentence for sentence in verdict([run(100), run(200)]) if "nothing was evicted" in sentence]
    assert len(sentences) == 1
    assert sentences[0].startswith("At 100 blocks")


def test_an_interrupted_run_is_no_ground_for_comparisons():
    stopped = run(200, requests=3)
    assert verdict([run(100), stopped]) == [
        "The run with 200 blocks was interrupted after 3 of 10 requests: its figures are of those.",
        *verdict([run(100)]),
    ]
    assert verdict([]) == []


def report(*runs: RunResult, interrupted: bool = False) -> ReplayReport:
    return ReplayReport(
        traces=("a.jsonl",),
        built_in=False,
        trace_requests=10,
        skipped_bad_lines=2,
        hash_block_size=8,
        sizes_from="given",
        runs=runs,
        interrupted=interrupted,
    )


def test_the_json_has_every_figure():
    document = json.loads(report_as_json(report(run(evicted_blocks=7), run(200, requests=3), interrupted=True)))
    assert document["interrupted"] is True
    assert document["skipped_bad_lines"] == 2
    first, second = document["runs"]
    assert first == {
        "num_blocks": 100,
        "block_size": 16,
        "requests": 10,
        "refused_requests": 0,
        "prompt_tokens": 1000,
        "hit_tokens": 500,
        "hit_rate": 0.5,
        "reusable_tokens": 500,
        "groups": [],
        "losses": [],
        "shortened_hits": {},
        "evicted_blocks": 7,
        "evicted_unused_blocks": 0,
        "peak_held_blocks": 9,
        "trace_requests": 10,
        "interrupted": False,
    }
    assert second["interrupted"] is True
    assert document["verdict"] == verdict([run(evicted_blocks=7), run(200, requests=3)])


def test_the_rows_fit_the_headings():
    rows = report_rows(report(run(10_000), run(200, requests=3)))
    assert all(len(row) == len(HEADINGS) for row in rows)
    assert rows[0][:2] == ("10,000", "10")
    assert rows[1][:2] == ("200", "3 of 10")
