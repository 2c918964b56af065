"""Which of vLLM 0.33's own tests speak for the ledger: files and folders, relative to its source tree.

SUITE is the core and the offloading; CONNECTORS, run as well with `--connectors`, are the tests of what else holds
blocks of the pool: KV connectors, loads that fail, streaming sessions.
"""

from __future__ import annotations

TESTED_VERSION = "0.33.0"

SUITE = (
    "tests/v1/core/test_prefix_caching.py",
    "tests/v1/core/test_kv_cache_utils.py",
    "tests/v1/core/test_single_type_kv_cache_manager.py",
    "tests/v1/core/test_kv_cache_metrics.py",
    "tests/v1/core/test_deferred_block_free.py",
    "tests/v1/core/test_prefix_replay.py",
    "tests/v1/core/test_swa_inflight_window_free.py",
    "tests/v1/core/test_mamba_align_chunk_split.py",
    "tests/v1/core/test_scheduler.py",
    "tests/v1/core/test_async_scheduler.py",
    "tests/v1/core/prefix_cache",
    "tests/v1/kv_offload/cpu/test_manager.py",
    "tests/v1/simple_kv_offload",
)

CONNECTORS = (
    "tests/v1/engine/test_kv_cache_group_metadata.py",
    "tests/v1/kv_connector/unit/offloading_connector/test_events.py",
    "tests/v1/kv_connector/unit/offloading_connector/test_scheduler.py",
    "tests/v1/kv_connector/unit/test_cache_pollution_prevention.py",
    "tests/v1/kv_connector/unit/test_decode_bench_connector.py",
    "tests/v1/kv_connector/unit/test_error_propagation.py",
    "tests/v1/kv_connector/unit/test_flexkv_connector.py",
    "tests/v1/kv_connector/unit/test_hisparse_connector.py",
    "tests/v1/kv_connector/unit/test_invalid_blocks_correctness.py",
    "tests/v1/kv_connector/unit/test_kv_connector_lifecycle.py",
    "tests/v1/kv_connector/unit/test_kv_load_failure_recovery.py",
    "tests/v1/kv_connector/unit/test_mooncake_store_connector.py",
    "tests/v1/kv_connector/unit/test_mooncake_store_coordinator.py",
    "tests/v1/kv_connector/unit/test_mooncake_store_hma_e2e.py",
    "tests/v1/kv_connector/unit/test_mooncake_store_scheduler.py",
    "tests/v1/kv_connector/unit/test_multi_connector.py",
    "tests/v1/kv_connector/unit/test_nixl_connector_hma.py",
    "tests/v1/kv_connector/unit/test_nixl_simple_cpu_offload.py",
    "tests/v1/kv_connector/unit/test_remote_decode_lifecycle.py",
    "tests/v1/kv_connector/unit/test_remote_prefill_lifecycle.py",
    "tests/v1/kv_connector/unit/test_simple_cpu_offload_connector.py",
    "tests/v1/streaming_input/test_scheduler_streaming.py",
    "tests/v1/test_kv_cache_spec_registry.py",
)


def is_in_a_suite(file: str) -> bool:
    return any(file == one or file.startswith(f"{one}/") for one in SUITE + CONNECTORS)
