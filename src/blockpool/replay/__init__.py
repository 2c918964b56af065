"""Traffic through the books: a trace replayed through a real cache manager, and what that showed.

`replay` asks the pure cache question, one request after the other, for every kind of attention. This room must not
know how a trace file is written, and it changes nothing in the books it drives.
"""

from typing import TYPE_CHECKING, Any

from .by_kind import KIND_HEADINGS, KindRun, by_kind, kind_rows
from .capacity import PromptUse, blocks_for, findable_tokens, measure_prompt, most_concurrent
from .digests import DigestedTrace
from .drive import DEFAULT_BATCHED_TOKENS, drive
from .errors import ReplayError, ReplayInterrupted
from .losses import Loss, LossReason
from .report import HEADINGS, ReplayReport, report_as_json, report_rows
from .result import GroupRun, RunResult
from .simulate import full_attention, replay
from .sizes import (
    DEFAULT_SHARES,
    TraceNeed,
    blocks_in_memory,
    default_block_size,
    default_pool_sizes,
    hash_unit,
    measure_need,
)
from .step_cost import StepCost
from .tier_run import StackRun, TierRun
from .tiers import StoreWhen, TierOrder, TierSpec, TierStack
from .verdict import verdict

if TYPE_CHECKING:
    from .concurrent import DEFAULT_NUM_SEQS, ConcurrentRun, Percentiles, replay_concurrently
    from .concurrent_report import (
        CONCURRENT_HEADINGS,
        ConcurrentReport,
        concurrent_as_json,
        concurrent_rows,
        concurrent_verdict,
    )

# The engine is imported by those only who ask for what runs on it.
_CONCURRENT = (
    *("DEFAULT_NUM_SEQS", "ConcurrentRun", "Percentiles", "replay_concurrently"),
    *("CONCURRENT_HEADINGS", "ConcurrentReport", "concurrent_as_json", "concurrent_rows", "concurrent_verdict"),
)

__all__ = [
    "CONCURRENT_HEADINGS",
    "DEFAULT_BATCHED_TOKENS",
    "DEFAULT_NUM_SEQS",
    "DEFAULT_SHARES",
    "HEADINGS",
    "KIND_HEADINGS",
    "ConcurrentReport",
    "ConcurrentRun",
    "DigestedTrace",
    "GroupRun",
    "KindRun",
    "Loss",
    "LossReason",
    "Percentiles",
    "PromptUse",
    "ReplayError",
    "ReplayInterrupted",
    "ReplayReport",
    "RunResult",
    "StackRun",
    "StepCost",
    "StoreWhen",
    "TierOrder",
    "TierRun",
    "TierSpec",
    "TierStack",
    "TraceNeed",
    "blocks_for",
    "blocks_in_memory",
    "by_kind",
    "concurrent_as_json",
    "concurrent_rows",
    "concurrent_verdict",
    "default_block_size",
    "default_pool_sizes",
    "drive",
    "findable_tokens",
    "full_attention",
    "hash_unit",
    "kind_rows",
    "measure_need",
    "measure_prompt",
    "most_concurrent",
    "replay",
    "replay_concurrently",
    "report_as_json",
    "report_rows",
    "verdict",
]


def __getattr__(name: str) -> Any:
    if name not in _CONCURRENT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import concurrent, concurrent_report

    return getattr(concurrent, name) if hasattr(concurrent, name) else getattr(concurrent_report, name)
