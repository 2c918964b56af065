"""Trace ids become digests that are equal exactly where the prefixes are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpool.hashing import BlockHasher
from blockpool.replay import DigestedTrace, ReplayError
from blockpool.replay import digests as digests_module
from blockpool.replay.expand import DIGEST_BYTES, num_known_hash_blocks
from blockpool.traces import Trace
from tests.sizes import property_settings

from .lru_oracle import naive_keys
from .trace_makers import id_traces, ids_request, token_traces, tokens_request, trace_of

exact = property_settings(80)


def split(chain: bytes) -> list[bytes]:
    assert len(chain) % DIGEST_BYTES == 0
    return [chain[i : i + DIGEST_BYTES] for i in range(0, len(chain), DIGEST_BYTES)]


def assert_same_equalities(trace: Trace, hash_block_size: int) -> None:
    """Digests and naive keys agree on what is equal, over all blocks of all requests."""
    key_of: dict[bytes, object] = {}
    digest_of: dict[object, bytes] = {}
    for request, chain in DigestedTrace(trace, hash_block_size):
        keys = naive_keys(request, hash_block_size)
        found = split(chain)
        assert len(found) == len(keys) == num_known_hash_blocks(request, hash_block_size)
        for key, digest in zip(keys, found, strict=True):
            assert key_of.setdefault(digest, key) == key
            assert digest_of.setdefault(key, digest) == digest


@pytest.mark.parametrize(("unit", "hash_block_size"), [(4, 4), (4, 2), (6, 2), (8, 1), (4, 8), (3, 9), (1, 5)])
@exact
@given(data=st.data())
def test_equal_digest_means_equal_prefix(unit: int, hash_block_size: int, data: st.DataObject):
    assert_same_equalities(data.draw(id_traces(unit)), hash_block_size)


@exact
@given(trace=token_traces(), hash_block_size=st.sampled_from([1, 3, 4]))
def test_equal_digest_means_equal_tokens(trace: Trace, hash_block_size: int):
    assert_same_equalities(trace, hash_block_size)


def test_one_id_becomes_k_digests_and_the_partial_last_id_only_its_full_ones():
    request = ids_request([5, 6], num_prompt_tokens=8 + 5, unit=8)
    ((_, chain),) = DigestedTrace(trace_of(request), 2)
    assert len(split(chain)) == 4 + 2
    assert len(set(split(chain))) == 6


def test_what_has_no_id_has_no_digest():
    ((_, chain),) = DigestedTrace(trace_of(ids_request([5], num_prompt_tokens=100, unit=8)), 4)
    assert len(split(chain)) == 2
    ((_, chain),) = DigestedTrace(trace_of(ids_request([], num_prompt_tokens=100, unit=8)), 4)
    assert chain == b""


def test_a_hash_block_over_several_ids_has_the_digest_of_the_id_that_closes_it():
    one, other = (ids_request(ids, num_prompt_tokens=16) for ids in ([1, 2, 3, 4], [9, 2, 8, 4]))
    chains = [chain for _, chain in DigestedTrace(trace_of(one, other), 8)]
    assert chains[0] == chains[1], "ids 2 and 4 close the blocks"
    ((_, chain),) = DigestedTrace(trace_of(ids_request([1, 2, 3], num_prompt_tokens=12)), 8)
    assert chain == chains[0][:DIGEST_BYTES], "the third id closes nothing"


def test_scopes_keep_equal_ids_apart():
    requests = [ids_request([1, 2], num_prompt_tokens=8, scope=scope) for scope in ("a", "b", "a")]
    a, b, again = (chain for _, chain in DigestedTrace(trace_of(*requests), 4))
    assert a == again
    assert not set(split(a)) & set(split(b))


def test_the_largest_ids():
    ids = [0, 1, 2**32, 2**62, 2**63 - 2, 2**63 - 1]
    ((_, chain),) = DigestedTrace(trace_of(ids_request(ids, num_prompt_tokens=24)), 2)
    assert len(set(split(chain))) == 12


def test_the_first_word_looks_random():
    # An index that uses these bits as its hash would crawl if they had a pattern.
    ((_, chain),) = DigestedTrace(trace_of(ids_request(range(4096), num_prompt_tokens=4096 * 4)), 1)
    words = [int.from_bytes(digest[:8], "little") for digest in split(chain)]
    assert len(set(words)) == len(words)
    for shift in (0, 16, 32, 48):
        buckets = {(word >> shift) & 0xFFFF for word in words}
        # 16,384 random draws of 65,536 values hit 14,500 different ones.
        assert 14_000 < len(buckets) < 15_000


def test_token_prompts_are_hashed_as_an_engine_hashes_them():
    tokens = list(range(50))
    ((_, chain),) = DigestedTrace(trace_of(tokens_request(tokens)), 16)
    hasher = BlockHasher("sha256_cbor", hash_block_size=16, seed=digests_module.HASH_SEED)
    assert chain == bytes(hasher.start(tokens).raw())


def test_batches_and_mixed_kinds_change_nothing(monkeypatch: pytest.MonkeyPatch):
    requests = []
    for number in range(30):
        requests.append(ids_request(range(number), num_prompt_tokens=4 * number + 1))
        if number % 3 == 0:
            requests.append(ids_request(range(number), num_prompt_tokens=8 * number + 1, unit=8, scope="u"))
        if number % 7 == 0:
            requests.append(tokens_request(range(number + 1)))
    trace = trace_of(*requests)
    alone = [chain for request in requests for _, chain in DigestedTrace(trace_of(request), 4)]
    for size in (1, 5, 1 << 15):
        monkeypatch.setattr(digests_module, "BATCH_DIGESTS", size)
        digested = DigestedTrace(trace, 4)
        assert [request for request, _ in digested] == requests
        for (request, chain), expected in zip(digested, alone, strict=True):
            # Alone, each scope has number 0: the chains agree in all but the word of the scope.
            assert [d[8:24] for d in split(chain)] == [
                d[8:24] for d in split(expected)
            ] or request.token_ids is not None
        assert list(digested) == list(digested)


def test_sizes_that_do_not_fit_are_named():
    trace = trace_of(ids_request([1], num_prompt_tokens=6, unit=6))
    with pytest.raises(ReplayError, match=r"hash blocks of 4 tokens .* ids of 6 tokens"):
        DigestedTrace(trace, 4)
