"""A model's capacity in figures: each setting (blocks, retention) measured, each pool beside it."""

from collections.abc import Sequence
from typing import Any

import msgspec

from blockpool.managers import ChunkedLocalAttentionSpec, KVCacheGroupSpec
from blockpool.models import CacheLayout

from .capacity import (
    PromptUse,
    blocks_for,
    common_unit,
    findable_tokens,
    measure_prompt,
    most_concurrent,
)
from .drive import DEFAULT_BATCHED_TOKENS
from .errors import ReplayError
from .kinds import group_kinds
from .working_set import PoolOutcome, WorkingSet

JSON_FORMAT = "blockpool.plan/1"


class GroupFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All groups of one kind. Bytes are those of their layers together; None where only groups were given."""

    kind: str
    """As `--groups` has it: full:16, window=1024:16."""
    groups: tuple[int, ...]
    layers: int | None
    block_size: int
    bytes_per_token: int | None
    bytes_per_state: int | None
    unused: float | None
    """The part of their blocks that is padding, or pages for which a group has no layer."""


class CapacitySetting(msgspec.Struct, frozen=True, kw_only=True):
    """How a cache is cut and what it keeps, and what one request of each length takes of it."""

    block_size: int | None
    """Tokens per block that were asked for; None where the groups were given with theirs."""
    retention_interval: int | None
    kv_cache_groups: tuple[KVCacheGroupSpec, ...]
    groups: tuple[GroupFigures, ...]
    bytes_per_block: int | None
    unit: int
    """Tokens at whose multiples hits end: no shorter prefix is ever found again."""
    prompts: tuple[PromptUse, ...]
    working_set: WorkingSet | None = None

    @property
    def longest(self) -> int:
        """Which of the prompts is the longest."""
        return max(range(len(self.prompts)), key=lambda at: self.prompts[at].num_prompt_tokens)


class CapacityPool(msgspec.Struct, frozen=True, kw_only=True):
    """A setting in a pool of a given size. One entry per length where there are several."""

    setting: CapacitySetting
    memory_bytes: int | None
    num_blocks: int
    """The null block included."""
    concurrency: tuple[int | None, ...]
    """Requests at once, see `most_concurrent`."""
    tokens_held: tuple[int | None, ...]
    """Tokens of finished prompts that can be found again at the same time, see `findable_tokens`."""
    outcome: PoolOutcome | None = None


class MemoryNeed(msgspec.Struct, frozen=True, kw_only=True):
    """The smallest pool for so many requests of one length at once."""

    num_requests: int
    num_prompt_tokens: int
    num_blocks: int
    memory_bytes: int | None


class CapacityReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer. `notes`: what was assumed. `needs`: one entry per setting, and in it one per length."""

    source: str
    architecture: str | None
    max_model_len: int | None
    num_encoder_tokens: int
    kv_cache_dtype: str | None
    tensor_parallel_size: int
    num_output_tokens: int
    max_num_batched_tokens: int
    notes: tuple[str, ...]
    settings: tuple[CapacitySetting, ...]
    pools: tuple[CapacityPool, ...]
    needs: tuple[tuple[MemoryNeed, ...], ...] = ()
    traces: tuple[str, ...] = ()


def measure_setting(
    groups: Sequence[KVCacheGroupSpec],
    *,
    layout: CacheLayout | None = None,
    block_size: int | None = None,
    bytes_per_block: int | None = None,
    retention_interval: int | None = None,
    lengths: Sequence[int],
    num_output_tokens: int = 0,
    max_num_batched_tokens: int = DEFAULT_BATCHED_TOKENS,
    num_encoder_tokens: int = 0,
) -> CapacitySetting:
    """One request of each length through these groups; `layout` where they are those of a model.

    Raises ReplayError for a request that is too large to be measured, ConfigError for an interval that does not fit.
    """
    unit = common_unit(groups, retention_interval)
    return CapacitySetting(
        block_size=block_size,
        retention_interval=retention_interval,
        kv_cache_groups=tuple(groups),
        groups=_group_figures(groups, layout),
        bytes_per_block=bytes_per_block if layout is None else layout.bytes_per_block,
        unit=unit,
        prompts=tuple(
            measure_prompt(
                groups,
                num_prompt_tokens=length,
                num_output_tokens=num_output_tokens,
                max_num_batched_tokens=max_num_batched_tokens,
                num_encoder_tokens=num_encoder_tokens,
                retention_interval=retention_interval,
            )
            for length in lengths
        ),
    )


