"""The encoder against cbor2, and what it refuses."""

from __future__ import annotations

import pytest
from hash_oracle import FIXED
from hypothesis import given
from hypothesis import strategies as st

from blockpool.hashing import CborError, cbor

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**64 - 1)
    | st.sampled_from([n + d for n in (0, 24, 2**8, 2**16, 2**32) for d in (-1, 0, 1)])
    | st.binary(max_size=300)
    | st.text(max_size=300)
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=30).map(tuple) | st.lists(inner), max_leaves=40)


@FIXED
@given(values)
def test_same_bytes_as_cbor2(value: object) -> None:
    cbor2 = pytest.importorskip("cbor2")
    assert cbor.encode(value) == cbor2.dumps(value, canonical=True)


@pytest.mark.parametrize("count", [23, 24, 255, 256, 65535, 65536])
def test_length_heads(count: int) -> None:
    cbor2 = pytest.importorskip("cbor2")
    for value in (bytes(count), "x" * count, (0,) * count):
        assert cbor.encode(value) == cbor2.dumps(value, canonical=True)


@pytest.mark.parametrize("value", [2**64, -(2**64) - 1, 1.0, {}, {1}, bytearray(1), "\ud800", (1, (2.0,))])
def test_refused(value: object) -> None:
    with pytest.raises(CborError):
        cbor.encode(value)
