"""Which block and pool sizes make sense for a trace when the user names none."""

from math import gcd

import msgspec
import numpy as np

from blockpool.traces import Trace

from .digests import DigestedTrace
from .errors import ReplayError
from .expand import DIGEST_BYTES

# What most engines use; for traces of tokens, which have no unit of their own.
TOKEN_TRACE_BLOCK_SIZE = 16
# Shares of the whole trace's need that show where a larger cache stops paying.
DEFAULT_SHARES = (0.05, 0.2, 0.5, 1.0)


class TraceNeed(msgspec.Struct, frozen=True):
    """Pool sizes a trace asks for, in blocks, the null block included."""

    largest_request: int
    """The smallest pool that refuses no request."""
    whole_trace: int
    """A pool from which nothing need ever be evicted."""


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


def measure_need(digested: DigestedTrace, block_size: int) -> TraceNeed:
    """What the trace asks for at this block size (a multiple of the hash block size). Reads the trace once."""
    stride = block_size // digested.hash_block_size * (DIGEST_BYTES // 8)
    closing_digests = []
    largest = largest_unknown = num_recomputed = 0
    for request, chain in digested:
        num_blocks = -(-(request.num_prompt_tokens + request.num_output_tokens) // block_size)
        # The first word stands for the digest: in a count, two that agree in 64 bits of 256 do not matter.
        words = np.frombuffer(chain, dtype="<u8")[stride - DIGEST_BYTES // 8 :: stride]
        closing_digests.append(words)
        largest = max(largest, num_blocks)
        largest_unknown = max(largest_unknown, num_blocks - len(words))
        # One prompt token is always computed: a prompt that ends with its last full block computes that block again,
        # and both copies stay.
        num_recomputed += len(words) * block_size == request.num_prompt_tokens
    distinct = len(np.unique(np.concatenate(closing_digests)))
    return TraceNeed(largest_request=1 + largest, whole_trace=1 + distinct + num_recomputed + largest_unknown)


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
