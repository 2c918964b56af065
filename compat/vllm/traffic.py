"""Random requests for both sides: real vLLM ones, and plain ones with only what the ledger reads.

Prompts are grown from a few shared prefixes over a tiny vocabulary, so that equal blocks, and so several blocks
under one key, are common. LoRA adapters, salts, images and embeddings come in some.

Equal strings are one object here. vLLM's digests over pickles depend on that: the same image twice in one block,
named by two equal strings, gives another digest than named by one string twice. Ours depend on the values alone, and
are vLLM's for one string.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from sys import intern
from types import SimpleNamespace
from typing import Any

VOCABULARY = 3
MAX_PREFIXES = 4


def init_hashing(name: str) -> Any:
    """vLLM's hash function of that name, with the root digest that goes with it: one for the whole process."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import init_none_hash

    function = get_hash_fn_by_name(name)
    init_none_hash(function)
    return function


@dataclass(frozen=True)
class Shape:
    """What the requests of one pool look like."""

    hash_block_size: int
    lookahead: int = 0
    max_tokens: int = 40
    min_tokens: int = 1
    extras: tuple[str, ...] = ("adapter", "salt", "images", "session")
    embeds: bool = False


class Traffic:
    """Makes requests; the same seed makes the same ones. `hasher` is called by each request as it grows."""

    def __init__(self, rng: random.Random, shape: Shape, hasher: Any) -> None:
        self.rng = rng
        self.shape = shape
        self.hasher = hasher
        self.made = 0
        self.prefixes: list[list[int]] = []

    def tokens(self) -> list[int]:
        rng = self.rng
        size = rng.randint(self.shape.min_tokens, self.shape.max_tokens)
        if self.prefixes and rng.random() < 0.8:
            shared = rng.choice(self.prefixes)
            tokens = shared[: rng.randint(1, len(shared))]
        else:
            tokens = []
        tokens = (tokens + [rng.randrange(VOCABULARY) for _ in range(max(0, size - len(tokens)))])[:size]
        if len(self.prefixes) < MAX_PREFIXES:
            self.prefixes.append(tokens)
        elif rng.random() < 0.1:
            self.prefixes[rng.randrange(MAX_PREFIXES)] = tokens
        return tokens

    def extras(self, num_tokens: int) -> dict[str, Any]:
        from vllm.lora.request import LoRARequest

        rng = self.rng
        found: dict[str, Any] = {}
        if self.has("adapter", 0.2):
            number = rng.randint(1, 2)
            found["lora_request"] = LoRARequest(f"adapter{number}", number, f"/adapters/{number}")
        if self.has("salt", 0.2):
            found["cache_salt"] = rng.choice(("salt", "pepper"))
        if self.has("images", 0.3):
            found["mm_features"] = self.images(num_tokens)
        if self.has("session", 0.2):
            found["session_id"] = f"session{rng.randint(1, 2)}"
        return found

    def has(self, extra: str, chance: float) -> bool:
        return extra in self.shape.extras and self.rng.random() < chance

    def images(self, num_tokens: int) -> list[Any]:
        """One to three images, in order, not overlapping, within the prompt."""
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

        rng = self.rng
        edges = sorted(rng.sample(range(num_tokens + 1), min(num_tokens + 1, 2 * rng.randint(1, 3))))
        pairs = zip(edges[::2], edges[1::2], strict=False)
        return [
            MultiModalFeatureSpec(
                data=None,
                modality="image",
                identifier=intern(f"image{rng.randint(1, 3)}"),
                mm_position=PlaceholderRange(offset=start, length=end - start),
            )
            for start, end in pairs
        ]

    def embeds(self, num_tokens: int) -> dict[str, Any]:
        """Embeddings for the whole prompt: the same few tensors, so that prefixes are shared here too."""
        import torch

        generator = torch.Generator().manual_seed(self.rng.randint(1, 2))
        table = torch.randn(64, 4, generator=generator)
        return {"prompt_embeds": table[:num_tokens].contiguous()}

    def request(self, *, plain: bool = False) -> Any:
        self.made += 1
        name = f"r{self.made}"
        tokens = self.tokens()
        extras = self.extras(len(tokens))
        if self.shape.embeds and self.rng.random() < 0.4:
            extras |= self.embeds(len(tokens))
        if plain:
            return self.plain(name, tokens, extras)
        return self.real(name, tokens, extras)

    def real(self, name: str, tokens: list[int], extras: dict[str, Any]) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=64)
        embedded = "prompt_embeds" in extras and self.rng.random() < 0.7
        return Request(
            request_id=name,
            prompt_token_ids=None if embedded else tokens,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            block_hasher=self.hasher,
            **extras,
        )

    def plain(self, name: str, tokens: list[int], extras: dict[str, Any]) -> Any:
        fields = {
            "lora_request": None, "cache_salt": None, "mm_features": [], "prompt_embeds": None, "session_id": None,
        }  # fmt: skip
        request = SimpleNamespace(
            request_id=name,
            num_prompt_tokens=len(tokens),
            num_tokens=len(tokens),
            all_token_ids=tokens,
            block_hashes=[],
            num_computed_tokens=0,
            num_in_flight_tokens=0,
            kv_cache_report_mode="incremental",
            skip_reading_prefix_cache=False,
            shared_prefix_boundary=0,
            **(fields | extras),
        )
        request.block_hashes.extend(self.hasher(request))
        return request

    def grow(self, request: Any) -> None:
        """One to a few output tokens."""
        tokens = [self.rng.randrange(VOCABULARY) for _ in range(self.rng.randint(1, 6))]
        if isinstance(request, SimpleNamespace):
            request.all_token_ids = request.all_token_ids + tokens
            request.num_tokens = len(request.all_token_ids)
            request.block_hashes.extend(self.hasher(request))
        else:
            request.append_output_token_ids(tokens)
