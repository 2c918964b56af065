"""One JSON value into a typed record, with errors that say where in words."""

import re
from typing import TypeVar

import msgspec

from .errors import TraceError

Record = TypeVar("Record")


def decode_record(
    decoder: msgspec.json.Decoder[Record], text: bytes | msgspec.Raw, place: str, within: str = ""
) -> Record:
    """Decode one JSON value. `place` is its "file:line"; `within` the path of `text` in its document.

    Raises `TraceError`: "file:line: field: what is wrong".
    """
    try:
        return decoder.decode(text)
    except msgspec.MsgspecError as error:
        raise TraceError(f"{place}: {_in_words(str(error), within)}") from error
    except RecursionError as error:
        raise TraceError(f"{place}: {_labelled(within, 'nested too deeply')}") from error


def check_utf8(text: bytes, place: str) -> None:
    """Refuse what is not UTF-8; the decoder itself looks only at the fields it needs.

    Raises `TraceError`.
    """
    if text.isascii():
        return
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise TraceError(f"{place}: invalid UTF-8 (byte {error.start})") from error


def _in_words(message: str, within: str) -> str:
    """A msgspec message turned round: the field first."""
    message = message.replace("`", "")
    if missing := re.fullmatch(r"Object missing required field (\S+)(?: - at \$\.?(.*))?", message):
        return _labelled(_joined(_joined(within, missing[2] or ""), missing[1]), "missing")
    if located := re.fullmatch(r"(.*) - at \$\.?(.*)", message):
        return _labelled(_joined(within, located[2]), _lower_first(located[1]))
    return _labelled(within, message if message.startswith("JSON") else _lower_first(message))


def _joined(outer: str, inner: str) -> str:
    return f"{outer}.{inner}" if outer and inner and not inner.startswith("[") else outer + inner


def _labelled(field: str, what: str) -> str:
    return f"{field}: {what}" if field else what


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
