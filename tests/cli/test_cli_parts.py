"""The command's small parts: memory sizes, the table, the progress bar."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpool.cli import progress
from blockpool.cli.memory_size import parse_memory
from blockpool.cli.text_table import text_table
from tests.sizes import property_settings


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("40GiB", 40 * 2**30),
        ("40GB", 40 * 10**9),
        ("1TiB", 2**40),
        ("1PB", 10**15),
        ("3 kib", 3072),
        ("0.1GB", 10**8),
        ("1.0000000001TiB", 2**40 + 109),
        ("17", 17),
        ("17B", 17),
        ("0", 0),
    ],
)
def test_memory_sizes(text: str, num_bytes: int):
    assert parse_memory(text) == num_bytes


@property_settings(100)
@given(text=st.text(max_size=4))
def test_other_text_is_refused_by_name(text: str):
    if text.strip().isdigit():
        return
    with pytest.raises(ValueError, match="is not a memory size"):
        parse_memory(text)


def test_the_table_is_never_cut():
    lines = text_table(("blocks", "prompt tokens", ""), [("1", "123,456,789", "x"), ("22,222,222", "1", "")])
    assert lines == [
        "                 prompt",
        "    blocks       tokens",
        "----------  -----------  -",
        "         1  123,456,789  x",
        "22,222,222            1",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    with progress.ProgressBar(4) as bar:
        bar.describe("a pool")
        bar.update(0)
        bar.update(2)
    assert "a pool" in terminal.getvalue()
    assert "2/4" in terminal.getvalue()


def test_a_short_wait_needs_no_progress(monkeypatch: pytest.MonkeyPatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(progress, "QUIET_S", 1e9)
    with progress.ProgressBar(4) as bar:
        bar.update(2)
    assert terminal.getvalue() == ""


def test_no_progress_without_a_terminal(monkeypatch: pytest.MonkeyPatch):
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    with progress.ProgressBar(4) as bar:
        bar.update(2)
    assert stream.getvalue() == ""


def test_the_limit_of_num_blocks_is_the_pools() -> None:
    from blockpool.cli.replay import MAX_NUM_BLOCKS
    from blockpool.pool.layout import MAX_BLOCKS

    assert MAX_NUM_BLOCKS == MAX_BLOCKS
