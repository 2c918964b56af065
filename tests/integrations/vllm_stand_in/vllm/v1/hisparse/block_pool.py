from vllm.v1.core.block_pool import BlockPool


class SharedEventQueueBlockPool(BlockPool):
    def __init__(self, *args, event_owner, **kwargs):
        self.event_owner = event_owner
        super().__init__(*args, **kwargs)
