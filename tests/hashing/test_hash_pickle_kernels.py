"""Every kernel path hashes the bytes that pickle writes, whatever the tokens, the extra values and the parent."""

from __future__ import annotations

import enum
import pickle
import pickletools
import threading
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hash_oracle import FIXED, oracle_chain, pickle_digest, token_ids
from hypothesis import given
from hypothesis import strategies as st

from blockpool.hashing import (
    BlockHasher,
    BlockSizeError,
    CborError,
    DigestError,
    ExtraKeys,
    KernelUnavailable,
    MediaItem,
    TokenIdError,
    TokenIds,
    available_kernels,
    cbor,
    hash_algorithm,
    kernel,
    pickled,
)

PARENT = bytes(range(32))
BORDERS = [0, 1, 255, 256, 65535, 65536, 2**30 - 1, 2**30, 2**31 - 1, 2**31, 2**32 - 1]
FRAME_LIMIT = 64 * 1024

CONTAINERS: dict[str, Callable[[list[int]], TokenIds]] = {
    "list": list,
    "tuple": tuple,
    "iterator": iter,
    "list of numpy ints": lambda ids: [np.int64(i) for i in ids],
    "int64": lambda ids: np.array(ids, np.int64),
    "uint32": lambda ids: np.array(ids, np.uint32),
    "every second": lambda ids: np.repeat(np.array(ids, np.int64), 2)[::2],
}

needs_c = pytest.mark.skipif("portable-c" not in available_kernels(), reason="the C kernel was not built")


def oracle(tokens: list[int], block_size: int, parent: bytes = PARENT, extras: Any = None) -> list[bytes]:
    return oracle_chain(tokens, block_size, parent, extras, pickle_digest)


# Few different strings and bytes, so that they repeat; the parent among them.
atoms = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 255, 256, -(2**31), 2**31, 2**63, 2**600, -(2**2100)]),
    st.sampled_from(["", "a", "lora", "b" * 255, "é" * 200, "\ud800"]),
    st.sampled_from([b"", b"a", b"lora", bytes(32), b"x" * 300, PARENT, PARENT[:31], b"C " + PARENT]),
    st.text(max_size=8),
    st.binary(max_size=40),
)
trees = st.recursive(atoms, lambda inner: st.lists(inner, max_size=5) | st.lists(inner, max_size=5).map(tuple))
extra_values = st.none() | st.lists(trees, max_size=5).map(tuple)


@FIXED
@given(st.data())
def test_equals_the_oracle(kernel_name: str, data: st.DataObject) -> None:
    ids = data.draw(st.lists(token_ids, max_size=90))
    block_size = data.draw(st.integers(1, 40))
    num_blocks = data.draw(st.integers(0, len(ids) // block_size))
    extras = data.draw(st.none() | st.lists(extra_values, min_size=num_blocks, max_size=num_blocks))
    container = CONTAINERS[data.draw(st.sampled_from(sorted(CONTAINERS)))]
    expected = oracle(ids, block_size, PARENT, extras if extras is not None else [None] * num_blocks)

    got = kernel.chain_pickled(container(ids), block_size, PARENT, extras, kernel_name, num_blocks)
    assert got == b"".join(expected)
    got = hash_algorithm("sha256").chain(ids, block_size, PARENT, extras, num_blocks)
    assert got == b"".join(expected)
    before = data.draw(st.lists(token_ids, max_size=9))
    listed = kernel.chain_as_list(
        "pickle", container([*before, *ids]), block_size, PARENT, extras, num_blocks, len(before), kernel_name
    )
    assert listed == expected


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 5, 16])
def test_every_width(kernel_name: str, block_size: int) -> None:
    for id_ in BORDERS:
        ids = [id_, id_, *BORDERS, id_, *BORDERS[::-1]] * 2
        expected = oracle(ids, block_size)
        containers: list[TokenIds] = [ids, tuple(ids), np.array(ids, np.uint32), np.array(ids, np.int64)]
        for tokens in containers:
            assert kernel.chain_pickled(tokens, block_size, PARENT, kernel=kernel_name) == b"".join(expected)
            assert kernel.chain_as_list("pickle", tokens, block_size, PARENT, kernel=kernel_name) == expected
    small = [id_ % 2**31 for id_ in ids]
    got = kernel.chain_pickled(np.array(small, np.int32), block_size, PARENT, kernel=kernel_name)
    assert got == b"".join(oracle(small, block_size))


