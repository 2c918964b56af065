"""A request's chain: however it was appended to and cut, it is the chain of the tokens that are left."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hash_oracle import FIXED, oracle_chain, oracle_key, token_ids
from hypothesis import given
from hypothesis import strategies as st

from blockpool.hashing import (
    BlockHasher,
    BlockHashes,
    BlockHashView,
    BlockSizeError,
    ExtraKeys,
    MediaItem,
    SeedError,
    TokenCountError,
    TokenIdError,
    TokensUnknown,
    UnknownAlgorithm,
    hash_algorithm,
)
from blockpool.hashing.extra_keys import Key

SEED = "a seed"
TOKENS = [int(t) for t in np.random.default_rng(11).integers(0, 150_000, 400)]


def hasher(algorithm: str = "sha256_cbor", unit: int = 4, lookahead: int = 0) -> BlockHasher:
    return BlockHasher(algorithm, hash_block_size=unit, seed=SEED, num_hash_lookahead_tokens=lookahead)


@st.composite
def extra_keys(draw: st.DrawFn) -> ExtraKeys | None:
    if draw(st.booleans()):
        return None
    media: list[MediaItem] = []
    position = 0
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 20)), max_size=4)):
        media.append(MediaItem(f"item {len(media)}", position + gap, length))
        position += gap + length
    return ExtraKeys(
        lora=draw(st.none() | st.just(("adapter", "/path"))),
        media=media,
        cache_salt=draw(st.none() | st.just("salt")),
        generation=draw(st.none() | st.just(3)),
        salt_from=draw(st.sampled_from([(), ((5, "s"),), ((0, "s"), (40, "t"))])),
    )


def oracle(
    tokens: list[int], extra: ExtraKeys | None, algorithm: str, unit: int, lookahead: int
) -> tuple[list[bytes], list[Key | None]]:
    """The digests, and the extra keys without lookahead tokens."""
    keys: list[Key | None] = []
    extras: list[object] = []
    for start in range(0, len(tokens), unit):
        behind = tokens[start + unit : start + unit + lookahead]
        if start + unit + lookahead > len(tokens):
            break
        key = None if extra is None else oracle_key(extra, start, start + unit + lookahead)
        keys.append(key)
        extras.append((key, *behind) if lookahead else key)
    parent = hasher(algorithm).none_hash
    return oracle_chain(tokens, unit, parent, extras, hash_algorithm(algorithm).digest), keys


FORMS: list[Callable[[list[int]], object]] = [
    list,
    tuple,
    iter,
    lambda ids: np.array(ids, np.int64),
    lambda ids: np.array(ids, np.uint32),
]


@FIXED
@given(st.data())
def test_a_chain_follows_its_tokens(kernel_name: str, data: st.DataObject) -> None:
    """Random pieces appended and random cuts; after each step equal to the oracle over the tokens that are left."""
    algorithm = data.draw(st.sampled_from(["sha256_cbor", "sha256"]))
    unit = data.draw(st.integers(1, 8))
    lookahead = data.draw(st.sampled_from([0, 0, 1, 3, 9]))
    extra = data.draw(extra_keys())
    chain = hasher(algorithm, unit, lookahead).start((), extra)
    view = chain.with_block_size(3 * unit)
    tokens: list[int] = []
    for _ in range(data.draw(st.integers(1, 6))):
        if data.draw(st.integers(0, 3)):
            piece = data.draw(st.lists(token_ids, max_size=30))
            before = len(chain)
            assert chain.append_tokens(data.draw(st.sampled_from(FORMS))(piece)) == len(chain) - before  # type: ignore[arg-type]
            tokens += piece
        else:
            cut = data.draw(st.integers(0, len(tokens)))
            kept = chain.truncate(cut)
            assert kept <= cut
            # no whole unit is lost that no digest beyond the cut depends on
            assert kept == cut or kept >= (cut - lookahead) // unit * unit
            del tokens[kept:]
        expected, keys = oracle(tokens, extra, algorithm, unit, lookahead)
        assert chain[:] == expected
        assert chain.num_tokens == len(tokens)
        assert chain.raw() == b"".join(expected)
        assert [chain.extra_keys(i) for i in range(len(chain))] == keys
        assert view[:] == expected[2::3]


@pytest.mark.parametrize("extra", [None, ExtraKeys(lora=("a", "/a"), media=[MediaItem("m", 30, 50)])])
def test_pieces_equal_one_go(algorithm: str, extra: ExtraKeys | None) -> None:
    whole = hasher(algorithm).start(TOKENS, extra)
    pieces = hasher(algorithm).start((), extra)
    for i in range(0, len(TOKENS), 7):
        pieces.append_tokens(TOKENS[i : i + 7])
    one_by_one = hasher(algorithm).start(np.array(TOKENS[:200], np.int32), extra)
    for token in TOKENS[200:]:
        one_by_one.append_tokens([token])
    assert len(whole) == 100
    assert whole.raw() == pieces.raw() == one_by_one.raw()


def test_what_is_reported(kernel_name: str) -> None:
    chain = hasher().start([1, 2, 3])
    assert (len(chain), chain.num_tokens, chain.raw(), list(chain)) == (0, 3, b"", [])
    assert chain.append_tokens([4]) == 1
    assert chain.append_tokens(range(5, 14)) == 2
    assert (len(chain), chain.num_tokens) == (3, 13)
    assert chain.append_tokens([]) == 0
    assert chain.digest_size == 32
    assert chain.hash_block_size == 4
    assert repr(chain) == "<BlockHashes: 3 digests, 13 tokens>"


def test_reading() -> None:
    chain = hasher().start(TOKENS)
    digests = list(chain)
    assert [chain[i] for i in range(100)] == digests
    assert [chain[i] for i in range(-100, 0)] == digests
    assert chain[3:90:7] == digests[3:90:7]
    assert chain[::-1] == digests[::-1]
    assert all(type(digest) is bytes for digest in digests)
    for index in (100, -101):
        with pytest.raises(IndexError, match=f"digest {index} of 100"):
            chain[index]
    assert chain.parent_of(0) is None
    assert chain.parent_of(5) == chain[4]
    assert chain.parent_of(-1) == chain[-2]
    with pytest.raises(IndexError):
        chain.parent_of(100)


def test_iteration_sees_what_is_appended_meanwhile() -> None:
    chain = hasher().start(TOKENS[:8])
    seen = []
    for digest in chain:
        seen.append(digest)
        if len(seen) == 1:
            chain.append_tokens(TOKENS[8:16])
    assert seen == chain[:]
    assert len(seen) == 4


def test_raw_spans() -> None:
    chain = hasher().start(TOKENS)
    whole = b"".join(chain)
    assert chain.raw() == whole
    assert chain.raw(7, 9) == whole[7 * 32 : 9 * 32]
    assert chain.raw(99) == whole[-32:]
    assert chain.raw(100) == chain.raw(5, 5) == b""
    for first, last in ((-1, 5), (5, 4), (0, 101), (101, None)):
        with pytest.raises(IndexError):
            chain.raw(first, last)


def test_raw_is_cached_until_something_is_appended() -> None:
    chain = hasher().start(TOKENS)
    first = chain.raw()
    assert chain.raw() is first
    chain.append_tokens([1, 2, 3])
    assert chain.raw() is first
    chain.append_tokens([4])
    assert chain.raw() == first + chain[-1]
    assert chain.raw() is chain.raw()
    chain.truncate(400)
    assert chain.raw() == first


def test_bytes_handed_out_do_not_change() -> None:
    chain = hasher().start(TOKENS)
    before = chain.raw()
    copy = bytes(bytearray(before))
    chain.append_tokens(TOKENS)
    chain.truncate(8)
    assert before == copy


@pytest.mark.parametrize("bad", [-1, 2**32, None, 1.5, True, "x"])
@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("length", [2, 30])  # within the tail; over many blocks
def test_bad_tokens_change_nothing(kernel_name: str, bad: object, lookahead: int, length: int) -> None:
    chain = hasher(lookahead=lookahead).start(TOKENS[:9])
    before = (chain[:], chain.num_tokens, chain.raw())
    for position in (0, length // 2, length - 1):
        tokens: list[object] = [1] * length
        tokens[position] = bad
        with pytest.raises(TokenIdError) as caught:
            chain.append_tokens(tokens)  # type: ignore[arg-type]
        assert (caught.value.index, caught.value.value) == (position, bad)
        assert (chain[:], chain.num_tokens, chain.raw()) == before
    chain.append_tokens(TOKENS[9:])
    assert chain.raw() == hasher(lookahead=lookahead).start(TOKENS).raw()


@pytest.mark.parametrize("length", [2, 30])
def test_a_bad_array_changes_nothing(algorithm: str, length: int) -> None:
    chain = hasher(algorithm).start(TOKENS[:9])
    before = (chain[:], chain.num_tokens)
    tokens = np.ones(length, np.int32)
    tokens[-1] = -7
    with pytest.raises(TokenIdError, match=f"index {length - 1} is -7"):
        chain.append_tokens(tokens)
    assert (chain[:], chain.num_tokens) == before
    chain.append_tokens(np.array(TOKENS[9:], np.int32))
    assert chain[:] == hasher(algorithm).start(TOKENS)[:]


def test_a_callers_list_is_not_kept() -> None:
    mine = [1, 2]
    chain = hasher().start(mine)
    mine[0] = 99
    chain.append_tokens([3, 4])
    assert chain[:] == hasher().start([1, 2, 3, 4])[:]


def test_hashed_tokens_are_not_kept() -> None:
    chain = hasher().start(TOKENS)
    chain.append_tokens([1, 2, 3])
    assert chain._tail == [1, 2, 3]
    chain = hasher(lookahead=6).start(TOKENS)
    assert chain._tail == TOKENS[len(chain) * 4 :]
    assert len(chain._tail) < 4 + 6


class TestTruncate:
    def test_within_the_tail_nothing_is_lost(self) -> None:
        chain = hasher().start(range(15))
        assert chain.truncate(14) == 14
        assert chain.truncate(12) == 12
        assert (len(chain), chain.num_tokens) == (3, 12)
        chain.append_tokens([12, 13, 14, 15])
        assert chain[:] == hasher().start(range(16))[:]

    def test_a_cut_inside_a_block_falls_back_to_its_start(self) -> None:
        chain = hasher().start(range(15))
        assert chain.truncate(11) == 8
        assert (len(chain), chain.num_tokens) == (2, 8)
        assert chain.truncate(3) == 0
        assert (len(chain), chain.num_tokens, chain.raw()) == (0, 0, b"")

    def test_a_cut_on_a_border_keeps_the_block(self) -> None:
        chain = hasher().start(range(15))
        assert chain.truncate(8) == 8
        assert len(chain) == 2

    def test_the_end_is_no_cut(self) -> None:
        chain = hasher().start(range(15))
        assert chain.truncate(15) == 15
        assert len(chain) == 3

    @pytest.mark.parametrize("num_tokens", [-1, 16])
    def test_beyond_the_chain(self, num_tokens: int) -> None:
        chain = hasher().start(range(15))
        with pytest.raises(TokenCountError):
            chain.truncate(num_tokens)
        assert (len(chain), chain.num_tokens) == (3, 15)

    def test_digests_that_looked_at_what_is_cut_go_as_well(self) -> None:
        chain = hasher(lookahead=2).start(range(15))  # hashed: [0, 4), [4, 8), [8, 12), each with two more
        assert len(chain) == 3
        assert chain.truncate(14) == 14
        assert len(chain) == 3
        assert chain.truncate(13) == 10  # the last untouched unit, and what it looked at
        assert len(chain) == 2
        chain.append_tokens([77])
        assert chain[:] == hasher(lookahead=2).start([*range(10), 77])[:]


class TestLookahead:
    def test_a_unit_waits_for_its_lookahead(self) -> None:
        chain = hasher(lookahead=3).start(range(6))
        assert len(chain) == 0
        assert chain.append_tokens([6]) == 1
        assert chain.lookahead_tokens(0) == (4, 5, 6)

    def test_the_tokens_are_kept_for_events(self, kernel_name: str) -> None:
        chain = hasher(lookahead=6).start(np.array(TOKENS[:50], np.int32))
        chain.append_tokens(TOKENS[50:])
        assert len(chain) == (400 - 6) // 4
        for i in range(len(chain)):
            assert chain.lookahead_tokens(i) == tuple(TOKENS[i * 4 + 4 : i * 4 + 10])
        assert {type(t) for t in chain.lookahead_tokens(0) or ()} == {int}
        chain.truncate(100)
        assert len(chain) == 23
        assert chain.lookahead_tokens(-1) == tuple(TOKENS[92:98])
        with pytest.raises(IndexError):
            chain.lookahead_tokens(23)

    def test_none_without_lookahead(self) -> None:
        assert hasher().start(TOKENS).lookahead_tokens(0) is None

    def test_extra_keys_reach_over_the_lookahead(self) -> None:
        extra = ExtraKeys(media=[MediaItem("m", 9, 2)])
        chain = hasher(lookahead=2).start(range(20), extra)
        assert [chain.extra_keys(i) for i in range(4)] == [None, (("mm", "m", 5),), (("mm", "m", 1),), None]
        assert [chain.event_extra_keys(i) for i in range(4)] == [None, (("m", 5),), (("m", 1),), None]


class TestView:
    @pytest.mark.parametrize("factor", [1, 2, 3, 7])
    def test_every_kth_digest(self, factor: int) -> None:
        chain = hasher().start(TOKENS[:150])
        view = chain.with_block_size(4 * factor)
        for piece in ([], TOKENS[150:151], TOKENS[151:]):
            chain.append_tokens(piece)
            expected = chain[factor - 1 :: factor]
            assert len(view) == len(expected)
            assert list(view) == view[:] == expected
            assert [view[i] for i in range(-len(view), len(view))] == expected * 2
            assert view[1:8:2] == expected[1:8:2]
            assert view.raw() == b"".join(expected)
            assert view.raw(2, 5) == b"".join(expected[2:5])
            assert [view.parent_of(i) for i in range(len(view))] == [None, *expected[:-1]]
        chain.truncate(50)
        assert view[:] == chain[factor - 1 :: factor]

    def test_outside(self) -> None:
        view = hasher().start(TOKENS).with_block_size(8)
        for index in (50, -51):
            with pytest.raises(IndexError):
                view[index]
        with pytest.raises(IndexError):
            view.raw(3, 51)
        with pytest.raises(IndexError):
            view.parent_of(50)

    @pytest.mark.parametrize("block_size", [0, -4, 3, 6])
    def test_no_multiple_of_the_unit(self, block_size: int) -> None:
        with pytest.raises(BlockSizeError):
            hasher().start(TOKENS).with_block_size(block_size)

    def test_extra_keys_of_the_whole_block(self) -> None:
        extra = ExtraKeys(media=[MediaItem("m", 5, 1), MediaItem("n", 11, 9)], cache_salt="s")
        view = hasher().start(range(24), extra).with_block_size(8)
        assert [view.extra_keys(i) for i in range(3)] == [
            (("mm", "m", 5), ("cache_salt", "s")),
            (("mm", "n", 3),),
            (("mm", "n", -5),),
        ]
        assert [view.event_extra_keys(i) for i in range(3)] == [(("m", 5), "s"), (("n", 3),), (("n", -5),)]
        assert (view.block_size, view.digest_size) == (8, 32)
        assert repr(view) == "<BlockHashView: 3 digests of 8 tokens>"
        assert isinstance(view, BlockHashView)


class TestFromDigests:
    BUFFER = bytes(range(256)) * 2

    def test_reading(self) -> None:
        chain = BlockHashes.from_digests(self.BUFFER, hash_block_size=4)
        assert (len(chain), chain.num_tokens, chain.digest_size) == (16, 64, 32)
        assert chain[1] == self.BUFFER[32:64]
        assert chain.raw() is self.BUFFER
        assert chain.with_block_size(8)[0] == chain[1]
        assert chain.parent_of(1) == chain[0]
        assert chain.extra_keys(0) is chain.event_extra_keys(0) is chain.lookahead_tokens(0) is None

    def test_an_incomplete_block_may_be_counted(self) -> None:
        chain = BlockHashes.from_digests(self.BUFFER, digest_size=16, hash_block_size=4, num_tokens=131)
        assert (len(chain), chain.num_tokens) == (32, 131)
        assert chain.truncate(129) == 129
        assert chain.truncate(127) == 124
        assert len(chain) == 31

    def test_nothing_can_follow(self) -> None:
        chain = BlockHashes.from_digests(self.BUFFER)
        with pytest.raises(TokensUnknown):
            chain.append_tokens([1])
        assert len(chain) == 16

    def test_refused(self) -> None:
        with pytest.raises(ValueError, match="no whole number"):
            BlockHashes.from_digests(self.BUFFER[1:])
        with pytest.raises(ValueError, match="no whole number"):
            BlockHashes.from_digests(self.BUFFER, digest_size=0)
        with pytest.raises(BlockSizeError):
            BlockHashes.from_digests(self.BUFFER, hash_block_size=0)
        for num_tokens in (63, 68):
            with pytest.raises(TokenCountError):
                BlockHashes.from_digests(self.BUFFER, hash_block_size=4, num_tokens=num_tokens)

    def test_empty(self) -> None:
        chain = BlockHashes.from_digests(b"")
        assert (len(chain), chain.num_tokens, chain[:], chain.raw()) == (0, 0, [], b"")


class TestHasher:
    def test_attributes(self, algorithm: str) -> None:
        made = BlockHasher(algorithm, hash_block_size=32, seed=SEED, num_hash_lookahead_tokens=1)
        assert made.algorithm == algorithm
        assert made.digest_size == len(made.none_hash) == (16 if algorithm.startswith("xxhash") else 32)
        assert (made.hash_block_size, made.num_hash_lookahead_tokens) == (32, 1)
        assert repr(made) == f"<BlockHasher: {algorithm}, 32 tokens per digest>"

    def test_refused(self) -> None:
        with pytest.raises(UnknownAlgorithm):
            BlockHasher("md5")
        with pytest.raises(BlockSizeError):
            BlockHasher(hash_block_size=0)
        with pytest.raises(BlockSizeError):
            BlockHasher(num_hash_lookahead_tokens=-1)
        with pytest.raises(SeedError):
            BlockHasher(seed=0)  # type: ignore[arg-type]
