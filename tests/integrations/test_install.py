"""Ours in vLLM's place: everywhere or nowhere, and back."""

from __future__ import annotations

import logging
import sys
from importlib import import_module, reload
from types import ModuleType
from typing import Any

import pytest

from blockpool.integrations import vllm as ours
from blockpool.integrations.vllm.swap import (
    ORIGINALS,
    InstallError,
    Replacement,
    ShapeError,
    UntestedVersionError,
    VLLMNotFoundError,
    install,
    is_installed,
    is_tested,
    own_objects,
    uninstall,
)
from tests.integrations.stand_in import StandIn, names

POOL, UTILS = "vllm/v1/core/block_pool.py", "vllm/v1/core/kv_cache_utils.py"
NAMES = [original.name for original in ORIGINALS]


def refused(kind: type[InstallError], force: bool = False) -> str:
    """The message of a refusal, which has changed nothing."""
    before = names()
    with pytest.raises(kind) as refusal:
        install(force)
    assert not is_installed()
    assert {name: value for name, value in names().items() if name in before} == before
    assert not any(value is getattr(ours, name) for value in names().values() for name in NAMES)
    message = str(refusal.value)
    assert "\n" not in message
    return message


# -- replaced ----------------------------------------------------------------------------------------


def test_modules_that_were_imported_before_and_after_get_ours(vllm: StandIn) -> None:
    coordinator = import_module("vllm.v1.core.coordinator")
    extra = import_module("vllm_extra")
    install()
    assert is_installed()
    engine = import_module("vllm.v1.engine.core")
    (pool, block), hasher = engine.start()
    assert type(pool) is ours.BlockPool
    assert type(block) is ours.KVCacheBlock
    assert hasher.__module__ == ours.get_request_block_hasher.__module__
    assert coordinator.Block is ours.KVCacheBlock, "whatever it is called there"
    assert extra.BlockPool is ours.BlockPool
    assert engine.SharedEventQueueBlockPool is ours.SharedEventQueueBlockPool
    for original in ORIGINALS:
        assert getattr(import_module(original.module), original.name) is getattr(ours, original.name)


def test_it_says_what_was_replaced_and_in_how_many_modules(vllm: StandIn) -> None:
    import_module("vllm.v1.engine.core")
    import_module("vllm_extra")
    assert install() == [
        Replacement("vllm.v1.core.block_pool", "BlockPool", 4),
        Replacement("vllm.v1.core.block_pool", "BlockHashToBlockMap", 2),
        Replacement("vllm.v1.core.kv_cache_utils", "KVCacheBlock", 3),
        Replacement("vllm.v1.core.kv_cache_utils", "FreeKVCacheBlockQueue", 2),
        Replacement("vllm.v1.core.kv_cache_utils", "get_request_block_hasher", 2),
        Replacement("vllm.v1.hisparse.block_pool", "SharedEventQueueBlockPool", 2),
    ]


def test_packages_of_other_names_keep_what_they_have(vllm: StandIn) -> None:
    theirs = import_module("other").BlockPool
    install()
    assert import_module("other").BlockPool is theirs
    assert import_module("vllm.v1.core.block_pool").BlockPool is not theirs


def test_twice_is_once(vllm: StandIn) -> None:
    import_module("vllm.v1.engine.core")
    first = install()
    after = names()
    assert install() == first
    assert names() == after
    uninstall()
    uninstall()
    assert not is_installed()
    assert install() == first


def test_a_module_that_was_loaded_anew_is_replaced_anew(vllm: StandIn) -> None:
    coordinator = import_module("vllm.v1.core.coordinator")
    before = own_objects()
    first = install()
    assert own_objects() == before, "vLLM's own, although ours are there"
    pools = reload(import_module("vllm.v1.core.block_pool"))
    anew = pools.BlockPool
    assert not is_installed()
    assert install() == first
    assert pools.BlockPool is coordinator.BlockPool is ours.BlockPool
    uninstall()
    assert pools.BlockPool is coordinator.BlockPool is anew
    assert own_objects()[ORIGINALS[2]] is before[ORIGINALS[2]]


def test_the_manager_is_replaced_when_it_is_asked_for_and_put_back(vllm: StandIn) -> None:
    vllm.add_manager()
    engine = import_module("vllm.v1.core.kv_cache_manager")
    theirs = engine.KVCacheManager
    install()
    assert is_installed()
    assert not is_installed(manager=True)
    assert engine.KVCacheManager is theirs
    replaced = install(manager=True)
    assert is_installed(manager=True)
    assert engine.KVCacheManager is ours.KVCacheManager
    assert replaced[-1] == Replacement("vllm.v1.core.kv_cache_manager", "KVCacheManager", 1)
    assert len(replaced) == len(ORIGINALS) + 1
    uninstall()
    assert engine.KVCacheManager is theirs
    assert not is_installed()


