"""Our classes in vLLM's place: everywhere in this process, or nowhere."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import msgspec

from blockpool.integrations.vllm.notice import forget_kept, logger

TESTED_VERSIONS = ("0.33.0",)


class Original(NamedTuple):
    """A name of vLLM's and the module that defines it. Ours has the same name."""

    module: str
    name: str


ORIGINALS = (
    Original("vllm.v1.core.block_pool", "BlockPool"),
    Original("vllm.v1.core.block_pool", "BlockHashToBlockMap"),
    Original("vllm.v1.core.kv_cache_utils", "KVCacheBlock"),
    Original("vllm.v1.core.kv_cache_utils", "FreeKVCacheBlockQueue"),
    Original("vllm.v1.core.kv_cache_utils", "get_request_block_hasher"),
    Original("vllm.v1.hisparse.block_pool", "SharedEventQueueBlockPool"),
)
#: What `install(manager=True)` replaces beside those.
MANAGER_ORIGINALS = (Original("vllm.v1.core.kv_cache_manager", "KVCacheManager"),)
#: Private methods that vLLM calls from other modules than the class's own.
CALLED_FROM_OUTSIDE = frozenset({"_insert_block_hash", "_maybe_evict_cached_block"})


class InstallError(RuntimeError):
    """Ours cannot take the place of vLLM's. Nothing was replaced."""


class VLLMNotFoundError(InstallError):
    """vLLM is not installed here, or cannot be imported."""


class UntestedVersionError(InstallError):
    """Nobody has tested this version of vLLM with ours."""


class ShapeError(InstallError):
    """vLLM's classes are not those that ours were made after."""


class Replacement(msgspec.Struct, frozen=True):
    """`name` of `module` is ours now, in `num_modules` modules: the one that defines it and those that import it."""

    module: str
    name: str
    num_modules: int


class Shape(msgspec.Struct, frozen=True):
    """What is different between vLLM's classes and ours. All empty: nothing that matters.

    `missing`: vLLM has not got what we replace, or ours has not got a method of vLLM's.
    `changed`: parameters that differ. `derived`: classes that were derived from vLLM's own before ours came, and
    would be half theirs and half ours.
    """

    missing: tuple[str, ...]
    changed: tuple[str, ...]
    derived: tuple[str, ...]


#: vLLM's own, while ours are in their place.
_own: dict[Original, Any] = {}


def install(force: bool = False, manager: bool = False) -> list[Replacement]:
    """Put ours in vLLM's place in every module that is imported now or later. Again: nothing more happens.

    To be called before an engine is built: one that exists keeps its pool, and is not to be used any more, since
    vLLM's pool would meet our classes. `force` accepts a version that was not tested and parameters that differ.
    `manager`: its KVCacheManager too, not the pool and the hasher alone.

    Raises VLLMNotFoundError, UntestedVersionError or ShapeError, and has changed nothing then.
    """
    if not is_installed(manager):
        check_version(force)
        own = own_objects(manager)
        _check_shape(own, force)
        _replace({id(theirs): _ours(original) for original, theirs in own.items()})
        _own.update(own)
    return replacements()


def uninstall() -> None:
    """Put vLLM's own back, also in modules that were imported since. Pools that exist stay what they are."""
    _replace({id(_ours(original)): theirs for original, theirs in _own.items()})
    _own.clear()
    forget_kept()


def is_installed(manager: bool = False) -> bool:
    """Whether ours are where vLLM defines its own; with `manager`, whether the KVCacheManager is as well."""
    return all(
        original in _own and getattr(sys.modules.get(original.module), original.name, None) is _ours(original)
        for original in originals(manager)
    )


def originals(manager: bool) -> tuple[Original, ...]:
    """What is replaced: pool and hasher, and with `manager` the KVCacheManager."""
    return ORIGINALS + MANAGER_ORIGINALS if manager else ORIGINALS


def replacements() -> list[Replacement]:
    """Where ours are now, or, if they are not installed, where they would be."""
    there = originals(is_installed(manager=True))
    sought = {original: _ours(original) for original in there} if is_installed() else own_objects()
    held = [set(map(id, _names(module).values())) for module in _modules_of_vllm()]
    return [
        Replacement(*original, num_modules=sum(id(value) in ids for ids in held))
        for original, value in sought.items()
    ]


def vllm_version() -> str:
    """The version of the vLLM that can be imported here. Raises VLLMNotFoundError."""
    return str(getattr(_import("vllm"), "__version__", "unknown"))


def is_tested(version: str) -> bool:
    """Whether ours was tested with that version, whatever it was built for (0.33.0+cpu is 0.33.0)."""
    return version.partition("+")[0] in TESTED_VERSIONS


def check_version(force: bool = False) -> str:
    """vLLM's version. Raises UntestedVersionError, unless forced."""
    version = vllm_version()
    if not force and not is_tested(version):
        raise UntestedVersionError(
            f"vLLM {version} was not tested with this blockpool, only {', '.join(TESTED_VERSIONS)}. "
            "Nothing was replaced. "
            "To use blockpool all the same: BLOCKPOOL_VLLM=force, or install(force=True). "
            "To use vLLM's own pool: leave BLOCKPOOL_VLLM unset."
        )
    return version


