"""The `blockpool` command: thin, one file per subcommand.

Subcommands import what they need when they run, so that help is quick. Nothing here may be needed by the library.
"""

from .app import app, main

__all__ = ["app", "main"]
