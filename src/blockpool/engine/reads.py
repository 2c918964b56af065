"""Which tokens a kind of attention reads: one rule for the models that read and for the check of what they get."""

from __future__ import annotations

import numpy as np

from blockpool.engine.slots import Ints
from blockpool.managers import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheSpec,
    ReferenceWindowSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)


def tokens_read(spec: KVCacheSpec, first: int, last: int, num_prompt_tokens: int) -> Ints:
    """The tokens that any of the tokens first .. last-1 reads, itself included, ascending.

    A circular buffer holds no more than its newest `block_size` tokens: there `last` is `first` + 1. Raises TypeError
    for a kind that does not read tokens by their place: states, and the output of an encoder.
    """
    if isinstance(spec, FullAttentionSpec | SinkFullAttentionSpec):
        return np.arange(last, dtype=np.int64)
    if isinstance(spec, SlidingWindowSpec):
        return np.arange(max(0, first - spec.sliding_window + 1), last, dtype=np.int64)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return np.arange(first - first % spec.attention_chunk_size, last, dtype=np.int64)
    if isinstance(spec, ReferenceWindowSpec):
        prompt = min(num_prompt_tokens, last)
        window = np.arange(max(prompt, first - spec.sliding_window), last, dtype=np.int64)
        return np.concatenate([np.arange(prompt, dtype=np.int64), window])
    if isinstance(spec, CircularBufferSpec):
        return np.arange(max(0, last - spec.block_size), last, dtype=np.int64)
    raise TypeError(f"{type(spec).__name__} does not read tokens by their place")
