"""What this room refuses by name."""


class ModelError(ValueError):
    """A configuration that cannot be read, or from which no cache can be planned; names the field and the rule."""


class UnknownArchitecture(ModelError):
    """A model whose layers this room does not know; its groups can still be given as text."""


class UnknownModel(ModelError):
    """A name that is no file, and no model known on this machine, or that several models have."""
