"""pyzmq, imported by name when a socket is made: the rest of the wire works without it."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from blockpool.wire.errors import MissingExtraError


def import_zmq(needed_by: str) -> ModuleType:
    """Raises MissingExtraError when pyzmq is not installed."""
    try:
        return import_module("zmq")  # by name: the package is built where pyzmq is not installed
    except ImportError:
        raise MissingExtraError(f"{needed_by} needs pyzmq: pip install 'blockpool[wire]'") from None
