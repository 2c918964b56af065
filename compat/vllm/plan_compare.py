"""Compares `blockpool.models` with vLLM's own planner, on the CPU and without weights.

Each configuration is given to vLLM, which builds the model from it on torch's "meta" device, asks every layer for
its spec and plans: groups, block sizes, bytes per block, number of blocks. blockpool reads the same file. Needs
nothing but the configuration; ranks of tensor parallelism are played by a process group that does not communicate.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from blockpool.models import lay_out, read_model

CONFIGS = Path(__file__).parents[2] / "src/blockpool/models/catalogue"
# One or two of each architecture; the others are planned the same way, and any of them can be given.
COMPARED = (
    *("llama-3.1-8b", "mistral-7b-v0.1", "mistral-7b-v0.3", "qwen2.5-7b", "qwen3-8b"),
    *("gemma-2-9b", "gemma-3-4b", "gemma-3-27b", "llama-4-scout", "gpt-oss-20b"),
    *("deepseek-v2-lite", "deepseek-v3", "deepseek-v3.2", "whisper-large-v3"),
    *("qwen3-next-80b", "jamba-v0.1", "nemotron-h-8b"),
)
MEMORY_BYTES = 40 << 30
MAX_MODEL_LEN = 4096
# vLLM's CPU kernels take blocks of windows and of states in steps of 32 tokens, where a GPU's take 16; its CPU kernel
# of latents takes 16 and nothing else.
BLOCK_SIZE, LATENT_BLOCK_SIZE = 32, 16
# The part that writes text, as a model of its own: what sees needs packages that this comparison has no use for.
TEXT_MODELS = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
}
SPARSE_ROWS = "the sparse kernels' rows have 656 bytes; made by hand, vLLM's spec has 576"
NO_KERNEL = "no CPU kernel of vLLM's takes a quarter of its experts"
# (architecture, dtype, ranks): what vLLM does not plan on a CPU, or plans differently, and why. A case that is listed
# here and comes out the same is a fault too.
ACCEPTED = {
    ("DeepseekV32ForCausalLM", "fp8", 1): SPARSE_ROWS,
    ("GptOssForCausalLM", "auto", 4): NO_KERNEL,
}
CASES = [("auto", 1), ("auto", 4), ("fp8", 1)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", type=Path, default=[CONFIGS / f"{stem}.json" for stem in COMPARED])
    parser.add_argument("--theirs", nargs=3, metavar=("CONFIG", "DTYPE", "RANKS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.theirs:
        config, dtype, ranks = arguments.theirs
        print(json.dumps(their_plan(json.loads(Path(config).read_text()), dtype, int(ranks))))
        return 0
    faults = 0
    for path in arguments.configs:
        fields = json.loads(path.read_text())
        for dtype, ranks in CASES:
            outcome = compared(path, fields, dtype, ranks)
            faults += outcome.startswith("FAULT")
            print(f"{path.stem:18} {dtype:4} x{ranks}  {outcome}", flush=True)
    print(f"{faults} faults" if faults else "all as expected")
    return 1 if faults else 0


def compared(path: Path, fields: dict[str, Any], dtype: str, ranks: int) -> str:
    """What came of one case, "FAULT ..." if it is not as expected."""
    accepted = ACCEPTED.get((fields["architectures"][0], dtype, ranks))
    ours = our_plan(path, dtype, ranks, block_size_of(fields))
    command = [sys.executable, __file__, "--theirs", str(path), dtype, str(ranks)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if result.returncode != 0:
        reason = result.stderr.strip().splitlines()[-1]
        return f"not planned: {accepted}" if accepted else f"FAULT vLLM did not plan: {reason}"
    theirs = json.loads(result.stdout.splitlines()[-1])
    if ours != theirs:
        shown = f"\n  ours   {json.dumps(ours)}\n  theirs {json.dumps(theirs)}"
        return f"differs: {accepted}" if accepted else f"FAULT differs:{shown}"
    sizes = ", ".join(f"{group['layers']} x {group['kind']}:{group['block_size']}" for group in ours["groups"])
    return f"{'FAULT listed as different, ' if accepted else ''}same: {ours['num_blocks']:,} blocks; {sizes}"


def block_size_of(fields: dict[str, Any]) -> int:
    return LATENT_BLOCK_SIZE if "kv_lora_rank" in fields else BLOCK_SIZE


def our_plan(path: Path, dtype: str, ranks: int, block_size: int) -> dict[str, Any]:
    layout = lay_out(read_model(path, kv_cache_dtype=dtype, tensor_parallel_size=ranks), block_size=block_size)
    return {
        "num_blocks": layout.num_blocks(MEMORY_BYTES),
        "bytes_per_block": layout.bytes_per_block,
        "groups": [
            described(part.group.kv_cache_spec, len(part.group.layer_names), part.used_bytes_per_block)
            for part in layout.groups
        ],
    }


def described(spec: Any, num_layers: int, used_bytes: int) -> dict[str, Any]:
    """A group in words that both sides have."""
    spec = next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)  # of several sizes: the kind is the same
    return {
        "kind": type(spec).__name__.replace("MLAAttentionSpec", "FullAttentionSpec").removesuffix("Spec"),
        "block_size": spec.block_size,
        "window": getattr(spec, "sliding_window", None),
        "chunk": getattr(spec, "attention_chunk_size", None),
        "layers": num_layers,
        "used_bytes_per_block": used_bytes,
    }


# -- vLLM, in a process of its own ---------------------------------------------------------------------


def their_plan(fields: dict[str, Any], dtype: str, ranks: int) -> dict[str, Any]:
    """What vLLM plans for rank 0."""
    block_size = block_size_of(fields)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        Path(folder, "config.json").write_text(json.dumps(text_model(fields)))
        if "kv_lora_rank" in fields and (dtype != "auto" or "index_head_dim" in fields):
            return planned(their_config(folder, "auto", ranks, block_size), latent_specs(fields, dtype))
        vllm_config = their_config(folder, dtype, ranks, block_size)
        return planned(vllm_config, their_specs(vllm_config, ranks))


def text_model(fields: dict[str, Any]) -> dict[str, Any]:
    architecture = TEXT_MODELS.get(fields["architectures"][0])
    if architecture is None:
        return fields
    return {
        **fields["text_config"],
        "architectures": [architecture],
        "torch_dtype": fields.get("torch_dtype"),
    }


def their_config(folder: str, dtype: str, ranks: int, block_size: int) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    vllm_config = EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        block_size=block_size,
        kv_cache_dtype=dtype,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=MAX_MODEL_LEN,
    ).create_engine_config()
    vllm_config.parallel_config.tensor_parallel_size = ranks
    return vllm_config


def their_specs(vllm_config: Any, ranks: int) -> dict[str, Any]:
    """The spec of every layer that has a cache, as the layers themselves give it."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import Platform, current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_current_vllm_config(vllm_config):
        play_ranks(ranks)
        with torch.device("meta"), set_default_torch_dtype(vllm_config.model_config.dtype):
            initialize_model(vllm_config)
        # The base class's, as on a GPU: it makes a block of attention hold a state.
        Platform.update_block_size_for_backend.__func__(type(current_platform), vllm_config)
        specs = {}
        for name, layer in vllm_config.compilation_config.static_forward_context.items():
            spec = layer.get_kv_cache_spec(vllm_config) if hasattr(layer, "get_kv_cache_spec") else None
            if spec is not None:
                specs[name] = spec
    return specs


