"""What the books say, for Prometheus: read when it is scraped, nothing is kept twice.

Names are vLLM's where it has one (`vllm:…`), else ours (`blockpool:…`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from blockpool.cache import PrefixCacheStats
from blockpool.pool import BlockPool
from blockpool.wire import Fleet, Mirror, MirrorStatus, Publisher

from .residency import BUCKETS_S, Histogram, ResidencySampler

if TYPE_CHECKING:
    from blockpool.cache import KVCacheManager


class MissingPrometheusError(ImportError):
    """Metrics without prometheus-client, which the extra `blockpool[metrics]` installs."""


class MetricsCollector:
    """A collector to register: `prometheus_client.REGISTRY.register(MetricsCollector(manager=manager))`.

    Whatever is given is reported: a `manager`'s pools and statistics (or `pools` alone), one `sampler` per pool,
    a `publisher`, the mirrors of a `fleet`. `model_name` and `engine` label every metric, as vLLM does. A scrape
    walks the records of every pool once. Of several engines in one process the collectors are given to one more,
    which is registered in their place, so that each metric is one family: `MetricsCollector(others=[first, second])`.

    Raises ValueError for two collectors with the same `model_name` and `engine`, MissingPrometheusError without
    prometheus-client.
    """

    def __init__(
        self,
        *,
        manager: KVCacheManager | None = None,
        pools: Sequence[BlockPool] = (),
        samplers: Sequence[ResidencySampler] = (),
        publisher: Publisher | None = None,
        fleet: Fleet | None = None,
        model_name: str = "",
        engine: str = "0",
        others: Sequence[MetricsCollector] = (),
    ) -> None:
        try:
            from prometheus_client import core, utils
        except ImportError:
            raise MissingPrometheusError("metrics need prometheus-client: pip install 'blockpool[metrics]'") from None
        self._core: Any = core
        as_label: Any = utils.floatToGoString
        self._ends = [as_label(end) for end in (*BUCKETS_S, float("inf"))]
        self.manager = manager
        self.pools = list(pools) if manager is None else list(manager.pools)
        self.samplers = list(samplers)
        self.publisher = publisher
        self.fleet = fleet
        self._labels = {"model_name": model_name, "engine": engine}
        self.others = list(others)
        told = [(*one._labels.values(),) for one in self._every()]
        if len(set(told)) < len(told):
            raise ValueError(f"two collectors have the same model_name and engine: {told}")

    def _every(self) -> Iterator[MetricsCollector]:
        if not self.others or self._reports():
            yield self
        for one in self.others:
            yield from one._every()

    def _reports(self) -> bool:
        return bool(self.pools or self.samplers or self.publisher or self.fleet)

    def describe(self) -> list[object]:
        """Nothing: what there is depends on what is attached."""
        return []

    def collect(self) -> Iterator[object]:
        """Each family once, with the samples of every engine."""
        families: dict[str, Any] = {}
        for one in self._every():
            for family in one._own():
                there = families.setdefault(family.name, family)
                if there is not family:
                    there.samples.extend(family.samples)
        yield from families.values()

    def _own(self) -> Iterator[Any]:
        if self.pools:
            yield from self._pools()
        if self.manager is not None:
            yield from self._hits(self.manager.stats.total)
        if self.samplers:
            yield from self._residency()
        if self.publisher is not None:
            yield from self._published(self.publisher)
        if self.fleet is not None:
            yield from self._mirrors(self.fleet)

    # -- one subject each --------------------------------------------------------------------------------

    def _pools(self) -> Iterator[object]:
        usages = [pool.get_usage_parts() for pool in self.pools]
        total = sum(pool.num_gpu_blocks - 1 for pool in self.pools)
        used = total - sum(usage.free for usage in usages)
        yield self._gauge(
            "vllm:kv_cache_usage_perc", "Part of the blocks in use, 0.0 to 1.0.", {(): used / total if total else 0.0}
        )
        states: dict[tuple[str, ...], float] = {}
        for number, usage in enumerate(usages):
            parts = {
                "free": usage.free - usage.cached,
                "cached_free": usage.cached,
                "deferred": usage.deferred,
                "held": usage.held - usage.pinned,
                "pinned": usage.pinned,
            }
            for state, blocks in parts.items():
                states[str(number), state] = blocks
        yield self._gauge("blockpool:blocks", "Blocks by state; the states add up.", states, "pool", "state")
        counters = [pool.counters for pool in self.pools]
        for name, text, values in (
            ("blockpool:allocated_blocks", "Blocks handed out.", [one.allocated_blocks for one in counters]),
            (
                "blockpool:evicted_unused_blocks",
                "Blocks handed out with a hash that nobody had used.",
                [one.evicted_unused_blocks for one in counters],
            ),
            (
                "blockpool:late_releases",
                "Holds released when they had ended.",
                [one.late_releases for one in counters],
            ),
        ):
            yield self._counter(name, text, {(str(i),): value for i, value in enumerate(values)}, "pool")
        evicted: dict[tuple[str, ...], float] = {}
        for number, one in enumerate(counters):
            evicted[str(number), "reuse"] = one.evicted_blocks
        for number, sampler in enumerate(self.samplers):
            evicted[str(number), "request"] = sampler.evicted_by_request
        yield self._counter(
            "blockpool:evicted_blocks",
            "Blocks that lost their hashes: by being handed out again (reuse), by evict_blocks (request).",
            evicted,
            "pool",
            "reason",
        )

    def _hits(self, stats: PrefixCacheStats) -> Iterator[object]:
        for name, text, value in (
            ("vllm:prefix_cache_queries", "Tokens of admitted requests, at their first admission.", stats.queries),
            ("vllm:prefix_cache_hits", "Those of them that were cached.", stats.hits),
            (
                "vllm:external_prefix_cache_queries",
                "Tokens that a connector was asked for.",
                stats.external_queries,
            ),
            ("vllm:external_prefix_cache_hits", "Those of them that it brings.", stats.external_hits),
            ("blockpool:admitted_requests", "Requests admitted for the first time.", stats.requests),
            ("blockpool:resumed_requests", "Requests admitted again after a preemption.", stats.preempted_requests),
            ("blockpool:resumed_prefix_cache_queries", "Tokens of resumed requests.", stats.preempted_queries),
            ("blockpool:resumed_prefix_cache_hits", "Those of them that were cached.", stats.preempted_hits),
        ):
            yield self._counter(name, text, {(): value})

    def _residency(self) -> Iterator[object]:
        for name, text, histograms in (
            (
                "vllm:kv_block_lifetime_seconds",
                "Sampled blocks: from handed out to evicted.",
                [one.lifetime for one in self.samplers],
            ),
            (
                "vllm:kv_block_idle_before_evict_seconds",
                "Sampled blocks: from the last use to evicted.",
                [one.idle for one in self.samplers],
            ),
            (
                "vllm:kv_block_reuse_gap_seconds",
                "Sampled blocks: between uses.",
                [one.reuse_gap for one in self.samplers],
            ),
        ):
            yield self._histogram(name, text, histograms)

    def _published(self, publisher: Publisher) -> Iterator[object]:
        counts = publisher.counts
        for name, text, value in (
            ("blockpool:published_batches", "Batches of events sent.", counts.batches),
            ("blockpool:published_events", "Events sent.", counts.events),
            ("blockpool:published_blocks", "Blocks named in events sent.", counts.blocks),
            ("blockpool:dropped_batches", "Batches that were not sent; readers see a gap.", counts.dropped),
        ):
            yield self._counter(name, text, {(): value})
        yield self._gauge("blockpool:waiting_batches", "Batches that wait to be sent.", {(): counts.waiting})

    def _mirrors(self, fleet: Fleet) -> Iterator[object]:
        mirrors = fleet.mirrors
        yield self._gauge(
            "blockpool:mirror_lag_batches",
            "Batches known to exist that the mirror does not have; left out where nobody knows how many.",
            {(name,): lag for name, mirror in mirrors.items() if (lag := _known_lag(mirror)) is not None},
            "worker",
        )
        yield self._gauge(
            "blockpool:mirror_status",
            "1 for the status that the mirror has.",
            {(name, str(s)): float(mirror.status is s) for name, mirror in mirrors.items() for s in MirrorStatus},
            "worker",
            "status",
        )
        yield self._gauge(
            "blockpool:mirror_blocks",
            "Keys that the mirror holds.",
            {(name, tier): n for name, mirror in mirrors.items() for tier, n in mirror.tiers.items()},
            "worker",
            "tier",
        )
        for kind in ("gaps", "restarts", "snapshots"):
            yield self._counter(
                f"blockpool:mirror_{kind}",
                f"The mirror's {kind}.",
                {(name,): getattr(mirror.counts, kind) for name, mirror in mirrors.items()},
                "worker",
            )

    # -- families ----------------------------------------------------------------------------------------

    def _gauge(self, name: str, text: str, values: Mapping[tuple[str, ...], float], *labels: str) -> object:
        return self._filled(self._core.GaugeMetricFamily, name, text, values, labels)

    def _counter(self, name: str, text: str, values: Mapping[tuple[str, ...], float], *labels: str) -> object:
        return self._filled(self._core.CounterMetricFamily, name, text, values, labels)

    def _filled(
        self, make: Any, name: str, text: str, values: Mapping[tuple[str, ...], float], labels: tuple[str, ...]
    ) -> object:
        family = make(name, text, labels=[*self._labels, *labels])
        for own, value in values.items():
            family.add_metric([*self._labels.values(), *own], value)
        return family

    def _histogram(self, name: str, text: str, histograms: list[Histogram]) -> object:
        family = self._core.HistogramMetricFamily(name, text, labels=[*self._labels, "pool"])
        for number, one in enumerate(histograms):
            buckets = list(zip(self._ends, accumulate(one.counts), strict=True))
            family.add_metric([*self._labels.values(), str(number)], buckets, one.sum_s)
        return family


def _known_lag(mirror: Mirror) -> int | None:
    """None rather than a 0 that nobody can vouch for."""
    if mirror.status is MirrorStatus.LIVE:
        return mirror.lag
    return mirror.lag or None if mirror.status is MirrorStatus.CATCHING_UP else None
