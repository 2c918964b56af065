"""One request through the books as an engine takes it there: the prompt in chunks, then the answer block by block."""

from collections.abc import Callable
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
    max_num_batched_tokens: int = DEFAULT_BATCHED_TOKENS,
    num_encoder_tokens: int = 0,
    on_commit: Callable[[], None] | None = None,
) -> Refusal | None:
    """Compute a request that nobody has admitted yet, behind its hit; the caller frees it.

    The prompt is computed in chunks of at most `max_num_batched_tokens`, which end where states are to be kept; the
    answer in pieces that end with a block, which takes and drops the same blocks as token by token. Where no group
    drops anything on the way, all is taken at once. `on_commit` is called when blocks were taken;
    `request.num_computed_tokens` then says how far the request is.

    A refusal is returned, before anything has changed, when the request as a whole would not fit.
    """
    prompt = request.num_prompt_tokens
    total = prompt + num_output_tokens
    request.num_tokens = total
    if not any(_drops(one.unread(total, prompt)) for one in manager.managers):
        plan = manager.plan(
            request,
            prompt - hit.num_tokens,
            hit=hit,
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
    growing = [one for one in manager.managers if one.table_length(total, prompt) > one.table_length(prompt, prompt)]
    stride = gcd(*(one.block_size for one in growing)) or total
    computed = hit.num_tokens
    adopted: Hit | None = hit
    while computed < total:
        if computed >= prompt:
            end = min(total, computed + stride - computed % stride)
        else:
            end = min(prompt, computed + max_num_batched_tokens)
            if has_states:
                end = _where_states_are_kept(manager, request, adopted, computed, end)
        plan = manager.plan(
            request,
            end - computed,
            hit=adopted,
            num_encoder_tokens=num_encoder_tokens,
            full_sequence_must_fit=adopted is not None,
        )
        if isinstance(plan, Refusal):
            manager.free(request)
            return plan
        manager.commit(plan)
        request.num_computed_tokens = computed = end
        adopted = None
        if on_commit is not None:
            on_commit()
    return None


def _drops(unread: tuple[int, int]) -> bool:
    first, end = unread
    return first < end


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