def own_manager() -> Any:
    """vLLM's own KVCacheManager, whether ours is in its place or not."""
    (original,) = MANAGER_ORIGINALS
    return _own[original] if original in _own else getattr(_import(original.module), original.name)


def own_objects(manager: bool = False) -> dict[Original, Any]:
    """vLLM's own, whether ours are in their place or not. Raises ShapeError when one is missing."""
    own: dict[Original, Any] = {}
    missing = []
    for original in originals(manager):
        module = _import(original.module)
        found = getattr(module, original.name, None)
        if found is not None and found is _ours(original):
            found = _own.get(original)
        if found is None:
            missing.append(f"vLLM has no {original.module if module is None else '.'.join(original)}")
        else:
            own[original] = found
    if missing:
        raise ShapeError(_shape_message(list(dict.fromkeys(missing))))
    return own


def shape_of(own: dict[Original, Any]) -> Shape:
    """What is different between these and ours."""
    missing: list[str] = []
    changed: list[str] = []
    derived: list[str] = []
    for original, theirs in own.items():
        ours = _ours(original)
        _compare(original.name, theirs, ours, changed)
        if not isinstance(theirs, type):
            continue
        for name, member in vars(theirs).items():
            if not (inspect.isfunction(member) or isinstance(member, property)):
                continue
            if not hasattr(ours, name):
                if not name.startswith("_") or name in CALLED_FROM_OUTSIDE:
                    missing.append(f"blockpool has no {original.name}.{name}")
            elif inspect.isfunction(member) and not name.startswith("__"):
                _compare(f"{original.name}.{name}", member, getattr(ours, name), changed)
        heirs: list[type] = theirs.__subclasses__()
        derived += [f"{heir.__module__}.{heir.__qualname__}" for heir in heirs if heir not in own.values()]
    return Shape(tuple(missing), tuple(changed), tuple(derived))


def _check_shape(own: dict[Original, Any], force: bool) -> None:
    shape = shape_of(own)
    wrong = [*shape.missing, *shape.changed]
    wrong += [f"{name} was derived from vLLM's own class before blockpool was installed" for name in shape.derived]
    if shape.missing or (wrong and not force):
        raise ShapeError(_shape_message(wrong))
    for what in wrong:
        logger.warning("blockpool was forced: %s", what)


def _shape_message(wrong: list[str]) -> str:
    return f"vLLM {vllm_version()} does not fit this blockpool: {'; '.join(wrong)}. Nothing was replaced."


def _compare(name: str, theirs: Any, ours: Any, changed: list[str]) -> None:
    expected, found = _parameters(ours), _parameters(theirs)
    if found != expected:
        changed.append(f"{name}({', '.join(found)}) where blockpool has ({', '.join(expected)})")


def _parameters(function: Any) -> list[str]:
    """Names, order, kinds and defaults as text, without self and without annotations."""
    given = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    bare = inspect.Signature([p.replace(annotation=inspect.Parameter.empty) for p in given])
    text = [str(p) for p in bare.parameters.values()]
    first_keyword = next((i for i, p in enumerate(given) if p.kind is p.KEYWORD_ONLY), None)
    if first_keyword is not None and not any(p.kind is p.VAR_POSITIONAL for p in given):
        text.insert(first_keyword, "*")
    return text


def _ours(original: Original) -> Any:
    return getattr(import_module("blockpool.integrations.vllm"), original.name)


def _import(name: str) -> Any:
    """A module of vLLM, None when this vLLM has none of that name."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name == "vllm":
            raise VLLMNotFoundError(f"vLLM is not installed for {sys.executable}") from None
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None
        raise VLLMNotFoundError(f"vLLM cannot be imported: {error}") from error
    except Exception as error:
        raise VLLMNotFoundError(f"vLLM cannot be imported: {type(error).__name__}: {error}") from error


def _modules_of_vllm() -> Iterator[ModuleType]:
    """The imported modules of vllm and of packages whose name begins with it (vllm_ascend), each once."""
    seen: set[int] = set()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0].startswith("vllm") and isinstance(module, ModuleType) and id(module) not in seen:
            seen.add(id(module))
            yield module


def _names(module: ModuleType) -> dict[str, Any]:
    """A module's names. A module that is loaded when it is first used stays unloaded."""
    return dict(ModuleType.__getattribute__(module, "__dict__"))


def _replace(new: dict[int, Any]) -> None:
    """Put `new[id(value)]` wherever a module of vLLM has that value; all of them or none."""
    done: list[tuple[ModuleType, str, Any]] = []
    try:
        for module in _modules_of_vllm():
            for name, value in _names(module).items():
                if id(value) in new:
                    setattr(module, name, new[id(value)])
                    done.append((module, name, value))
    except BaseException:
        for module, name, value in reversed(done):
            setattr(module, name, value)
        raise
