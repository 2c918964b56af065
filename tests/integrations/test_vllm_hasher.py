"""The drop-in's request hasher against the definition: one call of the hash function per unit, chained."""

from __future__ import annotations

import hashlib
import pickle
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpool.integrations.vllm import get_request_block_hasher, hasher
from blockpool.integrations.vllm.words import Words
from tests.sizes import property_settings

ROOT = hashlib.sha256(b"root").digest()


def sha256(value: Any) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()


def sha256_cbor(value: Any) -> bytes:
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()


def short(value: Any) -> bytes:
    return hashlib.md5(repr(value).encode()).digest()


for function in (sha256, sha256_cbor):
    function.__module__ = "vllm.utils.hashing"


class Request:
    """What the hasher reads of vLLM's requests."""

    def __init__(self, tokens: list[int], salt: str | None = None, media: list[Any] | None = None) -> None:
        self._all_token_ids = list(tokens)
        self.block_hashes: list[bytes] = []
        self.cache_salt = salt
        self.mm_features = media or []
        self.lora_request = None
        self.prompt_embeds = None

    @property
    def all_token_ids(self) -> tuple[int, ...]:
        return tuple(self._all_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self._all_token_ids)


class Spoken(Words):
    """Tagged keys as vLLM has them: the salt in the first unit, an image wherever it reaches."""

    def tagged_keys(self, request: Any, start: int, end: int, lookahead: int, at: int) -> tuple[Any, int]:
        end += lookahead
        keys: list[Any] = [("mm", name, o - start) for name, o, n in request.mm_features if o < end and o + n > start]
        if request.cache_salt and start == 0:
            keys.append(("cache_salt", request.cache_salt))
        return tuple(keys) or None, at

    def none_hash(self, hash_fn: Any) -> bytes:
        return ROOT


@pytest.fixture(autouse=True)
def spoken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hasher, "words", Spoken)


def by_definition(request: Request, unit: int, hash_fn: Any, lookahead: int) -> list[bytes]:
    tokens, out, parent = request._all_token_ids, [], ROOT
    for start in range(0, len(tokens) - unit - lookahead + 1, unit):
        end = start + unit
        extra, _ = Spoken().tagged_keys(request, start, end, lookahead, 0)
        if lookahead:
            extra = (extra, *tokens[end : end + lookahead])
        parent = hash_fn((parent, tuple(tokens[start:end]), extra))
        out.append(parent)
    return out


@property_settings(300)
@given(
    tokens=st.lists(st.integers(0, (1 << 32) - 1), max_size=70),
    cuts=st.lists(st.integers(0, 70), max_size=4),
    unit=st.sampled_from([1, 2, 3, 4, 16]),
    lookahead=st.sampled_from([0, 0, 2]),
    hash_fn=st.sampled_from([sha256, sha256_cbor, short]),
    salt=st.sampled_from([None, "", "s"]),
    media=st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 60), st.integers(1, 20)), max_size=2),
)
def test_a_request_that_grows_is_hashed_as_defined(
    tokens: list[int], cuts: list[int], unit: int, lookahead: int, hash_fn: Any, salt: str | None, media: list[Any]
) -> None:
    request = Request([], salt, media)
    hash_new = get_request_block_hasher(unit, hash_fn, lookahead)
    for cut in [*sorted(cuts), len(tokens)]:
        request._all_token_ids = tokens[:cut]
        request.block_hashes += hash_new(request)
        assert request.block_hashes == by_definition(request, unit, hash_fn, lookahead)
        assert hash_new(request) == []


def test_tokens_that_are_no_ids_are_left_to_the_hash_function() -> None:
    for hash_fn in (sha256, sha256_cbor):
        request = Request([1, -1, 2, 3])
        assert get_request_block_hasher(2, hash_fn)(request) == by_definition(request, 2, hash_fn, 0)


def test_a_request_without_a_plain_list_of_tokens_will_do() -> None:
    request = Request(list(range(40)))
    expected = by_definition(request, 16, sha256, 0)
    tokens = tuple(request._all_token_ids)

    class Wrapped:
        block_hashes: list[bytes] = []  # noqa: RUF012
        cache_salt = mm_features = lora_request = prompt_embeds = None
        num_tokens = len(tokens)
        all_token_ids = tokens

    assert get_request_block_hasher(16, sha256)(Wrapped()) == expected
