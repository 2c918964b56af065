"""What `blockpool vllm check` does: is ours the same as vLLM's own here, and how much faster?"""

from __future__ import annotations

import logging
import platform
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import msgspec

from blockpool import build_info
from blockpool.integrations.vllm.speed import (
    ManagerCycle,
    Speed,
    Work,
    allocate_and_free,
    cache_and_look_up,
    hash_prompt,
    hashable,
    race,
)
from blockpool.integrations.vllm.swap import (
    ORIGINALS,
    TESTED_VERSIONS,
    InstallError,
    Replacement,
    install,
    is_installed,
    is_tested,
    own_objects,
    uninstall,
    vllm_version,
)
from blockpool.integrations.vllm.twins import Differ, Difference, compare_pools, same

NUM_CALLS = 6000
#: What an engine has imported when it builds its pool; the importing modules are counted then.
ENGINE = "vllm.v1.engine.core"
UNIT = 16  # tokens per hash


class Comparison(msgspec.Struct, frozen=True):
    """`count` things of `what` were compared; `difference` is the first one, None when all were the same."""

    what: str
    count: int
    difference: Difference | None


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """`refused`: why `install()` would refuse; None when it would not. `left_out`: what could not be tried here."""

    vllm_version: str
    vllm_tested: bool
    tested_versions: tuple[str, ...]
    blockpool_version: str
    python: str
    compiled: bool
    hash_kernel: str
    refused: str | None
    replacements: tuple[Replacement, ...]
    comparisons: tuple[Comparison, ...]
    speeds: tuple[Speed, ...]
    left_out: tuple[str, ...]

    @property
    def differences(self) -> list[Difference]:
        return [one.difference for one in self.comparisons if one.difference is not None]

    @property
    def is_well(self) -> bool:
        """vLLM was tested, ours can be installed, and everything that was compared is the same."""
        return self.vllm_tested and self.refused is None and not self.differences


def check(tell: Callable[[str], None] = lambda stage: None) -> CheckReport:
    """Compare and time both, and leave nothing installed that was not. `tell` hears what is being done.

    Raises VLLMNotFoundError.
    """
    tell("importing vLLM")
    version = vllm_version()
    found = Findings()
    with _quiet(), _own_in_place():
        refused, replaced = _try_install(found)
        if replaced:
            tell("comparing the pools")
            own, ours = _both("BlockPool")
            found.compared("calls to both pools", *compare_pools(own, ours, NUM_CALLS))
            tell("comparing the block hashes")
            functions = _hash_functions(found)
            for name, function in functions.items():
                found.compared(f"block hashes, {name}", *_compare_digests(name, function))
            tell("timing")
            if not found.differences():
                _race_all(found, functions, with_manager=len(replaced) > len(ORIGINALS))
    build = build_info()
    return CheckReport(
        vllm_version=version,
        vllm_tested=is_tested(version),
        tested_versions=TESTED_VERSIONS,
        blockpool_version=build.version,
        python=platform.python_version(),
        compiled=build.is_compiled,
        hash_kernel=build.hash_kernel,
        refused=refused,
        replacements=tuple(replaced),
        comparisons=tuple(found.comparisons),
        speeds=tuple(found.speeds),
        left_out=tuple(found.left_out),
    )


class Findings:
    """What a check has found so far."""

    def __init__(self) -> None:
        self.comparisons: list[Comparison] = []
        self.speeds: list[Speed] = []
        self.left_out: list[str] = []

    def compared(self, what: str, count: int, difference: Difference | None) -> None:
        self.comparisons.append(Comparison(what, count, difference))

    def differences(self) -> bool:
        return any(one.difference is not None for one in self.comparisons)

    def race(self, work: str, make_theirs: Callable[[], Work], make_ours: Callable[[], Work]) -> None:
        """Time both. What vLLM's own cannot do here is left out; what only ours cannot do is a difference."""
        try:
            theirs = make_theirs()
            theirs()
        except Exception as error:
            self.left_out.append(f"{work}: {_in_short(error)}")
            return
        try:
            ours = make_ours()
            ours()
        except Exception as error:
            self.compared(work, 1, Difference(work, "outcome", "no error", _in_short(error)))
            return
        self.speeds.append(race(work, theirs, ours))


@contextmanager
def _quiet() -> Iterator[None]:
    """What both pools log when a call is refused is of no interest here."""
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _own_in_place() -> Iterator[None]:
    """vLLM's own classes in their place, and in the end what was there before."""
    was_installed, with_manager = is_installed(), is_installed(manager=True)
    uninstall()
    try:
        yield
    finally:
        uninstall()
        if was_installed:
            install(force=True, manager=with_manager)


def _try_install(found: Findings) -> tuple[str | None, list[Replacement]]:
    """Why `install()` refuses, and what it replaces, if need be with force. Nothing stays installed."""
    try:
        import_module(ENGINE)
    except Exception as error:
        found.left_out.append(f"modules that only {ENGINE} imports: {_in_short(error)}")
    refused = None
    for force in (False, True):
        try:
            replaced = install(force)
        except InstallError as error:
            refused = refused or str(error)
        else:
            uninstall()
            return refused, _with_manager(found, force) or replaced
    return refused, []


def _with_manager(found: Findings, force: bool) -> list[Replacement]:
    """What is replaced with our KVCacheManager too; nothing when that is refused."""
    try:
        replaced = install(force, manager=True)
    except InstallError as error:
        found.left_out.append(f"blockpool's KVCacheManager: {_in_short(error)}")
        return []
    uninstall()
    return replaced


