"""What the cache refuses by name. Every one of these leaves the books as they were."""

from __future__ import annotations


class CacheError(Exception):
    """Base of every error that the cache raises on purpose."""


class StalePlan(CacheError, RuntimeError):
    """The plan was made on another version of the pool: plan again."""


class RequestError(CacheError, ValueError):
    """A request, or a call about one, that contradicts itself."""


class ConfigError(CacheError, ValueError):
    """A configuration that cannot work."""


class StepError(CacheError, ValueError):
    """Steps begin in rising order; only the newest can be cancelled, and none after its acknowledgement."""
