"""A capacity report in words."""

from .capacity import PromptUse, num_reserved_blocks
from .capacity_report import CapacityPool, CapacityReport, CapacitySetting, MemoryNeed, holds_chunks
from .capacity_tables import setting_text
from .memory_text import enough_memory_text, memory_text


def capacity_verdict(report: CapacityReport) -> list[str]:
    """Sentences for every pool, then for what is the same in all of them."""
    several = len(report.settings) > 1
    sentences = []
    for pool in report.pools:
        sentences += _pool_sentences(pool, report, _setting_words(pool.setting) if several else "")
    for setting, needs in zip(report.settings, report.needs, strict=False):
        sentences += [_need(need, _setting_words(setting) if several else "") for need in needs]
    sentences += _reuse_sentences(report)
    if report.num_encoder_tokens:
        sentences.append(f"Each request also holds blocks for {_count(report.num_encoder_tokens, 'encoder token')}.")
    if holds_chunks(report.settings[0]):
        sentences.append(
            "Groups of chunks hold nothing at the end of a chunk and a whole chunk just before it: try lengths in "
            "between too."
        )
    return sentences


def _setting_words(setting: CapacitySetting) -> str:
    return f" ({setting_text(setting)})"


def _pool_sentences(pool: CapacityPool, report: CapacityReport, words: str) -> list[str]:
    setting = pool.setting
    size = f"{_count(pool.num_blocks, 'block')}, the null block included"
    if pool.memory_bytes is None:
        subject = f"{size}{words}"
    else:
        each = memory_text(setting.bytes_per_block or 0)
        subject = f"{memory_text(pool.memory_bytes)}{words} hold {size}, of {each} each"
    sentences = [subject + _at_once(pool) + "."]
    for use, count in zip(setting.prompts, pool.concurrency, strict=True):
        if count == 0:
            needs = _count(use.num_peak_blocks, "block")
            sentences.append(f"Not one request of {_length(use)} fits there{words}: at its peak it holds {needs}.")
    if pool.outcome is not None and setting.working_set is not None:
        sentences.append(_outcome(pool, report, words))
    return sentences


def _at_once(pool: CapacityPool) -> str:
    """Requests at once, length by length, as far as they fit."""
    answers = []
    for use, count in zip(pool.setting.prompts, pool.concurrency, strict=True):
        if count is None:
            answers.append(
                f"any number of requests of {_length(use)} (computed one after the other: at rest they hold nothing)"
            )
        elif count:
            answers.append(f"{_count(count, 'request')} of {_length(use)}")
    if not answers:
        return ""
    *some, last = answers
    return f": room for {', '.join(some) + ' or ' if some else ''}{last} at once"


def _length(use: PromptUse) -> str:
    prompt = _count(use.num_prompt_tokens, "token")
    return prompt if not use.num_output_tokens else f"{prompt} and {use.num_output_tokens:,} of output"


def _outcome(pool: CapacityPool, report: CapacityReport, words: str) -> str:
    outcome, working_set = pool.outcome, pool.setting.working_set
    assert outcome is not None
    assert working_set is not None
    blocks = _count(working_set.num_blocks, "block")
    if pool.setting.bytes_per_block is not None:
        blocks += f" ({memory_text(working_set.num_blocks * pool.setting.bytes_per_block)})"
    size = f"{memory_text(pool.memory_bytes)} of" if pool.memory_bytes else "the pool of"
    size = f"{size} {_count(pool.num_blocks, 'block')}{words}"
    needs = f"The working set of {', '.join(report.traces)} is {blocks}"
    if outcome.fits:
        return f"{needs} and fits {size}: {outcome.hit_rate:.1%} of the prompt tokens are found, nothing is evicted."
    found = (
        f"{outcome.hit_rate:.1%} of the prompt tokens are found, where a pool that never evicts finds "
        f"{working_set.hit_rate:.1%}"
    )
    evicted = f"{_count(outcome.evicted_blocks, 'block')} {_are(outcome.evicted_blocks)} evicted"
    room = pool.num_blocks - num_reserved_blocks(pool.setting.kv_cache_groups)
    if working_set.num_blocks > room:
        needs += f" and does not fit {size}"
    elif outcome.evicted_blocks:
        needs += f". {size[0].upper()}{size[1:]} would hold that alone, but not beside a request that runs"
    else:
        needs += f" and would fit {size}"
    return f"{needs}: {found}; {evicted}{_refused(outcome.refused_requests, working_set.largest_request)}."


def _refused(count: int, largest: int) -> str:
    """What is wrong with requests, and not with the working set."""
    if count == 0:
        return ""
    return (
        f", and {_count(count, 'request')} never {'fits' if count == 1 else 'fit'}: the largest holds "
        f"{_count(largest, 'block')} at its peak"
    )


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _need(need: MemoryNeed, words: str) -> str:
    requests = f"{_count(need.num_requests, 'request')} of {_count(need.num_prompt_tokens, 'token')} at once{words}"
    verb = "needs" if need.num_requests == 1 else "need"
    blocks = f"{need.num_blocks:,} blocks"
    if need.memory_bytes is None:
        return f"{requests} {verb} {blocks}, the null block included."
    return f"{requests} {verb} {enough_memory_text(need.memory_bytes)} ({blocks})."


def _reuse_sentences(report: CapacityReport) -> list[str]:
    sentences = []
    units = list(dict.fromkeys(setting.unit for setting in report.settings))
    cached = any(use.num_left_blocks for setting in report.settings for use in setting.prompts)
    if cached:
        shortest = _count(units[0], "token") if not units[1:] else f"{' or '.join(map(str, units))} tokens (the unit)"
        sentences.append(
            f"A prefix shorter than {shortest} is never found again, and of a prompt at least one token is computed."
        )
    if not cached:
        sentences.append("No prompt of these lengths leaves anything that can be found again.")
    for setting in report.settings:
        longest = setting.prompts[setting.longest]
        first = longest.first_reusable
        if first is not None and first > setting.unit:
            words = _setting_words(setting) if len(report.settings) > 1 else ""
            sentences.append(
                f"Of one prompt of {_count(longest.num_prompt_tokens, 'token')} the next one finds nothing below "
                f"{_count(first, 'token')}{words}: no shorter end is kept until two prompts have shared it."
            )
    return sentences


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
