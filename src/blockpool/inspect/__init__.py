"""Looking into the books from outside: the audit of a dump that an engine wrote.

This room reads what a pool says about itself and must not know how to change it.
"""

from .audit_report import PoolAudit, audit_file
from .block_line import BlockLine
from .dump_file import DumpFileError, load_dumps

__all__ = ["BlockLine", "DumpFileError", "PoolAudit", "audit_file", "load_dumps"]
