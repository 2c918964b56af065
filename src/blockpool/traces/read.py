"""Files into one trace."""

from collections.abc import Callable, Sequence

from .agentic import read_agentic
from .azure import read_azure
from .bailian import read_bailian
from .detect import detect_format
from .errors import BadLines, TraceError
from .formats import TraceFormat
from .kv_events import read_kv_events
from .kvcache_simulator import read_kvcache_simulator
from .mooncake import read_mooncake
from .sessions import read_sessions
from .source import STDIN, Source, load_source
from .tokens import read_tokens
from .trace import Trace, TraceRequest, in_arrival_order

_READERS: dict[TraceFormat, Callable[[Source, BadLines], list[TraceRequest]]] = {
    TraceFormat.MOONCAKE: read_mooncake,
    TraceFormat.SESSIONS: read_sessions,
    TraceFormat.AGENTIC: read_agentic,
    TraceFormat.BAILIAN: read_bailian,
    TraceFormat.KVCACHE_SIMULATOR: read_kvcache_simulator,
    TraceFormat.AZURE: read_azure,
    TraceFormat.KV_EVENTS: read_kv_events,
    TraceFormat.TOKENS: read_tokens,
}


def read_traces(paths: Sequence[str], *, format: TraceFormat | None = None, skip_bad_lines: bool = False) -> Trace:
    """Read the files (plain or gzip; "-" is stdin) and merge their requests by time.

    `format` is that of every file; by default each one's content tells. Raises `TraceError` for a file that cannot be
    read or has no requests, and for the first bad line unless `skip_bad_lines`.
    """
    if not paths:
        raise TraceError("no trace file given")
    if paths.count(STDIN) > 1:
        raise TraceError("stdin (-) can be read only once")
    bad_lines = BadLines(skip=skip_bad_lines)
    names = []
    requests: list[TraceRequest] = []
    for number, path in enumerate(paths):
        source = load_source(path, number)
        skipped_before = bad_lines.count
        found = _READERS[format or detect_format(source)](source, bad_lines)
        if not found:
            skipped = bad_lines.count - skipped_before
            why = f" that could be read, bad lines skipped: {skipped}" if skipped else ""
            raise TraceError(f"{source.name}: no requests{why}")
        names.append(source.name)
        requests += found
    return Trace(
        requests=in_arrival_order(requests),
        names=tuple(names),
        skipped_bad_lines=bad_lines.count,
        first_bad_line=None if bad_lines.first is None else str(bad_lines.first),
    )
