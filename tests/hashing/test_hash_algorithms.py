"""Algorithms by name, seeds, and what the pickle forms must not depend on."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
from hash_oracle import cbor_digest

from blockpool.hashing import (
    ALGORITHMS,
    DigestError,
    MissingDependency,
    RandomSeedWarning,
    SeedError,
    TokenIdError,
    TokenIds,
    UnknownAlgorithm,
    digest_to_int,
    hash_algorithm,
    hash_block_tokens,
    none_hash,
)
from blockpool.hashing.pickled import serialize


@pytest.fixture
def no_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


def test_names_and_sizes(algorithm: str) -> None:
    made = hash_algorithm(algorithm)
    assert made.name == algorithm
    assert made.digest_size == len(made.digest("x")) == (16 if algorithm.startswith("xxhash") else 32)
    assert hash_algorithm(algorithm) is made
    assert ALGORITHMS == ("sha256_cbor", "sha256", "xxhash_cbor", "xxhash")


@pytest.mark.parametrize("name", ["md5", "", "SHA256", "sha256_cbor "])
def test_unknown(name: str) -> None:
    with pytest.raises(UnknownAlgorithm, match="known are sha256_cbor, sha256, xxhash_cbor, xxhash"):
        hash_algorithm(name)


@pytest.fixture
def no_xxhash(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    hash_algorithm.cache_clear()
    yield
    hash_algorithm.cache_clear()


@pytest.mark.usefixtures("no_xxhash")
@pytest.mark.parametrize("name", ["xxhash", "xxhash_cbor"])
def test_a_missing_package_is_named(name: str) -> None:
    with pytest.raises(MissingDependency, match=r"blockpool\[xxhash\]"):
        hash_algorithm(name)
    assert hash_algorithm("sha256").digest_size == 32


class TestNoneHash:
    def test_an_explicit_seed_comes_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONHASHSEED", "1")
        assert none_hash(seed="0") == cbor_digest("0")

    def test_then_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for seed in ("7", "random", ""):
            monkeypatch.setenv("PYTHONHASHSEED", seed)
            assert none_hash() == cbor_digest(seed)

    @pytest.mark.usefixtures("no_seed")
    def test_then_a_fixed_text(self) -> None:
        assert none_hash() == none_hash(seed="vllm-none-hash")
        assert none_hash("sha256") == none_hash("sha256", "vllm-none-hash")

    @pytest.mark.usefixtures("no_seed")
    def test_which_is_random_for_xxhash(self) -> None:
        pytest.importorskip("xxhash")
        with pytest.warns(RandomSeedWarning, match="differ between processes"):
            first = none_hash("xxhash")
        with pytest.warns(RandomSeedWarning):
            assert none_hash("xxhash") == first
        assert first != none_hash("xxhash", "vllm-none-hash")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            none_hash("xxhash", "explicit")

    def test_a_seed_is_text(self) -> None:
        with pytest.raises(SeedError):
            none_hash(seed=0)  # type: ignore[arg-type]


class TestOneBlock:
    @pytest.mark.parametrize("parent", [b"x", bytes(33), "x" * 32, bytearray(32)])
    def test_a_parent_is_a_digest(self, parent: bytes) -> None:
        with pytest.raises(DigestError):
            hash_block_tokens(parent, [1])

    def test_a_parent_is_a_digest_of_the_same_algorithm(self) -> None:
        pytest.importorskip("xxhash")
        with pytest.raises(DigestError):
            hash_block_tokens(bytes(32), [1], algorithm="xxhash")

    def test_bad_tokens(self, algorithm: str) -> None:
        for bad in (-1, 2**32, True, 1.0):
            with pytest.raises(TokenIdError, match="index 1 "):
                hash_block_tokens(None, [0, bad], algorithm=algorithm, seed="s")  # type: ignore[list-item]

    def test_any_container(self, algorithm: str) -> None:
        expected = hash_block_tokens(None, [1, 2, 3], algorithm=algorithm, seed="s")
        others: list[TokenIds] = [(1, 2, 3), range(1, 4), np.array([1, 2, 3], np.int16), [np.int64(1), 2, 3]]
        for tokens in others:
            assert hash_block_tokens(None, tokens, algorithm=algorithm, seed="s") == expected


def test_pickles_do_not_depend_on_which_equal_strings_are_one_object() -> None:
    one = "a long string"
    other = "".join(["a long ", "string"])
    assert one is not other
    assert serialize((b"p", (1,), (("lora", one, one),))) == serialize((b"p", (1,), (("lora", one, other),)))


class TestSixtyFourBits:
    def test_low_eight_bytes_big_endian(self) -> None:
        assert digest_to_int(bytes(24) + bytes([1, 2, 3, 4, 5, 6, 7, 8])) == 0x0102030405060708
        assert digest_to_int(b"\xff" * 32) == 2**64 - 1

    def test_too_short(self) -> None:
        with pytest.raises(DigestError):
            digest_to_int(bytes(7))
