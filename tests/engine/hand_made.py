"""Steps made by hand, without a scheduler or a cache: one request in blocks of its own."""

from __future__ import annotations

from collections.abc import Sequence

from blockpool.cache import KVCacheConfig
from blockpool.engine import CachedRequestData, Model, NewRequestData, SchedulerOutput, Store, Worker
from blockpool.managers import CircularBufferSpec, MambaSpec


def step(
    step_id: int,
    *,
    new: Sequence[NewRequestData] = (),
    running: Sequence[CachedRequestData] = (),
    tokens: dict[str, int] | None = None,
    drafts: dict[str, list[int]] | None = None,
    copies: Sequence = (),
    clears: tuple[list[int], ...] = (),
    finished: Sequence[str] = (),
    preempted: Sequence[str] = (),
) -> SchedulerOutput:
    return SchedulerOutput(
        step_id=step_id,
        new_requests=list(new),
        running=list(running),
        num_scheduled_tokens=tokens or {},
        draft_token_ids=drafts or {},
        copies=list(copies),
        clears=clears,
        loads=[],
        finished_ids=list(finished),
        preempted_ids=list(preempted),
    )


def same_table(config: KVCacheConfig, num_tokens: int, first_block: int = 1) -> tuple[list[int], ...]:
    """Blocks for so many tokens, from `first_block` on, in every group."""
    tables = []
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        count = -(-num_tokens // group.block_size)
        if isinstance(spec, CircularBufferSpec) or (isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "none"):
            count = 1
        if isinstance(spec, MambaSpec):
            count += spec.num_speculative_blocks
        tables.append(list(range(first_block, first_block + count)))
        first_block += count
    return tuple(tables)


def alone(
    config: KVCacheConfig,
    model: Model,
    store: Store,
    prompt: Sequence[int],
    num_outputs: int,
    chunks: Sequence[int] = (),
) -> list[int]:
    """What a model says to a prompt that nothing else disturbs: every token is computed, in blocks of its own.

    `chunks`: how many tokens the first steps compute; the rest of the prompt is one step.
    """
    worker = Worker(config, store, model)
    tables = same_table(config, len(prompt) + num_outputs)
    new = [NewRequestData("alone", list(prompt), len(prompt), 0, tables)]
    done, number, outputs = 0, 0, []
    nothing: tuple[list[int], ...] = tuple([] for _ in tables)
    while len(outputs) < num_outputs:
        known = len(prompt) + len(outputs)
        count = min(known - done, chunks[number] if number < len(chunks) else known)
        running = [] if number == 0 else [CachedRequestData("alone", done, [], nothing, nothing)]
        result = worker.execute(step(number, new=new, running=running, tokens={"alone": count}))
        outputs += result.get("alone", [])
        new, done, number = [], done + count, number + 1
    return outputs
