"""What came of pages, in numbers."""

from __future__ import annotations

from collections.abc import Sequence

from blockpool.offload.tier import Loaded, Stored, TierStats


def count_loads(stats: TierStats, results: Sequence[Loaded], lengths: Sequence[int]) -> None:
    if results.count(Loaded.OK) == len(results):
        stats.loaded_pages += len(results)
        stats.loaded_bytes += sum(lengths)
        return
    for result, num_bytes in zip(results, lengths, strict=True):
        if result is Loaded.OK:
            stats.loaded_pages += 1
            stats.loaded_bytes += num_bytes
        elif result is Loaded.MISSING:
            stats.missing_pages += 1
        elif result is Loaded.CORRUPT:
            stats.corrupt_pages += 1
        else:
            stats.unreachable_pages += 1


def count_stores(stats: TierStats, results: Sequence[Stored], lengths: Sequence[int]) -> None:
    if results.count(Stored.OK) == len(results):
        stats.stored_pages += len(results)
        stats.stored_bytes += sum(lengths)
        return
    for result, num_bytes in zip(results, lengths, strict=True):
        if result is Stored.OK:
            stats.stored_pages += 1
            stats.stored_bytes += num_bytes
        elif result is not Stored.PRESENT:
            stats.refused_pages += 1
