"""The built-in workload is an ordinary trace, the same on every machine."""

import hashlib
from collections import Counter

import numpy as np

from blockpool.traces import synthetic_trace


def fingerprint(trace) -> str:
    digest = hashlib.sha256()
    for request in trace.requests:
        digest.update(f"{request.arrival_s} {request.num_prompt_tokens} {request.num_output_tokens}".encode())
        digest.update(request.hash_ids.astype("<i8").tobytes())
    return digest.hexdigest()


def test_the_same_seed_gives_the_same_requests():
    assert fingerprint(synthetic_trace(1)) == fingerprint(synthetic_trace(1)) != fingerprint(synthetic_trace(2))


def test_the_default_is_pinned():
    # A change here changes every published figure of the built-in workload.
    assert fingerprint(synthetic_trace()) == "3cdb952f6a85d6941b4462c7b4e50b6e845d776989121238a2af95b04d235f35"


def test_requests_are_sorted_and_sensible():
    trace = synthetic_trace()
    arrivals = [request.arrival_s for request in trace.requests]
    assert arrivals == sorted(arrivals)
    for request in trace.requests:
        assert request.unit == 16
        assert len(request.hash_ids) == request.num_prompt_tokens // 16
        assert 1 <= request.num_prompt_tokens < 100_000
        assert 1 <= request.num_output_tokens < 2_000


def test_every_kind_of_request_is_there():
    kinds = Counter(request.source.removeprefix("built-in:") for request in synthetic_trace().requests)
    assert set(kinds) == {"chat", "agent", "one-shot"}


def test_an_id_always_has_the_same_predecessor():
    predecessor: dict[int, int] = {}
    shared = 0
    for request in synthetic_trace().requests:
        ids = request.hash_ids.tolist()
        for before, own in zip([-1, *ids], ids, strict=False):
            shared += own in predecessor
            assert predecessor.setdefault(own, before) == before
    assert shared > len(predecessor), "most of the traffic is shared prefixes"
    assert np.all(np.array(list(predecessor)) >= 0)
