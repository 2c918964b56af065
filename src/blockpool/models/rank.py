"""One rank of an engine: what decides, beside the configuration, how much of a model it keeps."""

from __future__ import annotations

import msgspec

from .dtypes import head_bytes, state_dtype_bytes
from .hf_config import HFConfig


class Rank(msgspec.Struct, frozen=True):
    """How the model is run. `model_bytes`: of one number. `mamba_cache_mode`: as in `MambaSpec`.

    `notes`: see `ModelCache`; whoever decides something that the configuration leaves open adds to them.
    """

    config: HFConfig
    model_bytes: int = 2
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1
    mamba_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    mamba_cache_mode: str = "align"
    notes: list[str] = msgspec.field(default_factory=list)

    def share(self, field: str, count: int) -> int:
        """A rank's part of `count` heads or channels. Raises ModelError unless the ranks have equal parts."""
        if count % self.tensor_parallel_size != 0:
            raise self.config.error(field, f"{count} cannot be shared equally by {self.tensor_parallel_size} ranks")
        return count // self.tensor_parallel_size

    def share_or_copy(self, field: str, count: int) -> int:
        """A rank's part, where ranks that outnumber the heads hold copies of them."""
        if count < self.tensor_parallel_size and self.tensor_parallel_size % count == 0:
            return 1
        return self.share(field, count)

    def key_value_bytes(self, num_heads: int, num_kv_heads: int, head_size: int) -> int:
        """Bytes of one token's keys and values in one layer of ordinary attention."""
        self.share("num_attention_heads", num_heads)
        num_kv_heads = self.share_or_copy("num_key_value_heads", num_kv_heads)
        return 2 * num_kv_heads * head_bytes(head_size, self.kv_cache_dtype, self.model_bytes)

    def state_bytes(self, num_conv: int, num_ssm: int, ssm_dtype: str | None = None) -> int:
        """Bytes of one state: the last inputs of the convolution, and the recurrent part.

        The recurrent part has the dtype that was asked for, else the configuration's `ssm_dtype`, else that of the
        convolution. Raises ModelError for a dtype that is none.
        """
        conv_bytes = state_dtype_bytes("mamba_cache_dtype", self.mamba_cache_dtype, self.model_bytes)
        ssm_bytes = state_dtype_bytes("the configuration's dtype of states", ssm_dtype or "auto", conv_bytes)
        ssm_bytes = state_dtype_bytes("mamba_ssm_cache_dtype", self.mamba_ssm_cache_dtype, ssm_bytes)
        return num_conv * conv_bytes + num_ssm * ssm_bytes
