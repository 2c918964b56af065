"""The bytes of one trace file: from disk or stdin, unpacked, without a byte order mark."""

import gzip
import sys
import zlib
from pathlib import Path

import msgspec

from .errors import TraceError

GZIP_MAGIC = b"\x1f\x8b"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
STDIN = "-"


class Source(msgspec.Struct, frozen=True):
    """One input: `name` is fit for a one-line message; `number` tells two inputs of the same name apart."""

    name: str
    number: int
    data: bytes


def printable(name: str) -> str:
    """`name` without anything that would break a line or not print: such characters are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in name)


def load_source(path: str, number: int) -> Source:
    """Read the file `path`, or stdin for "-". gzip is recognised by its first bytes, not by the file's name.

    Raises `TraceError` when it cannot be read, cannot be unpacked or is empty.
    """
    name = "<stdin>" if path == STDIN else printable(path)
    try:
        data = sys.stdin.buffer.read() if path == STDIN else Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise TraceError(f"{name}: cannot be read: {reason}") from error
    if data.startswith(GZIP_MAGIC):
        try:
            data = gzip.decompress(data)
        except EOFError as error:
            raise TraceError(f"{name}: truncated gzip data") from error
        except (OSError, zlib.error) as error:
            raise TraceError(f"{name}: damaged gzip data: {error}") from error
    data = data.removeprefix(BYTE_ORDER_MARK)
    if not data.strip():
        raise TraceError(f"{name}: empty file")
    return Source(name, number, data)
