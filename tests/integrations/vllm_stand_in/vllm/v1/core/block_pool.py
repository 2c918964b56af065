from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock, maybe_convert_block_hash


def make_key(block_hash, group):
    return block_hash + group.to_bytes(4, "big")


class BlockHashToBlockMap:
    def __init__(self):
        self.found = {}

    def get_one_block(self, key):
        return next(iter(self.found.get(key, {}).values()), None)

    def contain(self, key, block_id):
        return block_id in self.found.get(key, {})

    def insert(self, key, block):
        self.found.setdefault(key, {})[block.block_id] = block

    def pop(self, key, block_id):
        block = self.found.get(key, {}).pop(block_id, None)
        if key in self.found and not self.found[key]:
            del self.found[key]
        return block

    def __len__(self):
        return len(self.found)


class BlockPool:
    def __init__(
        self,
        num_gpu_blocks,
        enable_caching,
        hash_block_size,
        enable_kv_cache_events=False,
        metrics_collector=None,
        num_hash_lookahead_tokens=0,
        medium="GPU",
    ):
        self.num_gpu_blocks, self.enable_caching = num_gpu_blocks, enable_caching
        self.hash_block_size, self.medium = hash_block_size, medium
        self.enable_kv_cache_events, self.num_hash_lookahead_tokens = (
            enable_kv_cache_events,
            num_hash_lookahead_tokens,
        )
        self.blocks = [KVCacheBlock(block_id, pool=self) for block_id in range(num_gpu_blocks)]
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)
        self.null_block = self.free_block_queue.popleft()
        self.null_block.is_null = True
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        self.cached_block_hashes_by_block = {}
        self.kv_event_queue = []
        self.watchers = {}

    def _tell(self, event):
        if self.enable_kv_cache_events:
            self.kv_event_queue.append(event)

    def get_cached_block(self, block_hash, kv_cache_group_ids):
        found = [
            self.cached_block_hash_to_block.get_one_block(make_key(block_hash, group)) for group in kv_cache_group_ids
        ]
        return None if None in found else found

    def _stored(self, request, hashes, parent, begin, end, ends, block_size, group):
        lookahead, tokens = self.num_hash_lookahead_tokens, request.all_token_ids
        told = [maybe_convert_block_hash(one) for one in hashes]
        parent = None if parent is None else maybe_convert_block_hash(parent)
        event = BlockStored(told, parent, tokens[begin:end], block_size, None, self.medium, None, None, group)
        if lookahead:
            event.lookahead_token_ids = [tokens[at : at + lookahead] for at in ends]
        self._tell(event)

    def cache_full_blocks(
        self, request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, block_mask=None
    ):
        if num_cached_blocks >= num_full_blocks:
            return
        every = block_size // self.hash_block_size
        hashes = request.block_hashes[every - 1 :: every]
        new, ends = [], []
        for at in range(num_cached_blocks, num_full_blocks):
            block, end = blocks[at], (at + 1) * block_size
            if block.is_null or (block_mask is not None and not block_mask[at - num_cached_blocks]):
                continue
            if block.block_hash is not None:
                assert block.block_hash_num_tokens is not None
                assert block.block_hash_num_tokens < end
                self._maybe_evict_cached_block(block)
            self._insert_block_hash(make_key(hashes[at], kv_cache_group_id), block, end)
            new.append(hashes[at])
            ends.append(end)
        parent = hashes[num_cached_blocks - 1] if num_cached_blocks else None
        begin, end = num_cached_blocks * block_size, num_full_blocks * block_size
        self._stored(request, new, parent, begin, end, ends, block_size, kv_cache_group_id)

    def emit_cached_block_events(self, request, num_cached_blocks, block_size, kv_cache_group_id):
        raise NotImplementedError

    def cache_partial_block(
        self, request, block, num_tokens, kv_cache_group_id, block_size, replace_existing_hashes=False
    ):
        if block.is_null:
            return None
        unit = self.hash_block_size
        number = num_tokens // unit
        key = make_key(request.block_hashes[number - 1], kv_cache_group_id)
        if not replace_existing_hashes and self.cached_block_hash_to_block.contain(key, block.block_id):
            return key
        if replace_existing_hashes or (block.block_hash_num_tokens or num_tokens) < num_tokens:
            self._maybe_evict_cached_block(block)
        self._insert_block_hash(key, block, num_tokens)
        parent = request.block_hashes[number - 2] if number > 1 else None
        new = [request.block_hashes[number - 1]]
        begin = num_tokens - unit
        self._stored(request, new, parent, begin, num_tokens, [num_tokens], unit, kv_cache_group_id)
        return key

    def _insert_block_hash(self, block_hash_with_group_id, block, num_tokens):
        key = block_hash_with_group_id
        if self.cached_block_hash_to_block.contain(key, block.block_id):
            return
        if block.block_hash is None:
            block.set_block_hash(key, num_tokens)
        else:
            self.cached_block_hashes_by_block.setdefault(block.block_id, {})[key] = None
        self.cached_block_hash_to_block.insert(key, block)

    def _forget(self, block):
        keys = [block.block_hash] if block.block_hash is not None else []
        keys += self.cached_block_hashes_by_block.pop(block.block_id, {})
        for key in keys:
            self.cached_block_hash_to_block.pop(key, block.block_id)
        block.reset_hash()
        return keys

    def _maybe_evict_cached_block(self, block):
        keys = self._forget(block)
        for key in keys:
            group = int.from_bytes(key[-4:], "big")
            self._tell(BlockRemoved([maybe_convert_block_hash(key[:-4])], self.medium, group))
        return bool(keys)

    def move_block_hashes(self, src_block, dst_block):
        num_tokens = src_block.block_hash_num_tokens
        for key in self._forget(src_block):
            self._insert_block_hash(key, dst_block, num_tokens)
            num_tokens = None

    def get_new_blocks(self, num_blocks):
        if num_blocks > self.get_num_free_blocks():
            raise ValueError("too many")
        taken = self.free_block_queue.popleft_n(num_blocks)
        for block in taken:
            self._fire(block)
        for block in taken:
            self._maybe_evict_cached_block(block)
            block.ref_cnt += 1
        return taken

    def _fire(self, block):
        if block.block_id in self.watchers:
            self.watchers.pop(block.block_id)(block)

    def unpin_blocks(self, blocks, on_reuse):
        gone = []
        for block in blocks:
            block.ref_cnt -= 1
            self.watchers[block.block_id] = on_reuse
            if block.ref_cnt == 0:
                gone.append(block)
        self.free_block_queue.append_n(gone)

    def touch(self, blocks):
        for block in blocks:
            if not block.is_null:
                if block.ref_cnt == 0:
                    self.free_block_queue.remove(block)
                block.ref_cnt += 1

    def is_block_writable(self, block):
        return not block.is_null and block.ref_cnt == 1 and block.block_hash is None

    def free_blocks(self, ordered_blocks):
        front, back = [], []
        for block in ordered_blocks:
            if not block.is_null:
                block.ref_cnt -= 1
                if block.ref_cnt == 0:
                    (front if block.block_hash is None else back).append(block)
        self.free_block_queue.prepend_n(front)
        self.free_block_queue.append_n(back)

    def evict_blocks(self, block_ids):
        for block_id in block_ids:
            self._maybe_evict_cached_block(self.blocks[block_id])

    def reset_prefix_cache(self):
        if self.num_gpu_blocks - self.get_num_free_blocks() != 1:
            return False
        for block_id in list(self.watchers):
            self._fire(self.blocks[block_id])
        for block in self.blocks:
            self._forget(block)
        self._tell(AllBlocksCleared())
        return True

    def get_num_free_blocks(self):
        return self.free_block_queue.num_free_blocks

    def get_usage(self):
        return 1.0 - self.get_num_free_blocks() / (self.num_gpu_blocks - 1)

    def take_events(self):
        told, self.kv_event_queue = self.kv_event_queue, []
        return told
