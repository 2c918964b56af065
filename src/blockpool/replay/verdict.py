"""The figures in words. Every sentence says what was measured on this trace, and nothing beyond it."""

from collections.abc import Sequence
from itertools import pairwise

from .by_kind import KindRun, by_kind
from .kinds import listed
from .result import RunResult
from .tier_report import tier_sentences, where_found


def verdict(runs: Sequence[RunResult]) -> list[str]:
    """Sentences about the runs, the smallest pool first."""
    by_size = sorted(runs, key=lambda run: run.num_blocks)
    finished = [run for run in by_size if not run.interrupted]
    sentences = [_interruption(run) for run in by_size if run.interrupted]
    sentences += [_refusals(run) for run in finished if run.refused_requests]
    measured = [run for run in finished if run.replayed_requests]
    sentences += [_hit_rate(run) for run in measured if run is measured[0] or run.tiers]
    sentences += [_comparison(smaller, larger) for smaller, larger in pairwise(measured)]
    for run in measured:
        sentences += _losses(run)
    sentences += [_evictions(run) for run in measured if run.evicted_blocks]
    # Without evictions every larger pool behaves the same, so the smallest such pool says it all.
    sentences += [_no_evictions(run) for run in measured if not run.evicted_blocks][:1]
    for run in measured:
        if run.tiers is not None:
            sentences += tier_sentences(f"At {_count(run.num_blocks, 'block')}", run.tiers)
    return sentences


def _interruption(run: RunResult) -> str:
    return (
        f"The run with {_count(run.num_blocks, 'block')} was interrupted after {run.requests:,} of "
        f"{_count(run.trace_requests, 'request')}: its figures are of those."
    )


def _refusals(run: RunResult) -> str:
    at = f"At {_count(run.num_blocks, 'block')}"
    if not run.replayed_requests:
        return f"{at} nothing was replayed: every request needs more than the whole pool."
    verb = "was" if run.refused_requests == 1 else "were"
    return (
        f"{at} {_count(run.refused_requests, 'request')} of {run.requests:,} {verb} refused, needing more than the "
        f"whole pool; {'the hit rate is that' if run.tiers is None else 'the shares are those'} of the others."
    )


def _hit_rate(run: RunResult) -> str:
    if run.tiers is not None:
        return f"At {_count(run.num_blocks, 'block')}{_of_tokens(run)}, {where_found(run, run.tiers)}"
    return (
        f"At {_count(run.num_blocks, 'block')}{_of_tokens(run)}, {run.hit_rate:.1%} of the "
        f"prompt tokens were found in the cache ({run.hit_tokens:,} of {run.prompt_tokens:,})."
    )


def _of_tokens(run: RunResult) -> str:
    """Blocks of several groups have no one length."""
    return "" if len(run.groups) > 1 else f" of {_count(run.block_size, 'token')}"


def _losses(run: RunResult) -> list[str]:
    """What could have been hit and was not, and which group of layers it was."""
    lost = run.reusable_tokens - run.found_tokens
    if not lost:
        return []
    at = f"At {_count(run.num_blocks, 'block')}"
    tokens: dict[str, int] = {}
    for loss in run.losses:
        tokens[loss.reason] = tokens.get(loss.reason, 0) + loss.tokens
    greatest_first = sorted(tokens.items(), key=lambda item: -item[1])
    reasons = ", ".join(f"{reason} ({count:,})" for reason, count in greatest_first)
    sentences = [
        f"{at} {_count(lost, 'prompt token')} {_were(lost)} computed again that an earlier prompt had in front too: "
        f"{reasons}."
    ]
    if len(run.groups) > 1:
        sentences.append(f"{at} {_worst(max(by_kind(run), key=lambda one: one.lost_tokens), lost)}")
    return sentences


def _worst(kind: KindRun, lost: int) -> str:
    groups = "group" if len(kind.groups) == 1 else "groups"
    return (
        f"{kind.kind} ({groups} {listed(kind.groups)}) cost the most of that, {kind.lost_tokens / lost:.1%}: it "
        f"shortened {_count(kind.shortened_hits, 'hit')}, mostly: {next(iter(kind.reasons))}."
    )


def _were(number: int) -> str:
    return "was" if number == 1 else "were"


def _comparison(smaller: RunResult, larger: RunResult) -> str:
    sizes = f"From {smaller.num_blocks:,} to {_count(larger.num_blocks, 'block')}"
    rates = f"{smaller.found_rate:.1%} to {larger.found_rate:.1%}"
    rate, hit = ("hit rate", "hit token") if larger.tiers is None else ("share that was found", "token")
    if smaller.refused_requests != larger.refused_requests:
        return f"{sizes} the {rate} went from {rates}, but not over the same requests: fewer were refused."
    more = larger.found_tokens - smaller.found_tokens
    if more == 0:
        return f"{sizes} the {rate} did not change."
    direction, difference = ("rose", "more") if more > 0 else ("fell", "fewer")
    return f"{sizes} the {rate} {direction} from {rates} ({_count(abs(more), f'{difference} {hit}')})."


def _evictions(run: RunResult) -> str:
    at = f"At {_count(run.num_blocks, 'block')}"
    if run.evicted_blocks == 1:
        ever = "had not been hit" if run.evicted_unused_blocks else "had been hit"
        return f"{at} 1 block was evicted; it {ever} since it was cached."
    share = run.evicted_unused_blocks / run.evicted_blocks
    return f"{at} {run.evicted_blocks:,} blocks were evicted; {share:.1%} of them had not been hit since cached."


def _no_evictions(run: RunResult) -> str:
    at = f"At {_count(run.num_blocks, 'block')} nothing was evicted"
    if run.refused_requests:
        return f"{at}: a larger pool can bring more hits only by replaying what this one refused."
    return f"{at}: for this trace a larger pool can bring no more hits."


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
