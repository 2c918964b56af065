"""What a manager is made of in one random workload: its groups, its sizes and its options."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd, lcm
from typing import Any

MAX_MODEL_LEN = 128
STATE_BLOCK_SIZE = 8
#: Groups by name; "large" is full attention with blocks of twice the size.
KINDS = (
    "full",
    "full",
    "full",
    "window",
    "chunk",
    "reference",
    "full+window",
    "full+window",
    "full+window+window",
    "large+window",
    "full+large",
    "full+chunk",
    "full+reference",
    "window+window",
    "full+mamba",
    "full+mamba",
    "full+mamba+mamba",
    "large+mamba",
    "full+window+mamba",
    "full+ring",
    "full+ring+mamba",
    "full+encoder",
)
#: Names of groups that are never looked up.
NEVER_CACHED = frozenset({"ring", "encoder"})


@dataclass(frozen=True)
class ManagerScenario:
    seed: int
    kind: str
    block_size: int
    window: int
    num_blocks: int
    enable_caching: bool
    enable_events: bool
    retention: int | None
    use_eagle: bool
    draft_group: int | None
    num_hash_lookahead: int
    num_prefill_lookahead: int
    num_drafts: int
    max_in_flight: int | None
    watermark: float
    hash_name: str
    reports_all: bool

    @classmethod
    def of(cls, seed: int) -> ManagerScenario:
        rng = random.Random(f"manager {seed}")
        kind = rng.choice(KINDS)
        names = kind.split("+")
        block_size = rng.choice((2, 4))
        scenario = cls(
            seed=seed,
            kind=kind,
            block_size=block_size,
            window=rng.choice((3, 5, 9)),
            num_blocks=rng.choice((12, 20, 40)) * min(len(names), 2),
            enable_caching="encoder" not in names and rng.random() < 0.9,
            enable_events=rng.random() < 0.8,
            retention=None,
            use_eagle=False,
            draft_group=None,
            num_hash_lookahead=0,
            num_prefill_lookahead=0,
            num_drafts=rng.choice((0, 0, 2)) if "mamba" in names else 0,
            max_in_flight=rng.choice((None, None, 8, 32)),
            watermark=rng.choice((0.0, 0.0, 0.1)),
            hash_name=rng.choice(("sha256", "sha256_cbor", "xxhash")),
            reports_all="mamba" not in names and rng.random() < 0.1,
        )
        if rng.random() < 0.5:
            scenario = replace(scenario, retention=rng.choice((0, 0, *scenario.intervals)))
        return scenario.with_drafts(rng)

    def with_drafts(self, rng: random.Random) -> ManagerScenario:
        """Some models draft: they drop the last block of a hit, or hash tokens ahead."""
        fits = [i for i, name in enumerate(self.names) if name in ("full", "large", "window")]
        drawn = rng.random()
        # (Windows of another block size than full attention's may have longer hits in ours.)
        if drawn < 0.2 and fits and self.kind != "large+window":
            # Where every group may draft, none need say so, and then all do.
            group = rng.choice((*fits, None)) if len(fits) == len(self.names) else rng.choice(fits)
            ahead = rng.choice((0, 0, 1, 3))
            return replace(
                self,
                use_eagle=True,
                draft_group=group,
                num_prefill_lookahead=min(ahead, self.scheduler_block_size),
            )
        if (
            drawn < 0.3
            and not {"window", "chunk"} & set(self.names)
            and all(
                self.size_of(name) == self.hash_block_size
                for name in self.names
                if name not in ("mamba", *NEVER_CACHED)
            )
        ):
            return replace(self, num_hash_lookahead=2, num_prefill_lookahead=rng.choice((0, 1, 2)))
        return self

    @property
    def names(self) -> list[str]:
        return self.kind.split("+")

    @property
    def has_states(self) -> bool:
        return "mamba" in self.names

    def size_of(self, name: str) -> int:
        return {"mamba": STATE_BLOCK_SIZE, "large": 2 * self.block_size}.get(name, self.block_size)

    @property
    def scheduler_block_size(self) -> int:
        return lcm(*(self.size_of(name) for name in self.names))

    @property
    def hash_block_size(self) -> int:
        """A state block of several hash units brings partial hits and copy-on-write."""
        return 2 if self.has_states else gcd(*(self.size_of(n) for n in self.names if n not in NEVER_CACHED))

    @property
    def min_prompt(self) -> int:
        """With drafts, vLLM keeps the first window of a prompt that is too short to be resumed anywhere."""
        return 2 * self.scheduler_block_size + 1 if self.use_eagle and self.retention is not None else 1

    @property
    def intervals(self) -> tuple[int, ...]:
        """Retention intervals that vLLM accepts here, besides 0."""
        if not {"window", "mamba"} & set(self.names):
            return ()
        return (self.scheduler_block_size, 2 * self.scheduler_block_size)

    def build(self) -> Any:
        """A manager of whatever class vLLM's modules hold now."""
        import torch
        from vllm.v1 import kv_cache_interface as interface
        from vllm.v1.core.kv_cache_manager import KVCacheManager

        heads = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
        size = self.block_size
        makers: dict[str, Callable[[], Any]] = {
            "full": lambda: interface.FullAttentionSpec(block_size=size, **heads),
            "large": lambda: interface.FullAttentionSpec(block_size=2 * size, **heads),
            "window": lambda: interface.SlidingWindowSpec(block_size=size, sliding_window=self.window, **heads),
            "chunk": lambda: interface.ChunkedLocalAttentionSpec(
                block_size=size, attention_chunk_size=4 * size, **heads
            ),
            "reference": lambda: interface.RSWASpec(block_size=size, rswa_window=self.window, **heads),
            "ring": lambda: interface.CircularBufferSpec(block_size=size, **heads),
            "encoder": lambda: interface.CrossAttentionSpec(block_size=size, **heads),
            "mamba": lambda: interface.MambaSpec(
                block_size=STATE_BLOCK_SIZE,
                shapes=((1,),),
                dtypes=(torch.float32,),
                mamba_cache_mode="align",
                num_speculative_blocks=self.num_drafts,
            ),
        }
        groups = [interface.KVCacheGroupSpec([f"layer{i}"], makers[name]()) for i, name in enumerate(self.names)]
        if self.draft_group is not None:
            groups[self.draft_group].is_eagle_group = True
        config = interface.KVCacheConfig(
            num_blocks=self.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=self.retention,
        )
        return KVCacheManager(
            config,
            max_model_len=MAX_MODEL_LEN,
            scheduler_block_size=self.scheduler_block_size,
            hash_block_size=self.hash_block_size,
            max_in_flight_tokens=self.max_in_flight,
            enable_caching=self.enable_caching,
            enable_kv_cache_events=self.enable_events,
            use_eagle=self.use_eagle,
            num_hash_lookahead_tokens=self.num_hash_lookahead,
            num_prefill_lookahead=self.num_prefill_lookahead,
            watermark=self.watermark,
            log_stats=True,
        )

    def chunk(self, rng: random.Random, start: int, request: Any) -> int:
        """How many tokens to compute from `start` on. State models stop where a state can be kept: at the ends of
        blocks and at the prompt's last hash boundary."""
        missing = request.num_tokens - start
        if not self.has_states or start >= request.num_prompt_tokens:
            return rng.randint(1, missing)
        size = STATE_BLOCK_SIZE
        unit = self.hash_block_size
        last = (request.num_prompt_tokens - max(1, self.num_hash_lookahead)) // unit * unit
        if self.use_eagle:
            last = max(0, request.num_prompt_tokens // unit * unit - unit)
        ends = [end for end in (*range(size, last, size), last, request.num_prompt_tokens) if end > start]
        return min(missing, rng.choice(ends[:2]) - start)
