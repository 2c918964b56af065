"""What the engine refuses by name. Every one of these leaves the books as they were."""

from __future__ import annotations


class EngineError(Exception):
    """Base of every error that the engine raises on purpose."""


class EngineConfigError(EngineError, ValueError):
    """A scheduler that cannot work."""


class EngineRequestError(EngineError, ValueError):
    """A request, or a call about one, that contradicts itself."""


class ResultError(EngineError, ValueError):
    """Results that are not those of the step that they are given for."""
