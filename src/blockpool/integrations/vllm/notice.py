"""What the user is to hear, kept until it can be heard.

vLLM loads its plugins before it sets up its log in some processes and after it in others, and a forked process has
what its parent has loaded and does not load it again. So a line that the log would drop now is kept, and said when
the first pool is built: by then the log is set up, and this is the process that it matters in.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.blockpool")

_kept: list[str] = []


def say(line: str) -> None:
    """Say it at INFO, now if it is heard now."""
    if logger.isEnabledFor(logging.INFO):
        logger.info(line)
    else:
        _kept.append(line)


def say_kept() -> None:
    """Say what was kept, once. A pool calls this when it is built."""
    while _kept:
        logger.info(_kept.pop(0))


def forget_kept() -> None:
    """Say none of it: it is not true any more."""
    _kept.clear()
