"""What this room refuses."""

from __future__ import annotations


class OffloadError(ValueError):
    """Tiers, or what is to be done with them, that cannot be."""
