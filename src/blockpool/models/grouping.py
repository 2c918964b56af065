"""Layers into groups: each group one block table, all groups with about equally many layers."""

from __future__ import annotations

from collections.abc import Sequence

from .pages import LayerPage

# Below this many times the smallest kind, all layers of a kind stay in one group, and the smaller kinds waste a
# little: 11 layers of one kind and 10 of another make two groups, not three.
STILL_ONE_GROUP = 1.5


def grouped(pages: Sequence[LayerPage]) -> list[list[LayerPage]]:
    """The groups of layers with pages of one size, in the order in which their kinds appear in the model.

    A kind with n times the layers of the smallest becomes n groups, layer after layer in turn: a block then has one
    page for each layer of a group, whichever group it is lent to.
    """
    kinds: dict[object, list[LayerPage]] = {}
    for page in pages:
        kinds.setdefault((page.spec, page.layer.bytes_per_token, page.layer.bytes_per_state), []).append(page)
    counts = [len(kind) for kind in kinds.values()]
    per_group = max(counts) if max(counts) < STILL_ONE_GROUP * min(counts) else min(counts)
    groups = []
    for kind in kinds.values():
        num_groups = -(-len(kind) // per_group)
        groups += [kind[at::num_groups] for at in range(num_groups)]
    return groups
