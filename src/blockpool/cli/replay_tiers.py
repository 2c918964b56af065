"""`blockpool replay --tier`."""

import re
from typing import TYPE_CHECKING

from .exits import fail
from .memory_size import parse_memory

if TYPE_CHECKING:
    from blockpool.cache import KVCacheConfig
    from blockpool.models import CacheLayout
    from blockpool.replay.tiers import StoreWhen, TierOrder, TierSpec, TierStack

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_OF_NAMES = ("GPU", "hits")  # that mean something else


def parse_tiers(texts: list[str], stores: list[str], orders: list[str]) -> "tuple[TierSpec, ...]":
    """The values of --tier, --tier-store and --tier-policy; empty without tiers. Raises ReplayError."""
    from blockpool.replay.tiers import TierSpec

    if not texts:
        for option, given in (("--tier-store", stores), ("--tier-policy", orders)):
            if given:
                fail(f"{option} says what a tier does: it needs --tier")
        return ()
    sizes = [_parse_tier(text) for text in texts]
    names = [name for name, _, _ in sizes]
    for name in names:
        if names.count(name) > 1:
            fail(f"--tier: two tiers are named {name}")
    store_of = _by_name("--tier-store", stores, names, "completion")
    order_of = _by_name("--tier-policy", orders, names, "lru")
    specs = []
    for name, size, speed in sizes:
        store, num_hits = _parse_store(store_of[name])
        specs.append(
            TierSpec(
                name=name,
                capacity_bytes=size,
                read_bytes_per_s=speed,
                store=store,
                num_hits=num_hits,
                order=_parse_order(order_of[name]),
            )
        )
    return tuple(specs)


def tier_stack(
    specs: "tuple[TierSpec, ...]",
    config: "KVCacheConfig",
    layout: "CacheLayout | None",
    *,
    bytes_per_token: int | None,
    block_bytes: int | None,
    prefill_tokens_per_s: float | None,
) -> "TierStack | None":
    """The tiers of a replay, with the pages of its groups; None without tiers. Raises ReplayError."""
    from blockpool.replay.tiers import TierStack

    if not specs:
        return None
    if layout is not None:
        page_bytes = [group.used_bytes_per_block for group in layout.groups]
    elif bytes_per_token is not None:
        page_bytes = [bytes_per_token * config.kv_cache_groups[0].block_size]
    else:
        assert block_bytes is not None
        page_bytes = [block_bytes] * len(config.kv_cache_groups)
    return TierStack(tiers=specs, page_bytes=tuple(page_bytes), prefill_tokens_per_s=prefill_tokens_per_s)


def check_tier_options(
    has_tiers: bool,
    mode: str,
    model: str | None,
    bytes_per_token: int | None,
    block_bytes: str | None,
) -> int | None:
    """The bytes of a block, if they are given. Fail where they are not known, or twice, or tiers are not asked for or
    not for this mode.
    """
    if not has_tiers:
        if block_bytes is not None:
            fail("--block-bytes says what a page of a tier costs: it needs --tier")
        return None
    if mode == "concurrent":
        fail("--tier is for --mode sequential: the concurrent replay has no tiers yet")
    if block_bytes is not None and (model is not None or bytes_per_token is not None):
        fail("--block-bytes is not needed with --model or --bytes-per-token, which say it")
    if block_bytes is None and model is None and bytes_per_token is None:
        fail("--tier needs the bytes of a block: give --model, --block-bytes, or --memory with --bytes-per-token")
    if block_bytes is None:
        return None
    try:
        num_bytes = parse_memory(block_bytes)
    except ValueError as error:
        fail(f"--block-bytes: {error}")
    if num_bytes < 1:
        fail(f"--block-bytes: a block of {block_bytes} holds nothing")
    return num_bytes


def _parse_tier(text: str) -> tuple[str, int, float | None]:
    """host=64GiB or host=64GiB@25GB/s: name, bytes and bytes/s."""
    name, equals, rest = text.partition("=")
    if not equals or not _NAME.fullmatch(name) or name in _OF_NAMES:
        fail(f"--tier: {text!r} is not a name and a size such as host=64GiB or host=64GiB@25GB/s")
    size, at, speed = rest.partition("@")
    try:
        capacity = parse_memory(size)
    except ValueError as error:
        fail(f"--tier {name}: {error}")
    if not capacity:
        fail(f"--tier {name}: a tier of {size} holds nothing")
    if not at:
        return name, capacity, None
    amount, slash, second = speed.rpartition("/")
    try:
        read_bytes_per_s = parse_memory(amount)
    except ValueError:
        read_bytes_per_s = 0
    if slash and second == "s" and re.search(r"[A-Za-z]b$", amount):
        fail(f"--tier {name}: {speed!r} may be bits or bytes: write bytes, such as {amount[:-1]}B/s")
    if not slash or second != "s" or not read_bytes_per_s:
        fail(f"--tier {name}: {speed!r} is not a read bandwidth such as 25GB/s")
    return name, capacity, float(read_bytes_per_s)


def _by_name(option: str, texts: list[str], names: list[str], otherwise: str) -> dict[str, str]:
    """One value per tier: NAME=VALUE is for that one, VALUE for all others."""
    of_all: list[str] = []
    of_one: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name == "hits":
            of_all.append(text)
        elif name not in names:
            fail(f"{option}: there is no tier {name!r}, but {', '.join(names)}")
        elif name in of_one:
            fail(f"{option}: tier {name} has two values, {of_one[name]} and {value}")
        else:
            of_one[name] = value
    if len(of_all) > 1:
        fail(f"{option}: {of_all[0]} and {of_all[1]} are both for all tiers: name them, as in {names[0]}={of_all[1]}")
    return {name: of_one.get(name, of_all[0] if of_all else otherwise) for name in names}


def _parse_store(text: str) -> "tuple[StoreWhen, int]":
    from blockpool.replay.tiers import StoreWhen

    if text in (StoreWhen.COMPLETION, StoreWhen.EVICTION):
        return StoreWhen(text), 0
    word, _, number = text.partition("=")
    if word != StoreWhen.HITS or not re.fullmatch(r"[1-9][0-9]{0,8}", number):
        fail(f"--tier-store: {text!r} is not completion, eviction or hits=N with N at least 1")
    return StoreWhen.HITS, int(number)


def _parse_order(text: str) -> "TierOrder":
    from blockpool.replay.tiers import TierOrder

    if text not in list(TierOrder):
        fail(f"--tier-policy: {text!r} is not one of {', '.join(TierOrder)}")
    return TierOrder(text)
