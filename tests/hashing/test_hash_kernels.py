"""Every kernel path gives the oracle's digests, for every container of tokens, and names bad ids alike."""

from __future__ import annotations

import array
import enum
import gc
import os
import subprocess
import sys
import threading
import tracemalloc
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hash_oracle import FIXED, oracle_chain, token_ids
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import blockpool
from blockpool.hashing import (
    BlockSizeError,
    DigestError,
    KernelUnavailable,
    TokenIdError,
    TokenIds,
    available_kernels,
    cbor,
    kernel,
    pickled,
    pure,
)

PARENT = bytes(range(32))
RNG_SEED = 7

CONTAINERS: dict[str, Callable[[list[int]], TokenIds]] = {
    "list": list,
    "tuple": tuple,
    "deque": deque,
    "iterator": iter,
    "list of numpy ints": lambda ids: [np.int64(i) for i in ids],
    "mixed list": lambda ids: [np.uint32(id_) if i % 3 == 2 else id_ for i, id_ in enumerate(ids)],
    "array.array": lambda ids: array.array("Q", ids),
    "memoryview": lambda ids: memoryview(array.array("I", ids)),
    "int64": lambda ids: np.array(ids, np.int64),
    "uint32": lambda ids: np.array(ids, np.uint32),
    "uint64": lambda ids: np.array(ids, np.uint64),
    "objects": lambda ids: np.array(ids, object),
    "other byte order": lambda ids: np.array(ids, np.dtype(np.int64).newbyteorder()),
    "every second": lambda ids: np.repeat(np.array(ids, np.int64), 2)[::2],
    "backwards": lambda ids: np.array(ids[::-1], np.uint32)[::-1],
    "read-only": lambda ids: np.frombuffer(np.array(ids, np.int64).tobytes(), np.int64) if ids else ids,
    "unaligned": lambda ids: (
        np.frombuffer(b"x" + np.array(ids, np.uint32).tobytes(), np.uint32, offset=1) if ids else ids
    ),
}
SMALL: dict[str, Callable[[list[int]], TokenIds]] = {
    "int32": lambda ids: np.array(ids, np.int32),
    "int16": lambda ids: np.array([i % 2**15 for i in ids], np.int16),
    "uint8": lambda ids: np.array([i % 2**8 for i in ids], np.uint8),
}


def encode_all(extras: Sequence[object]) -> list[bytes | None]:
    return [None if extra is None else cbor.encode(extra) for extra in extras]


