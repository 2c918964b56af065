"""Without pyzmq the wire is there, but for its sockets."""

from __future__ import annotations

import subprocess
import sys

import pytest

from blockpool.wire import Fleet, Mirror, MissingExtraError, Publisher, Subscriber, WireError, poll_all
from blockpool.wire.player import Player


def test_importing_the_wire_imports_no_sockets() -> None:
    code = "import sys, blockpool.wire; sys.exit('zmq' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_sockets_name_the_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    for make in (
        Publisher,
        lambda: Subscriber(Mirror(), "tcp://127.0.0.1:1"),
        lambda: Player("tcp://127.0.0.1:*"),
    ):
        with pytest.raises(MissingExtraError, match=r"needs pyzmq: pip install 'blockpool\[wire\]'") as error:
            make()  # type: ignore[operator]
        assert isinstance(error.value, WireError)
        assert isinstance(error.value, ImportError)
    assert Fleet().overlap([b"a" * 32]) == {}
    assert poll_all([]) == 0