def blocks_in(setting: CapacitySetting, memory_bytes: int) -> int:
    """The blocks that fit, the null block included. Raises ReplayError for fewer than the 2 that a pool needs."""
    assert setting.bytes_per_block is not None
    num_blocks = memory_bytes // setting.bytes_per_block
    if num_blocks < 2:
        raise ReplayError(
            f"{memory_bytes} bytes hold {num_blocks} blocks of {setting.bytes_per_block} bytes, and a pool needs 2 "
            "(one is the null block)"
        )
    return num_blocks


def pool_of(
    setting: CapacitySetting, num_blocks: int, memory_bytes: int | None = None, outcome: PoolOutcome | None = None
) -> CapacityPool:
    """The setting in a pool of so many blocks, the null block included."""
    groups = setting.kv_cache_groups
    return CapacityPool(
        setting=setting,
        memory_bytes=memory_bytes,
        num_blocks=num_blocks,
        concurrency=tuple(most_concurrent(num_blocks, groups, use) for use in setting.prompts),
        tokens_held=tuple(findable_tokens(num_blocks, groups, use) for use in setting.prompts),
        outcome=outcome,
    )


def needs_of(setting: CapacitySetting, num_requests: int) -> tuple[MemoryNeed, ...]:
    """What so many requests at once need, for each length."""
    needs = []
    for use in setting.prompts:
        num_blocks = blocks_for(num_requests, setting.kv_cache_groups, use)
        needs.append(
            MemoryNeed(
                num_requests=num_requests,
                num_prompt_tokens=use.num_prompt_tokens,
                num_blocks=num_blocks,
                memory_bytes=None if setting.bytes_per_block is None else num_blocks * setting.bytes_per_block,
            )
        )
    return tuple(needs)


def holds_chunks(setting: CapacitySetting) -> bool:
    """Whether what a request holds at rest depends on where in a chunk it stands."""
    return any(isinstance(group.kv_cache_spec, ChunkedLocalAttentionSpec) for group in setting.kv_cache_groups)


def _group_figures(groups: Sequence[KVCacheGroupSpec], layout: CacheLayout | None) -> tuple[GroupFigures, ...]:
    members: dict[str, list[int]] = {}
    for at, kind in enumerate(group_kinds(groups)):
        members.setdefault(kind, []).append(at)
    return tuple(_figures(kind, tuple(ids), groups[ids[0]].block_size, layout) for kind, ids in members.items())


def _figures(kind: str, groups: tuple[int, ...], block_size: int, layout: CacheLayout | None) -> GroupFigures:
    if layout is None:
        return GroupFigures(
            kind=kind,
            groups=groups,
            layers=None,
            block_size=block_size,
            bytes_per_token=None,
            bytes_per_state=None,
            unused=None,
        )
    parts = [layout.groups[at] for at in groups]
    used = sum(part.used_bytes_per_block for part in parts)
    return GroupFigures(
        kind=kind,
        groups=groups,
        layers=sum(len(part.group.layer_names) for part in parts),
        block_size=block_size,
        bytes_per_token=sum(part.bytes_per_token for part in parts),
        bytes_per_state=sum(part.bytes_per_state for part in parts),
        unused=1 - used / (layout.bytes_per_block * len(parts)),
    )


def capacity_as_json(report: CapacityReport, verdict: Sequence[str]) -> bytes:
    """The report as an indented JSON document with a line end. A pool names its setting by its place in the list."""
    document: dict[str, Any] = {"format": JSON_FORMAT} | msgspec.structs.asdict(report)
    document["settings"] = [_setting_as_dict(setting) for setting in report.settings]
    document["pools"] = [_pool_as_dict(pool, report.settings.index(pool.setting)) for pool in report.pools]
    document["verdict"] = verdict
    return msgspec.json.format(msgspec.json.encode(document)) + b"\n"


def _setting_as_dict(setting: CapacitySetting) -> dict[str, Any]:
    figures: dict[str, Any] = msgspec.structs.asdict(setting)
    del figures["kv_cache_groups"]
    if setting.working_set is not None:
        figures["working_set"] = msgspec.structs.asdict(setting.working_set) | {
            "num_blocks": setting.working_set.num_blocks
        }
    return figures


def _pool_as_dict(pool: CapacityPool, setting: int) -> dict[str, Any]:
    figures: dict[str, Any] = msgspec.structs.asdict(pool) | {"setting": setting}
    if pool.outcome is not None:
        figures["outcome"] = msgspec.structs.asdict(pool.outcome) | {"fits": pool.outcome.fits}
    return figures
