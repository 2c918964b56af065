"""One step at a time: the scheduler says who runs, the worker turns that into slots, clears and copies.

The engine drives the cache; it knows no model but its reference one, no network and no clock.
"""

from blockpool.engine.output import CachedRequestData, NewRequestData, SchedulerOutput

__all__ = [
    "CachedRequestData",
    "NewRequestData",
    "SchedulerOutput",
]
