"""Which block and pool sizes make sense for a trace when the user names none."""

from collections.abc import Sequence
from math import gcd

import msgspec
import numpy as np
import numpy.typing as npt

from blockpool.cache import KVCacheConfig, KVCacheManager, Request
from blockpool.managers import KVCacheGroupSpec, KVCacheSpec, SinkFullAttentionSpec
from blockpool.traces import Trace

from .digests import DigestedTrace
from .drive import DEFAULT_BATCHED_TOKENS, blocks_held, drive
from .errors import ReplayError
from .expand import DIGEST_BYTES

# What most engines use; for traces of tokens, which have no unit of their own.
TOKEN_TRACE_BLOCK_SIZE = 16
# A hash block of fewer tokens would make a replay slow for no insight.
SMALLEST_UNIT = 8
# Shares of the whole trace's need that show where a larger cache stops paying.
DEFAULT_SHARES = (0.05, 0.2, 0.5, 1.0)


class TraceNeed(msgspec.Struct, frozen=True):
    """Pool sizes a trace asks for, in blocks, the null block included."""

    largest_request: int
    """The smallest pool that refuses no request."""
    whole_trace: int
    """A pool with room for every distinct prefix of the trace. Where all groups read everything, nothing is ever
    evicted from it; others may ask for more, when their hits are shortened and blocks computed twice."""


def default_block_size(trace: Trace) -> int:
    """The trace's own unit; for several units the largest block that fits them all.

    Raises `ReplayError` when that would be a block no engine has.
    """
    units = trace.units()
    if not units:
        return TOKEN_TRACE_BLOCK_SIZE
    common = gcd(*units)
    if common < min(units[0], TOKEN_TRACE_BLOCK_SIZE):
        listed = ", ".join(str(unit) for unit in units)
        raise ReplayError(f"the traces have ids of {listed} tokens: choose --block-size")
    return common


