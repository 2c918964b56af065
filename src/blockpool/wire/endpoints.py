"""Where sockets are: which endpoints are bound and which connected to, and each rank's own."""

from __future__ import annotations

from blockpool.wire.errors import EndpointError

SCHEMES = ("tcp", "ipc", "inproc")
LAST_PORT = 65_535


def is_bound(endpoint: str) -> bool:
    """Whether a publisher opens this endpoint itself; others it connects to."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def endpoint_of_rank(endpoint: str, rank: int) -> str:
    """The endpoint of a data-parallel rank: a TCP port + rank (0, any port, stays), an inproc name with `_dp{rank}`.

    Raises EndpointError for an endpoint that has no place for a rank.
    """
    scheme = scheme_of(endpoint)
    if rank == 0:
        return endpoint
    if scheme == "inproc":
        return f"{endpoint}_dp{rank}"
    host, _, port = endpoint.rpartition(":")
    if scheme != "tcp":
        raise EndpointError(f"{endpoint!r} has no place for data-parallel rank {rank}: use tcp:// or inproc://")
    if port in ("*", "0"):
        return endpoint
    if not port.isdecimal() or int(port) + rank > LAST_PORT:
        raise EndpointError(f"{endpoint!r} has no port for data-parallel rank {rank}")
    return f"{host}:{int(port) + rank}"


def check_rank(rank: object) -> None:
    """Raises EndpointError for what is no data-parallel rank, nor None."""
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 0):
        raise EndpointError(f"data_parallel_rank must be an int of at least 0, or None, not {rank!r}")


def scheme_of(endpoint: str) -> str:
    """Raises EndpointError unless it is one that we know, with a port that there is."""
    scheme, colon, rest = endpoint.partition("://")
    if not colon or not rest or scheme not in SCHEMES:
        raise EndpointError(f"{endpoint!r} is no endpoint: expected one of tcp://, ipc://, inproc://")
    try:
        endpoint.encode()
    except UnicodeEncodeError:
        raise EndpointError(f"{endpoint!r} is no endpoint: it is not UTF-8") from None
    port = rest.rpartition(":")[2]
    if scheme == "tcp" and port.isdecimal() and (len(port.lstrip("0")) > 5 or int(port) > LAST_PORT):
        raise EndpointError(f"{endpoint!r} is no endpoint: ports end at {LAST_PORT}")
    return scheme