def test_without_a_manager_in_vllm_nothing_is_replaced(vllm: StandIn) -> None:
    with pytest.raises(ShapeError, match=r"vLLM has no vllm\.v1\.core\.kv_cache_manager"):
        install(manager=True)
    assert not is_installed()
    install()
    with pytest.raises(ShapeError):
        install(manager=True)
    assert is_installed(), "the pool stays where it was"


def test_a_manager_with_another_method_is_refused(vllm: StandIn) -> None:
    vllm.add_manager()
    vllm.edit("vllm/v1/core/kv_cache_manager.py", "    def free(self, request)", "    def free(self, request, later)")
    with pytest.raises(ShapeError, match=r"KVCacheManager.free\(request, later\) where blockpool has \(request\)"):
        install(manager=True)
    assert not is_installed()


# -- restored ----------------------------------------------------------------------------------------


def test_uninstall_restores_every_name_also_where_ours_was_imported(vllm: StandIn) -> None:
    import_module("vllm.v1.core.coordinator")
    before = names()
    install()
    import_module("vllm.v1.engine.core")
    import_module("vllm_extra")
    uninstall()
    after = names()
    assert {name: after[name] for name in before} == before
    for original in ORIGINALS:
        theirs = getattr(import_module(original.module), original.name)
        assert theirs.__module__ == original.module
        held = [value for (_, name), value in after.items() if name == original.name]
        assert held
        assert all(value is theirs for value in held)


def test_uninstall_without_install_is_nothing() -> None:
    uninstall()
    assert not is_installed()


# -- all or nothing ----------------------------------------------------------------------------------


class Stubborn(ModuleType):
    """A module whose names cannot be set once `closed`."""

    closed = False

    def __setattr__(self, name: str, value: Any) -> None:
        if self.closed:
            raise TypeError(f"{name} cannot be set")
        super().__setattr__(name, value)


def test_a_module_that_cannot_be_changed_undoes_all(vllm: StandIn) -> None:
    engine = import_module("vllm.v1.engine.core")
    stubborn = Stubborn("vllm.stubborn")
    stubborn.get_request_block_hasher = engine.get_request_block_hasher  # type: ignore[attr-defined]
    sys.modules["vllm.stubborn"] = stubborn
    before = names()
    Stubborn.closed = True
    try:
        with pytest.raises(TypeError, match="get_request_block_hasher cannot be set"):
            install()
        assert names() == before
        assert not is_installed()
        Stubborn.closed = False
        install()
        after = names()
        Stubborn.closed = True
        with pytest.raises(TypeError, match="cannot be set"):
            uninstall()
        assert names() == after
        assert is_installed()
    finally:
        Stubborn.closed = False


