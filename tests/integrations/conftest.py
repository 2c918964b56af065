from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations.stand_in import StandIn, imported_here


@pytest.fixture
def stand_in(tmp_path: Path) -> StandIn:
    """A vLLM to edit, not imported."""
    return StandIn(tmp_path / "environment")


@pytest.fixture
def vllm(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A vLLM that can be imported in this process, and edited until then."""
    with imported_here(stand_in, monkeypatch):
        yield stand_in