def latent_specs(fields: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Specs made here, of vLLM's classes: its CPU kernels read no latents in 8 bits and none with an indexer."""
    import torch
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    def spec(size: int, number: Any) -> Any:
        return MLAAttentionSpec(LATENT_BLOCK_SIZE, num_kv_heads=1, max_tp_shards=1, head_size=size, dtype=number)

    row = spec(fields["kv_lora_rank"] + fields["qk_rope_head_dim"], torch.uint8 if dtype == "fp8" else torch.bfloat16)
    specs = {}
    for at in range(fields["num_hidden_layers"]):
        specs[f"layers.{at}"] = row
        if "index_head_dim" in fields:
            specs[f"layers.{at}.indexer"] = spec(fields["index_head_dim"] + 4, torch.uint8)
    return specs


def play_ranks(ranks: int) -> None:
    """Rank 0 of a group that never communicates."""
    import torch.distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    torch.distributed.init_process_group(backend="fake", store=FakeStore(), rank=0, world_size=ranks)
    new_group = torch.distributed.new_group
    torch.distributed.new_group = lambda ranks, **_: new_group(ranks, backend="fake")
    MessageQueue.create_from_process_group = staticmethod(lambda *_, **__: None)  # it would wait for the other ranks
    init_distributed_environment(ranks, 0, "env://", 0, "fake")
    initialize_model_parallel(ranks, 1)


def planned(vllm_config: Any, specs: dict[str, Any]) -> dict[str, Any]:
    from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

    register_all_kvcache_specs(vllm_config)
    vllm_config.cache_config.kv_cache_layout = "LBNHC"  # layer by layer
    groups = get_global_kv_cache_groups(vllm_config, [specs])
    plan = get_kv_cache_configs(vllm_config, [specs], [MEMORY_BYTES], groups)[0]
    (size,) = {tensor.size for tensor in plan.kv_cache_tensors}
    return {
        "num_blocks": plan.num_blocks,
        "bytes_per_block": size // plan.num_blocks,
        "groups": [
            described(group.kv_cache_spec, len(group.layer_names), used_bytes(group.kv_cache_spec, group.layer_names))
            for group in plan.kv_cache_groups
        ],
    }


def used_bytes(spec: Any, layer_names: list[str]) -> int:
    """Of a group's block, without padding."""
    own = getattr(spec, "kv_cache_specs", {})
    total = 0
    for name in layer_names:
        layer = own.get(name, spec)
        total += getattr(layer, "real_page_size_bytes", None) or layer.unpadded_page_size_bytes
    return total


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # Whisper's is 448
    sys.exit(main())
