"""Extra keys against an oracle that looks at everything for every block; what they refuse; embeddings and masks."""

from __future__ import annotations

import array
import hashlib
from typing import Any

import numpy as np
import pytest
from hash_oracle import FIXED, oracle_key
from hypothesis import given
from hypothesis import strategies as st

from blockpool.hashing import BlockHasher, ExtraKeys, ExtraKeysError, MediaItem

LENGTH = 60  # tokens of the prompts that are drawn


@st.composite
def any_extra_keys(draw: st.DrawFn) -> ExtraKeys:
    item = st.builds(MediaItem, st.sampled_from(["a", "b", "lora"]), st.integers(0, 70), st.integers(1, 30))
    media = draw(st.lists(item, max_size=6))
    salts = draw(st.dictionaries(st.integers(0, 70), st.sampled_from(["s", "t"]), max_size=3))
    embeds = mask = None
    if draw(st.booleans()):
        num_tokens = draw(st.integers(0, LENGTH))
        embeds = np.arange(num_tokens * 3, dtype=np.float16).reshape(num_tokens, 3)
        mask = draw(st.none() | st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens))
    return ExtraKeys(
        lora=draw(st.none() | st.sampled_from([("a", "/a"), ("", "")])),
        media=sorted(media, key=lambda item: item.offset),  # they may overlap and lie in each other
        cache_salt=draw(st.sampled_from([None, "", "salt"])),
        prompt_embeds=embeds,
        embeds_mask=mask,
        generation=draw(st.sampled_from([None, 0, 7])),
        salt_from=tuple(sorted(salts.items())),
    )


@FIXED
@given(any_extra_keys(), st.integers(1, 20), st.integers(0, 9), st.integers(0, 5), st.integers(0, 8))
def test_equals_the_oracle(extra: ExtraKeys, unit: int, lookahead: int, first: int, count: int) -> None:
    blocks = range(first, first + count)
    expected = [oracle_key(extra, b * unit, (b + 1) * unit + lookahead) for b in blocks]
    assert [extra.key(b * unit, (b + 1) * unit + lookahead) for b in blocks] == expected
    at_once = extra.keys(first, count, unit, lookahead)
    assert (at_once or [None] * count) == expected


def test_order_tags_and_events() -> None:
    embeds = np.zeros((4, 2), np.float32)
    extra = ExtraKeys(
        lora=("name", "/path"),
        media=[MediaItem("img", 1, 2)],
        cache_salt="salt",
        prompt_embeds=embeds,
        embeds_mask=[True, False, False, True],
        generation=7,
        salt_from=[(2, "deep")],
    )
    digest = hashlib.sha256(bytes(32)).digest()
    assert extra.key(0, 4) == (
        ("lora", "name", "/path"),
        ("mm", "img", 1),
        ("cache_salt", "salt"),
        ("prompt_embeds", digest),
        ("embeds_mask", b"\1\0\0\1"),
        ("generation", 7),
        ("salt_from", 2, "deep"),
    )
    assert extra.event_key(0, 4) == ("name", ("img", 1), "salt", digest, b"\1\0\0\1", 7, (2, "deep"))
    assert extra.key(2, 4) == (
        ("lora", "name", "/path"),
        ("mm", "img", -1),
        ("prompt_embeds", hashlib.sha256(bytes(16)).digest()),
        ("embeds_mask", b"\0\1"),
        ("salt_from", 2, "deep"),
    )


def test_none_is_not_an_empty_tuple() -> None:
    assert ExtraKeys().key(0, 16) is None
    assert ExtraKeys().event_key(0, 16) is None
    assert ExtraKeys().keys(0, 5, 16) is None
    assert ExtraKeys(cache_salt="").key(0, 16) is None
    assert ExtraKeys(cache_salt="s").key(16, 32) is None
    assert ExtraKeys(cache_salt="s").keys(1, 5, 16) is None


def test_many_items_are_found_where_they_are() -> None:
    media = [MediaItem(f"frame {i}", i * 20, 10) for i in range(5000)]
    keys = ExtraKeys(media=media).keys(0, 10_000, 10)
    assert keys == [(("mm", f"frame {i // 2}", 0),) if i % 2 == 0 else None for i in range(10_000)]


@pytest.mark.parametrize("span", [(0, 0), (5, 4), (-4, 4)])
def test_no_block(span: tuple[int, int]) -> None:
    with pytest.raises(ExtraKeysError):
        ExtraKeys().key(*span)


EMBEDS = np.zeros((4, 2), np.float32)


