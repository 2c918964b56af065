"""Real traffic in: readers for public trace formats, and a built-in workload.

A trace says when requests came, how long they were and which prefixes they shared. This room turns files into
`TraceRequest`s and must not know what a block, a pool or a hash chain is.
"""

from .errors import TraceError
from .formats import TraceFormat
from .read import read_traces
from .synthetic import synthetic_trace
from .trace import Trace, TraceRequest

__all__ = ["Trace", "TraceError", "TraceFormat", "TraceRequest", "read_traces", "synthetic_trace"]
