"""A copy of the package that stands in for vLLM, for one test."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TREE = Path(__file__).parent / "vllm_stand_in"
MANAGER_TREE = Path(__file__).parent / "manager_stand_in"
PACKAGES = ("vllm", "vllm_extra", "other")


class StandIn:
    """The copy: `edit` it, then import it here or in another process."""

    def __init__(self, root: Path) -> None:
        self.root = root
        shutil.copytree(TREE, root, ignore=shutil.ignore_patterns("__pycache__"))

    def edit(self, file: str, old: str, new: str) -> None:
        path = self.root / file
        text = path.read_text()
        assert text.count(old) == 1, (file, old)
        path.write_text(text.replace(old, new))

    def add_manager(self) -> None:
        """A KVCacheManager and what one is made of, which most tests do without. Its methods do nothing."""
        shutil.copytree(MANAGER_TREE, self.root, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))

    def version(self, version: str) -> None:
        self.edit("vllm/__init__.py", "0.33.0+cpu", version)

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Python in a process of its own, in which this is vLLM."""
        path = os.pathsep.join([str(self.root), *filter(None, [os.environ.get("PYTHONPATH")])])
        return subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PYTHONPATH": path} | environment,
        )


def modules_of_the_stand_in() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] in PACKAGES}


def names() -> dict[tuple[str, str], Any]:
    """Every name of every module of the stand-in, and what it is."""
    return {
        (module, name): value
        for module, loaded in modules_of_the_stand_in().items()
        if isinstance(loaded, ModuleType)
        for name, value in vars(loaded).items()
        if not name.startswith("__") and not isinstance(value, ModuleType)
    }


@contextmanager
def imported_here(made: StandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """While it lasts, `import vllm` in this process is the stand-in. In the end everything is as it was."""
    from blockpool.integrations.vllm.swap import uninstall
    from blockpool.integrations.vllm.words import words

    there = {name: sys.modules.pop(name) for name in modules_of_the_stand_in()}
    monkeypatch.syspath_prepend(str(made.root))
    importlib.invalidate_caches()
    words.cache_clear()
    try:
        yield
    finally:
        uninstall()
        for name in modules_of_the_stand_in():
            del sys.modules[name]
        sys.modules.update(there)
        words.cache_clear()
