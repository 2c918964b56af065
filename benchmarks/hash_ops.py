"""One process that times the hash chain of a 128 k-token prompt when told to: ours, or the rival's hasher.

Reads row names from standard input and answers each with one JSON line, the median seconds per block of 16 tokens.
`--rival` times vLLM's request hasher over a list.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

NUM_TOKENS = 131_072
BLOCK_SIZE = 16
TOKENS = [random.Random(0).randrange(128_000) for _ in range(NUM_TOKENS)]


def rival() -> Callable[[str], Callable[[], object]]:
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256_cbor)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256_cbor)

    def of_row(row: str) -> Callable[[], object]:
        request = SimpleNamespace(
            block_hashes=[],
            num_tokens=NUM_TOKENS,
            all_token_ids=TOKENS,
            mm_features=[],
            lora_request=None,
            cache_salt=None,
            prompt_embeds=None,
        )
        return lambda: hasher(request)

    return of_row


def ours() -> Callable[[str], Callable[[], object]]:
    import numpy as np

    from blockpool.hashing import none_hash
    from blockpool.hashing.kernel import KERNEL, available_kernels, chain

    parent = none_hash("sha256_cbor", "bench")
    array = np.array(TOKENS, dtype=np.int32)

    def of_row(row: str) -> Callable[[], object]:
        kernel = "portable-c" if row.startswith("portable") else KERNEL
        tokens = array if "array" in row else TOKENS
        if kernel not in available_kernels():
            raise SystemExit(f"the {kernel} kernel is not in this build")
        return lambda: chain(tokens, BLOCK_SIZE, parent, kernel=kernel)

    return of_row


ROWS = [
    "sha256_cbor chain, list of ints",
    "sha256_cbor chain, int32 array",
    "portable sha256_cbor chain, list of ints",
    "portable sha256_cbor chain, int32 array",
]


def main() -> None:
    call_of = rival() if "--rival" in sys.argv else ours()
    for line in sys.stdin:
        call = call_of(line.strip())
        times = []
        for _ in range(5):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        median = statistics.median(times) / (NUM_TOKENS // BLOCK_SIZE)
        print(json.dumps({"median": median, "longest": max(times)}), flush=True)


if __name__ == "__main__":
    main()
