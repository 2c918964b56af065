"""Which parts of this installation are compiled: found by looking, never remembered."""

from __future__ import annotations

import importlib

import msgspec

ROOMS = tuple(
    f"blockpool.{room}" for room in ("pool", "managers", "cache", "engine", "wire", "offload", "integrations.vllm")
)
#: Interpreted in every build: exceptions and plain values, where nothing is hot.
INTERPRETED = frozenset(
    {"errors", "events", "reports", "audit", "specs", "config", "plan", "block_copy"}
    | {
        "members",
        "additional",
        "words",
        "pools",
        "hasher",
        "managers",
        "views",
        "translate",
        "swap",
        "notice",
        "plugin",
        "selftest",
        "twins",
        "speed",
    }
    | {
        "output",
        "states",
        "connector",
        "engine",
        "worker",
        "block_table",
        "slots",
        "reads",
        "fingerprint",
        "store",
        "paged_store",
        "shadow_store",
        "checked_store",
        "model",
        "reference_model",
        "shadow_model",
        "demo",
    }
    | {"codec", "lean", "endpoints", "protocol", "extra", "outbox", "ledger", "desk", "publisher", "mirror"}
    | {"rules", "fleet", "subscriber", "recording", "player", "check", "diff"}
    | {"tier", "policy", "namespace", "memory", "announcing", "slot_tier", "host", "disk", "checksum"}
    | {"valkey", "valkey_value"}
)


class BuildInfo(msgspec.Struct, frozen=True):
    """`compiled`: module -> whether it runs compiled, for each module that a full build compiles.

    `hash_kernel`: the SHA-256 path that runs: "sha-ni", "portable-c" or "pure-python".
    """

    version: str
    compiled: dict[str, bool]
    hash_kernel: str

    @property
    def is_compiled(self) -> bool:
        """Whether everything that can be compiled is."""
        return all(self.compiled.values()) and self.hash_kernel != "pure-python"


def build_info() -> BuildInfo:
    """Look at every module that a full build compiles."""
    import pkgutil  # slow to import, and only this needs it

    from blockpool import __version__
    from blockpool.hashing import KERNEL

    compiled: dict[str, bool] = {}
    for room in ROOMS:
        for found in pkgutil.iter_modules(importlib.import_module(room).__path__):
            if found.name not in INTERPRETED:
                module = importlib.import_module(f"{room}.{found.name}")
                compiled[module.__name__] = not str(module.__file__).endswith(".py")
    return BuildInfo(__version__, compiled, KERNEL)
