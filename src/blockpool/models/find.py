"""From the name of a model to its configuration: on this machine only, nothing is downloaded."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Final

import msgspec

from .catalogue import known_models
from .errors import UnknownModel

FILE_NAME: Final = "config.json"
# What Hugging Face accepts, the owner being optional here.
NAME: Final = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)
# A model's page there, or a page or a file below it.
ADDRESS: Final = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([^/?#]+/[^/?#]+)(?:[/?#].*)?", re.I)


class ModelSource(msgspec.Struct, frozen=True):
    """A configuration and where it is from. `name`: as Hugging Face spells it, or the path that was given."""

    path: Path
    name: str
    origin: str


def find_model(text: str) -> ModelSource:
    """The configuration that `text` means: a path, a model in the local Hugging Face cache, or one of `known_models`.

    What exists as a path is one. Names are compared without regard to case, may leave out the owner, and may be the
    address of the model's page. Raises UnknownModel for a name that nobody has, or that several have.
    """
    if not text.strip():
        raise UnknownModel("no model is named: the text is empty")
    address = ADDRESS.fullmatch(text.strip())
    if address is not None:
        text = address[1]
    elif not _may_be_name(text) or os.path.exists(text):
        return ModelSource(Path(text), text, "")
    for origin, models in (("the local Hugging Face cache", _cached_models), ("blockpool's catalogue", known_models)):
        found = _matches(text, models())
        if len({path for _, path in found}) > 1:
            names = ", ".join(name for name, _ in found)
            raise UnknownModel(f"{text!r} is the name of several models in {origin}: {names}; give the owner too")
        if found:
            name, path = found[0]
            return ModelSource(path, name, origin)
    near = nearest_models(text)
    name = text.strip().replace(" ", "-")
    if "/" not in name:
        name = near[0] if near else f"OWNER/{name}"
    raise UnknownModel(
        f"{text!r} is no file, and no model that is known here"
        + (f" (near: {', '.join(near)})" if near else "")
        + f"; get its configuration with `curl -fLO https://huggingface.co/{name}/resolve/main/{FILE_NAME}` (a gated "
        "model asks for a token of yours: -H 'Authorization: Bearer TOKEN') and give that file, or describe its "
        "groups, as in --groups 'full:16,window=1024:16,mamba:256'"
    )


def nearest_models(text: str, count: int = 4) -> list[str]:
    """Known names that look like `text`: first those that contain it, then those that it begins with."""
    wanted = _letters(text)
    by_letters: dict[str, str] = {}
    for name in known_models():
        by_letters.setdefault(_letters(name), name)
    near = [name for letters, name in by_letters.items() if wanted in letters]
    near += [by_letters[letters] for letters in sorted(by_letters, reverse=True) if wanted.startswith(letters)]
    near += [by_letters[letters] for letters in get_close_matches(wanted, by_letters, n=count)]
    return list(dict.fromkeys(near))[:count]


def _may_be_name(text: str) -> bool:
    """Also with the spaces that people write: such a name is nobody's, but one may be near."""
    return NAME.fullmatch(text.strip().replace(" ", "-")) is not None and not text.endswith(".json")


def _bare(name: str) -> str:
    return name.rpartition("/")[2].lower()


def _letters(name: str) -> str:
    """The letters and digits of a name without its owner: how to separate them is what people remember least."""
    return re.sub(r"[\W_]", "", _bare(name))


def _matches(text: str, models: dict[str, Path]) -> list[tuple[str, Path]]:
    """Those of exactly this name; without an owner, those of this name by any owner."""
    if "/" in text:
        return [(name, path) for name, path in models.items() if name.lower() == text.lower()]
    return [(name, path) for name, path in models.items() if _bare(name) == text.lower()]


def _cached_models() -> dict[str, Path]:
    """The models whose configuration Hugging Face's tools have left on this machine."""
    models = {}
    for folder in sorted(_hub_cache().glob("models--*")):
        try:
            commit = (folder / "refs" / "main").read_text().strip()
            path = folder / "snapshots" / commit / FILE_NAME
            if commit and path.is_file():
                models[folder.name.removeprefix("models--").replace("--", "/")] = path
        except (OSError, ValueError):
            continue  # a cache that somebody else writes: what cannot be read is not there
    return models


def _hub_cache() -> Path:
    """Where Hugging Face's tools keep what they have downloaded."""
    hub = os.environ.get("HF_HUB_CACHE")
    if hub:
        return _at_home(hub)
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return _at_home(home) / "hub"


def _at_home(folder: str | Path) -> Path:
    """Without the ~; one of a user that there is not stays, and no such folder is there."""
    return Path(os.path.expanduser(folder))
