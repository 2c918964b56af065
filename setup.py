"""Build: the compiled rooms with mypyc, the hash kernel with the C compiler, each whole or not at all.

BLOCKPOOL_PURE=1               build nothing; the same files run interpreted
BLOCKPOOL_REQUIRE_COMPILED=1   a failing compiler ends the build instead of leaving that part pure
"""

import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

PURE = os.environ.get("BLOCKPOOL_PURE") == "1"
MUST = os.environ.get("BLOCKPOOL_REQUIRE_COMPILED") == "1"
PACKAGE = Path("src/blockpool")
# Values, exceptions and event structs: nothing there is hot, and interpreted classes pickle and document themselves.
INTERPRETED = {"__init__", "errors", "events", "reports", "audit", "specs", "config", "plan", "block_copy"}
# Of the drop-in: what people subclass, refer to weakly or run once.
INTERPRETED |= {"members", "additional", "words", "pools", "hasher", "managers", "views", "translate"}
INTERPRETED |= {"swap", "notice", "plugin", "selftest", "twins", "speed"}
# Of the engine: all but what the scheduler runs in each step.
INTERPRETED |= {"output", "states", "connector", "engine", "worker", "block_table", "slots", "reads", "fingerprint"}
INTERPRETED |= {"store", "paged_store", "shadow_store", "checked_store", "model", "reference_model", "shadow_model"}
INTERPRETED |= {"demo"}
# Of the wire: all but the keys themselves.
INTERPRETED |= {"codec", "lean", "endpoints", "protocol", "extra", "outbox", "ledger", "desk", "publisher", "mirror"}
INTERPRETED |= {"rules", "fleet", "subscriber", "recording", "player", "check", "diff"}
# Of the lower tiers: all but what people subclass, and what waits for others.
INTERPRETED |= {"tier", "policy", "namespace", "memory", "announcing", "slot_tier", "host", "disk", "checksum"}
INTERPRETED |= {"valkey", "valkey_value"}


def compiled_rooms() -> list[Extension]:
    from mypyc.build import mypycify  # a pure build must not need it

    files = [
        str(path)
        for room in ("pool", "managers", "cache", "engine", "wire", "offload", "integrations/vllm")
        for path in sorted((PACKAGE / room).glob("*.py"))
        if path.stem not in INTERPRETED
    ]
    return mypycify(files, opt_level="3", group_name="blockpool")


def hash_kernel() -> list[Extension]:
    source = PACKAGE / "hashing" / "_sha.c"
    return [Extension("blockpool.hashing._sha", [str(source)], extra_compile_args=["-O3"])]


def groups() -> list[list[Extension]]:
    if PURE:
        return []
    return [compiled_rooms(), hash_kernel()]


GROUPS = groups()


class Build(build_ext):
    """A group of extensions is installed whole or not at all: half a compiled room cannot be imported."""

    def build_extensions(self) -> None:
        for group in GROUPS:
            try:
                for extension in group:
                    self.build_extension(extension)
            except (CCompilerError, BaseError, OSError) as why:
                if MUST:
                    raise
                for extension in group:
                    Path(self.get_ext_fullpath(extension.name)).unlink(missing_ok=True)
                self.warn(f"{group[0].name} stays pure: {why}")


for extension in (extension for group in GROUPS for extension in group):
    extension.optional = not MUST
    extension.extra_compile_args = [arg for arg in extension.extra_compile_args if arg != "-Werror"]

setup(
    ext_modules=[extension for group in GROUPS for extension in group],
    cmdclass={"build_ext": Build},
    # apart, so that what one build leaves behind is never packed into the other
    options={"build": {"build_base": "build/pure" if PURE else "build/compiled"}},
)