@pytest.mark.parametrize("block_size", [8, 32, 64, 127, 128, 255, 256, 257, 1000, 4096])
def test_larger_blocks(kernel_name: str, block_size: int) -> None:
    ids = np.random.default_rng(7).integers(0, 2**32, 3 * block_size + 1, np.int64)
    expected = b"".join(oracle(ids.tolist(), block_size))
    assert kernel.chain_pickled(ids, block_size, PARENT, kernel=kernel_name) == expected
    assert kernel.chain_pickled(ids.tolist(), block_size, PARENT, kernel=kernel_name) == expected


def test_every_padding(kernel_name: str) -> None:
    """Message lengths across two borders of the 64-byte chunks, where padding needs one more."""
    for length in range(140):
        extras = [(bytes(length),)] * 2
        for size in (1, 4):
            ids = list(range(2 * size))
            expected = b"".join(oracle(ids, size, PARENT, extras))
            assert kernel.chain_pickled(ids, size, PARENT, extras, kernel_name) == expected


def num_frames(tokens: list[int], extra: object) -> int:
    written = pickle.dumps((PARENT, tuple(tokens), extra), 5)
    return sum(opcode.name == "FRAME" for opcode, _, _ in pickletools.genops(written))


# Width in bytes of a token, and the number of tokens whose pickle just has one frame.
AT_THE_LIMIT = [(7, 2, 32748), (300, 3, 21832), (70000, 5, 13099), (2**32 - 1, 7, 9356)]


@pytest.mark.parametrize(("id_", "width", "num_tokens"), AT_THE_LIMIT)
@pytest.mark.parametrize("more", [-2, -1, 0, 1, 2, 40])
def test_the_frame_limit(kernel_name: str, id_: int, width: int, num_tokens: int, more: int) -> None:
    block_size = num_tokens + more
    ids = [id_] * block_size * 2
    assert num_frames(ids[:block_size], None) == (1 if more <= 0 else 2)
    expected = oracle(ids, block_size)
    assert kernel.chain_pickled(ids, block_size, PARENT, kernel=kernel_name) == b"".join(expected)
    assert kernel.chain_as_list("pickle", ids, block_size, PARENT, kernel=kernel_name) == expected


@pytest.mark.parametrize("text", [str, bytes])
@pytest.mark.parametrize("more", range(-14, 15, 2))
def test_the_frame_limit_within_an_extra_value(kernel_name: str, text: type, more: int) -> None:
    def make(length: int) -> object:
        return "x" * length if text is str else b"x" * length

    for extra in ((make(FRAME_LIMIT + more - 60), 5), (make(40_000), make(FRAME_LIMIT + more - 40_070), 5, None)):
        for ids in ([1] * 4, [1, 70000, 2, 300] * 4):
            expected = b"".join(oracle(ids, len(ids), PARENT, [extra]))
            assert kernel.chain_pickled(ids, len(ids), PARENT, [extra], kernel_name) == expected


@needs_c
def test_c_leaves_to_pickle_exactly_what_could_have_two_frames() -> None:
    from blockpool.hashing import _sha

    for id_, width, num_tokens in AT_THE_LIMIT:
        most = (FRAME_LIMIT - 1 - 42) // width
        assert num_tokens - 2 <= most <= num_tokens
        for block_size in (most, most + 1):
            digests = _sha.chain("pickle", [id_] * block_size, block_size, PARENT, None, 1, True)
            assert (digests is None) == (block_size > most)


@pytest.mark.parametrize("size", [FRAME_LIMIT - 1, FRAME_LIMIT, FRAME_LIMIT + 1, 1_000_000])
def test_extra_values_that_stand_outside_of_frames(kernel_name: str, size: int) -> None:
    extras: list[object] = [None, ("x" * size, 1), (b"x" * size, "a", "a"), ("a",)]
    ids = list(range(8))
    assert kernel.chain_pickled(ids, 2, PARENT, extras, kernel_name) == b"".join(oracle(ids, 2, PARENT, extras))


