"""Bytes of what is cached: the type of the model, of quantised keys and values, and of states."""

from __future__ import annotations

from typing import Any, Final

from .errors import ModelError
from .hf_config import HFConfig

MODEL_DTYPE_BYTES: Final = {"float16": 2, "half": 2, "bfloat16": 2, "float32": 4, "float": 4}
FP8: Final = ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc")
# A float32 scale beside each head of each token's keys, and one beside its values.
PER_TOKEN_HEAD: Final = ("fp8_per_token_head", "int8_per_token_head")
NVFP4: Final = "nvfp4"
FP8_MLA: Final = "fp8_ds_mla"

KV_CACHE_DTYPES: Final = ("auto", "float16", "bfloat16", *FP8, *PER_TOKEN_HEAD, NVFP4, FP8_MLA)
"""What `kv_cache_dtype` may be, with vLLM's names."""

STATE_DTYPES: Final = ("auto", "float16", "bfloat16", "float32")
"""What the dtype of a state may be."""


def model_dtype_bytes(config: HFConfig, notes: list[str]) -> int:
    """Bytes of one number where the model runs: that of its checkpoint, but 16 bits where that has 32.

    Raises ModelError for a dtype that is none.
    """
    dtype = config.get_anywhere("dtype", "torch_dtype")
    if dtype is None:
        notes.append("the configuration names no dtype: 16 bits per number assumed")
        return 2
    size = MODEL_DTYPE_BYTES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else None
    if size is None:
        raise config.error("torch_dtype", f"expected one of {', '.join(MODEL_DTYPE_BYTES)}, not {dtype!r}")
    if size == 4:
        notes.append("the checkpoint is float32: 16 bits per number assumed, as engines run it")
    return 2


def resolved_kv_cache_dtype(kv_cache_dtype: str, config: HFConfig, notes: list[str]) -> str:
    """`kv_cache_dtype`, where "auto" takes what the checkpoint was quantised for.

    Raises ModelError for a name that is none.
    """
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ModelError(f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES)}, not {kv_cache_dtype!r}")
    if kv_cache_dtype == "auto" and _quantised_to_8_bits(config.get_anywhere("quantization_config")):
        notes.append("the checkpoint is quantised for 8-bit keys and values: kv_cache_dtype fp8")
        return "fp8"
    return kv_cache_dtype


def _quantised_to_8_bits(quantization: Any) -> bool:
    """As the checkpoints of compressed-tensors and of ModelOpt say it."""
    if not isinstance(quantization, dict):
        return False
    scheme = quantization.get("kv_cache_scheme")
    if isinstance(scheme, dict) and scheme.get("type") == "float" and scheme.get("num_bits") == 8:
        return True
    algorithm = quantization.get("kv_cache_quant_algo")
    return isinstance(algorithm, str) and algorithm.lower() == "fp8"


def head_bytes(head_size: int, kv_cache_dtype: str, model_bytes: int) -> int:
    """Bytes of one head of one token's keys (or values).

    Raises ModelError where the head does not fit the format.
    """
    if kv_cache_dtype in ("auto", "float16", "bfloat16"):
        return head_size * (model_bytes if kv_cache_dtype == "auto" else 2)
    if kv_cache_dtype in FP8:
        return head_size
    if kv_cache_dtype in PER_TOKEN_HEAD:
        return head_size + 4
    if kv_cache_dtype == NVFP4:
        if head_size % 16 != 0:
            raise ModelError(f"kv_cache_dtype nvfp4 needs heads of a multiple of 16 numbers, not {head_size}")
        return head_size // 2 + head_size // 16  # two numbers a byte, and one byte of scale for 16 of them
    raise ModelError(f"kv_cache_dtype {kv_cache_dtype} is for latents (MLA), which this model does not have")


def state_dtype_bytes(field: str, dtype: str, otherwise: int) -> int:
    """Bytes of one number of a state; `otherwise` for "auto". Raises ModelError for a name that is none."""
    if dtype not in STATE_DTYPES:
        raise ModelError(f"{field} must be one of {', '.join(STATE_DTYPES)}, not {dtype!r}")
    return otherwise if dtype == "auto" else MODEL_DTYPE_BYTES[dtype]
