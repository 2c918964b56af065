"""Looking into the books from outside: the audit of a dump that an engine wrote, and metrics of what runs.

This room reads what pools, caches and mirrors say about themselves and must not know how to change them.
"""

from .audit_report import PoolAudit, audit_file
from .block_line import BlockLine
from .dump_file import DumpFileError, load_dumps
from .metrics import MetricsCollector, MissingPrometheusError
from .residency import ResidencySampler

__all__ = [
    "BlockLine",
    "DumpFileError",
    "MetricsCollector",
    "MissingPrometheusError",
    "PoolAudit",
    "ResidencySampler",
    "audit_file",
    "load_dumps",
]