class TestReferences:
    """Pickle writes an object that it has met as a number."""

    def check(self, kernel_name: str, ids: list[int], size: int, extras: list[Any], parent: bytes = PARENT) -> None:
        expected = oracle(ids, size, parent, extras)
        assert kernel.chain_pickled(ids, size, parent, extras, kernel_name) == b"".join(expected)
        assert kernel.chain_as_list("pickle", ids, size, parent, extras, kernel=kernel_name) == expected

    @pytest.mark.parametrize("size", [1, 2, 3, 4, 16])
    def test_a_string_that_repeats(self, kernel_name: str, size: int) -> None:
        name = "".join(["an adap", "ter"])
        other = "".join(["an ad", "apter"])
        extra = (("lora", name, other), ("mm", other, 3), ("mm", name, 5), (b"b" * 9, b"b" * 9))
        self.check(kernel_name, list(range(3 * size)), size, [extra, None, extra])

    def test_numbers_of_more_than_a_byte(self, kernel_name: str) -> None:
        words = [f"word {i}" for i in range(400)]
        extra = (*words, *[f"word {i}" for i in range(240, 400)])
        self.check(kernel_name, [1, 2, 3, 4], 2, [extra, extra])

    def test_bytes_that_equal_the_parent(self, kernel_name: str) -> None:
        for own in (PARENT, bytes(list(PARENT)), b"."):
            for extra in ((own,), ("a", ("b", [own])), (own, own), (b"x" + own, own + b"x")):
                self.check(kernel_name, [1, 2, 3, 4], 2, [extra, extra])
                self.check(kernel_name, [1, 2, 3, 4], 2, [None, extra])

    def test_bytes_that_equal_a_parent_further_on(self, kernel_name: str) -> None:
        ids = list(range(12))
        first, second, third = oracle(ids, 3)[:3]
        for digests in ((None, first, None, None), (None, None, second, second), (None, first, second, third)):
            self.check(kernel_name, ids, 3, [None if d is None else (("prompt_embeds", d),) for d in digests])

    def test_a_reference_to_the_parent_differs_from_its_bytes(self) -> None:
        """Which is why the kernel must not overlook it."""
        with_reference = pickled.serialize((PARENT, (1,), (PARENT,)))
        body = pickled.extra_body((PARENT,))
        assert body is not None
        assert PARENT in body
        assert body not in with_reference

    def test_the_body_of_an_extra_value(self) -> None:
        extras: list[object] = [(), [], ("a", "a"), (("lora", "n", "n"), b"x", 2**70, [True, None])]
        for extra in extras:
            body = pickled.extra_body(extra)
            assert body is not None
            for tokens in ((1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)):
                whole = pickled.serialize((PARENT, tokens, extra))
                assert whole.endswith(b"\x94" + body + b"\x87\x94.")


class Text(str):
    __slots__ = ()


class Bytes(bytes):
    __slots__ = ()


class Colour(enum.IntEnum):
    RED = 5


Pair = namedtuple("Pair", "a b")


class TestValuesOfOtherTypes:
    """They are pickled by Python, and digests do not depend on the kernel."""

    VALUES = (1.5, {"a": PARENT}, {1}, Text("a"), Bytes(b"a"), Bytes(PARENT), Colour.RED, np.int64(5), Pair("a", "a"))

    @pytest.mark.parametrize("value", VALUES, ids=repr)
    def test_in_an_extra_value(self, kernel_name: str, value: object) -> None:
        assert pickled.extra_body((value,)) is None
        for extra in ((value,), ("a", [value, "a"])):
            extras: list[object] = [("a", "a"), extra]
            expected = oracle([1, 2, 3, 4], 2, PARENT, extras)
            assert kernel.chain_pickled([1, 2, 3, 4], 2, PARENT, extras, kernel_name) == b"".join(expected)
            assert kernel.chain_as_list("pickle", [1, 2, 3, 4], 2, PARENT, extras, kernel=kernel_name) == expected

    def test_the_parent_itself_where_no_copy_is_made(self, kernel_name: str) -> None:
        extras = [{"a": PARENT}, {"a": PARENT}]
        expected = oracle([1, 2, 3, 4], 2, PARENT, extras)
        assert kernel.chain_pickled([1, 2, 3, 4], 2, PARENT, extras, kernel_name) == b"".join(expected)

    def test_a_parent(self, kernel_name: str) -> None:
        parent = Bytes(PARENT)
        expected = oracle([1, 2, 3, 4], 2, parent)
        assert expected != oracle([1, 2, 3, 4], 2)
        assert kernel.chain_pickled([1, 2, 3, 4], 2, parent, kernel=kernel_name) == b"".join(expected)
        assert kernel.chain_as_list("pickle", [1, 2, 3, 4], 2, parent, kernel=kernel_name) == expected
        assert kernel.chain_as_list("cbor", [1, 2, 3, 4], 2, parent) == kernel.chain_as_list(
            "cbor", [1, 2, 3, 4], 2, PARENT
        )

    def test_what_has_no_pickle(self, kernel_name: str) -> None:
        with pytest.raises(TypeError, match="pickle"):
            kernel.chain_pickled([1], 1, PARENT, [(threading.Lock(),)], kernel_name)

    def test_bad_ids_are_named_first(self, kernel_name: str) -> None:
        with pytest.raises(TokenIdError, match="index 3 "):
            kernel.chain_pickled([1, 2, 3, -1], 2, PARENT, [(1.5,), (threading.Lock(),)], kernel_name)