@pytest.mark.parametrize(
    "fields",
    [
        {"lora": "name"},
        {"lora": ("name",)},
        {"lora": ("name", None)},
        {"media": [("img", 0, 1)]},
        {"media": [MediaItem("b", 2, 1), MediaItem("a", 1, 1)]},
        {"cache_salt": 5},
        {"cache_salt": "\ud800"},
        {"cache_salt": np.str_("x")},
        {"prompt_embeds": [[1.0]]},
        {"prompt_embeds": np.zeros(4)},
        {"prompt_embeds": np.zeros((4, 0))},
        {"prompt_embeds": np.zeros((2, 2, 2))},
        {"prompt_embeds": np.zeros((4, 4))[:, ::2]},
        {"prompt_embeds": np.asfortranarray(np.zeros((4, 4)))},
        {"prompt_embeds": b"1234"},
        {"prompt_embeds": EMBEDS, "embeds_mask": [True] * 3},
        {"prompt_embeds": EMBEDS, "embeds_mask": [1] * 4},
        {"prompt_embeds": EMBEDS, "embeds_mask": np.ones((4, 1), bool)},
        {"embeds_mask": [True]},
        {"generation": -1},
        {"generation": 2**63},
        {"generation": "1"},
        {"generation": True},
        {"salt_from": [5]},
        {"salt_from": [(5, "")]},
        {"salt_from": [("5", "s")]},
        {"salt_from": [(-1, "s")]},
        {"salt_from": [(5, "s"), (5, "t")]},
        {"salt_from": [(5, "s"), (4, "t")]},
    ],
    ids=repr,
)
def test_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ExtraKeysError):
        ExtraKeys(**fields)


@pytest.mark.parametrize(
    "item", [(5, 0, 1), ("a", -1, 1), ("a", 0, 0), ("a", 0, True), ("a", None, 1), ("\udfff", 0, 1)]
)
def test_refused_items(item: tuple[Any, Any, Any]) -> None:
    with pytest.raises(ExtraKeysError):
        MediaItem(*item)


def test_frozen() -> None:
    with pytest.raises(AttributeError):
        ExtraKeys().cache_salt = "x"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        MediaItem("a", 0, 1).offset = 5  # type: ignore[misc]


class TestEmbeddings:
    def test_anything_with_a_buffer(self) -> None:
        rows = np.arange(12, dtype=np.float64).reshape(6, 2)
        flat = array.array("d", rows.ravel().tolist())
        expected = ExtraKeys(prompt_embeds=rows).keys(0, 3, 2)
        assert ExtraKeys(prompt_embeds=memoryview(flat).cast("B").cast("d", (6, 2))).keys(0, 3, 2) == expected
        assert ExtraKeys(prompt_embeds=rows.view(np.int64)).keys(0, 3, 2) == expected

    def test_rows_past_the_prompt_are_of_no_bytes(self) -> None:
        extra = ExtraKeys(prompt_embeds=np.ones((6, 2), np.float32), embeds_mask=[True] * 6)
        nothing = hashlib.sha256(b"").digest()
        assert extra.key(4, 8) == (
            ("prompt_embeds", hashlib.sha256(np.ones(4, np.float32).tobytes()).digest()),
            ("embeds_mask", b"\1\1"),
        )
        assert extra.key(8, 12) == (("prompt_embeds", nothing),)
        assert ExtraKeys(prompt_embeds=np.ones((0, 2))).key(0, 4) == (("prompt_embeds", nothing),)

    def test_the_mask_may_be_changed_afterwards(self) -> None:
        mask = np.array([True, False])
        extra = ExtraKeys(prompt_embeds=np.ones((2, 2)), embeds_mask=mask)
        mask[1] = True
        key = extra.key(0, 2)
        assert key is not None
        assert ("embeds_mask", b"\1\0") in key

    @pytest.mark.parametrize("make", [list, tuple, np.array])
    def test_embedded_positions_are_hashed_as_token_0(self, make: Any) -> None:
        mask = [False, True, True, False, False, True]
        extra = ExtraKeys(prompt_embeds=np.ones((6, 2)), embeds_mask=mask)
        hasher = BlockHasher(hash_block_size=2, seed="s")
        expected = hasher.start([5, 0, 0, 8, 9, 0, 11, 12], extra)
        given = make([5, -1, 7, 8, 9, 2**40, 11, 12])
        assert hasher.start(given, extra)[:] == expected[:]
        pieces = hasher.start(given[:2], extra)
        for i in range(2, 8):
            pieces.append_tokens(given[i : i + 1])
        assert pieces[:] == expected[:]
        if make is np.array:
            assert given.tolist() == [5, -1, 7, 8, 9, 2**40, 11, 12]

    def test_without_a_mask_tokens_are_hashed_as_given(self) -> None:
        extra = ExtraKeys(prompt_embeds=np.ones((4, 2)))
        hasher = BlockHasher(hash_block_size=2, seed="s")
        assert hasher.start([0, 0, 0, 0], extra)[0] != hasher.start([1, 0, 0, 0], extra)[0]
