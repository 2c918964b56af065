"""One request through the books as an engine takes it there: the prompt in chunks, then the answer block by block."""

from collections.abc import Callable, Iterator
from math import gcd

from blockpool.cache import Hit, KVCacheManager, Refusal, Request

# What vLLM computes in a step on a large GPU.
DEFAULT_BATCHED_TOKENS = 8192


def drive(
    manager: KVCacheManager,
    request: Request,
    hit: Hit,
    *,
    num_output_tokens: int,
    num_external_tokens: int = 0,
    max_num_batched_tokens: int = DEFAULT_BATCHED_TOKENS,
    num_encoder_tokens: int = 0,
    on_commit: Callable[[], None] | None = None,
) -> Refusal | None:
    """Compute a request that nobody has admitted yet, behind its hit; the caller frees it.

    `num_external_tokens` more than the hit come from elsewhere into blocks that are taken for them, before anything
    is computed.

    The prompt is computed in chunks of at most `max_num_batched_tokens`, which end where states are to be kept; the
    answer in pieces that end with a block, which takes and drops the same blocks as token by token. Where no group
    drops anything on the way, all is taken at once. `on_commit` is called when blocks were taken;
    `request.num_computed_tokens` then says how far the request is.

    A refusal is returned, before anything has changed, when the blocks that are free cannot hold the request at its
    peak, as it is computed here; an engine that admits by the worst case of any chunk asks for more.
    """
    prompt = request.num_prompt_tokens
    total = prompt + num_output_tokens
    request.num_tokens = total
    for one in manager.managers:
        first, last = one.unread(total, prompt)
        if first < last:  # it drops what it no longer reads
            break
    else:
        plan = manager.plan(
            request,
            prompt - hit.num_tokens - num_external_tokens,
            hit=hit,
            num_external_computed_tokens=num_external_tokens or None,
            num_lookahead_tokens=num_output_tokens,
            num_encoder_tokens=num_encoder_tokens,
        )
        if isinstance(plan, Refusal):
            return plan
        manager.commit(plan)
        request.num_computed_tokens = total
        if on_commit is not None:
            on_commit()
        return None
    has_states = any(one.is_state and one.prefix_cacheable for one in manager.managers)
    stride = _stride(manager, prompt, total)
    computed = hit.num_tokens
    external = num_external_tokens
    adopted: Hit | None = hit
    fits = False  # whatever comes; else it is asked step by step
    while computed < total:
        if external:
            end = computed + external
        elif computed >= prompt:
            end = min(total, computed + stride - computed % stride)
        else:
            end = min(prompt, computed + max_num_batched_tokens)
            if has_states:
                end = _where_states_are_kept(manager, request, adopted, computed, end)
        plan = manager.plan(
            request,
            end - computed - external,
            hit=adopted,
            num_external_computed_tokens=external or None,
            num_encoder_tokens=num_encoder_tokens,
            full_sequence_must_fit=adopted is not None and not fits,
        )
        if isinstance(plan, Refusal):
            if adopted is not None and not fits:
                free = [pool.get_num_free_blocks() for pool in manager.pools]
                peaks = blocks_held(
                    manager, hit, prompt, total, max_num_batched_tokens, num_encoder_tokens, num_external_tokens
                )
                fits = all(held <= room for blocks in peaks for held, room in zip(blocks, free, strict=True))
                if fits:
                    continue
            manager.free(request)
            return plan
        manager.commit(plan)
        request.num_computed_tokens = computed = end
        adopted = None
        external = 0
        if on_commit is not None:
            on_commit()
    return None


def blocks_held(
    manager: KVCacheManager,
    hit: Hit | None,
    num_prompt_tokens: int,
    num_tokens: int,
    max_num_batched_tokens: int,
    num_encoder_tokens: int = 0,
    num_external_tokens: int = 0,
) -> Iterator[list[int]]:
    """What a request holds per pool, in blocks, step after step, its hit and what comes from elsewhere included.

    Chunks are taken as if none of them ended early for a state.
    """
    managers = manager.managers
    pool_of = [group.pool for group in manager.config.kv_cache_groups]
    computed = num_external_tokens + (0 if hit is None else hit.num_tokens)
    copied = [int(one.prefix_cacheable and computed % one.block_size != 0) for one in managers]
    stride = _stride(manager, num_prompt_tokens, num_tokens)
    while computed < num_tokens:
        if computed < num_prompt_tokens:
            end = min(num_prompt_tokens, computed + max_num_batched_tokens)
        else:
            end = min(num_tokens, computed + stride - computed % stride)
        held = [0] * len(manager.pools)
        for at, one in enumerate(managers):
            length = one.table_length(end, num_prompt_tokens, num_encoder_tokens)
            first, last = one.unread(computed, num_prompt_tokens)
            held[pool_of[at]] += length - max(0, min(last, length) - first) + copied[at]
        yield held
        computed = end


def _stride(manager: KVCacheManager, num_prompt_tokens: int, num_tokens: int) -> int:
    """An answer is computed in pieces that end where some group that grows takes a block."""
    growing = [
        one.block_size
        for one in manager.managers
        if one.table_length(num_tokens, num_prompt_tokens) > one.table_length(num_prompt_tokens, num_prompt_tokens)
    ]
    return gcd(*growing) or num_tokens


def _where_states_are_kept(
    manager: KVCacheManager, request: Request, adopted: Hit | None, computed: int, end: int
) -> int:
    """The end of a chunk, moved back to a boundary at which a state can be found, if there is one."""
    checkpoint = manager.next_checkpoint(request, adopted)
    if checkpoint is not None and checkpoint <= end:
        return checkpoint
    if end < request.num_prompt_tokens:
        aligned = end - end % manager.alignment
        if aligned > computed:
            return aligned
    return end
