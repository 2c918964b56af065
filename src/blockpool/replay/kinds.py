"""What groups are called in reports: as `--groups` has them."""

from collections.abc import Sequence

from blockpool.managers import KVCacheGroupSpec
from blockpool.models import ModelError, groups_as_text


def group_kinds(groups: Sequence[KVCacheGroupSpec]) -> list[str]:
    """One name per group; that of its spec where the text has none."""
    return [_kind(group) for group in groups]


def _kind(group: KVCacheGroupSpec) -> str:
    try:
        return groups_as_text([group])
    except ModelError:
        return f"{type(group.kv_cache_spec).__name__}:{group.block_size}"


def listed(numbers: Sequence[int]) -> str:
    """Ascending numbers in short: 0-5, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
