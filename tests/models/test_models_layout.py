"""Pages come to one size, layers to groups of one size, and blocks fit into memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpool.managers import FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec
from blockpool.models import CacheLayout, LayerCache, ModelCache, ModelError, groups_as_text, lay_out
from tests.sizes import property_settings

FULL, WINDOW, STATE = FullAttentionSpec(1), SlidingWindowSpec(1, 64), MambaSpec(1, mamba_cache_mode="align")


def layers(*kinds: tuple[int, KVCacheSpec, int], whole_rows: bool = False) -> ModelCache:
    """(how many, kind, bytes of a token or of a state) each."""
    made = []
    for count, kind, size in kinds:
        for _ in range(count):
            token, state = (0, size) if kind.is_state else (size, 0)
            made.append(LayerCache(f"layers.{len(made)}", kind, token, state, whole_rows and not kind.is_state))
    return ModelCache("Test", tuple(made))


def groups(layout: CacheLayout) -> tuple[str, list[int]]:
    return groups_as_text(layout.kv_cache_groups), [len(group.layer_names) for group in layout.kv_cache_groups]


def test_layers_of_one_kind_are_one_group_whatever_their_sizes() -> None:
    layout = lay_out(layers((2, FULL, 100), (1, FULL, 30)), block_size=4)
    assert groups(layout) == ("full:4", [3])
    assert layout.bytes_per_block == 4 * (100 + 100 + 30)


def test_a_smaller_page_takes_more_tokens() -> None:
    layout = lay_out(layers((2, FULL, 400), (2, WINDOW, 100)), block_size=4)
    assert groups(layout) == ("full:4,window=64:16", [2, 2])
    assert layout.bytes_per_block == 2 * 1600
    assert [part.used_bytes_per_block for part in layout.groups] == [3200, 3200]


def test_a_page_that_does_not_divide_the_largest_is_padded() -> None:
    layout = lay_out(layers((2, FULL, 300), (2, WINDOW, 200)), block_size=4)
    assert groups(layout) == ("full:4,window=64:4", [2, 2])
    assert layout.bytes_per_block == 2 * 1200
    assert [part.used_bytes_per_block for part in layout.groups] == [2400, 1600]


def test_rows_without_gaps_are_never_padded() -> None:
    with pytest.raises(ModelError, match=r"^layers\.0: pages of 1200 bytes cannot be padded to 2000"):
        lay_out(layers((2, FULL, 300), (2, WINDOW, 500), whole_rows=True), block_size=4)
    lay_out(layers((2, FULL, 250), (2, WINDOW, 500), whole_rows=True), block_size=4)


@pytest.mark.parametrize(("state", "block_size"), [(1, 16), (1600, 16), (1601, 32), (4800, 48), (4801, 64)])
def test_attention_grows_until_a_page_holds_a_state(state: int, block_size: int) -> None:
    layout = lay_out(layers((1, FULL, 100), (1, STATE, state)))
    assert groups(layout) == (f"full:{block_size},mamba:{block_size}", [1, 1])
    assert layout.bytes_per_block == 100 * block_size
    assert layout.groups[1].used_bytes_per_block == state


def test_states_alone_keep_the_block_size() -> None:
    layout = lay_out(layers((3, STATE, 5000)))
    assert groups(layout) == ("mamba:16", [3])
    assert layout.bytes_per_block == 15_000
    assert layout.bytes_per_token == 0


@pytest.mark.parametrize(
    ("num_full", "num_window", "expected"),
    [
        (2, 4, [2, 2, 2]),
        (3, 7, [3, 3, 2, 2]),
        (6, 5, [6, 5]),  # 6 < 1.5 * 5: the windows stay together
        (2, 3, [2, 2, 1]),  # 3 is not: the smallest kind decides
        (10, 1, [1] * 11),
    ],
)
def test_groups_have_about_equally_many_layers(num_full: int, num_window: int, expected: list[int]) -> None:
    layout = lay_out(layers((num_full, FULL, 10), (num_window, WINDOW, 10)))
    assert [len(group.layer_names) for group in layout.kv_cache_groups] == expected
    assert layout.bytes_per_block == max(expected) * 160


def test_layers_of_a_kind_are_dealt_out_in_turn() -> None:
    layout = lay_out(layers((2, FULL, 10), (5, WINDOW, 10)))
    assert [group.layer_names for group in layout.kv_cache_groups] == [
        ("layers.0", "layers.1"),
        ("layers.2", "layers.5"),
        ("layers.3", "layers.6"),
        ("layers.4",),
    ]


def test_blocks_in_memory() -> None:
    layout = lay_out(layers((1, FULL, 10)))
    assert layout.num_blocks(320) == layout.num_blocks(479) == 2
    assert layout.num_blocks(480) == 3
    for memory in (-1, 0, 319):
        with pytest.raises(ModelError, match=r"blocks of 160 bytes, and a pool needs 2"):
            layout.num_blocks(memory)


def test_what_cannot_be_laid_out() -> None:
    with pytest.raises(ModelError, match="no layer keeps anything"):
        lay_out(layers())
    for block_size in (0, -16, 16.0, True):
        with pytest.raises(ModelError, match=r"^block_size must be an int of at least 1 token"):
            lay_out(layers((1, FULL, 10)), block_size=block_size)  # type: ignore[arg-type]


@property_settings(200)
@given(
    kinds=st.lists(
        st.tuples(
            st.integers(1, 12), st.sampled_from([FULL, WINDOW, STATE, SlidingWindowSpec(1, 9)]), st.integers(1, 99)
        ),
        min_size=1,
        max_size=5,
    ),
    block_size=st.integers(1, 64),
)
def test_no_layer_is_lost_and_every_group_fits_a_block(
    kinds: list[tuple[int, KVCacheSpec, int]], block_size: int
) -> None:
    model = layers(*kinds)
    layout = lay_out(model, block_size=block_size)
    names = [name for group in layout.kv_cache_groups for name in group.layer_names]
    assert sorted(names) == sorted(layer.name for layer in model.layers)
    by_name = {layer.name: layer for layer in model.layers}
    for part in layout.groups:
        spec = part.group.kv_cache_spec
        own = [by_name[name] for name in part.group.layer_names]
        assert {type(layer.attention) for layer in own} == {type(spec)}
        assert spec.block_size % block_size == 0
        assert part.bytes_per_token == sum(layer.bytes_per_token for layer in own)
        assert part.used_bytes_per_block == part.bytes_per_state + part.bytes_per_token * spec.block_size
        assert part.used_bytes_per_block <= layout.bytes_per_block
    assert layout.bytes_per_token == sum(layer.bytes_per_token for layer in model.layers)
