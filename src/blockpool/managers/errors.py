"""What this room refuses by name."""

from __future__ import annotations


class SpecError(ValueError):
    """A spec that cannot work, alone or with its pool; the message names the field and the rule."""
