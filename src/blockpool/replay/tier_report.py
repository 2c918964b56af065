"""The tiers of a run: as rows of a table, as JSON, and in words."""

from typing import Any

import msgspec

from .memory_text import memory_text
from .result import RunResult
from .tier_run import StackRun, TierRun

TIER_HEADINGS = (
    "blocks",
    "tier",
    "hit tokens",
    "share",
    "loaded",
    "stored",
    "promoted",
    "written / distinct",
    "written / loaded",
    "pages evicted",
    "evicted unread",
)


def tier_rows(run: RunResult) -> list[tuple[str, ...]]:
    """A row for the GPU and one per tier, under `TIER_HEADINGS`; none where there are no tiers."""
    if run.tiers is None:
        return []
    gpu = (f"{run.num_blocks:,}", "GPU", f"{run.hit_tokens:,}", f"{run.hit_rate:.1%}", *["-"] * 7)
    return [gpu, *(_row(run, tier) for tier in run.tiers.tiers)]


def _row(run: RunResult, tier: TierRun) -> tuple[str, ...]:
    return (
        "",
        tier.name,
        f"{tier.hit_tokens:,}",
        f"{_share(tier.hit_tokens, run):.1%}",
        memory_text(tier.loaded_bytes),
        memory_text(tier.stored_bytes),
        memory_text(tier.promoted_bytes),
        _ratio(tier.write_amplification),
        _ratio(tier.written_per_loaded),
        f"{tier.evicted_pages:,}",
        f"{tier.evicted_unread_pages:,}",
    )


def stack_as_dict(run: RunResult, stack: StackRun) -> dict[str, Any]:
    """What a run's JSON has more where there are tiers."""
    return {
        "found_tokens": run.found_tokens,
        "found_rate": run.found_rate,
        "tiers": [
            msgspec.structs.asdict(tier)
            | {
                "hit_rate": _share(tier.hit_tokens, run),
                "written_bytes": tier.written_bytes,
                "write_amplification": tier.write_amplification,
                "written_per_loaded": tier.written_per_loaded,
                "load_s": tier.load_s,
            }
            for tier in stack.tiers
        ],
        "prefill_tokens_per_s": stack.prefill_tokens_per_s,
        "load_s": stack.load_s,
        "recompute_s": stack.recompute_s,
        "saved_s": stack.saved_s,
    }


def where_found(run: RunResult, stack: StackRun) -> str:
    """The rest of a sentence: which part of the prompts was found where."""
    parts = [f"{run.hit_rate:.1%} of the prompt tokens were found on the GPU ({run.hit_tokens:,})"]
    parts += [
        f"{_share(tier.hit_tokens, run):.1%} more with {tier.name} ({tier.hit_tokens:,})" for tier in stack.tiers
    ]
    return f"{', '.join(parts)}: {run.found_rate:.1%} in all ({run.found_tokens:,} of {run.prompt_tokens:,})."


def tier_sentences(at: str, stack: StackRun) -> list[str]:
    """What moved, and the time it took where speeds are stated. `at`: the pool, as each sentence begins."""
    return [*(_moved(at, tier) for tier in stack.tiers), *_time(at, stack)]


def _moved(at: str, tier: TierRun) -> str:
    if not tier.written_bytes:
        return f"{at} nothing was written to {tier.name}."
    sentence = f"{at} {memory_text(tier.written_bytes)} were written to {tier.name}"
    if tier.promoted_bytes:
        sentence += f", {memory_text(tier.promoted_bytes)} of that promoted from slower tiers"
    sentence += f"; {memory_text(tier.loaded_bytes)} were loaded from it"
    if not tier.evicted_pages:
        return f"{sentence}, and nothing was evicted from it."
    share = tier.evicted_unread_pages / tier.evicted_pages
    evicted = "1 page was" if tier.evicted_pages == 1 else f"{tier.evicted_pages:,} pages were"
    return f"{sentence}; {evicted} evicted from it, {share:.1%} never loaded since written."


def _time(at: str, stack: StackRun) -> list[str]:
    """Nothing is said of a speed that was not stated."""
    if not stack.hit_tokens:
        return []
    load, recompute, saved = stack.load_s, stack.recompute_s, stack.saved_s
    loads = f"loading {memory_text(stack.loaded_bytes)} takes"
    tokens = f"computing these {stack.hit_tokens:,} tokens"
    if load is not None and recompute is not None and saved is not None:
        difference = f"{_seconds(saved)} are saved" if saved >= 0 else f"{_seconds(-saved)} are lost"
        return [
            f"{at} {loads} {_seconds(load)} at the stated bandwidths, {tokens} {_seconds(recompute)} at "
            f"{_rate(stack.prefill_tokens_per_s)} tokens/s: {difference} by loading."
        ]
    if load is not None:
        return [f"{at} {loads} {_seconds(load)} at the stated bandwidths."]
    if recompute is not None:
        return [f"{at} {tokens} would take {_seconds(recompute)} at {_rate(stack.prefill_tokens_per_s)} tokens/s."]
    return []


def _share(tokens: int, run: RunResult) -> float:
    return tokens / run.prompt_tokens if run.prompt_tokens else 0.0


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _seconds(seconds: float) -> str:
    if seconds >= 1e9:
        return f"{seconds:.3g} s"
    return f"{seconds:,.1f} s" if seconds >= 10 else f"{seconds:.3f} s"


def _rate(per_second: float | None) -> str:
    assert per_second is not None
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:g}"