class Lazy(ModuleType):
    """A module that is loaded at the first look at it, which must not be ours."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError("loaded")


def test_modules_that_are_not_loaded_yet_stay_so(vllm: StandIn) -> None:
    sys.modules["vllm.lazy"] = Lazy("vllm.lazy")
    sys.modules["vllm.nothing"] = None  # type: ignore[assignment]
    try:
        install()
        uninstall()
    finally:
        del sys.modules["vllm.lazy"], sys.modules["vllm.nothing"]


# -- versions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "tested"),
    [("0.33.0", True), ("0.33.0+cpu", True), ("0.33.0+cu130.local", True)]
    + [(other, False) for other in ("0.33.1", "0.33", "0.33.0rc1", "0.33.0.dev5+g12", "0.34.0", "1.0", "dev", "")],
)
def test_the_public_version_counts(version: str, tested: bool) -> None:
    assert is_tested(version) is tested


def test_an_untested_version_is_refused_and_the_message_tells_how_to_force(vllm: StandIn) -> None:
    vllm.version("0.34.0+cu130")
    import_module("vllm_extra")
    message = refused(UntestedVersionError)
    for said in ("0.34.0+cu130", "0.33.0", "BLOCKPOOL_VLLM=force", "install(force=True)", "unset"):
        assert said in message
    forced = install(force=True)
    assert is_installed()
    assert install() == forced, "it is there already"


def test_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert "vLLM is not installed for " in refused(VLLMNotFoundError)


def test_a_vllm_that_cannot_be_imported(vllm: StandIn) -> None:
    vllm.edit(UTILS, "from typing import Any\n", "from typing import Any\n\nimport libdevice_that_is_not_there\n")
    assert refused(VLLMNotFoundError) == "vLLM cannot be imported: No module named 'libdevice_that_is_not_there'"


# -- shapes ------------------------------------------------------------------------------------------

MISSING = [
    (
        POOL,
        "class BlockHashToBlockMap:",
        "class BlockHashMap:",
        "vLLM has no vllm.v1.core.block_pool.BlockHashToBlockMap",
    ),
    (
        POOL,
        "    def touch(",
        "    def pin(self, blocks):\n        pass\n\n    def touch(",
        "blockpool has no BlockPool.pin",
    ),
    (
        UTILS,
        "    def popleft(self",
        "    def peek(self):\n        pass\n\n    def popleft(self",
        "FreeKVCacheBlockQueue.peek",
    ),
    (
        UTILS,
        "    def reset_hash(self",
        "    @property\n    def age(self):\n        pass\n\n    def reset_hash(self",
        "blockpool has no KVCacheBlock.age",
    ),
]
CHANGED = [
    (POOL, "def touch(self, blocks)", "def touch(self, blocks, now)", "BlockPool.touch(blocks, now) where"),
    (POOL, "def free_blocks(self, ordered_blocks)", "def free_blocks(self, blocks)", "has (ordered_blocks)"),
    (POOL, 'medium="GPU",', 'medium="CPU",', "medium='CPU') where"),
    (
        POOL,
        "metrics_collector=None,",
        "metrics_collector=False,",
        "metrics_collector=False, num_hash_lookahead_tokens=0",
    ),
    (POOL, "def pop(self, key, block_id)", "def pop(self, block_id, key)", "BlockHashToBlockMap.pop(block_id, key)"),
    (UTILS, "kw_only=True, ", "", "KVCacheBlock(block_id"),
    (UTILS, "num_hash_lookahead_tokens=0):", "num_hash_lookahead_tokens=1):", "get_request_block_hasher("),
    (
        "vllm/v1/hisparse/block_pool.py",
        "event_owner, **",
        "owner, **",
        "SharedEventQueueBlockPool(*args, owner, **kwargs)",
    ),
]


@pytest.mark.parametrize(("file", "old", "new", "said"), [*MISSING, *CHANGED])
def test_another_shape_is_refused_by_name(vllm: StandIn, file: str, old: str, new: str, said: str) -> None:
    vllm.edit(file, old, new)
    message = refused(ShapeError)
    assert said in message
    assert "vLLM 0.33.0+cpu does not fit this blockpool" in message


@pytest.mark.parametrize(("file", "old", "new", "said"), MISSING)
def test_what_is_missing_is_refused_although_forced(vllm: StandIn, file: str, old: str, new: str, said: str) -> None:
    vllm.edit(file, old, new)
    assert said in refused(ShapeError, force=True)


@pytest.mark.parametrize(("file", "old", "new", "said"), CHANGED)
def test_other_parameters_can_be_forced_and_are_told(
    vllm: StandIn, caplog: pytest.LogCaptureFixture, file: str, old: str, new: str, said: str
) -> None:
    vllm.edit(file, old, new)
    with caplog.at_level(logging.WARNING, "vllm.blockpool"):
        install(force=True)
    assert said in caplog.text


def test_a_module_that_is_gone_is_named(vllm: StandIn) -> None:
    (vllm.root / "vllm/v1/hisparse/block_pool.py").unlink()
    for force in (False, True):
        assert "vLLM has no vllm.v1.hisparse.block_pool" in refused(ShapeError, force)


def test_private_methods_of_its_own_are_no_difference(vllm: StandIn) -> None:
    vllm.edit(POOL, "    def touch(", "    def _look(self):\n        pass\n\n    def touch(")
    install()


def test_a_class_derived_from_vllms_own_would_be_half_and_half(
    vllm: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    (vllm.root / "vllm_extra/pool.py").write_text(
        "from vllm.v1.core.block_pool import BlockPool\n\n\nclass LoudPool(BlockPool):\n    pass\n"
    )
    loud = import_module("vllm_extra.pool")
    assert "vllm_extra.pool.LoudPool was derived from vLLM's own class before" in refused(ShapeError)
    with caplog.at_level(logging.WARNING, "vllm.blockpool"):
        install(force=True)
    assert "LoudPool" in caplog.text
    del loud


# -- what the package needs --------------------------------------------------------------------------


def test_importing_the_package_imports_no_engine(stand_in: StandIn) -> None:
    modules = "notice, plugin, selftest, speed, swap, twins"
    program = f"import sys\nfrom blockpool.integrations.vllm import {modules}\n"
    result = stand_in.run("-c", program + "print({'vllm', 'torch'} & set(sys.modules))")
    assert (result.stdout, result.stderr) == ("set()\n", "")