def _both(name: str) -> tuple[Any, Any]:
    """vLLM's own and ours of that name."""
    original = next(one for one in ORIGINALS if one.name == name)
    return own_objects()[original], getattr(import_module("blockpool.integrations.vllm"), name)


def _hash_functions(found: Findings) -> dict[str, Callable[[Any], bytes]]:
    by_name = import_module("vllm.utils.hashing").get_hash_fn_by_name
    functions = {name: by_name(name) for name in ("sha256", "sha256_cbor")}
    if find_spec("xxhash") is None:
        found.left_out.append("block hashes of xxhash and xxhash_cbor: the package xxhash is not installed")
    else:
        functions |= {name: by_name(name) for name in ("xxhash", "xxhash_cbor")}
    return functions


@contextmanager
def _seeded(function: Callable[[Any], bytes]) -> Iterator[None]:
    """vLLM's process-wide start of all chains, made with this function for a while."""
    utils: Any = import_module("vllm.v1.core.kv_cache_utils")
    before = getattr(utils, "NONE_HASH", None)
    utils.init_none_hash(function)
    try:
        yield
    finally:
        if before is None:
            del utils.NONE_HASH
        else:
            utils.NONE_HASH = before


def _compare_digests(name: str, function: Callable[[Any], bytes]) -> tuple[int, Difference | None]:
    """The chains of many kinds of requests, hashed in two parts: how many digests, and the first difference."""
    own, ours = _both("get_request_block_hasher")
    count = 0
    with _seeded(function):
        for lookahead in (0, 2):
            hashers = own(UNIT, function, lookahead), ours(UNIT, function, lookahead)
            for label, tokens, more in _kinds_of_requests():
                place = f"{name}, lookahead {lookahead}, {label}"
                answers: list[Any] = []
                for hasher in hashers:
                    prompt = hashable("prompt", tokens[: len(tokens) // 2], **more)
                    try:
                        prompt.block_hashes += hasher(prompt)
                        prompt.all_token_ids, prompt.num_tokens = tokens, len(tokens)
                        prompt.block_hashes += hasher(prompt)
                        answers.append([bytes(one).hex() for one in prompt.block_hashes])
                    except Exception as error:
                        answers.append(_in_short(error))
                count += len(answers[0])
                try:
                    same("digest", place, *answers)
                except Differ as differ:
                    return count, differ.difference
    return count, None


def _kinds_of_requests() -> Iterator[tuple[str, list[int], dict[str, Any]]]:
    """Names, tokens and extra keys."""
    choose = random.Random(2)
    lora = SimpleNamespace(lora_name="adapter", name="adapter", lora_path="/adapter", lora_int_id=1, adapter_id=1)
    images = [
        SimpleNamespace(
            identifier=f"image-{offset}",
            mm_hash=None,
            modality="image",
            mm_position=SimpleNamespace(offset=offset, length=length),
        )
        for offset, length in ((5, 20), (30, 2), (32, 100), (500, 40))
    ]
    extras: dict[str, dict[str, Any]] = {
        "tokens only": {},
        "LoRA": {"lora_request": lora},
        "cache salt": {"cache_salt": "salt"},
        "images": {"mm_features": images},
        "LoRA, cache salt and images": {"lora_request": lora, "cache_salt": "salt", "mm_features": images},
    }
    for label, more in extras.items():
        yield label, [choose.randrange(150_000) for _ in range(1000)], more
    yield "large token ids", [choose.randrange(2**31) for _ in range(1000)], {}
    yield "fewer tokens than a block", [1, 2, 3], {}


def _race_all(found: Findings, functions: dict[str, Callable[[Any], bytes]], with_manager: bool) -> None:
    own, ours = _both("BlockPool")
    found.race("allocate and free 1,000 blocks", lambda: allocate_and_free(own), lambda: allocate_and_free(ours))
    found.race(
        "cache and look up a 512-block prompt", lambda: cache_and_look_up(own), lambda: cache_and_look_up(ours)
    )
    own, ours = _both("get_request_block_hasher")
    for name in ("sha256", "sha256_cbor"):
        function = functions[name]
        with _seeded(function):
            found.race(
                f"hash 8,192 tokens, {name}",
                lambda function=function: hash_prompt(own, function),  # type: ignore[misc]
                lambda function=function: hash_prompt(ours, function),  # type: ignore[misc]
            )
    with _seeded(functions["sha256"]):
        _race_managers(found, functions["sha256"], "KVCacheManager", manager=False)
        if with_manager:
            _race_managers(found, functions["sha256"], "blockpool's KVCacheManager", manager=True)


def _race_managers(found: Findings, function: Callable[[Any], bytes], name: str, manager: bool) -> None:
    """vLLM's KVCacheManager on its own pool, and on ours, or our manager: both must give the same blocks."""
    cycles: list[ManagerCycle] = []

    def on_own() -> Work:
        cycles.append(ManagerCycle(function))
        return cycles[-1].work

    def on_ours() -> Work:
        with _installed(manager):
            cycles.append(ManagerCycle(function))
        return _while_installed(cycles[-1].work, manager)

    found.race(f"one prompt of 8,192 tokens through {name}", on_own, on_ours)
    if len(cycles) == 2:
        theirs, ours = (cycle.seen for cycle in cycles)
        difference = None
        try:
            same("prompt", name, theirs, ours)
        except Differ as differ:
            difference = differ.difference
        found.compared(f"prompts through {name}", len(theirs), difference)


def _while_installed(work: Work, manager: bool) -> Work:
    def installed_work() -> int:
        with _installed(manager):
            return work()

    return installed_work


@contextmanager
def _installed(manager: bool) -> Iterator[None]:
    install(force=True, manager=manager)
    try:
        yield
    finally:
        uninstall()


def _in_short(error: Exception) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