def measure_need(
    digested: DigestedTrace,
    config: KVCacheConfig,
    *,
    max_num_batched_tokens: int = DEFAULT_BATCHED_TOKENS,
    num_encoder_tokens: int = 0,
) -> TraceNeed:
    """What the trace asks of a cache with these groups; the config's number of blocks does not matter.

    Reads the trace once.
    """
    groups = config.kv_cache_groups
    num_reserved = sum(_num_reserved(group.kv_cache_spec) for group in groups)
    asked = KVCacheManager(
        msgspec.structs.replace(config, num_blocks=1 + num_reserved), max_in_flight_tokens=max_num_batched_tokens
    )
    block_sizes = {group.block_size for group in groups if group.kv_cache_spec.prefix_cacheable}
    closing_digests: dict[int, list[npt.NDArray[np.uint64]]] = {size: [] for size in block_sizes}
    largest_unknown = dict.fromkeys(block_sizes, 0)
    num_recomputed = dict.fromkeys(block_sizes, 0)
    shapes: set[tuple[int, int]] = set()
    num_chunks = 0
    for request, chain in digested:
        prompt = request.num_prompt_tokens
        shapes.add((prompt, request.num_output_tokens))
        num_chunks += 1 + -(-prompt // max_num_batched_tokens)
        # The first word stands for the digest: in a count, two that agree in 64 bits of 256 do not matter.
        words = np.frombuffer(chain, dtype="<u8")
        for size in block_sizes:
            stride = size // digested.hash_block_size * (DIGEST_BYTES // 8)
            closing = words[stride - DIGEST_BYTES // 8 :: stride]
            closing_digests[size].append(closing)
            num_blocks = -(-(prompt + request.num_output_tokens) // size)
            largest_unknown[size] = max(largest_unknown[size], num_blocks - len(closing))
            # One prompt token is always computed: a prompt that ends with its last full block computes that block
            # again, and both copies stay.
            num_recomputed[size] += len(closing) * size == prompt
    distinct = {size: len(np.unique(np.concatenate(parts))) for size, parts in closing_digests.items()}
    largest = _largest(asked, shapes, max_num_batched_tokens, num_encoder_tokens)
    whole = 0
    for group in groups:
        size = group.block_size
        if size in distinct and group.kv_cache_spec.prefix_cacheable:
            kept = distinct[size] + num_recomputed[size]
            whole += largest_unknown[size] + (min(kept, num_chunks) if group.kv_cache_spec.is_state else kept)
    return TraceNeed(
        largest_request=1 + num_reserved + largest,
        whole_trace=1 + num_reserved + max(whole, largest),
    )


def _num_reserved(spec: KVCacheSpec) -> int:
    return spec.sink_len // spec.block_size if isinstance(spec, SinkFullAttentionSpec) else 0


def _largest(manager: KVCacheManager, shapes: set[tuple[int, int]], chunk: int, num_encoder_tokens: int) -> int:
    """The most blocks that one of these requests holds at a time, in a pool that has none to give."""
    bounds: list[tuple[int, int, int]] = []
    for prompt, output in shapes:
        request = Request("asked", num_prompt_tokens=prompt)
        refusal = drive(
            manager,
            request,
            manager.get_computed_blocks(request),
            num_output_tokens=output,
            max_num_batched_tokens=chunk,
            num_encoder_tokens=num_encoder_tokens,
        )
        assert refusal is not None
        bounds.append((refusal.pools[0].needed, prompt, output))
    # A refusal names what the worst of all chunks would need: no request needs more, and few have to be looked at.
    largest = 0
    for bound, prompt, output in sorted(bounds, reverse=True):
        if bound <= largest:
            break
        if _drops_nothing(manager, prompt, prompt + output):
            largest = bound  # it holds the most at its end
        else:
            held = blocks_held(manager, None, prompt, prompt + output, chunk, num_encoder_tokens)
            largest = max(largest, max(blocks[0] for blocks in held))
    return largest


def _drops_nothing(manager: KVCacheManager, num_prompt_tokens: int, num_tokens: int) -> bool:
    """Whether no group gives a block back while a request runs."""
    spans = [one.unread(num_tokens, num_prompt_tokens) for one in manager.managers]
    return all(first >= last for first, last in spans)


def default_pool_sizes(need: TraceNeed) -> list[int]:
    """A few shares of what the whole trace needs, ascending, none so small that a request is refused."""
    shares = (int(share * need.whole_trace) for share in DEFAULT_SHARES)
    return sorted({max(need.largest_request, size) for size in shares})


def blocks_in_memory(memory_bytes: int, bytes_per_token: int, block_size: int) -> int:
    """The pool that fits, the null block included.

    Raises `ReplayError` when not even one block besides the null block fits.
    """
    num_blocks = memory_bytes // (bytes_per_token * block_size)
    if num_blocks < 2:
        raise ReplayError(
            f"{memory_bytes} bytes hold {num_blocks} of the blocks of {block_size} tokens at {bytes_per_token} bytes "
            "per token, and a pool needs 2 (one is the null block)"
        )
    return num_blocks


def hash_unit(trace: Trace, groups: Sequence[KVCacheGroupSpec]) -> int:
    """The largest unit in which both the blocks of the groups and the ids of the trace can be told apart, in tokens.

    Raises `ReplayError` when it is so small that a replay would drown in digests.
    """
    sizes = [group.block_size for group in groups if group.kv_cache_spec.prefix_cacheable]
    unit = gcd(*(sizes or [group.block_size for group in groups]), *trace.units())
    if trace.units() and unit < min(SMALLEST_UNIT, *sizes, *trace.units()):
        units = ", ".join(str(unit) for unit in trace.units())
        blocks = ", ".join(str(size) for size in sorted(set(sizes)))
        raise ReplayError(
            f"blocks of {blocks} tokens and ids of {units} tokens have only {unit} in common: choose another block "
            "size, or groups with one"
        )
    return unit
