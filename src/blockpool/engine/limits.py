"""How many tokens of a request one step may compute, and what it can hold at the least."""

from __future__ import annotations

from typing import final

from blockpool.cache import Hit, KVCacheManager
from blockpool.engine.request import EngineRequest


@final
class Limits:
    """What the cache and its groups impose on a scheduler.

    `most_drafts`: as many as the groups of states have states for. `drops`: some group gives blocks back while a
    request runs, `only_grows` says group by group which do not.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self.max_steps_in_flight = manager.managers[0].max_steps_in_flight
        self.hash_block_size = manager.pool.hash_block_size
        self.max_model_len = manager.max_model_len
        self.max_in_flight_tokens = manager.max_in_flight_tokens
        self.only_grows: list[bool] = [m.most_blocks(1 << 40, 1) is None for m in manager.managers]
        self.drops = not all(self.only_grows)
        self.has_states = False
        self.keeps_states = False
        self.most_drafts = 1 << 40
        self.largest_block = 1
        for kind, group in zip(manager.managers, manager.config.kv_cache_groups, strict=True):
            if kind.prefix_cacheable:
                self.largest_block = max(self.largest_block, kind.block_size)
            if kind.is_state:
                self.has_states = True
                self.keeps_states = self.keeps_states or kind.prefix_cacheable
                states = getattr(group.kv_cache_spec, "num_speculative_blocks", 0)
                self.most_drafts = min(self.most_drafts, states)

    def first_chunk(self, request: EngineRequest, hit: Hit | None, budget: int) -> int:
        """Tokens to compute first, behind the hit: as many as may be, but to the next checkpoint of states."""
        start = 0 if hit is None else hit.num_tokens
        new = min(request.num_tokens - start, budget, self.max_in_flight_tokens)
        if self.keeps_states and new > 1:
            return self.where_states_are_kept(request, start, new, self.manager.next_checkpoint(request, hit))
        return new

    def next_chunk(self, request: EngineRequest, new: int) -> int:
        """Of `new` tokens of a running request, those before the next checkpoint of states."""
        if self.keeps_states and new > 1:
            start = request.num_computed_tokens
            return self.where_states_are_kept(request, start, new, self.manager.next_checkpoint(request))
        return new

    def where_states_are_kept(self, request: EngineRequest, start: int, new: int, checkpoint: int | None) -> int:
        """Of `new` tokens from `start`, those before the checkpoint; else before the last boundary at which a state
        can be found, if what is known goes beyond it.
        """
        end = start + new
        if checkpoint is not None and checkpoint <= end:
            return checkpoint - start
        if end < request.num_tokens:
            aligned = end - end % self.manager.alignment
            if aligned > start:
                return aligned - start
        return new

    def fits_in_pieces(self, request: EngineRequest) -> bool:
        """Whether the known tokens would fit the empty pools, computed one by one with one step in flight."""
        groups = self.manager.groups
        prompt, encoder = request.num_prompt_tokens, request.num_encoder_tokens
        for computed in range(request.num_tokens - 1, -1, -1):  # the longest tables first
            total = [0] * len(groups.pools)
            for at, manager in enumerate(groups.managers):
                length = manager.table_length(computed + 1, prompt, encoder)
                first, end = manager.unread(computed, prompt)
                total[groups.pool_of[at]] += length - max(0, min(end, length) - first)
            for pool, blocks in enumerate(total):
                if blocks > groups.capacity(pool):
                    return False
        return True