@FIXED
@given(st.data())
def test_equals_the_oracle(kernel_name: str, data: st.DataObject) -> None:
    ids = data.draw(st.lists(token_ids, max_size=90))
    block_size = data.draw(st.integers(1, 40))
    num_blocks = data.draw(st.integers(0, len(ids) // block_size))
    extra = st.none() | st.tuples(st.text(max_size=8), st.binary(max_size=150), st.integers(-9, 9))
    extras = data.draw(st.none() | st.lists(extra, min_size=num_blocks, max_size=num_blocks))
    container = data.draw(st.sampled_from(sorted(CONTAINERS)))
    expected = oracle_chain(ids, block_size, PARENT, extras if extras is not None else [None] * num_blocks)
    encoded = None if extras is None else encode_all(extras)
    got = kernel.chain(
        CONTAINERS[container](ids), block_size, PARENT, encoded, kernel=kernel_name, num_blocks=num_blocks
    )
    assert got == b"".join(expected)


@pytest.mark.parametrize("container", [*CONTAINERS, *SMALL])
def test_every_container(kernel_name: str, container: str) -> None:
    ids = np.random.default_rng(RNG_SEED).integers(0, 200_000, 500).tolist()
    make = (CONTAINERS | SMALL)[container]
    if container in SMALL and container != "int32":
        ids = [int(i) for i in make(ids)]
    assert kernel.chain(make(ids), 16, PARENT, kernel=kernel_name) == b"".join(oracle_chain(ids, 16, PARENT))


@pytest.mark.parametrize("block_size", [1, 15, 16, 17, 23, 24, 128, 255, 256, 1000, 65535, 65536, 70000])
def test_every_array_header(kernel_name: str, block_size: int) -> None:
    ids = np.random.default_rng(RNG_SEED).integers(0, 2**32, 2 * block_size + 1, np.int64)
    expected = b"".join(oracle_chain(ids.tolist(), block_size, PARENT))
    assert kernel.chain(ids, block_size, PARENT, kernel=kernel_name) == expected
    assert kernel.chain(ids.tolist(), block_size, PARENT, kernel=kernel_name) == expected


def test_every_padding(kernel_name: str) -> None:
    """Message lengths across two borders of the 64-byte chunks, where padding needs one more."""
    for length in range(140):
        extra = (bytes(length),)
        expected = b"".join(oracle_chain([1, 2, 3, 4], 2, PARENT, [extra, extra]))
        assert kernel.chain([1, 2, 3, 4], 2, PARENT, encode_all([extra, extra]), kernel=kernel_name) == expected


def test_extras_of_very_different_lengths(kernel_name: str) -> None:
    extras: list[object] = [("x" * 5000,), None, ("y",), (b"z" * 700,), None]
    expected = b"".join(oracle_chain(list(range(10)), 2, PARENT, extras))
    assert kernel.chain(range(10), 2, PARENT, encode_all(extras), kernel=kernel_name) == expected


def test_nothing_to_hash(kernel_name: str) -> None:
    assert kernel.chain([], 16, PARENT, kernel=kernel_name) == b""
    assert kernel.chain(np.array([]), 16, PARENT, kernel=kernel_name) == b""
    assert kernel.chain([1, 2], 16, PARENT, kernel=kernel_name) == b""


class Colour(enum.IntEnum):
    RED = 70000


def test_an_index_is_an_integer(kernel_name: str) -> None:
    expected = kernel.chain([1, 70000], 2, PARENT, kernel=kernel_name)
    assert kernel.chain([1, Colour.RED], 2, PARENT, kernel=kernel_name) == expected
    assert kernel.chain((np.uint8(1), 70000), 2, PARENT, kernel=kernel_name) == expected


BAD = [-1, 2**32, 2**63, 2**70, -(2**70), True, False, 1.0, None, "1", b"1", np.bool_(True), np.float32(1), [1]]


@pytest.mark.parametrize("bad", BAD, ids=repr)
@pytest.mark.parametrize("position", [0, 5, 31, 32, 39, 300, 699])
def test_a_bad_id_is_named(kernel_name: str, bad: object, position: int) -> None:
    ids: list[object] = [1] * (40 if position < 40 else 700)
    ids[position] = bad
    for tokens in (ids, tuple(ids), deque(ids)):
        with pytest.raises(TokenIdError) as caught:
            kernel.chain(tokens, 16, PARENT, kernel=kernel_name)  # type: ignore[arg-type]
        assert caught.value.index == position
        assert caught.value.value is bad
        assert f"index {position} " in str(caught.value)
        assert caught.value.is_integer == (type(bad) is int)


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [(np.int32, -1), (np.int8, -1), (np.int64, -(2**63)), (np.int64, 2**32), (np.uint64, 2**32), (np.uint64, 2**63)],
)
@pytest.mark.parametrize("position", [0, 5, 31, 32, 39, 300, 699])
def test_a_bad_id_in_an_array_is_named(kernel_name: str, dtype: type, bad: int, position: int) -> None:
    ids: NDArray[Any] = np.ones(40 if position < 40 else 700, dtype)
    ids[position] = bad
    with pytest.raises(TokenIdError) as caught:
        kernel.chain(ids, 16, PARENT, kernel=kernel_name)
    assert (caught.value.index, caught.value.value) == (position, bad)
    assert type(caught.value.value) is int


@pytest.mark.parametrize(
    "tokens",
    [np.ones(4), np.ones(4, bool), np.ones((2, 2), int), np.array(1), np.array(["1"]), np.ones(4, complex), "text"],
    ids=repr,
)
def test_arrays_that_hold_no_ids(kernel_name: str, tokens: TokenIds) -> None:
    with pytest.raises(TokenIdError) as caught:
        kernel.chain(tokens, 2, PARENT, kernel=kernel_name)
    assert caught.value.index == 0
    assert "not an integer" in str(caught.value)


def test_what_is_not_iterable_is_a_type_error(kernel_name: str) -> None:
    with pytest.raises(TypeError):
        kernel.chain(5, 2, PARENT, kernel=kernel_name)  # type: ignore[arg-type]


def test_bad_arguments(kernel_name: str) -> None:
    with pytest.raises(BlockSizeError):
        kernel.chain([1], 0, PARENT, kernel=kernel_name)
    with pytest.raises(BlockSizeError):
        kernel.chain([1, 2, 3], 2, PARENT, kernel=kernel_name, num_blocks=2)
    with pytest.raises(BlockSizeError):
        kernel.chain([1, 2, 3], 2, PARENT, kernel=kernel_name, num_blocks=-1)
    for parent in (b"", bytes(31), bytes(33), bytearray(32)):
        with pytest.raises(DigestError):
            kernel.chain([1, 2], 2, parent, kernel=kernel_name)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 extras for 1 blocks"):
        kernel.chain([1, 2], 2, PARENT, [None, None], kernel=kernel_name)
    with pytest.raises(TypeError):
        kernel.chain([1, 2], 2, PARENT, ["text"], kernel=kernel_name)  # type: ignore[list-item]


def test_a_kernel_that_does_not_exist() -> None:
    with pytest.raises(KernelUnavailable, match="no such kernel"):
        kernel.chain([1, 2], 2, PARENT, kernel="rot13")


def test_arrays_are_hashed_by_several_threads_at_once(kernel_name: str) -> None:
    ids = np.random.default_rng(RNG_SEED).integers(0, 2**31, 20_000).astype(np.int32)
    expected = kernel.chain(ids.tolist(), 16, PARENT, kernel=kernel_name)
    results: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: results.append(kernel.chain(ids, 16, PARENT, kernel=kernel_name)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4


@pytest.mark.skipif("portable-c" not in available_kernels(), reason="the C kernel was not built")
class TestCompiled:
    """What only the C code can get wrong."""

    def test_its_own_arguments_are_checked(self) -> None:
        from blockpool.hashing import _sha

        chain_list: Any = _sha.chain_list
        good: tuple[Any, ...] = ("cbor", [1, 2], 2, PARENT, None, 1, True)
        assert _sha.chain(*good) == pure.chain([1, 2], 2, PARENT, None, 1)
        assert _sha.chain("pickle", *good[1:]) == pickled.chain([1, 2], 2, PARENT, None, 1, pure.sha256)
        faults: list[tuple[int, Any, Any]] = [
            (0, "CBOR", ValueError),
            (0, "", ValueError),
            (0, b"cbor", ValueError),
            (0, None, ValueError),
            (1, 5, TypeError),
            (1, np.ones(2), TypeError),
            (1, np.ones((2, 2), np.int32), TypeError),
            (1, np.ones(8, np.int32)[::2], (ValueError, BufferError)),
            (1, b"12", TypeError),
            (2, 0, ValueError),
            (2, -1, ValueError),
            (2, 2**80, OverflowError),
            (2, "2", TypeError),
            (3, bytes(31), ValueError),
            (3, "x" * 32, ValueError),
            (4, [], ValueError),
            (4, [None, None], ValueError),
            (4, ["x"], TypeError),
            (4, 5, TypeError),
            (5, 2, ValueError),
            (5, -1, ValueError),
            (5, 2**62, ValueError),
        ]
        for position, bad, error in faults:
            for form in ("cbor", "pickle"):
                arguments: list[Any] = [form, *good[1:]]
                arguments[position] = bad
                with pytest.raises(error):
                    _sha.chain(*arguments)
                with pytest.raises(error):
                    chain_list(*arguments[:2], 0, *arguments[2:])
        for first, error in (
            (1, ValueError),
            (3, ValueError),
            (-1, ValueError),
            (2**80, OverflowError),
            ("0", TypeError),
        ):
            with pytest.raises(error):
                chain_list(*good[:2], first, *good[2:])
        for few in (good[:6], (*good, 1)):
            with pytest.raises(TypeError):
                _sha.chain(*few)
        with pytest.raises(TypeError):
            chain_list(*good)

    @pytest.mark.parametrize("form", ["cbor", "pickle"])
    def test_extras_that_change_the_tokens(self, form: Any) -> None:
        """Arguments run Python code when they are read; the tokens must be looked at after that."""
        from blockpool.hashing import _sha

        class Extras:
            def __iter__(self) -> Any:
                tokens.clear()
                return iter([None, None])

        tokens = [1, 2, 3, 4]
        with pytest.raises(ValueError, match="there are no 2 blocks of 2 tokens"):
            _sha.chain(form, tokens, 2, PARENT, Extras(), 2, True)  # type: ignore[call-overload]

    @pytest.mark.parametrize("name", [name for name in available_kernels() if name != "pure-python"])
    def test_nothing_leaks(self, name: str) -> None:
        value = ("x" * 100,)
        extra = cbor.encode(value)
        bad = object()
        array_of_bad = np.full(5000, -1, np.int32)

        def use() -> None:
            kernel.chain([1] * 64, 16, PARENT, [extra, None] * 2, kernel=name)
            kernel.chain(np.ones(5000, np.int32), 16, PARENT, kernel=name)
            kernel.chain_pickled([1] * 64, 16, PARENT, [value, None] * 2, kernel=name)
            kernel.chain_pickled([1] * 64, 16, PARENT, [value, (PARENT,)] * 2, kernel=name)
            kernel.chain_pickled([1] * 9400, 9400, PARENT, kernel=name)
            for form in ("cbor", "pickle"):
                kernel.chain_as_list(form, [1] * 64, 16, PARENT, [value, None] * 2, kernel=name)
                kernel.chain_as_list(form, tuple([1] * 64), 16, PARENT, None, 1, 20, kernel=name)
                kernel.chain_as_list(form, np.ones(5000, np.int32), 16, PARENT, kernel=name, first=9)
                kernel.chain_as_list(form, [1] * 20, 16, PARENT, None, 0, kernel=name)
                for tokens in ([1] * 50 + [bad], [1] * 20 + [-5], array_of_bad):
                    with pytest.raises(TokenIdError):
                        kernel.chain_as_list(form, tokens, 1, PARENT, None, None, 3, name)  # type: ignore[arg-type]
                with pytest.raises(BlockSizeError):
                    kernel.chain_as_list(form, [1] * 20, 16, PARENT, None, 2, kernel=name)
            for tokens in ([1] * 50 + [bad], [1] * 20 + [-5], array_of_bad, [1] * 20 + [2**70]):
                with pytest.raises(TokenIdError):
                    kernel.chain(tokens, 16, PARENT, kernel=name)  # type: ignore[arg-type]
            with pytest.raises(TypeError):
                kernel.chain([1] * 32, 16, PARENT, [extra, 1], kernel=name)  # type: ignore[list-item]

        def count_references() -> list[int]:
            gc.collect()  # exceptions and their tracebacks
            return [sys.getrefcount(o) for o in (value, extra, bad, array_of_bad, PARENT, TokenIdError)]

        for _ in range(20):  # caches fill
            use()
        counts = count_references()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(300):
                use()
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert count_references() == counts
        assert grown < 300 * 16  # the smallest object of one call would be more


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = str(Path(blockpool.__path__[0]).parent)
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


SHOW = "from blockpool.hashing import KERNEL, available_kernels; print(KERNEL, *available_kernels())"
WITHOUT_C = "import sys; sys.modules['blockpool.hashing._sha'] = None\n" + SHOW


@pytest.mark.parametrize("name", available_kernels())
def test_the_environment_forces_a_kernel(name: str) -> None:
    assert run_python(SHOW, BLOCKPOOL_HASH_KERNEL=name).stdout.split() == [name, *available_kernels()]


def test_the_fastest_kernel_is_taken() -> None:
    for code, available in ((SHOW, available_kernels()), (WITHOUT_C, ("pure-python",))):
        assert run_python(code, BLOCKPOOL_HASH_KERNEL="").stdout.split() == [available[0], *available]


def test_a_forced_kernel_that_is_not_available_ends_the_import() -> None:
    for code, name in ((SHOW, "rot13"), (WITHOUT_C, "portable-c")):
        done = run_python(code, BLOCKPOOL_HASH_KERNEL=name)
        assert done.returncode != 0
        assert "KernelUnavailable" in done.stderr
        assert "pure-python" in done.stderr
