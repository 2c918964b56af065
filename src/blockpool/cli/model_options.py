"""What the commands that know models have in common."""

from typing import TYPE_CHECKING

from .exits import fail

if TYPE_CHECKING:
    from blockpool.models import CacheLayout


def lay_out_model(model: str, block_size: int, kv_cache_dtype: str, tensor_parallel_size: int) -> "CacheLayout":
    """The groups of a model by its name or its config.json. Raises ModelError."""
    from blockpool.models import lay_out, read_model

    read = read_model(model, kv_cache_dtype=kv_cache_dtype, tensor_parallel_size=tensor_parallel_size)
    return lay_out(read, block_size=block_size)


def parse_retention(text: str) -> int | None:
    """The value of --retention-interval: None for dense."""
    if text == "dense":
        return None
    if not text.isascii() or not text.isdecimal():
        fail(f"--retention-interval: {text!r} is neither dense nor a number of tokens")
    return int(text)
