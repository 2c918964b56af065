"""Keys: what must differ differs, what must be shared is equal, and both in every process."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import blockpool
from blockpool.hashing import BlockHasher, ExtraKeys, MediaItem, digest_to_int, hash_block_tokens

TOKENS = range(100, 124)  # six blocks of four


def digests(algorithm: str, extra: ExtraKeys | None = None) -> list[bytes]:
    return BlockHasher(algorithm, hash_block_size=4, seed="seed").start(TOKENS, extra)[:]


def differing(one: list[bytes], other: list[bytes]) -> list[int]:
    return [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]


ALL = [0, 1, 2, 3, 4, 5]


def test_salt_adapter_and_neither(algorithm: str) -> None:
    variants = [
        digests(algorithm, extra)
        for extra in (
            None,
            ExtraKeys(cache_salt="x"),
            ExtraKeys(lora=("x", "/x")),
            ExtraKeys(media=[MediaItem("x", 0, 1)]),
            ExtraKeys(salt_from=[(0, "x")]),
            ExtraKeys(cache_salt="y"),
        )
    ]
    for i in ALL:
        assert len({chain[i] for chain in variants}) == len(variants)


def test_salt_in_the_first_block_changes_all_descendants(algorithm: str) -> None:
    assert differing(digests(algorithm), digests(algorithm, ExtraKeys(cache_salt="x"))) == ALL


def test_a_public_prefix_before_a_salted_region_stays_shared(algorithm: str) -> None:
    salted = digests(algorithm, ExtraKeys(salt_from=[(9, "x")]))
    assert differing(digests(algorithm), salted) == [2, 3, 4, 5]
    assert differing(salted, digests(algorithm, ExtraKeys(salt_from=[(9, "y")]))) == [2, 3, 4, 5]
    assert differing(salted, digests(algorithm, ExtraKeys(salt_from=[(10, "x")]))) == [2, 3, 4, 5]


def test_versions_of_an_adapter(algorithm: str) -> None:
    one = digests(algorithm, ExtraKeys(lora=("x", "/x"), generation=1))
    assert differing(one, digests(algorithm, ExtraKeys(lora=("x", "/x"), generation=2))) == ALL
    assert differing(one, digests(algorithm, ExtraKeys(lora=("x", "/x")))) == ALL
    assert differing(one, digests(algorithm, ExtraKeys(lora=("x", "/x@2"), generation=1))) == ALL


@pytest.mark.parametrize("position", [0, 31, 63])
def test_images_that_differ_anywhere_in_their_id(algorithm: str, position: int) -> None:
    name = "0123456789abcdef" * 4
    other = name[:position] + "z" + name[position + 1 :]
    one = digests(algorithm, ExtraKeys(media=[MediaItem(name, 9, 3)]))
    assert differing(one, digests(algorithm, ExtraKeys(media=[MediaItem(other, 9, 3)]))) == [2, 3, 4, 5]


def test_an_image_moved_by_one_token(algorithm: str) -> None:
    one = ExtraKeys(media=[MediaItem("img", 5, 6)])
    moved = ExtraKeys(media=[MediaItem("img", 6, 6)])
    assert differing(digests(algorithm, one), digests(algorithm, moved)) == [1, 2, 3, 4, 5]
    # of themselves, only the blocks that touch it differ; the rest follows from the chain
    blocks = [(start, start + 4) for start in range(0, 24, 4)]
    assert [i for i, block in enumerate(blocks) if one.key(*block) != moved.key(*block)] == [1, 2]


def test_text_before_an_image_is_shared(algorithm: str) -> None:
    with_image = digests(algorithm, ExtraKeys(media=[MediaItem("img", 8, 6)]))
    assert differing(digests(algorithm), with_image) == [2, 3, 4, 5]


def test_embeddings_and_their_mask(algorithm: str) -> None:
    rows = np.arange(48, dtype=np.float32).reshape(24, 2)
    masks = [[True] * 24, [True] * 20 + [False] * 4, [True] * 20 + [False] * 3 + [True]]
    zeros = BlockHasher(algorithm, hash_block_size=4, seed="seed")
    masked = [zeros.start([0] * 24, ExtraKeys(prompt_embeds=rows, embeds_mask=mask))[:] for mask in masks]
    for i, one in enumerate(masked):
        for other in masked[:i]:
            assert differing(one, other) == [5]
    changed = rows.copy()
    changed[13, 1] += 1
    again = zeros.start([0] * 24, ExtraKeys(prompt_embeds=changed, embeds_mask=masks[0]))[:]
    assert differing(masked[0], again) == [3, 4, 5]
    assert differing(masked[0], zeros.start([0] * 24, ExtraKeys(prompt_embeds=rows))[:]) == ALL


def test_the_parent_changes_the_block(algorithm: str) -> None:
    def of(tokens: list[int]) -> bytes:
        parent = hash_block_tokens(None, tokens, algorithm=algorithm, seed="seed")
        return hash_block_tokens(parent, [1, 2], algorithm=algorithm)

    assert of([1, 2]) != of([1, 3])
    assert of([1, 2]) == of([1, 2])


def test_the_seed_changes_every_block(algorithm: str) -> None:
    other = BlockHasher(algorithm, hash_block_size=4, seed="other").start(TOKENS)[:]
    assert differing(digests(algorithm), other) == ALL


def test_the_64_bit_form_is_one_number_for_signed_and_unsigned_readers(algorithm: str) -> None:
    for digest in digests(algorithm):
        number = digest_to_int(digest)
        (signed,) = struct.unpack(">q", digest[-8:])
        assert 0 <= number < 2**64
        assert signed % 2**64 == number
        assert np.uint64(number).astype(np.int64) == signed


PRINT = """
import sys, warnings
from blockpool.hashing import BlockHasher, ExtraKeys, MediaItem
for extra in (None, ExtraKeys(lora=("n", "/p"), cache_salt="s", media=[MediaItem("i", 3, 4), MediaItem("j", 9, 1)])):
    print(BlockHasher(sys.argv[1], hash_block_size=4, seed="seed").start(range(24), extra).raw().hex())
"""


def test_equal_in_every_process(algorithm: str) -> None:
    printed = set()
    for hash_seed in (None, None, "0", "1", "random"):
        environment = {**os.environ, "PYTHONPATH": str(Path(blockpool.__path__[0]).parent)}
        environment.pop("PYTHONHASHSEED", None)
        if hash_seed is not None:
            environment["PYTHONHASHSEED"] = hash_seed
        done = subprocess.run(
            [sys.executable, "-c", PRINT, algorithm], env=environment, capture_output=True, text=True, check=True
        )
        printed.add(done.stdout)
    assert len(printed) == 1
    here = BlockHasher(algorithm, hash_block_size=4, seed="seed").start(range(24)).raw().hex()
    assert printed.pop().split()[0] == here
