"""A model is found by its path, in the local Hugging Face cache, or by its name; nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blockpool.models import ModelError, UnknownModel, find_model, known_models, read_model

QWEN = known_models()["Qwen/Qwen3-8B"]


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache, and an empty folder to be in."""
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "hub"


def put(hub: Path, name: str, layers: int = 3, commit: str = "abc") -> Path:
    """A model as Hugging Face's tools leave it."""
    folder = hub / ("models--" + name.replace("/", "--"))
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(commit)
    path = snapshot / "config.json"
    fields = json.loads(QWEN.read_text()) | {"num_hidden_layers": layers}
    path.write_text(json.dumps(fields))
    return path


def unknown(text: str) -> str:
    with pytest.raises(UnknownModel) as caught:
        find_model(text)
    return str(caught.value)


@pytest.mark.parametrize("text", ["Qwen/Qwen3-8B", "qwen/qwen3-8b", "Qwen3-8B", "qwen3-8b"])
def test_by_name(text: str) -> None:
    found = find_model(text)
    assert (found.path, found.name, found.origin) == (QWEN, "Qwen/Qwen3-8B", "blockpool's catalogue")
    assert read_model(text) == read_model(QWEN)


def test_models_of_one_shape_share_a_configuration() -> None:
    base, tuned = find_model("Llama-3.1-8B"), find_model("Llama-3.1-8B-Instruct")
    assert base.path == tuned.path
    assert (base.name, tuned.name) == ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct")


def test_the_local_cache_comes_before_the_catalogue(hub: Path) -> None:
    path = put(hub, "Qwen/Qwen3-8B")
    found = find_model("qwen3-8b")
    assert (found.path, found.name, found.origin) == (path, "Qwen/Qwen3-8B", "the local Hugging Face cache")
    assert len(read_model("qwen3-8b").layers) == 3


def test_the_local_cache_has_models_that_the_catalogue_has_not(hub: Path) -> None:
    path = put(hub, "somebody/Other_Model.v2")
    assert find_model("other_model.V2").path == path


def test_the_snapshot_is_that_of_main(hub: Path) -> None:
    put(hub, "Qwen/Qwen3-8B", layers=5, commit="old")
    new = put(hub, "Qwen/Qwen3-8B", layers=6, commit="new")
    assert find_model("qwen3-8b").path == new


def test_a_cache_without_the_configuration_is_passed_over(hub: Path) -> None:
    put(hub, "Qwen/Qwen3-8B").unlink()
    (hub / "models--Qwen--Qwen3-4B").mkdir()
    assert find_model("qwen3-8b").path == QWEN
    assert find_model("qwen3-4b").origin == "blockpool's catalogue"


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    plain = put(tmp_path / "home" / ".cache" / "huggingface" / "hub", "Qwen/Qwen3-8B")
    assert find_model("qwen3-8b").path == plain
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    xdg = put(tmp_path / "xdg" / "huggingface" / "hub", "Qwen/Qwen3-8B")
    assert find_model("qwen3-8b").path == xdg
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    home = put(tmp_path / "hf" / "hub", "Qwen/Qwen3-8B")
    assert find_model("qwen3-8b").path == home


def test_what_exists_as_a_path_is_one(tmp_path: Path) -> None:
    fields = json.loads(QWEN.read_text()) | {"num_hidden_layers": 7}
    Path("qwen3-8b").mkdir()
    Path("qwen3-8b", "config.json").write_text(json.dumps(fields))
    assert find_model("qwen3-8b").path == Path("qwen3-8b")
    assert len(read_model("qwen3-8b").layers) == 7


def test_two_of_one_name_are_told_apart_by_their_owners(hub: Path) -> None:
    mine = put(hub, "me/Qwen3-8B")
    put(hub, "you/Qwen3-8B")
    said = unknown("qwen3-8b")
    assert "several models in the local Hugging Face cache: me/Qwen3-8B, you/Qwen3-8B; give the owner too" in said
    assert find_model("me/qwen3-8b").path == mine
    # The catalogue's is still there under its full name.
    assert find_model("Qwen/Qwen3-8B").path == QWEN


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("qwen3-9b", "Qwen/Qwen3-8B"),
        ("gemma3-27b", "google/gemma-3-27b-it"),
        ("meta/llama-3.1-8b-chat", "meta-llama/Llama-3.1-8B"),
        ("Qwen/Qwen3-8B-Instruct", "Qwen/Qwen3-8B"),
        ("Llama 3.1 8B", "meta-llama/Llama-3.1-8B"),
        (" qwen 3 9b ", "Qwen/Qwen3-8B"),
    ],
)
def test_a_name_that_is_nearly_right(text: str, near: str) -> None:
    assert near in unknown(text).partition("(near: ")[2].partition(")")[0].split(", ")


def test_a_name_that_nobody_has_says_how_to_go_on() -> None:
    said = unknown("acme/rocket-1")
    assert said.startswith("'acme/rocket-1' is no file, and no model that is known here; ")
    assert "`curl -fLO https://huggingface.co/acme/rocket-1/resolve/main/config.json`" in said
    assert "a gated model asks for a token of yours" in said
    assert "--groups 'full:16,window=1024:16,mamba:256'" in said
    assert "https://huggingface.co/OWNER/rocket-1/resolve" in unknown("rocket-1")


@pytest.mark.parametrize("text", ["absent.json", "folder/config.json", "./absent", "/absent/folder", "a/b/c", "-"])
def test_what_looks_like_a_path_keeps_its_message(text: str) -> None:
    assert find_model(text).path == Path(text)
    with pytest.raises(ModelError, match="cannot be read: "):
        read_model(text)


@pytest.mark.parametrize("host", ["https://huggingface.co", "http://www.huggingface.co", "https://hf.co"])
@pytest.mark.parametrize(
    "rest", ["", "/", "/tree/main", "/blob/main/config.json", "/resolve/main/config.json?download=true", "#usage"]
)
def test_the_address_of_a_model_is_its_name(host: str, rest: str) -> None:
    found = find_model(f"{host}/Qwen/Qwen3-8B{rest}")
    assert (found.path, found.name) == (QWEN, "Qwen/Qwen3-8B")
    assert "https://huggingface.co/acme/rocket-1/resolve/main" in unknown(f"{host}/acme/rocket-1{rest}")


@pytest.mark.parametrize("text", ["", " ", "\t"])
def test_no_name_at_all(text: str) -> None:
    assert unknown(text) == "no model is named: the text is empty"


def test_the_command_that_fetches_takes_the_nearest_name() -> None:
    for text in ("qwen3-9b", "Qwen 3 9B"):
        assert "https://huggingface.co/Qwen/Qwen3-8B/resolve/main" in unknown(text)
    assert "https://huggingface.co/OWNER/rocket-ship/resolve/main" in unknown("rocket ship")


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME"])
def test_the_home_of_nobody_is_no_cache(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv(variable, "~nosuchuser/x")
    assert find_model("qwen3-8b").path == QWEN


def test_a_very_long_name() -> None:
    assert "is no file" in unknown("x" * 5_000)
