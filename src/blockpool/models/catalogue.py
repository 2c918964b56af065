"""The models that are known by name: trimmed configurations with published values, each under the names it serves."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

import msgspec

FOLDER: Final = Path(__file__).parent / "catalogue"
NAMES: Final = FOLDER.with_suffix(".json")


@cache
def known_models() -> dict[str, Path]:
    """The names on Hugging Face, and of each its configuration here."""
    listed = msgspec.json.decode(NAMES.read_bytes(), type=dict[str, list[str]])
    return {name: FOLDER / f"{stem}.json" for stem, names in listed.items() for name in names}
