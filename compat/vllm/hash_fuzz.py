"""Compares the two block hashers on random requests: all four hash functions, with and without lookahead, extra keys
of every kind, requests that grow, requests with hashes of their own already."""

from __future__ import annotations

import random
from typing import Any

from lockstep import Parting, first_difference
from sides import Side
from traffic import Shape, Traffic, init_hashing

CALLS_PER_SCENARIO = 30
HASH_NAMES = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")


class Twin:
    """One side's requests. Each side has its own, made alike: embeddings leave digests behind on the request."""

    def __init__(self, side: Side, name: str, shape: Shape, seed: int) -> None:
        self.hasher = side.get_request_block_hasher(shape.hash_block_size, init_hashing(name), shape.lookahead)
        self.rng = random.Random(f"hashing {seed}")
        self.traffic = Traffic(self.rng, shape, self.hasher)
        self.request: Any = None

    def new(self) -> str:
        plain = self.rng.random() < 0.3 and not self.traffic.shape.embeds
        self.request = self.traffic.request(plain=plain)
        return f"new {shown(self.request)}"

    def grow(self) -> str:
        self.traffic.grow(self.request)
        return f"grown to {self.request.num_tokens} tokens"

    def ask_again(self) -> str:
        """The hasher gives what is missing, and here that is nothing."""
        self.request.block_hashes.extend(self.hasher(self.request))
        return "asked again"

    def cut(self) -> str:
        """A continued session: the last hashes are dropped and computed anew, from the image that they begin in."""
        kept = self.rng.randint(0, len(self.request.block_hashes))
        del self.request.block_hashes[kept:]
        self.request.block_hashes.extend(self.hasher(self.request))
        return f"cut to {kept} hashes and asked again"


def fuzz_hashing(theirs: Side, ours: Side, seed: int) -> tuple[int, Parting | None]:
    """The number of hasher calls compared, and the first difference."""
    rng = random.Random(f"hash scenario {seed}")
    name = HASH_NAMES[seed % len(HASH_NAMES)]
    shape = Shape(rng.choice((1, 2, 4, 16)), rng.choice((0, 2)), max_tokens=60, embeds=rng.random() < 0.4)
    twins = [Twin(side, name, shape, seed) for side in (theirs, ours)]
    steps = ["new", *rng.choices(("new", "grow", "ask_again", "cut"), weights=(3, 6, 1, 2), k=CALLS_PER_SCENARIO)]
    history: list[str] = []
    for step in steps:
        texts = [getattr(twin, step)() for twin in twins]
        history.append(texts[0])
        seen = [list(twin.request.block_hashes) for twin in twins]
        if found := first_difference(*seen, "block_hashes"):
            setting = f"{name}, unit {shape.hash_block_size}, lookahead {shape.lookahead}"
            return len(history), Parting(f"hashing ({setting})", seed, len(history), *found, tuple(history))
    return len(history), None


def shown(request: Any) -> str:
    parts = [f"{request.request_id}: {list(request.all_token_ids)}"]
    if request.lora_request is not None:
        parts.append(f"lora {request.lora_request.lora_name}")
    if request.cache_salt:
        parts.append(f"salt {request.cache_salt}")
    for feature in request.mm_features or ():
        place = feature.mm_position
        parts.append(f"{feature.identifier} at {place.offset}+{place.length}")
    if request.prompt_embeds is not None:
        parts.append(f"embeds {tuple(request.prompt_embeds.shape)}")
    return ", ".join(parts)
