"""Mamba and other linear attention: one state after each token, of which only the newest is read."""

from __future__ import annotations

from typing import final

from librt.vecs import append, vec
from mypy_extensions import i32, i64

from blockpool.managers.base import SingleTypeKVCacheManager
from blockpool.managers.specs import KVCacheGroupSpec, MambaSpec
from blockpool.managers.tables import NO_BLOCKS, GroupHit, Table
from blockpool.pool.block_pool import BlockPool


@final
class MambaManager(SingleTypeKVCacheManager):
    """Mode "align": the state at the end of block p stands at position p, so that it can be found; the running state
    stands at the last position of the computed tokens, the states of drafts behind it. Between checkpoints are nulls.
    `num_tokens` is without drafts. Mode "none": the running state and those of drafts, in as many positions.
    """

    def __init__(self, pool: BlockPool, group_id: int, group: KVCacheGroupSpec) -> None:
        super().__init__(pool, group_id, group)
        spec = group.kv_cache_spec
        assert isinstance(spec, MambaSpec)
        self.num_speculative_blocks: int = spec.num_speculative_blocks
        self.aligned: bool = spec.mamba_cache_mode == "align"
        self.supports_partial_boundaries = self.aligned

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - 1)

    def unread(self, num_computed_tokens: int, num_prompt_tokens: int) -> tuple[int, int]:
        return 0, self.num_skipped_tokens(num_computed_tokens) // self.block_size if self.aligned else 0

    def num_blocks(self, num_tokens: int, num_prompt_tokens: int = 0, num_encoder_tokens: int = 0) -> int:
        return 1 + self.num_speculative_blocks

    def can_read(self, request_id: str, num_computed_tokens: int, num_tokens: int, num_prompt_tokens: int) -> bool:
        """Without draft states, the state must stand where the step begins, and have a block where it ends."""
        table = self.tables.get(request_id)
        if table is None or not self.aligned or self.num_speculative_blocks:
            return True
        held = len(table)
        for tokens in (min(num_computed_tokens, num_tokens), num_tokens):
            at = (tokens - 1) // self.block_size
            if 0 <= at < held and table.blocks[at] == 0:
                return False
        return True

    def most_blocks(self, max_model_len: int, max_in_flight_tokens: int, num_prompt_tokens: int = 0) -> int | None:
        """With the states that steps in flight read and write."""
        return self.num_speculative_blocks + 1 + (self.max_steps_in_flight if self.aligned else 0)

    def table_length(self, num_tokens: int, num_prompt_tokens: int = 0, num_encoder_tokens: int = 0) -> int:
        positions = -(-num_tokens // self.block_size) if self.aligned else 1
        return positions + self.num_speculative_blocks

    # -- a table grows by one state, wherever it ends -------------------------------------------------

    def num_new_blocks(
        self,
        request_id: str,
        num_tokens: int,
        hit: GroupHit | None = None,
        num_computed_tokens: int = 0,
        num_prompt_tokens: int = 0,
        num_encoder_tokens: int = 0,
    ) -> int:
        if not self.aligned:
            return super().num_new_blocks(request_id, num_tokens, hit, num_computed_tokens)
        length = self.table_length(num_tokens)
        running = length - 1 - self.num_speculative_blocks
        table = self.tables.get(request_id)
        if table is not None:
            held = len(table)
            if length <= held:
                return 0
            return length - max(held, running) - len(self.movable(table, running))
        adopted = 0 if hit is None else len(hit)
        copied = 0 if hit is None or hit.num_tokens % self.block_size == 0 else 1
        loaded = 0 if self.loaded_at(adopted, running, num_computed_tokens) < 0 else 1
        return max(0, length - max(adopted, running)) + loaded + copied

    def grow(
        self,
        request_id: str,
        num_tokens: int,
        num_computed_tokens: int = 0,
        num_prompt_tokens: int = 0,
        num_encoder_tokens: int = 0,
    ) -> vec[i32]:
        if not self.aligned:
            return super().grow(request_id, num_tokens, num_computed_tokens)
        table = self.tables[request_id]
        held = len(table)
        length = self.table_length(num_tokens)
        if length <= held:
            return NO_BLOCKS
        running = length - 1 - self.num_speculative_blocks
        moved = self.movable(table, running)
        loaded = self.loaded_at(held, running, num_computed_tokens) if table.num_scratch == 0 else -1
        count = length - max(held, running) - len(moved) + int(loaded >= 0)
        blocks = self.pool.take(count)
        if loaded >= 0:
            table.extend_null(loaded - held)
            table.extend(blocks[:1])
            blocks = blocks[1:]
        table.extend_null(running - len(table))
        self.leave(table, moved, held)
        table.extend(moved)
        table.extend(blocks)
        table.num_scratch = self.num_speculative_blocks
        return table.blocks[held:]

    def loaded_at(self, held: int, running: int, num_computed_tokens: int) -> int:
        """The position of a state that comes from elsewhere, between those held and the running one; -1 for none."""
        if num_computed_tokens <= held * self.block_size:
            return -1
        at = (num_computed_tokens - 1) // self.block_size
        return at if at < running else -1

    def movable(self, table: Table, running: int) -> vec[i32]:
        """The draft states that would stand before the running one: they move along, unless somebody shares them."""
        out = vec[i32]()
        blocks = table.blocks
        end: i64 = len(blocks)
        at = end - table.num_scratch
        while at < min(end, running):
            if self.pool.is_block_writable(int(blocks[at])):
                out = append(out, blocks[at])
            at += 1
        return out

    def leave(self, table: Table, moved: vec[i32], held: i64) -> None:
        """Show null where these blocks stood."""
        blocks = table.blocks
        at = held - table.num_scratch
        for b in moved:
            while blocks[at] != b:
                at += 1
            blocks[at] = 0
