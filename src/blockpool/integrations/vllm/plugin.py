"""What vLLM runs at its start, in each of its processes: nothing, unless BLOCKPOOL_VLLM asks for us.

This module imports nothing and cannot fail to load. vLLM logs a plugin that does not load and goes on without it, but
an exception of `register` ends its start: who has asked for us is told that they did not get us.
"""

from __future__ import annotations

import os

VARIABLE = "BLOCKPOOL_VLLM"
MANAGER_VARIABLE = "BLOCKPOOL_VLLM_MANAGER"


def register() -> None:
    """The entry point, group `vllm.general_plugins`. Called again it does nothing.

    BLOCKPOOL_VLLM unset, empty or 0: vLLM keeps its own pool. 1: ours is installed. force: also into a version of
    vLLM that was not tested. BLOCKPOOL_VLLM_MANAGER=1 beside it: our KVCacheManager too. Raises ValueError for other
    values, and what `install` raises.
    """
    asked = os.environ.get(VARIABLE, "")
    managed = os.environ.get(MANAGER_VARIABLE, "")
    if managed not in ("", "0", "1"):
        raise ValueError(f"{MANAGER_VARIABLE}={managed!r}: give 1 (use blockpool's KVCacheManager too) or 0")
    manager = managed == "1"
    if asked in ("", "0"):
        if manager:
            raise ValueError(f"{MANAGER_VARIABLE}=1 needs {VARIABLE}=1: the manager works on blockpool's pool alone")
        return
    if asked not in ("1", "force"):
        raise ValueError(f"{VARIABLE}={asked!r}: give 1 (use blockpool), force (also with an untested vLLM) or 0")

    from blockpool.integrations.vllm.notice import logger, say
    from blockpool.integrations.vllm.swap import install, is_installed, is_tested, vllm_version

    if is_installed(manager):
        return
    replaced = install(force=asked == "force", manager=manager)
    version = vllm_version()
    if not is_tested(version):
        logger.warning("blockpool was forced into vLLM %s, with which it was not tested", version)

    from blockpool import build_info

    build = build_info()
    kind = "compiled" if build.is_compiled else "not compiled"
    say(
        f"blockpool {build.version} ({kind}, hash kernel {build.hash_kernel}) stands in for vLLM {version}'s "
        f"{', '.join(one.name for one in replaced)}"
    )
    if not build.is_compiled:
        logger.warning(
            "blockpool %s is not compiled here: correct, but slower than vLLM's own pool. "
            "`blockpool version` says what is missing; install it where there is a C compiler.",
            build.version,
        )
