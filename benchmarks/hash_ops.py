"""One process that times the hash chain of a 128 k-token prompt when told to: ours, or the rival's hasher.

Reads row names from standard input and answers each with one JSON line, the median seconds per block of 16 tokens.
`--rival` times vLLM's request hasher over a list, with the hash function of the row. It returns a list of digests, as
ours does in the rows "list to list"; in the rows "one block per call" both are called as a request grows, at each
block that became full.
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
NUM_BLOCKS = NUM_TOKENS // BLOCK_SIZE
TOKENS = random.Random(0).choices(range(128_000), k=NUM_TOKENS)


def rival() -> Callable[[str], Callable[[], object]]:
    from vllm.utils import hashing
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    def of_row(row: str) -> Callable[[], object]:
        hash_function = hashing.sha256_cbor if "sha256_cbor" in row else hashing.sha256
        init_none_hash(hash_function)
        hasher = get_request_block_hasher(BLOCK_SIZE, hash_function)
        request = SimpleNamespace(
            block_hashes=[],
            num_tokens=NUM_TOKENS,
            all_token_ids=TOKENS,
            mm_features=[],
            lora_request=None,
            cache_salt=None,
            prompt_embeds=None,
        )

        def grow() -> None:
            request.block_hashes = []
            for end in range(BLOCK_SIZE, NUM_TOKENS + 1, BLOCK_SIZE):
                request.num_tokens = end
                request.block_hashes.extend(hasher(request))

        return grow if "one block per call" in row else lambda: hasher(request)

    return of_row


def ours() -> Callable[[str], Callable[[], object]]:
    import numpy as np

    from blockpool.hashing import none_hash
    from blockpool.hashing.kernel import KERNEL, available_kernels, chain, chain_as_list, chain_pickled

    parent = none_hash("sha256_cbor", "bench")
    array = np.array(TOKENS, dtype=np.int32)

    def of_row(row: str) -> Callable[[], object]:
        kernel = "portable-c" if row.startswith("portable") else KERNEL
        tokens = array if "array" in row else TOKENS
        if kernel not in available_kernels():
            raise SystemExit(f"the {kernel} kernel is not in this build")
        form = "cbor" if "sha256_cbor" in row else "pickle"

        def grow() -> None:
            hashes = [parent]
            for first in range(0, NUM_TOKENS, BLOCK_SIZE):
                hashes.extend(chain_as_list(form, tokens, BLOCK_SIZE, hashes[-1], None, 1, first))

        if "one block per call" in row:
            return grow
        if "list to list" in row:
            return lambda: chain_as_list(form, tokens, BLOCK_SIZE, parent, kernel=kernel)
        concatenated = chain if form == "cbor" else chain_pickled
        return lambda: concatenated(tokens, BLOCK_SIZE, parent, kernel=kernel)

    return of_row


ROWS = [
    "sha256_cbor chain, list of ints",
    "sha256_cbor chain, int32 array",
    "portable sha256_cbor chain, list of ints",
    "portable sha256_cbor chain, int32 array",
    "sha256_cbor chain, list to list",
    "sha256_cbor, one block per call",
    "sha256 chain, list of ints",
    "sha256 chain, int32 array",
    "portable sha256 chain, list of ints",
    "sha256 chain, list to list",
    "sha256, one block per call",
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
        median = statistics.median(times) / NUM_BLOCKS
        print(json.dumps({"median": median, "longest": max(times)}), flush=True)


if __name__ == "__main__":
    main()
