"""A capacity report as tables for people."""

from collections.abc import Sequence

from .capacity_report import CapacityPool, CapacityReport, CapacitySetting, GroupFigures
from .kinds import listed
from .memory_text import memory_text

GROUP_HEADINGS = ("groups", "layers", "tokens per block", "bytes per token", "bytes per state", "unused", "kind")
PROMPT_HEADINGS = (
    "prompt tokens",
    "blocks at rest",
    "memory at rest",
    "blocks at peak",
    "memory at peak",
    "peak at token",
    "blocks left",
    "found from",
    "same again",
)


def bytes_lines(setting: CapacitySetting) -> list[str]:
    """What a token and a block cost, where that is known."""
    if setting.bytes_per_block is None:
        return []
    per_token = sum(figures.bytes_per_token or 0 for figures in setting.groups)
    block = f"{setting.bytes_per_block:,} bytes per block"
    return [f"{per_token:,} bytes per token in all layers, {block}" if per_token else block]


def group_rows(setting: CapacitySetting) -> list[tuple[str, ...]]:
    """One row per kind of group, under `GROUP_HEADINGS`."""
    width = max(len(figures.kind) for figures in setting.groups)
    return [_group_row(figures, width) for figures in setting.groups]


def _group_row(figures: GroupFigures, width: int) -> tuple[str, ...]:
    return (
        listed(figures.groups),
        _number(figures.layers),
        f"{figures.block_size:,}",
        _number(figures.bytes_per_token or None),
        _number(figures.bytes_per_state or None),
        "-" if figures.unused is None else f"{figures.unused:.1%}",
        figures.kind.ljust(width),
    )


def prompt_rows(setting: CapacitySetting) -> list[tuple[str, ...]]:
    """One row per length, under `PROMPT_HEADINGS`."""
    return [
        (
            f"{use.num_prompt_tokens:,}",
            per_group(use.at_rest),
            _memory(setting, use.num_rest_blocks),
            per_group(use.peak),
            _memory(setting, use.num_peak_blocks),
            f"{use.peak_tokens:,}",
            per_group(use.left),
            _number(use.first_reusable),
            f"{use.same_again:,}",
        )
        for use in setting.prompts
    ]


def comparison_headings(report: CapacityReport) -> tuple[str, ...]:
    """Of `comparison_rows`."""
    lengths = [use.num_prompt_tokens for use in report.settings[0].prompts]
    headings = ["tokens per block", "retention", "memory", "blocks", "tokens held"]
    headings += [f"at once {length:,}" for length in lengths]
    headings += ["unit", "found from", "blocks left"]
    if report.traces:
        headings += ["working set", "fits", "hit rate"]
    return tuple(headings)


def comparison_rows(report: CapacityReport) -> list[tuple[str, ...]]:
    """One row per pool."""
    return [_comparison_row(pool) for pool in report.pools]


def _comparison_row(pool: CapacityPool) -> tuple[str, ...]:
    setting = pool.setting
    longest = setting.prompts[setting.longest]
    cells = [
        block_sizes(setting),
        retention_text(setting.retention_interval),
        "-" if pool.memory_bytes is None else memory_text(pool.memory_bytes),
        f"{pool.num_blocks:,}",
        _number(pool.tokens_held[setting.longest]),
        *("any" if count is None else f"{count:,}" for count in pool.concurrency),
        f"{setting.unit:,}",
        _number(longest.first_reusable),
        f"{longest.num_left_blocks:,}",
    ]
    if setting.working_set is not None and pool.outcome is not None:
        cells += [
            f"{setting.working_set.num_blocks:,}",
            "yes" if pool.outcome.fits else "no",
            f"{pool.outcome.hit_rate:.1%}",
        ]
    return tuple(cells)


def block_sizes(setting: CapacitySetting) -> str:
    """Tokens per block of the groups, each size once."""
    return "/".join(str(size) for size in dict.fromkeys(figures.block_size for figures in setting.groups))


def setting_text(setting: CapacitySetting) -> str:
    """A setting in words."""
    return f"blocks of {block_sizes(setting)} tokens, retention {retention_text(setting.retention_interval)}"


def retention_text(interval: int | None) -> str:
    """A retention interval as the option has it."""
    return "dense" if interval is None else str(interval)


def per_group(blocks: Sequence[int]) -> str:
    """Blocks of each group in the order of the groups, equal neighbours as one: 64*6+512; the sum behind it."""
    runs: list[list[int]] = []
    for count in blocks:
        if runs and runs[-1][0] == count:
            runs[-1][1] += 1
        else:
            runs.append([count, 1])
    if len(blocks) == 1:
        return f"{blocks[0]:,}"
    parts = "+".join(str(count) if times == 1 else f"{count}*{times}" for count, times in runs)
    return f"{parts} = {sum(blocks):,}"


def _memory(setting: CapacitySetting, num_blocks: int) -> str:
    return "-" if setting.bytes_per_block is None else memory_text(num_blocks * setting.bytes_per_block)


def _number(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"
