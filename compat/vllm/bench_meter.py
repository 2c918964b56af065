"""Timers around methods: the time spent inside them, less what the timers themselves cost.

The clock is this thread's processor time, so that other work on the machine is not booked under a method.
A call made from within another timed call belongs to that one and is not counted again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Call = Callable[..., Any]

CALIBRATION_CALLS = 5_000


@dataclass
class Spent:
    num_calls: int = 0
    raw_ns: int = 0


class Meter:
    """Timers that share one account. `args` and `kwargs` are typical ones: a timer costs more with more of them."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._spent: dict[str, Spent] = {}
        self._inside = False
        self._inner_ns, self._outer_ns = self._overhead_ns(args, kwargs)

    def timed(self, name: str, call: Call) -> Call:
        """The same call, its time booked under `name`."""
        spent = self._spent.setdefault(name, Spent())
        clock = time.thread_time_ns

        def timed_call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return call(*args, **kwargs)
            self._inside = True
            start = clock()
            try:
                return call(*args, **kwargs)
            finally:
                spent.raw_ns += clock() - start
                spent.num_calls += 1
                self._inside = False

        return timed_call

    def take(self) -> tuple[dict[str, float], dict[str, int], float]:
        """Seconds by name, calls by name, and the seconds that the timers added to whatever ran around them."""
        seconds = {name: max(0.0, s.raw_ns - s.num_calls * self._inner_ns) / 1e9 for name, s in self._spent.items()}
        calls = {name: spent.num_calls for name, spent in self._spent.items()}
        for spent in self._spent.values():
            spent.num_calls = spent.raw_ns = 0
        return seconds, calls, sum(calls.values()) * self._outer_ns / 1e9

    def _overhead_ns(self, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[float, float]:
        """What a timer adds per call: to the time that it books, and to the caller's time."""
        timed_call = self.timed("calibration", nothing)
        spent = self._spent.pop("calibration")
        inner, outer = [], []
        for _ in range(7):
            spent.raw_ns = 0
            bare_ns = loop_ns(nothing, args, kwargs)
            whole_ns = loop_ns(timed_call, args, kwargs)
            inner.append(spent.raw_ns - bare_ns)
            outer.append(whole_ns - bare_ns)
        return statistics.median(inner) / CALIBRATION_CALLS, statistics.median(outer) / CALIBRATION_CALLS


def nothing(*args: object, **kwargs: object) -> None:
    """The cheapest call."""


def loop_ns(call: Call, args: tuple[object, ...], kwargs: dict[str, object]) -> int:
    start = time.thread_time_ns()
    for _ in range(CALIBRATION_CALLS):
        call(*args, **kwargs)
    return time.thread_time_ns() - start
