"""Groups are written in text and read back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpool.managers import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    ReferenceWindowSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from blockpool.models import ModelError, groups_as_text, parse_groups
from tests.sizes import property_settings

SPECS: list[tuple[str, KVCacheSpec]] = [
    ("full:16", FullAttentionSpec(16)),
    ("window=1024:32", SlidingWindowSpec(32, 1024)),
    ("chunk=8192:16", ChunkedLocalAttentionSpec(16, 8192)),
    ("reference=128:16", ReferenceWindowSpec(16, 128)),
    ("mamba:256", MambaSpec(256, mamba_cache_mode="align")),
    ("running-mamba:256", MambaSpec(256)),
    ("ring:64", CircularBufferSpec(64)),
    ("cross:16", CrossAttentionSpec(16)),
    ("sink=32:16", SinkFullAttentionSpec(16, 32)),
]


@pytest.mark.parametrize(("text", "spec"), SPECS)
def test_every_kind_has_its_word(text: str, spec: KVCacheSpec) -> None:
    (group,) = parse_groups(text)
    assert group.kv_cache_spec == spec
    assert groups_as_text([group]) == text


def test_several_groups() -> None:
    groups = parse_groups(" full:16, window=1024:16*2 ,mamba:256")
    assert [group.kv_cache_spec for group in groups] == [
        FullAttentionSpec(16),
        SlidingWindowSpec(16, 1024),
        SlidingWindowSpec(16, 1024),
        MambaSpec(256, mamba_cache_mode="align"),
    ]
    names = [group.layer_names[0] for group in groups]
    assert names == ["full:16 #0", "window=1024:16 #1", "window=1024:16 #2", "mamba:256 #3"]


@property_settings(200)
@given(st.lists(st.sampled_from([spec for _, spec in SPECS]), min_size=1, max_size=12))
def test_what_was_written_is_read_back(specs: list[KVCacheSpec]) -> None:
    text = groups_as_text([KVCacheGroupSpec(("a",), spec) for spec in specs])
    assert [group.kv_cache_spec for group in parse_groups(text)] == specs
    assert text == groups_as_text(parse_groups(text))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "groups: '' is not a group such as full:16"),
        ("full", "groups: 'full' is not a group"),
        ("full:", "groups: 'full:' is not a group"),
        ("full:x", "groups: 'full:x' is not a group"),
        ("full:-16", "groups: 'full:-16' is not a group"),
        ("full:16:16", "groups: 'full:16:16' is not a group"),
        ("full:\u0661\u0666", "groups: 'full:\u0661\u0666' is not a group"),
        ("full:16,,mamba:16", "groups: '' is not a group"),
        ("full:16;mamba:16", "groups: 'full:16;mamba:16' is not a group"),
        ("full:16*", "groups: 'full:16*' is not a group"),
        ("full:9999999999", "groups: 'full:9999999999' is not a group"),
        ("dense:16", "groups: 'dense:16': 'dense' is none of full, mamba"),
        ("full=8:16", "groups: 'full=8:16': full has no size: write full:16"),
        ("window:16", "groups: 'window:16': window needs its size in tokens: window=1024:16"),
        ("full:0", "groups: 'full:0': block_size must be an int of at least 1 token"),
        ("window=0:16", "groups: 'window=0:16': sliding_window must be an int of at least 1 token"),
        ("sink=20:16", "groups: 'sink=20:16': sink_len must be a multiple of block_size 16"),
        ("full:16*0", "groups: 'full:16*0': a cache has between 1 and 1000 groups"),
        ("full:16*999,ring:8*2", "groups: 'ring:8*2': a cache has between 1 and 1000 groups"),
    ],
)
def test_what_is_wrong_is_named(text: str, said: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_groups(text)
    assert str(caught.value).startswith(said)


def test_a_kind_without_a_word() -> None:
    for spec in (MambaSpec(16, 2, "align"), KVCacheSpec(16)):
        with pytest.raises(ModelError, match="has no name in text"):
            groups_as_text([KVCacheGroupSpec(("a",), spec)])
