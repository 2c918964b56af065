"""A run's groups, those of equal kind as one: what each kind held, lost and stood in the way of."""

import msgspec

from .kinds import listed
from .losses import LossReason
from .result import RunResult

KIND_HEADINGS = (
    "blocks",
    "groups",
    "kind",
    "held at peak",
    "blocks evicted",
    "cached at end",
    "shortened hits",
    "tokens lost",
)


class KindRun(msgspec.Struct, frozen=True, kw_only=True):
    """All groups of one kind together. `shortened_hits`: lookups that found less because of one of them."""

    kind: str
    groups: tuple[int, ...]
    held_at_peak: int
    evicted_blocks: int
    cached_blocks: int
    shortened_hits: int
    lost_tokens: int
    reasons: dict[LossReason, int]
    """Tokens per reason, the greatest first."""


def by_kind(run: RunResult) -> list[KindRun]:
    """In the order of the groups."""
    members: dict[str, list[int]] = {}
    for at, group in enumerate(run.groups):
        members.setdefault(group.kind, []).append(at)
    return [_kind_run(run, kind, tuple(groups)) for kind, groups in members.items()]


def _kind_run(run: RunResult, kind: str, groups: tuple[int, ...]) -> KindRun:
    reasons: dict[LossReason, int] = {}
    losses = [loss for loss in run.losses if loss.group in groups]
    for loss in losses:
        reasons[loss.reason] = reasons.get(loss.reason, 0) + loss.tokens
    return KindRun(
        kind=kind,
        groups=groups,
        held_at_peak=sum(run.groups[at].held_at_peak for at in groups),
        evicted_blocks=sum(run.groups[at].evicted_blocks for at in groups),
        cached_blocks=sum(run.groups[at].cached_blocks for at in groups),
        shortened_hits=run.shortened_hits.get(kind, 0),
        lost_tokens=sum(loss.tokens for loss in losses),
        reasons=dict(sorted(reasons.items(), key=lambda item: -item[1])),
    )


def kind_rows(run: RunResult) -> list[tuple[str, ...]]:
    """One row per kind, under `KIND_HEADINGS`."""
    return [
        (
            f"{run.num_blocks:,}" if number == 0 else "",
            listed(one.groups),
            one.kind,
            f"{one.held_at_peak:,}",
            f"{one.evicted_blocks:,}",
            f"{one.cached_blocks:,}",
            f"{one.shortened_hits:,}",
            f"{one.lost_tokens:,}",
        )
        for number, one in enumerate(by_kind(run))
    ]
