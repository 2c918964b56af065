"""The pool classes that vLLM gets. Not compiled, so that people can subclass them and set attributes on them."""

from __future__ import annotations

from typing import Any

from blockpool.integrations.vllm.block_pool import PoolOverBooks


class BlockPool(PoolOverBooks):
    """vLLM's BlockPool over blockpool's books."""


class SharedEventQueueBlockPool(BlockPool):
    """A pool whose events go into the queue of another pool, `event_owner`, in one order with that pool's."""

    def __init__(self, *args: Any, event_owner: BlockPool, **kwargs: Any) -> None:
        self._event_owner = event_owner
        waiting = event_owner.kv_event_queue
        super().__init__(*args, **kwargs)  # begins with an empty queue
        event_owner.kv_event_queue = waiting

    @property
    def kv_event_queue(self) -> list[Any]:
        return self._event_owner.kv_event_queue

    @kv_event_queue.setter
    def kv_event_queue(self, events: list[Any]) -> None:
        self._event_owner.kv_event_queue = events
