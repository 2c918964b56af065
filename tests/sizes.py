"""How long the random tests run: the default, or the long size behind BLOCKPOOL_LONG=1."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

LONG = os.environ.get("BLOCKPOOL_LONG") == "1"


def machine_settings(examples: int = 120, steps: int = 40) -> settings:
    """For state machines."""
    return settings(
        max_examples=examples * 20 if LONG else examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def property_settings(examples: int = 200) -> settings:
    """For single properties."""
    return settings(
        max_examples=examples * 20 if LONG else examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
