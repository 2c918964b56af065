"""What a tier refuses, by name. No failure of a page is among them: those are answers (`Loaded`, `Stored`)."""

from __future__ import annotations


class TierError(Exception):
    """Base of what a tier refuses."""


class PolicyError(TierError, ValueError):
    """A policy of a name that is not known."""


class TierSizeError(TierError, ValueError):
    """A tier without room for one page, or quotas that are more than the whole."""


class PageError(TierError, ValueError):
    """A page longer than the tier's pages or of no bytes, a buffer that is not one run of bytes or cannot be written,
    or not as many keys as pages."""


class KeyLengthError(TierError, ValueError):
    """A key that is empty, or longer than the tier can note down."""


class TierClosedError(TierError, RuntimeError):
    """A tier was used after `close()`."""


class DiskFileError(TierError, ValueError):
    """The file is not a tier's, or no regular file, or one of another version, page size or capacity, or its header
    is damaged."""


class DiskInUseError(TierError, RuntimeError):
    """The file is another tier's at this moment."""


class DiskFullError(TierError, OSError):
    """The file system has no room for the tier's file."""


class MissingExtraError(TierError, ImportError):
    """A package that an extra of blockpool installs is not there: xxhash (`disk`) or redis (`valkey`)."""


class ServerError(TierError, ValueError):
    """An address of a server that is none."""


class OffloadError(TierError, ValueError):
    """Tiers, or what is to be done with them, that cannot be."""
