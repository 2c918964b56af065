"""Traffic through the books: a trace replayed through a real cache manager, and what that showed.

`replay` asks the pure cache question, one request after the other. This room must not know how a trace file is
written, and it changes nothing in the books it drives.
"""

from .digests import DigestedTrace
from .errors import ReplayError, ReplayInterrupted
from .report import HEADINGS, ReplayReport, report_as_json, report_rows
from .result import RunResult
from .simulate import replay
from .sizes import DEFAULT_SHARES, TraceNeed, blocks_in_memory, default_block_size, default_pool_sizes, measure_need
from .verdict import verdict

__all__ = [
    "DEFAULT_SHARES",
    "HEADINGS",
    "DigestedTrace",
    "ReplayError",
    "ReplayInterrupted",
    "ReplayReport",
    "RunResult",
    "TraceNeed",
    "blocks_in_memory",
    "default_block_size",
    "default_pool_sizes",
    "measure_need",
    "replay",
    "report_as_json",
    "report_rows",
    "verdict",
]
