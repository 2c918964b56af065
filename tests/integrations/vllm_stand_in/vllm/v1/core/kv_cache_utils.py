from dataclasses import dataclass, field
from typing import Any


def init_none_hash(hash_fn):
    global NONE_HASH
    NONE_HASH = hash_fn("a seed")


def maybe_convert_block_hash(block_hash):
    return int.from_bytes(block_hash[-8:], "big")


def generate_block_hash_extra_keys(request, start_token_idx, end_token_idx, start_mm_idx):
    keys = []
    if request.lora_request is not None:
        keys.append(("lora", request.lora_request.lora_name, request.lora_request.lora_path))
    for feature in request.mm_features:
        offset, length = feature.mm_position.offset, feature.mm_position.length
        if offset < end_token_idx and offset + length > start_token_idx:
            keys.append(("mm", feature.identifier, offset - start_token_idx))
    if request.cache_salt and start_token_idx == 0:
        keys.append(("cache_salt", request.cache_salt))
    return (tuple(keys) or None), 0


def generate_lookahead_block_hash_extra_keys(
    request, start_token_idx, end_token_idx, hash_end_token_idx, start_mm_idx
):
    return generate_block_hash_extra_keys(request, start_token_idx, hash_end_token_idx, start_mm_idx)


def to_event_extra_keys(extra_keys):
    return None


@dataclass(slots=True)
class KVCacheBlock:
    block_id: int
    ref_cnt: int = 0
    _block_hash: bytes | None = None
    _block_hash_num_tokens: int | None = None
    prev_free_block: Any = None
    next_free_block: Any = None
    is_null: bool = False
    pool: Any = field(default=None, kw_only=True, repr=False, compare=False)

    @property
    def block_hash(self):
        return self._block_hash

    @property
    def block_hash_num_tokens(self):
        return self._block_hash_num_tokens

    def set_block_hash(self, block_hash, num_tokens=None):
        assert self._block_hash is None
        self._block_hash, self._block_hash_num_tokens = block_hash, num_tokens

    def reset_hash(self):
        self._block_hash = self._block_hash_num_tokens = None


class FreeKVCacheBlockQueue:
    def __init__(self, blocks):
        self.line = list(blocks)

    @property
    def num_free_blocks(self):
        return len(self.line)

    def popleft(self):
        return self.line.pop(0)

    def popleft_n(self, n):
        assert n <= len(self.line)
        taken, self.line = self.line[:n], self.line[n:]
        return taken

    def remove(self, block):
        self.line = [one for one in self.line if one is not block]

    def append(self, block):
        self.line.append(block)

    def prepend_n(self, blocks):
        self.line = [*blocks, *self.line]

    def append_n(self, blocks):
        self.line += blocks

    def get_all_free_blocks(self):
        return list(self.line)

    def iter_blocks_after(self, cursor):
        yield from self.line


def get_request_block_hasher(hash_block_size, caching_hash_fn, num_hash_lookahead_tokens=0):
    def hasher(request):
        unit, lookahead = hash_block_size, num_hash_lookahead_tokens
        known, new = len(request.block_hashes), []
        parent = request.block_hashes[-1] if known else NONE_HASH
        for start in range(known * unit, request.num_tokens - unit - lookahead + 1, unit):
            end = start + unit
            tokens = tuple(request.all_token_ids[start:end])
            extra = generate_block_hash_extra_keys(request, start, end + lookahead, 0)[0]
            if lookahead:
                extra = (extra, *request.all_token_ids[end : end + lookahead])
            parent = caching_hash_fn((parent, tokens, extra))
            new.append(parent)
        return new

    return hasher
