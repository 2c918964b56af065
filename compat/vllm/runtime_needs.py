"""Prints what the compiled library needs at run time and vLLM's environment does not bring: mypyc's runtime, in the
versions that pyproject.toml asks for. The rest is there already, and typer and rich are only the command's."""

from __future__ import annotations

import tomllib
from pathlib import Path

MYPYC_RUNTIME = ("librt", "mypy-extensions")

project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
for need in project["project"]["dependencies"]:
    if need.startswith(MYPYC_RUNTIME):
        print(need)
