"""The digests that other engines compute: those of hash_vectors.json, and vLLM's, which are written down here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from blockpool.hashing import (
    BlockHasher,
    ExtraKeys,
    MediaItem,
    cbor,
    digest_to_int,
    hash_algorithm,
    hash_block_tokens,
    kernel,
    none_hash,
    pickled,
)

VECTORS = Path(__file__).parents[2].parent / "shared" / "cases" / "hash_vectors.json"


def load() -> dict[str, Any]:
    if not VECTORS.exists():
        return {"cases": []}
    loaded: dict[str, Any] = json.loads(VECTORS.read_text())
    return loaded


CASES = [pytest.param(case, id=case["name"]) for case in load()["cases"]] or [
    pytest.param(None, marks=pytest.mark.skip(reason="hash_vectors.json is not there"))
]

EXTRA_KEYS = {
    "salt in the first block": ExtraKeys(cache_salt="tenant-a"),
    "adapter in every block": ExtraKeys(lora=("x", "/adapters/x")),
    "adapter then salt": ExtraKeys(lora=("x", "/a"), cache_salt="x"),
    "image over two blocks, starting inside the first": ExtraKeys(media=[MediaItem("img-7f", 2, 4)]),
}


def deep_tuple(value: Any) -> Any:
    return tuple(map(deep_tuple, value)) if isinstance(value, list) else value


@pytest.mark.parametrize("case", CASES)
def test_vectors_of_the_file(case: dict[str, Any], kernel_name: str) -> None:
    name, seed = case["algorithm"], load()["seed"]
    if name.startswith("xxhash"):
        pytest.importorskip("xxhash")
    tokens, size = case["tokens"], case["block_size"]
    digests = [bytes.fromhex(text) for text in case["digests"]]
    extras = [deep_tuple(case["extra_keys"].get(str(i))) for i in range(len(digests))]
    parent = none_hash(name, seed)
    assert parent.hex() == load()["none_hash"][name]

    assert hash_algorithm(name).chain(tokens, size, parent, extras, len(digests)) == b"".join(digests)
    chain = BlockHasher(name, hash_block_size=size, seed=seed).start(tokens, EXTRA_KEYS.get(case["name"]))
    assert chain[:] == digests
    assert [chain.extra_keys(i) for i in range(len(digests))] == extras
    assert [digest_to_int(digest) for digest in chain] == case["uint64"]
    for i, digest in enumerate(digests):
        block = tokens[i * size : (i + 1) * size]
        assert hash_block_tokens(parent, block, extras[i], algorithm=name) == digest
        parent = digest


@pytest.mark.parametrize("case", CASES)
def test_every_extra_of_the_file_is_made_from_extra_keys(case: dict[str, Any]) -> None:
    assert bool(case["extra_keys"]) == (case["name"] in EXTRA_KEYS)


NONE_HASHES = {
    ("sha256", "vllm-none-hash"): "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198",
    ("sha256_cbor", "vllm-none-hash"): "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0",
    ("sha256", "0"): "1973e23848344dc43a988a9b478663803cfffe1243480253f9a3cf004b14aa7c",
    ("sha256_cbor", "0"): "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e",
    ("xxhash", "0"): "6fb31cc38bba6066183f7f2104b9c051",
    ("xxhash_cbor", "0"): "1ebe36576dcb573f26b99533a20aaeca",
}
FIRST = {  # seed "0", tokens 0..3, no extra
    "sha256": "46117ba77ad894de70dbb722c54f081d9c22d67a118e1776b7acef72235a141f",
    "sha256_cbor": "8d4c7c828f1611f485f1ebfc2b19f0fe1c90d0a71d00cd90948a1fa5e8c9e91f",
    "xxhash": "cbbf757563249a6f37e187270f9fdc7d",
    "xxhash_cbor": "c20df5f86688b63f4cb5a744053f0b61",
}
CHILD = {  # of the above, tokens 4..7, EXTRA
    "sha256": "672dc01a97cc898c01e41da63b6b9ef4feec73b7036ef8e2d843e4e057485fd7",
    "sha256_cbor": "102600ee1b29813cd9cbff3cf9eb99c1f9596d9fb3a382f910f44a30c70772c3",
    "xxhash": "958c758bc56a91f7d7c2d49a4af4fb8a",
    "xxhash_cbor": "ade75264f749cd5e6d5b5501520e2b63",
}
EXTRA = (("lora", "n", "/p"), ("mm", "abc", -2), ("cache_salt", "s"), ("prompt_embeds", bytes(4)))


@pytest.mark.parametrize(("name", "seed"), NONE_HASHES)
def test_none_hash_of_vllm(name: str, seed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.startswith("xxhash"):
        pytest.importorskip("xxhash")
    assert none_hash(name, seed).hex() == NONE_HASHES[name, seed]
    monkeypatch.setenv("PYTHONHASHSEED", seed)
    assert none_hash(name).hex() == NONE_HASHES[name, seed]


def test_blocks_of_vllm(algorithm: str, kernel_name: str) -> None:
    first = hash_block_tokens(None, range(4), algorithm=algorithm, seed="0")
    assert first.hex() == FIRST[algorithm]
    assert hash_block_tokens(b"", [0, 1, 2, 3], algorithm=algorithm, seed="0") == first
    assert hash_block_tokens(first, (4, 5, 6, 7), EXTRA, algorithm=algorithm).hex() == CHILD[algorithm]

    both = hash_algorithm(algorithm).chain(
        list(range(8)), 4, none_hash(algorithm, "0"), [None, deep_tuple([*EXTRA])], 2
    )
    assert both.hex() == FIRST[algorithm] + CHILD[algorithm]


def test_blocks_of_vllm_by_kernel(kernel_name: str) -> None:
    digests = kernel.chain(range(8), 4, none_hash(seed="0"), [None, cbor.encode(EXTRA)], kernel=kernel_name)
    assert digests.hex() == FIRST["sha256_cbor"] + CHILD["sha256_cbor"]


def test_serialised_bytes_of_vllm() -> None:
    block = (bytes(32), (1, 2, 300, 70000), None)
    assert cbor.encode(block).hex() == "835820" + "00" * 32 + "84010219012c1a00011170f6"
    assert pickled.serialize(block).hex() == (
        "800595360000000000000043" + "20" + "00" * 32 + "94284b014b024d2c014a7011010074944e87942e"
    )
