"""The fields of a `config.json`, each asked for by name and type."""

from __future__ import annotations

import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from .errors import ModelError
from .find import FILE_NAME, find_model

# Where models that also see or hear keep the part that writes text.
TEXT_PART = "text_config"
# The largest published configurations have a hundred kilobytes and a hundred layers.
MOST_BYTES: Final = 4 * 2**20
MOST_LAYERS: Final = 1_000
# What a block size and a window may be.
MOST: Final = 2**31 - 1


class HFConfig:
    """A configuration and, for what it leaves out, the values of its class in Hugging Face's `transformers`.

    Fields are those of the part that writes text, where there is one. An explicit `null` is a value: none.
    """

    def __init__(self, fields: Mapping[str, Any], name: str) -> None:
        part = fields.get(TEXT_PART)
        self.name = name
        self.whole = fields
        self.fields: Mapping[str, Any] = part if isinstance(part, Mapping) else fields
        self.defaults: Mapping[str, Any] = {}

    def error(self, field: str, what: str) -> ModelError:
        return ModelError(f"{self.name}: {field}: {what}")

    def get(self, field: str) -> Any:
        """The value; None for `null`, and when it is left out and the class has none."""
        return self.fields[field] if field in self.fields else self.defaults.get(field)

    def get_anywhere(self, *fields: str) -> Any:
        """The first of these fields that is there, in the part that writes text or beside it."""
        for field in fields:
            for place in (self.fields, self.whole):
                if place.get(field) is not None:
                    return place[field]
        return None

    def count(self, field: str, least: int = 1) -> int:
        """An int from `least` to `MOST`. Raises ModelError for anything else, and when it is left out."""
        value = self.optional_count(field, least)
        if value is None:
            raise self.error(field, "missing")
        return value

    def optional_count(self, field: str, least: int = 1) -> int | None:
        value = self.get(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(field, f"expected an int of at least {least}, not {value!r}")
        if value > MOST:
            raise self.error(field, f"expected an int of at most {MOST:,}, not {value:,}")
        return value

    def num_layers(self, field: str = "num_hidden_layers") -> int:
        """A count of layers. Raises ModelError for more than anybody has, which would take minutes to plan."""
        return self.checked_layers(field, self.count(field))

    def checked_layers(self, field: str, count: int) -> int:
        if count > MOST_LAYERS:
            raise self.error(field, f"{count:,} layers are more than the {MOST_LAYERS:,} that are planned")
        return count

    def head_size(self, size_field: str, heads_field: str) -> int:
        """What each head has of the model's width. Raises ModelError for fewer numbers than heads."""
        size, heads = self.count(size_field), self.count(heads_field)
        if size < heads:
            raise self.error(size_field, f"{size} numbers cannot be shared by the {heads} heads of {heads_field}")
        return size // heads

    def flag(self, field: str) -> bool:
        """Left out means false."""
        value = self.get(field)
        if value is not None and not isinstance(value, bool):
            raise self.error(field, f"expected true or false, not {value!r}")
        return bool(value)

    def optional_text(self, field: str) -> str | None:
        value = self.get(field)
        if value is not None and not isinstance(value, str):
            raise self.error(field, f"expected text, not {value!r}")
        return value

    def optional_list(self, field: str, length: int) -> list[Any] | None:
        """A list with one entry per layer; None when it is left out, null or empty."""
        value = self.get(field)
        if value is None or value == []:
            return None
        if not isinstance(value, list) or len(value) != length:
            raise self.error(field, f"expected a list with one entry for each of the {length} layers")
        return value

    @property
    def architecture(self) -> str:
        """The class of the model. Raises ModelError when the configuration does not name one."""
        names = self.whole.get("architectures")
        if not isinstance(names, Sequence) or isinstance(names, str) or not names or not isinstance(names[0], str):
            raise self.error("architectures", 'expected a list such as ["LlamaForCausalLM"]')
        return names[0]


def read_hf_config(source: str | Path | Mapping[str, Any]) -> HFConfig:
    """A configuration from its file, from the folder that holds it, by the model's name (`find_model`), or from what
    was read already.

    Raises ModelError when it cannot be read or is no JSON object.
    """
    if isinstance(source, Mapping):
        return HFConfig(source, "config")
    if isinstance(source, str):
        found = find_model(source)
        path, name = found.path, found.name if found.origin else ""
    else:
        path, name = Path(source), ""
    try:
        if path.is_dir():
            path = path / FILE_NAME
        data = _content(path)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ModelError(f"{str(path)!r}: cannot be read: {reason}") from error
    try:
        fields = msgspec.json.decode(data.removeprefix(b"\xef\xbb\xbf"))  # what some editors put in front
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ModelError(f"{path}: expected a JSON object, the config.json of a model")
    return HFConfig(fields, name or str(path))


def _content(path: Path) -> bytes:
    """The bytes of a file. Raises OSError or ValueError."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is not a regular file")  # a pipe may wait forever, a device never end
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES:,} bytes, which no model's configuration has")
    return data
