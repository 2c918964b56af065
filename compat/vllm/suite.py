"""Which of vLLM 0.33's own tests speak for the ledger: files and folders, relative to its source tree."""

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
