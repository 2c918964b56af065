"""Metrics: a real scrape says what the books say, and the dashboard asks for what is there."""

from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from blockpool.cache import KVCacheConfig, KVCacheManager, Request
from blockpool.hashing import BlockHasher
from blockpool.inspect import MetricsCollector, MissingPrometheusError, ResidencySampler
from blockpool.managers import FullAttentionSpec, KVCacheGroupSpec
from blockpool.pool import BlockPool
from blockpool.wire import Fleet, KVEventBatch, Mirror, Publisher, encode_batch
from tests.wire.sockets import LOOPBACK

prometheus_client = pytest.importorskip("prometheus_client")
pytest.importorskip("zmq")

DASHBOARD = Path(__file__).parents[2] / "docs/grafana/blockpool.json"
HASHER = BlockHasher(hash_block_size=4, seed="metrics")
LABELS = {"model_name": "m", "engine": "3"}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def scrape(collector: MetricsCollector) -> tuple[str, dict[str, float]]:
    """The text, and each sample by its name and labels, without those that all have."""
    registry = prometheus_client.CollectorRegistry()
    registry.register(collector)
    text = prometheus_client.generate_latest(registry).decode()
    samples: dict[str, float] = {}
    for family in prometheus_client.parser.text_string_to_metric_families(text):
        for sample in family.samples:
            assert {name: sample.labels.pop(name) for name in LABELS} == LABELS
            own = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{own}}}"] = sample.value
    return text, samples


def run(manager: KVCacheManager, name: str, tokens: range) -> Request:
    request = Request(name, list(tokens), hasher=HASHER)
    hit = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, request.num_tokens - hit.num_tokens, hit.num_tokens, hit) is not None
    request.num_computed_tokens = request.num_tokens
    return request


@pytest.fixture
def everything() -> Any:
    import prometheus_client.parser  # noqa: F401

    clock = Clock()
    sampler = ResidencySampler(1.0, clock=clock)
    config = KVCacheConfig(9, (KVCacheGroupSpec(("layer",), FullAttentionSpec(4)),), hash_block_size=4)
    manager = KVCacheManager(config, events="first_last", metrics=sampler)
    fleet = Fleet()
    with Publisher(LOOPBACK) as publisher:
        collector = MetricsCollector(manager=manager, samplers=[sampler], publisher=publisher, fleet=fleet, **LABELS)
        yield clock, sampler, manager, fleet, publisher, collector


def test_a_scrape(everything: Any) -> None:
    clock, _, manager, fleet, publisher, collector = everything
    first = run(manager, "first", range(16))
    clock.now = 1.0
    second = run(manager, "second", range(18))  # 16 of its tokens hit
    clock.now = 3.0
    third = run(manager, "third", range(18))
    manager.free(first)
    manager.free(second)
    clock.now = 10.0
    manager.free(third)
    manager.pool.evict_blocks([4])
    manager.pool.get_new_blocks(8)  # evicts the other three
    publisher.publish(manager.take_events())
    mirror: Mirror = fleet.join("w0")
    mirror.connected()
    fleet.join("w1")

    _, samples = scrape(collector)
    assert samples["vllm:kv_cache_usage_perc{}"] == 1.0
    assert [samples[f"blockpool:blocks{{pool=0,state={s}}}"] for s in ("free", "cached_free", "held")] == [0, 0, 8]
    assert (samples["vllm:prefix_cache_queries_total{}"], samples["vllm:prefix_cache_hits_total{}"]) == (52, 32)
    assert samples["blockpool:admitted_requests_total{}"] == 3
    assert samples["blockpool:evicted_blocks_total{pool=0,reason=reuse}"] == 3
    assert samples["blockpool:evicted_blocks_total{pool=0,reason=request}"] == 1
    assert samples["blockpool:evicted_unused_blocks_total{pool=0}"] == 0
    # All eight blocks were handed out again or evicted, at 10 s; four of them were used at 1 s and at 3 s.
    assert samples["vllm:kv_block_lifetime_seconds_count{pool=0}"] == 6
    assert samples["vllm:kv_block_reuse_gap_seconds_sum{pool=0}"] == 4 * 2.0
    assert samples["vllm:kv_block_reuse_gap_seconds_bucket{le=1.0,pool=0}"] == 0
    assert samples["vllm:kv_block_reuse_gap_seconds_bucket{le=2.0,pool=0}"] == 4
    assert samples["vllm:kv_block_idle_before_evict_seconds_bucket{le=+Inf,pool=0}"] == 6
    assert samples["blockpool:dropped_batches_total{}"] == 0
    assert samples["blockpool:mirror_status{status=never_fed,worker=w0}"] == 1
    assert samples["blockpool:mirror_status{status=live,worker=w0}"] == 0
    assert "blockpool:mirror_lag_batches{worker=w1}" not in samples


