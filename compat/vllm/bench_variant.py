"""The two variants in one process: vLLM's own classes, and ours put in their place; with the manager, or without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

VLLM = "vllm"
OURS = "blockpool"


class Options:
    """`manager`: ours is the KVCacheManager too, not pool and hasher alone."""

    manager = False


@contextmanager
def installed(variant: str) -> Iterator[None]:
    """vLLM with the classes of this variant; afterwards vLLM's own again."""
    if variant == VLLM:
        yield
        return
    from blockpool.integrations.vllm import install, uninstall

    install(manager=Options.manager)
    try:
        yield
    finally:
        uninstall()


def require(variant: str, thing: object) -> None:
    """Refuse to go on if `thing` (an object, class or function) is not of this variant."""
    owner = thing if hasattr(thing, "__qualname__") else type(thing)
    package = owner.__module__.partition(".")[0]
    if package != variant:
        raise SystemExit(f"meant to measure {variant}, but {owner.__module__}.{owner.__qualname__} is at work")