@pytest.fixture
def other_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a Python whose highest protocol is not the one that C writes."""
    monkeypatch.setattr(kernel, "_PICKLES", False)
    if "portable-c" in available_kernels():
        from blockpool.hashing import _sha

        for name in ("chain", "chain_list"):
            run = getattr(_sha, name)

            def only_cbor(form: str, *rest: Any, run: Any = run) -> Any:
                assert form == "cbor"
                return run(form, *rest)

            monkeypatch.setattr(_sha, name, only_cbor)


@pytest.mark.usefixtures("other_protocol")
def test_under_another_protocol_c_does_not_pickle(kernel_name: str) -> None:
    ids = list(range(12))
    extras = [("a", "a"), None, (PARENT,)]
    expected = oracle(ids, 4, PARENT, extras)
    assert kernel.chain_pickled(ids, 4, PARENT, extras, kernel_name) == b"".join(expected)
    assert kernel.chain_as_list("pickle", ids, 4, PARENT, extras, kernel=kernel_name) == expected
    assert kernel.chain_as_list("pickle", ids, 4, PARENT, None, 3, 0, kernel_name) == oracle(ids, 4)


def test_the_protocol_is_the_highest() -> None:
    assert (pickle.HIGHEST_PROTOCOL == 5) == kernel._PICKLES


def test_a_request_hashes_alike_with_every_kernel(kernel_name: str) -> None:
    extra = ExtraKeys(
        lora=("x", "x"),
        cache_salt="x",
        media=[MediaItem("img", 3, 6), MediaItem("img", 12, 2)],
        prompt_embeds=np.arange(48, dtype=np.float32).reshape(24, 2),
        salt_from=[(9, "x")],
    )
    for lookahead in (0, 2):
        hasher = BlockHasher("sha256", hash_block_size=4, seed="s", num_hash_lookahead_tokens=lookahead)
        chain = hasher.start(range(30), extra)
        parent = hasher.none_hash
        for i, digest in enumerate(chain):
            value: Any = chain.extra_keys(i)
            if lookahead:
                value = (value, *chain.lookahead_tokens(i))  # type: ignore[misc]
            parent = pickle_digest((parent, tuple(range(4 * i, 4 * i + 4)), value))
            assert digest == parent


BAD = [-1, 2**32, 2**63, 2**70, -(2**70), True, 1.0, None, "1", np.bool_(True)]


@pytest.mark.parametrize("form", ["cbor", "pickle"])
class TestBadIds:
    @pytest.mark.parametrize("bad", BAD, ids=repr)
    @pytest.mark.parametrize("position", [0, 5, 31, 32, 39])
    def test_are_named(self, kernel_name: str, form: Any, bad: object, position: int) -> None:
        ids: list[Any] = [1] * 40
        ids[position] = bad
        chain = kernel.chain if form == "cbor" else kernel.chain_pickled
        for tokens in (ids, tuple(ids)):
            with pytest.raises(TokenIdError) as caught:
                chain(tokens, 16, PARENT, kernel=kernel_name)
            assert (caught.value.index, caught.value.value) == (position, bad)
            if position < 32:
                with pytest.raises(TokenIdError) as caught:
                    kernel.chain_as_list(form, tokens, 16, PARENT, kernel=kernel_name)
                assert (caught.value.index, caught.value.value) == (position, bad)

    @pytest.mark.parametrize(("dtype", "bad"), [(np.int32, -1), (np.int64, -(2**63)), (np.int64, 2**32)])
    @pytest.mark.parametrize("position", [3, 4, 39, 4999])
    def test_in_an_array_are_named(self, kernel_name: str, form: Any, dtype: type, bad: int, position: int) -> None:
        ids: Any = np.ones(40 if position < 40 else 6000, dtype)
        ids[position] = bad
        with pytest.raises(TokenIdError) as caught:
            kernel.chain_as_list(form, ids, 1, PARENT, kernel=kernel_name, first=3)
        assert (caught.value.index, caught.value.value) == (position, bad)
        assert type(caught.value.value) is int

    @pytest.mark.parametrize("bad", BAD, ids=repr)
    def test_count_from_the_start_of_what_was_given(self, kernel_name: str, form: Any, bad: Any) -> None:
        ids = [1, 2, 3, 4, bad, 6, 7, 8]
        with pytest.raises(TokenIdError) as caught:
            kernel.chain_as_list(form, ids, 2, PARENT, None, 2, 3, kernel_name)
        assert (caught.value.index, caught.value.value) == (4, bad)

    @pytest.mark.parametrize("bad", BAD, ids=repr)
    def test_outside_of_what_is_hashed_are_not_read(self, kernel_name: str, form: Any, bad: Any) -> None:
        expected = kernel.chain_as_list(form, [3, 4, 5, 6], 2, PARENT, kernel=kernel_name)
        assert kernel.chain_as_list(form, [bad, bad, 3, 4, 5, 6, bad], 2, PARENT, None, 2, 2, kernel_name) == expected
        assert kernel.chain_as_list(form, [bad], 2, PARENT, None, 0, 1, kernel_name) == []


@pytest.mark.parametrize("form", ["cbor", "pickle"])
class TestLists:
    def test_equal_the_concatenated_digests(self, kernel_name: str, form: Any) -> None:
        ids = np.random.default_rng(7).integers(0, 200_000, 500).tolist()
        extra = (("lora", "n", "/p"),)
        for num_blocks in (0, 1, 2, 31):
            extras = [None, extra, extra, *[None] * 28][:num_blocks]
            if form == "cbor":
                bytes_of = [None if value is None else cbor.encode(value) for value in extras]
                joined = kernel.chain(ids, 16, PARENT, bytes_of, kernel_name, num_blocks)
            else:
                joined = kernel.chain_pickled(ids, 16, PARENT, extras, kernel_name, num_blocks)
            listed = kernel.chain_as_list(form, ids, 16, PARENT, extras, num_blocks, kernel=kernel_name)
            assert listed == [joined[i : i + 32] for i in range(0, len(joined), 32)]
            assert all(type(digest) is bytes for digest in listed)

    def test_start_anywhere(self, kernel_name: str, form: Any) -> None:
        ids = np.random.default_rng(7).integers(0, 2**31, 100).tolist()
        for first in (0, 1, 15, 16, 84, 85, 99, 100):
            expected = kernel.chain_as_list(form, ids[first:], 16, PARENT, kernel=kernel_name)
            assert len(expected) == (100 - first) // 16
            for tokens in (
                ids,
                tuple(ids),
                np.array(ids, np.int32),
                np.array(ids, np.int64),
                np.array(ids, np.uint64),
            ):
                assert kernel.chain_as_list(form, tokens, 16, PARENT, first=first, kernel=kernel_name) == expected
        whole = kernel.chain_as_list(form, ids, 16, PARENT, kernel=kernel_name)
        assert kernel.chain_as_list(form, ids, 16, whole[3], None, 1, 64, kernel_name) == whole[4:5]

    def test_integers_of_another_type(self, kernel_name: str, form: Any) -> None:
        expected = kernel.chain_as_list(form, [5, 7, 9, 5], 2, PARENT)
        mixed: list[Any] = [True, Colour.RED, 7, np.uint8(9), Colour.RED, None]
        assert kernel.chain_as_list(form, mixed, 2, PARENT, None, 2, 1, kernel_name) == expected

    def test_bad_arguments(self, kernel_name: str, form: Any) -> None:
        def run(
            ids: Any = (1, 2, 3),
            size: int = 2,
            parent: Any = PARENT,
            extras: Any = None,
            count: Any = 1,
            first: int = 0,
        ) -> object:
            return kernel.chain_as_list(form, ids, size, parent, extras, count, first, kernel_name)

        for size in (0, -1):
            for count in (1, 0, None):
                with pytest.raises(BlockSizeError):
                    run(size=size, count=count)
        for count, first in ((2, 0), (-1, 0), (1, 2), (0, 4), (None, 4), (0, -1), (None, -1), (1, 2**80), (2**80, 0)):
            with pytest.raises(BlockSizeError):
                run(count=count, first=first)
        for parent in (b"", bytes(31), bytes(33), bytearray(32), None):
            with pytest.raises(DigestError):
                run(parent=parent)
        for extras in ([], [None, None]):
            with pytest.raises(ValueError, match=f"{len(extras)} extras for 1 blocks"):
                run(extras=extras)
        with pytest.raises(TypeError):
            run(ids=5)
        with pytest.raises(TokenIdError):
            run(ids=np.ones(4))

    def test_arrays_are_hashed_by_several_threads_at_once(self, kernel_name: str, form: Any) -> None:
        ids = np.random.default_rng(7).integers(0, 2**31, 20_000).astype(np.int32)
        expected = kernel.chain_as_list(form, ids.tolist(), 16, PARENT, kernel=kernel_name)
        results: list[list[bytes]] = []

        def run() -> None:
            results.append(kernel.chain_as_list(form, ids, 16, PARENT, kernel=kernel_name))

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [expected] * 4


def test_extra_values_of_cbor_lists_are_encoded(kernel_name: str) -> None:
    extras = [(("lora", "n", "/p"),), None]
    expected = oracle_chain([1, 2, 3, 4], 2, PARENT, extras)
    assert kernel.chain_as_list("cbor", [1, 2, 3, 4], 2, PARENT, extras, kernel=kernel_name) == expected
    with pytest.raises(CborError):
        kernel.chain_as_list("cbor", [1, 2], 2, PARENT, [1.5], kernel=kernel_name)


def test_names_that_do_not_exist() -> None:
    with pytest.raises(KernelUnavailable, match="no such kernel"):
        kernel.chain_pickled([1, 2], 2, PARENT, kernel="rot13")
    with pytest.raises(KernelUnavailable, match="no such kernel"):
        kernel.chain_as_list("cbor", [1, 2], 2, PARENT, kernel="rot13")
    with pytest.raises(ValueError, match="known are cbor, pickle"):
        kernel.chain_as_list("json", [1, 2], 2, PARENT)  # type: ignore[arg-type]


def test_bad_arguments(kernel_name: str) -> None:
    for size, count in ((0, None), (2, 2), (2, -1)):
        with pytest.raises(BlockSizeError):
            kernel.chain_pickled([1, 2, 3], size, PARENT, kernel=kernel_name, num_blocks=count)
    for parent in (b"", bytes(31), bytearray(32)):
        with pytest.raises(DigestError):
            kernel.chain_pickled([1, 2], 2, parent, kernel=kernel_name)  # type: ignore[arg-type]
        with pytest.raises(DigestError):
            hash_algorithm("sha256").chain([1, 2], 2, parent, None, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 extras for 1 blocks"):
        kernel.chain_pickled([1, 2], 2, PARENT, [None, None], kernel=kernel_name)


class Untouchable(list[int]):
    """A list of which no slice can be taken and no copy be made."""

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("an item was asked for")

    def __iter__(self) -> Any:
        raise AssertionError("it was iterated over")


@needs_c
@pytest.mark.parametrize("form", ["cbor", "pickle"])
def test_c_reads_a_list_where_it_lies(form: Any) -> None:
    expected = kernel.chain_as_list(form, list(range(8, 24)), 4, PARENT)
    assert kernel.chain_as_list(form, Untouchable(range(30)), 4, PARENT, None, 4, 8, "portable-c") == expected
