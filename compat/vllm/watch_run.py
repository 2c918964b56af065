"""pytest plugin for one of the two runs: puts our pool in place or makes sure that it is not, and writes down
what became of each test.

It is driven by the environment, because it is loaded with ``-p`` in a process of its own:

COMPAT_RECORD   file to append to: one JSON object per line, so that a crash loses nothing
COMPAT_POOL     "ours": vLLM loads its general plugins with BLOCKPOOL_VLLM=1; "managed": with BLOCKPOOL_VLLM_MANAGER=1
                as well; "theirs": with neither set
COMPAT_DONE     file with the node ids to leave out, one per line: those an earlier, crashed process has done

A run that tests the wrong pool must be impossible. So the process ends before the first test unless the classes
in vLLM's modules are the right ones, and each test fails whose own module holds a wrong one.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REPLACED = {
    "vllm.v1.core.block_pool": ("BlockPool", "BlockHashToBlockMap"),
    "vllm.v1.core.kv_cache_utils": ("KVCacheBlock", "FreeKVCacheBlockQueue", "get_request_block_hasher"),
    "vllm.v1.hisparse.block_pool": ("SharedEventQueueBlockPool",),
}
REPLACED_BY_THE_MANAGER = {"vllm.v1.core.kv_cache_manager": ("KVCacheManager",)}
OURS = "blockpool"


class WrongPool(Exception):
    """The pool in vLLM's modules is not the one that this run is about."""


def owner(thing: object) -> str:
    """The package which a class or function comes from."""
    return str(getattr(thing, "__module__", type(thing).__module__)).partition(".")[0]


def describe(thing: object) -> str:
    return f"{getattr(thing, '__module__', '?')}.{getattr(thing, '__qualname__', thing)}"


class Watch:
    def __init__(self, record: Path, expected: str, done: frozenset[str]) -> None:
        self.out = record.open("a", encoding="utf-8")
        self.expected = expected
        self.done = done
        self.outcome: dict[str, Any] = {}

    def write(self, **fields: Any) -> None:
        self.out.write(json.dumps(fields) + "\n")
        self.out.flush()

    def names(self) -> Iterator[tuple[str, str, bool]]:
        """Module and name of all that may be replaced, and whether it is to be ours."""
        for module, names in REPLACED.items():
            for name in names:
                yield module, name, self.expected != "theirs"
        for module, names in REPLACED_BY_THE_MANAGER.items():
            for name in names:
                yield module, name, self.expected == "managed"

    def put_in_place(self) -> None:
        import importlib

        from vllm import __version__
        from vllm.plugins import load_general_plugins

        for variable, runs in (("BLOCKPOOL_VLLM", ("ours", "managed")), ("BLOCKPOOL_VLLM_MANAGER", ("managed",))):
            os.environ.pop(variable, None)
            if self.expected in runs:
                os.environ[variable] = "1"
        load_general_plugins()
        pool = {}
        for module, name, is_ours in self.names():
            thing = getattr(importlib.import_module(module), name)
            pool[f"{module}.{name}"] = describe(thing)
            if (owner(thing) == OURS) != is_ours:
                raise WrongPool(f"{module}.{name} is {describe(thing)}; this run is about {self.expected}")
        self.write(event="pool", vllm=__version__, pool=pool, build=self.build())

    def build(self) -> str | None:
        """Compiled or pure, and where from: a run on sources that were not meant is worth nothing."""
        package = sys.modules.get(OURS)
        if package is None:
            return None
        inner = sys.modules.get("blockpool.pool.block_pool")
        return str(getattr(inner, "__file__", None) or package.__file__)

    def check_module(self, module: ModuleType) -> None:
        for _, name, is_ours in self.names():
            thing = vars(module).get(name)
            if thing is not None and (owner(thing) == OURS) != is_ours:
                raise WrongPool(f"{module.__name__} uses {describe(thing)}")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item], config: pytest.Config) -> None:
        self.write(event="collected", node_ids=[item.nodeid for item in items])
        left_out = [item for item in items if item.nodeid in self.done]
        items[:] = [item for item in items if item.nodeid not in self.done]
        config.hook.pytest_deselected(items=left_out)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(event="uncollected", node_id=report.nodeid, text=str(report.longrepr)[-2000:])

    def pytest_collection_finish(self) -> None:
        """vLLM's tests collect garbage after each test, and each time thaw what importing vLLM left: a second a test,
        half of the whole run. Here that is frozen and stays frozen; garbage of the tests is collected as before."""
        gc.collect()
        gc.freeze()
        gc.unfreeze = lambda: None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.write(event="started", node_id=item.nodeid)
        self.outcome = {"outcome": "passed", "seconds": 0.0, "text": ""}
        result = yield
        self.write(event="ended", node_id=item.nodeid, **self.outcome)
        return result

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        module = getattr(item, "module", None)
        if module is not None:
            self.check_module(module)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.outcome["seconds"] = round(self.outcome["seconds"] + report.duration, 3)
        if report.skipped:
            self.outcome["outcome"] = "skipped"
        elif report.failed:
            self.outcome["outcome"] = "failed" if report.when == "call" else "error"
            self.outcome["text"] = str(report.longrepr)[-4000:]

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.write(event="finished", exit_status=int(exitstatus))
        self.out.close()


def pytest_configure(config: pytest.Config) -> None:
    done = os.environ.get("COMPAT_DONE")
    names = Path(done).read_text(encoding="utf-8").splitlines() if done else []
    watch = Watch(Path(os.environ["COMPAT_RECORD"]), os.environ["COMPAT_POOL"], frozenset(names))
    try:
        watch.put_in_place()
    except Exception as error:
        pytest.exit(f"{type(error).__name__}: {error}", returncode=3)
    config.pluginmanager.register(watch, "compat-watch")