def test_a_lag_that_nobody_knows_is_left_out(everything: Any) -> None:
    """0 would say that nothing is missing."""
    _, _, manager, fleet, _, collector = everything
    run(manager, "r", range(16))
    payload = encode_batch(KVEventBatch(0.0, manager.take_events()))
    mirror = fleet.join("w0")

    def lag() -> float | None:
        return scrape(collector)[1].get("blockpool:mirror_lag_batches{worker=w0}")

    assert lag() is None  # never fed
    mirror.connected()
    mirror.replayed([(0, payload)], None)
    assert (mirror.status, lag()) == ("live", 0)
    mirror.receive(3, payload)
    assert (mirror.status, lag()) == ("catching_up", 3)
    mirror.gave_up("too long")
    assert (mirror.status, lag()) == ("stale", None)
    mirror.connected()
    assert (mirror.status, lag()) == ("catching_up", None)  # what was missed has been asked


def test_states_add_up(everything: Any) -> None:
    _, _, manager, _, _, collector = everything
    request = run(manager, "r", range(12))
    manager.pin(request, "me")
    manager.free(request)
    run(manager, "s", range(20, 24))
    _, samples = scrape(collector)
    blocks = [value for name, value in samples.items() if name.startswith("blockpool:blocks{")]
    assert sum(blocks) == manager.pool.num_gpu_blocks - 1
    assert samples["blockpool:blocks{pool=0,state=pinned}"] == 3


def test_the_dashboard_asks_for_what_a_scrape_has(everything: Any) -> None:
    _, _, manager, fleet, publisher, collector = everything
    run(manager, "r", range(16))
    publisher.publish(events := manager.take_events())
    mirror = fleet.join("w0")
    mirror.connected()
    mirror.replayed([], None)
    mirror.receive(0, encode_batch(KVEventBatch(0.0, events)))
    text, _ = scrape(collector)
    labels: dict[str, set[str]] = {}
    for name, inside in re.findall(r"^([a-z_:]+)\{([^}]*)\}", text, re.MULTILINE):
        labels.setdefault(name, set()).update(re.findall(r"(\w+)=", inside))

    asked: Counter[str] = Counter()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            expression = target["expr"]
            named = re.findall(r"((?:vllm|blockpool):\w+)\{", expression)
            assert named, expression
            for name in named:
                asked[name] += 1
                assert name in labels, f"{panel['title']}: {name}"
                used = set(re.findall(r"(\w+)=~", expression))
                used |= {word for by in re.findall(r"by \(([^)]*)\)", expression) for word in by.split(", ")}
                used |= set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
                assert used <= labels[name], f"{panel['title']}: {used - labels[name]}"
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in labels} == shown


def test_the_sampler_follows_a_part_of_the_blocks() -> None:
    clock = Clock()
    sampler = ResidencySampler(0.25, clock=clock, rng=random.Random(1))
    pool = BlockPool(1001, metrics=sampler)
    pool.free_blocks(pool.get_new_blocks(1000))
    clock.now = 5.0
    pool.get_new_blocks(1000)
    assert 200 < sampler.lifetime.num_observed < 300
    assert sampler.lifetime.sum_s == 5.0 * sampler.lifetime.num_observed
    assert (sampler.evicted_by_reuse, sampler.evicted_by_request) == (0, 0)
    for wrong in (0.0, 1.5):
        with pytest.raises(ValueError, match="sample_rate"):
            ResidencySampler(wrong)


def test_without_prometheus_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingPrometheusError, match=r"blockpool\[metrics\]"):
        MetricsCollector()


def test_what_is_not_given_is_not_reported() -> None:
    assert list(MetricsCollector().collect()) == []
    names = {family.name for family in MetricsCollector(pools=[BlockPool(3)]).collect()}  # type: ignore[attr-defined]
    assert "vllm:kv_cache_usage_perc" in names
    assert not any("prefix_cache" in name for name in names)


def test_several_engines_are_one_family(everything: Any) -> None:
    """What scrapes may not have twice is a family."""
    manager = everything[2]
    one, two = (MetricsCollector(manager=manager, model_name="m", engine=engine) for engine in "01")
    registry = prometheus_client.CollectorRegistry()
    registry.register(MetricsCollector(others=[one, two]))
    text = prometheus_client.generate_latest(registry).decode()
    assert text.count("# TYPE vllm:kv_cache_usage_perc") == 1
    assert text.count("vllm:kv_cache_usage_perc{") == 2
    with pytest.raises(ValueError, match="same model_name and engine"):
        MetricsCollector(others=[one, one])
    with pytest.raises(ValueError, match="same model_name and engine"):
        MetricsCollector(manager=manager, model_name="m", engine="0", others=[one])
