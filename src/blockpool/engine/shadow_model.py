"""A model without numbers: it accesses a store as each kind of attention does; its tokens follow from prefixes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blockpool.cache import KVCacheConfig
from blockpool.engine.fingerprint import NO_PREFIX, mixed
from blockpool.engine.model import RequestStep
from blockpool.engine.reads import tokens_read
from blockpool.engine.slots import ring_slots, slots_of
from blockpool.engine.store import Access, Store
from blockpool.managers import CircularBufferSpec, CrossAttentionSpec, SinkFullAttentionSpec


class ShadowModel:
    """To be run over a ShadowStore, which checks what it reads. All kinds of attention.

    `vocab_size`: its tokens are below that. `num_drafts`: most drafts per step, which a circular buffer leaves room
    for: its tokens read no further back than what rejected drafts cannot have overwritten.
    """

    def __init__(self, config: KVCacheConfig, vocab_size: int = 8, num_drafts: int = 0) -> None:
        self.groups = config.kv_cache_groups
        self.vocab_size = vocab_size
        self.num_drafts = num_drafts

    def token_after(self, print_of_prefix: int) -> int:
        """The token that follows a prefix."""
        return mixed(print_of_prefix ^ NO_PREFIX) % self.vocab_size

    def write_sinks(self, store: Store, sink_block_ids: Sequence[Sequence[int]]) -> None:
        """What attention sinks hold, which a step never writes: once, before the first."""
        for group_id, blocks in enumerate(sink_block_ids):
            if blocks:
                store.write(sink_access("sinks", group_id, self.groups[group_id].block_size, list(blocks)), 0)

    def forward(self, steps: list[RequestStep], store: Store) -> list[list[int]]:
        for group_id, group in enumerate(self.groups):
            spec = group.kv_cache_spec
            if spec.is_state:
                for step in steps:
                    self._start_state(step, group_id, store)
                for step in steps:
                    self._leave_states(step, group_id, store)
            elif isinstance(spec, CircularBufferSpec):
                for step in steps:
                    self._ring(step, group_id, spec, store)
            elif isinstance(spec, CrossAttentionSpec):
                for step in steps:
                    self._cross(step, group_id, group.block_size, store)
            else:
                size = group.block_size
                for step in steps:
                    tokens = np.arange(step.first, step.last)
                    store.write(step.access(group_id, tokens, slots_of(step.rows[group_id], size, tokens)), 0)
                for step in steps:
                    if isinstance(spec, SinkFullAttentionSpec):
                        store.read(sink_access(step.request_id, group_id, size, step.sinks[group_id]), 0)
                    tokens = tokens_read(spec, step.first, step.last, step.num_prompt_tokens)
                    store.read(step.access(group_id, tokens, slots_of(step.rows[group_id], size, tokens)), 0)
        return [self._sample(step) for step in steps]

    def _sample(self, step: RequestStep) -> list[int]:
        if not step.wants_token:
            return []
        return [
            self.token_after(int(print_of_prefix))
            for print_of_prefix in step.prints[step.last - 1 - step.num_drafts : step.last]
        ]

    def _start_state(self, step: RequestStep, group_id: int, store: Store) -> None:
        states = step.states[group_id]
        if states is not None and step.first > 0:
            store.read(step.access(group_id, np.array([step.first - 1]), np.array([states.start])), 0)

    def _leave_states(self, step: RequestStep, group_id: int, store: Store) -> None:
        states = step.states[group_id]
        if states is not None:
            for after, block in zip(states.after, states.writes, strict=True):
                store.write(step.access(group_id, np.array([after - 1]), np.array([block])), 0)

    def _ring(self, step: RequestStep, group_id: int, spec: CircularBufferSpec, store: Store) -> None:
        row = step.rows[group_id]
        for token in range(step.first, step.last):
            own = np.array([token])
            store.write(step.access(group_id, own, ring_slots(row, spec.block_size, own)), 0)
            tokens = tokens_read(spec, token, token + 1, step.num_prompt_tokens)
            tokens = tokens[tokens >= max(step.first_of_own, token + 1 - spec.block_size + self.num_drafts)]
            store.read(step.access(group_id, tokens, ring_slots(row, spec.block_size, tokens)), 0)

    def _cross(self, step: RequestStep, group_id: int, block_size: int, store: Store) -> None:
        """The encoder's output depends on the request alone: it is written when the request starts to compute."""
        places = np.arange(len(step.rows[group_id]) * block_size)
        name = mixed(sum(byte << (8 * (at % 8)) for at, byte in enumerate(step.request_id.encode())) % 2**64)
        prints = np.array([mixed(name ^ place) for place in places.tolist()], np.uint64)
        access = Access(step.request_id, group_id, places, slots_of(step.rows[group_id], block_size, places), prints)
        if step.first == step.first_of_own:
            store.write(access, 0)
        store.read(access, 0)


def sink_access(reader: str, group_id: int, block_size: int, sinks: list[int]) -> Access:
    """All slots of the sink blocks of a group: their content depends on their place alone."""
    places = np.arange(len(sinks) * block_size)
    prints = np.array([mixed(place + 1) for place in places.tolist()], np.uint64)
    return Access(reader, group_id, places, slots_of(np.array(sinks, np.int32), block_size, places), prints)
