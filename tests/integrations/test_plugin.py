"""What vLLM runs at its start, in each of its processes."""

from __future__ import annotations

import logging
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import blockpool
from blockpool import BuildInfo
from blockpool.integrations.vllm import BlockPool
from blockpool.integrations.vllm.notice import forget_kept
from blockpool.integrations.vllm.plugin import register
from blockpool.integrations.vllm.swap import ORIGINALS, UntestedVersionError, is_installed, uninstall
from tests.integrations.stand_in import StandIn

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.fixture(autouse=True)
def _nothing_kept() -> None:
    forget_kept()


@pytest.fixture
def heard(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """vLLM's log as it is by default: INFO is shown."""
    caplog.set_level(logging.INFO, "vllm")
    return caplog


def lines(log: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in log.records if record.levelno == level]


def test_the_entry_point_is_register() -> None:
    declared = tomllib.loads(PYPROJECT.read_text())["project"]["entry-points"]["vllm.general_plugins"]
    assert EntryPoint("blockpool", declared["blockpool"], "vllm.general_plugins").load() is register


@pytest.mark.parametrize("value", [None, "", "0"])
def test_who_does_not_ask_pays_nothing(stand_in: StandIn, value: str | None) -> None:
    program = (
        "import os, sys\n"
        "os.environ.pop('BLOCKPOOL_VLLM', None) if len(sys.argv) == 1 else None\n"
        "from blockpool.integrations.vllm.plugin import register\n"
        "register()\n"
        "print({'vllm', 'numpy', 'blockpool.pool', 'blockpool.integrations.vllm.pools'} & set(sys.modules))"
    )
    asked = {} if value is None else {"BLOCKPOOL_VLLM": value}
    result = stand_in.run("-c", program, *asked, **asked)
    assert (result.stdout, result.stderr) == ("set()\n", "")


@pytest.mark.parametrize("value", ["yes", "true", "2", "FORCE", " 1"])
def test_other_values_are_refused(vllm: StandIn, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("BLOCKPOOL_VLLM", value)
    with pytest.raises(ValueError, match=r"give 1 .*, force .* or 0") as refusal:
        register()
    assert repr(value) in str(refusal.value)
    assert not is_installed()


def test_1_installs_and_says_so_in_one_line(
    vllm: StandIn, monkeypatch: pytest.MonkeyPatch, heard: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("BLOCKPOOL_VLLM", "1")
    register()
    assert is_installed()
    (line,) = lines(heard, logging.INFO)
    assert line.startswith(f"blockpool {blockpool.__version__} (")
    assert "hash kernel " in line
    assert "vLLM 0.33.0+cpu" in line
    assert all(original.name in line for original in ORIGINALS)


def test_again_is_nothing(vllm: StandIn, monkeypatch: pytest.MonkeyPatch, heard: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("BLOCKPOOL_VLLM", "1")
    register()
    said = list(heard.records)
    register()
    assert heard.records == said


@pytest.mark.parametrize("compiled", [True, False])
def test_a_build_that_is_slow_is_a_warning(
    vllm: StandIn, monkeypatch: pytest.MonkeyPatch, heard: pytest.LogCaptureFixture, compiled: bool
) -> None:
    build = BuildInfo("9.9", {"blockpool.pool.queue": compiled}, "sha-ni")
    monkeypatch.setattr("blockpool.build_info", lambda: build)
    monkeypatch.setenv("BLOCKPOOL_VLLM", "1")
    register()
    warnings = lines(heard, logging.WARNING)
    if compiled:
        assert warnings == []
        assert "blockpool 9.9 (compiled, hash kernel sha-ni) " in heard.text
    else:
        assert "blockpool 9.9 is not compiled here" in warnings[0]
        assert "blockpool 9.9 (not compiled, " in heard.text


@pytest.mark.parametrize("value", ["yes", "force", "2"])
def test_other_values_of_the_managers_switch_are_refused(
    vllm: StandIn, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("BLOCKPOOL_VLLM", "1")
    monkeypatch.setenv("BLOCKPOOL_VLLM_MANAGER", value)
    with pytest.raises(ValueError, match=f"BLOCKPOOL_VLLM_MANAGER='{value}': give 1 .* or 0"):
        register()
    assert not is_installed()


@pytest.mark.parametrize("value", ["", "0"])
def test_the_manager_needs_the_pool(vllm: StandIn, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("BLOCKPOOL_VLLM", value)
    monkeypatch.setenv("BLOCKPOOL_VLLM_MANAGER", "1")
    with pytest.raises(ValueError, match="BLOCKPOOL_VLLM_MANAGER=1 needs BLOCKPOOL_VLLM=1"):
        register()
    assert not is_installed()


def test_the_manager_is_installed_too_and_named_in_the_line(
    vllm: StandIn, monkeypatch: pytest.MonkeyPatch, heard: pytest.LogCaptureFixture
) -> None:
    vllm.add_manager()
    monkeypatch.setenv("BLOCKPOOL_VLLM", "1")
    monkeypatch.setenv("BLOCKPOOL_VLLM_MANAGER", "1")
    register()
    assert is_installed(manager=True)
    (line,) = lines(heard, logging.INFO)
    assert line.endswith(", KVCacheManager")


def test_an_untested_version_ends_the_start_and_says_how_to_go_on(
    vllm: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm.version("0.34.0")
    monkeypatch.setenv("BLOCKPOOL_VLLM", "1")
    with pytest.raises(UntestedVersionError, match=r"BLOCKPOOL_VLLM=force.*leave BLOCKPOOL_VLLM unset"):
        register()
    assert not is_installed()


def test_force_goes_on_and_warns(
    vllm: StandIn, monkeypatch: pytest.MonkeyPatch, heard: pytest.LogCaptureFixture
) -> None:
    vllm.version("0.34.0")
    monkeypatch.setenv("BLOCKPOOL_VLLM", "force")
    register()
    assert is_installed()
    assert "blockpool was forced into vLLM 0.34.0, with which it was not tested" in lines(heard, logging.WARNING)


def test_a_line_that_the_log_would_drop_is_said_when_a_pool_is_built(
    vllm: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("BLOCKPOOL_VLLM", "1")
    caplog.set_level(logging.WARNING, "vllm")
    register()
    assert lines(caplog, logging.INFO) == []
    caplog.set_level(logging.INFO, "vllm")
    for _ in range(2):
        BlockPool(8, True, 16)
    assert len(lines(caplog, logging.INFO)) == 1


def test_what_is_not_true_any_more_is_not_said(
    vllm: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("BLOCKPOOL_VLLM", "1")
    caplog.set_level(logging.WARNING, "vllm")
    register()
    uninstall()
    caplog.set_level(logging.INFO, "vllm")
    BlockPool(8, True, 16)
    assert lines(caplog, logging.INFO) == []
