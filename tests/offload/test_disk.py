"""A file that survives: restarts, kills, cuts, flipped bits and full disks."""

from __future__ import annotations

import errno
import itertools
import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpool.offload.checksum import CHECKSUM_BYTES
from blockpool.offload.disk import DiskTier, Reopened
from blockpool.offload.disk_layout import ALIGNMENT, ENTRY_BYTES, HEADER, MAX_KEY_BYTES
from blockpool.offload.disk_slots import behind, runs
from blockpool.offload.errors import (
    DiskFileError,
    DiskFullError,
    DiskInUseError,
    KeyLengthError,
    MissingExtraError,
    TierSizeError,
)
from blockpool.offload.tier import Loaded, Stored
from tests.offload import storing_child
from tests.offload.content import ONE, TWO, key_of, page_of
from tests.sizes import LONG, property_settings

ROOT = Path(__file__).parents[2]
PAGE_BYTES = 6000
NUM_PAGES = 8
KEYS = [key_of(number) for number in range(20)]
HEADER_BYTES = HEADER.size + CHECKSUM_BYTES
FIRST_SLOT = 2 * ALIGNMENT


@pytest.fixture(params=[PAGE_BYTES, 2 * ALIGNMENT], ids=["padded", "whole"], autouse=True)
def page_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that fill their slots are written and read with their neighbours at once."""
    monkeypatch.setattr(sys.modules[__name__], "PAGE_BYTES", request.param)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tier"


def tier_at(path: Path, num_pages: int = NUM_PAGES, page_bytes: int = 0, **options: Any) -> DiskTier:
    page_bytes = page_bytes or PAGE_BYTES
    return DiskTier(path, num_pages * page_bytes, page_bytes, **options)


def store(tier: DiskTier, *keys: bytes) -> list[Stored]:
    return tier.store(keys, [page_of(key, PAGE_BYTES, full=True) for key in keys])


def load(tier: DiskTier, *keys: bytes) -> list[Loaded]:
    pages = [memoryview(bytearray(PAGE_BYTES)) for _ in keys]
    results = tier.load(keys, pages)
    for key, page, result in zip(keys, pages, results, strict=True):
        assert result is not Loaded.OK or page == page_of(key, PAGE_BYTES, full=True)
    return results


def leave(tier: DiskTier) -> None:
    """As a process that is killed: the file stays as it is."""
    os.close(tier._file)
    tier._closed = True


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))


@pytest.mark.parametrize("ending", [DiskTier.close, leave], ids=["closed", "killed"])
@pytest.mark.parametrize("checksum", ["xxh3_128", "sha1"])
def test_pages_survive_a_restart(
    path: Path, ending: Callable[[DiskTier], None], checksum: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if checksum == "xxh3_128":
        pytest.importorskip("xxhash")
    monkeypatch.setattr("blockpool.offload.disk.best_checksum", lambda: checksum)
    tier = tier_at(path)
    assert tier.reopened == Reopened()
    store(tier, *KEYS[:3])
    store(tier, *KEYS[3:10])  # two of the first go
    tier.discard([KEYS[3]])
    found = sorted(tier.keys())
    ending(tier)
    again = tier_at(path)
    assert again.checksum == checksum
    assert again.reopened == Reopened(num_pages=7)
    assert sorted(again.keys()) == found
    assert load(again, *found) == [Loaded.OK] * 7
    assert again.used_bytes == 7 * PAGE_BYTES
    assert not again.audit()
    again.close()


def test_the_order_of_use_survives_a_close(path: Path) -> None:
    tier = tier_at(path, 4)
    for key in KEYS[:4]:
        store(tier, key)
    load(tier, KEYS[0])
    store(tier, KEYS[1])  # present
    tier.close()
    tier = tier_at(path, 4)
    store(tier, KEYS[4], KEYS[5])
    assert sorted(tier.keys()) == sorted([KEYS[0], KEYS[1], KEYS[4], KEYS[5]])
    tier.close()


def test_the_order_of_a_loaded_prefix_survives_a_close(path: Path) -> None:
    tier = tier_at(path, 4)
    for key in KEYS[:4]:
        store(tier, key)
    load(tier, *KEYS[:4])
    tier.close()
    tier = tier_at(path, 4)
    store(tier, KEYS[4], KEYS[5])  # the end goes first
    assert sorted(tier.keys()) == sorted([KEYS[0], KEYS[1], KEYS[4], KEYS[5]])
    tier.close()


def test_the_order_of_stores_survives_a_kill(path: Path) -> None:
    tier = tier_at(path, 4)
    store(tier, KEYS[0])
    store(tier, KEYS[1], KEYS[2], KEYS[3])
    leave(tier)
    tier = tier_at(path, 4)
    store(tier, KEYS[4], KEYS[5])
    assert sorted(tier.keys()) == sorted([KEYS[1], KEYS[2], KEYS[4], KEYS[5]])
    tier.close()


@pytest.mark.parametrize("forget", ["discard", "clear", "evict"])
def test_what_was_forgotten_does_not_come_back(path: Path, forget: str) -> None:
    tier = tier_at(path)
    store(tier, *KEYS[:8])
    if forget == "discard":
        tier.discard([*KEYS[:3], KEYS[6]])
    elif forget == "clear":
        tier.clear()
    else:
        store(tier, *KEYS[8:12])
    left = sorted(tier.keys())
    leave(tier)
    tier = tier_at(path)
    assert sorted(tier.keys()) == left
    tier.close()


def test_a_page_forgotten_while_it_is_written_does_not_come_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = tier_at(path)
    write = tier._write

    def write_and_clear(*arguments: Any) -> bool:
        done = write(*arguments)
        tier.clear()
        return done

    monkeypatch.setattr(tier, "_write", write_and_clear)
    store(tier, KEYS[0])
    leave(tier)
    tier = tier_at(path)
    assert tier.keys() == []
    assert tier.reopened == Reopened()
    tier.close()


def test_other_quotas_after_a_restart(path: Path) -> None:
    tier = tier_at(path)
    mine = [key_of(number, TWO) for number in range(4)]
    for key in [*mine, *KEYS[:4]]:
        store(tier, key)
    tier.close()
    tier = tier_at(path, quotas={TWO.prefix: 2 * PAGE_BYTES, ONE.prefix: 3 * PAGE_BYTES})
    assert sorted(tier.keys()) == sorted([*mine[2:], *KEYS[1:4]])
    assert tier.reopened == Reopened(num_pages=5, num_surplus=3)
    assert not tier.audit()
    leave(tier)
    tier = tier_at(path)
    assert tier.reopened == Reopened(num_pages=5)
    tier.close()


def test_the_second_opener_is_refused(path: Path) -> None:
    tier = tier_at(path)
    with pytest.raises(DiskInUseError, match="tier is in use"):
        tier_at(path)
    with pytest.raises(DiskInUseError):
        tier_at(path, overwrite=True)
    store(tier, KEYS[0])
    tier.close()
    tier_at(path).close()


def test_a_file_made_for_something_else_is_refused(path: Path) -> None:
    tier = tier_at(path)
    store(tier, KEYS[0])
    tier.close()
    with pytest.raises(DiskFileError, match=f"its pages have {PAGE_BYTES} bytes, not 5999; overwrite=True"):
        tier_at(path, page_bytes=5999)
    with pytest.raises(DiskFileError, match="room for 8 pages, not 9"):
        tier_at(path, num_pages=9)
    with pytest.raises(TierSizeError):
        tier_at(path, num_pages=0)
    tier = tier_at(path)
    assert load(tier, KEYS[0]) == [Loaded.OK]  # refusals change nothing
    tier.close()
    tier = tier_at(path, num_pages=9, overwrite=True)
    assert tier.keys() == []
    tier.close()


def test_another_version_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as other:
        other.setattr("blockpool.offload.disk_layout.VERSION", 7)
        tier_at(path).close()
    with pytest.raises(DiskFileError, match="version 7"):
        tier_at(path)


@pytest.mark.parametrize("content", [b"letters to my mother", bytes(100_000)], ids=["text", "zeros"])
def test_the_file_of_another_program_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(DiskFileError, match="not the file of a disk tier"):
        tier_at(path)
    assert path.read_bytes() == content


def test_a_file_that_needs_xxhash_where_it_is_missing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xxhash")
    tier = tier_at(path)
    tier.close()
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(MissingExtraError, match=r"tier has checksums of xxh3_128.*blockpool\[disk\]"):
        tier_at(path)
    tier = tier_at(path, overwrite=True)
    assert tier.checksum == "sha1"
    assert store(tier, KEYS[0]) == [Stored.OK]
    tier.close()


def test_keys_longer_than_an_entry_are_refused(path: Path) -> None:
    tier = tier_at(path)
    longest = ONE.prefix + bytes(MAX_KEY_BYTES - 8)
    assert store(tier, longest) == [Stored.OK]
    with pytest.raises(KeyLengthError, match=f"takes 1 to {MAX_KEY_BYTES}"):
        store(tier, longest + b"x")
    tier.close()
    tier = tier_at(path)
    assert load(tier, longest) == [Loaded.OK]
    tier.close()


@pytest.mark.parametrize("when", ["open", "reopened"])
@pytest.mark.parametrize("seed", range(200 if LONG else 12))
def test_flipped_bits_anywhere(path: Path, seed: int, when: str) -> None:
    """In the header: refused. In an entry: not found. In a page: CORRUPT, and gone."""
    rng = random.Random(seed)
    tier = tier_at(path)
    store(tier, *KEYS[:8])
    if when == "reopened":
        tier.close()
    size = path.stat().st_size
    places = [rng.randrange(HEADER_BYTES), rng.randrange(ALIGNMENT, ALIGNMENT + 8 * ENTRY_BYTES)]
    places += [rng.randrange(FIRST_SLOT, size) for _ in range(4)]
    place = places[seed % len(places)]
    flip(path, place, rng.randrange(8))
    if when == "reopened":
        if place < HEADER_BYTES:
            with pytest.raises(DiskFileError):
                tier_at(path)
            return
        tier = tier_at(path)
    found = [key for key in KEYS[:8] if tier.lookup([key])[0]]
    results = load(tier, *found)
    stats = tier.stats()
    is_entry = ALIGNMENT <= place < FIRST_SLOT
    is_page = place >= FIRST_SLOT and (place - FIRST_SLOT) % (2 * ALIGNMENT) < PAGE_BYTES
    assert len(found) == (7 if is_entry and when == "reopened" else 8)
    assert results.count(Loaded.CORRUPT) == stats.corrupt_pages == is_page
    assert results.count(Loaded.OK) == len(found) - is_page
    assert tier.lookup(found) == [result is Loaded.OK for result in results]
    assert not tier.audit()
    left = [key for key, result in zip(found, results, strict=True) if result is Loaded.OK]
    if when == "reopened":
        leave(tier)
        tier = tier_at(path)
        assert sorted(tier.keys()) == sorted(left)
    tier.close()


@pytest.mark.parametrize("num_bytes", [0, 100, ALIGNMENT, ALIGNMENT + 300, FIRST_SLOT, FIRST_SLOT + 30_000])
def test_a_file_that_was_cut(path: Path, num_bytes: int) -> None:
    tier = tier_at(path)
    store(tier, *KEYS[:8])
    tier.close()
    whole = path.stat().st_size
    os.truncate(path, num_bytes)
    if num_bytes == 100:
        with pytest.raises(DiskFileError, match="damaged"):
            tier_at(path)
        return
    tier = tier_at(path)
    assert path.stat().st_size == whole
    found = tier.keys()
    assert len(found) == (3 if num_bytes > FIRST_SLOT else 0)
    assert load(tier, *found) == [Loaded.OK] * len(found)
    assert store(tier, *KEYS[8:16]) == [Stored.OK] * 8
    tier.close()


def test_a_file_that_is_cut_while_it_is_open(path: Path) -> None:
    tier = tier_at(path)
    store(tier, *KEYS[:8])
    os.truncate(path, FIRST_SLOT + 30_000)
    results = load(tier, *KEYS[:8])
    assert sorted(result.value for result in results) == ["corrupt"] * 5 + ["ok"] * 3
    assert tier.stats().corrupt_pages == 5
    assert store(tier, *KEYS[8:12]) == [Stored.OK] * 4
    assert load(tier, *KEYS[8:12]) == [Loaded.OK] * 4
    tier.close()


class Device:
    """os.pwritev that fails when told to, after it wrote a part."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.write = os.pwritev
        self.fails_after: int | None = None  # so many writes
        self.error = errno.ENOSPC
        self.num_writes = 0
        monkeypatch.setattr(os, "pwritev", self)

    def __call__(self, file: int, buffers: list[Any], offset: int) -> int:
        self.num_writes += 1
        if self.fails_after is None:
            return self.write(file, buffers, offset)
        part = memoryview(buffers[0])[: max(1, len(buffers[0]) // 2)]
        self.write(file, [part], offset)
        if self.fails_after > 0:
            self.fails_after -= 1
            return len(part)  # a short write is no failure
        raise OSError(self.error, os.strerror(self.error))


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("fails_after", range(9))
def test_a_device_that_refuses(path: Path, monkeypatch: pytest.MonkeyPatch, fails_after: int, error: int) -> None:
    """At each of the writes of a page that evicts another: blank entry, page, entry."""
    tier = tier_at(path, 2)
    device = Device(monkeypatch)
    store(tier, KEYS[0], KEYS[1])
    device.error, device.fails_after = error, fails_after
    result = store(tier, KEYS[2])
    device.fails_after = None
    assert result == [Stored.FAILED]
    assert tier.lookup(KEYS[:3]) == [True, False, False]
    assert tier.stats().refused_pages == 1
    assert not tier.audit()
    assert store(tier, KEYS[3]) == [Stored.OK]  # in the slot that was given back
    assert load(tier, KEYS[0], KEYS[3]) == [Loaded.OK] * 2
    leave(tier)
    tier = tier_at(path, 2)
    assert sorted(tier.keys()) == sorted([KEYS[0], KEYS[3]])
    assert load(tier, KEYS[0], KEYS[3]) == [Loaded.OK] * 2
    tier.close()


def test_a_refused_page_is_right_if_it_comes_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a failing device has kept, nothing else is found after a restart."""
    for fails_after in range(20):
        tier = tier_at(path, 2, overwrite=True)
        device = Device(monkeypatch)
        store(tier, KEYS[0], KEYS[1])
        device.fails_after = fails_after
        store(tier, KEYS[2])
        tier.discard([KEYS[0]])
        device.fails_after = None
        leave(tier)
        tier = tier_at(path, 2)
        assert load(tier, *tier.keys()) == [Loaded.OK] * len(tier.keys())
        tier.close()


def test_a_device_that_refuses_some_of_a_call(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page that was answered OK is there, and all that is found after a restart is right."""
    device = Device(monkeypatch)
    for fails_after in range(40):
        device.fails_after = None
        tier = tier_at(path, 6, overwrite=True)
        store(tier, *KEYS[:6])
        device.fails_after = fails_after
        results = store(tier, *KEYS[6:10])
        device.fails_after = None
        kept = [key for key, result in zip(KEYS[6:10], results, strict=True) if result is Stored.OK]
        assert set(results) <= {Stored.OK, Stored.FAILED}
        assert load(tier, *KEYS[:2], *kept) == [Loaded.OK] * (2 + len(kept))
        assert not tier.audit()
        leave(tier)
        tier = tier_at(path, 6)
        assert load(tier, *KEYS[:2], *kept) == [Loaded.OK] * (2 + len(kept))
        assert load(tier, *tier.keys()) == [Loaded.OK] * len(tier.keys())
        tier.close()


@property_settings()
@given(st.lists(st.integers(0, 12), max_size=12), st.integers(1, 5))
def test_neighbours(slots: list[int], at_once: int) -> None:
    """Every place once, what is together follows each other, and nothing that could be together is apart."""
    found = runs(slots, at_once)
    assert sorted(at for run in found for at in run) == list(range(len(slots)))
    for run in found:
        assert [slots[at] - slots[run[0]] for at in run] == list(range(len(run)))
        assert len(run) <= at_once
    for run, later in itertools.pairwise(found):
        assert len(run) == at_once or slots[later[0]] != slots[run[-1]] + 1


@property_settings()
@given(st.lists(st.binary(min_size=1, max_size=5), max_size=6), st.integers(0, 30))
def test_what_is_left_of_buffers(parts: list[bytes], count: int) -> None:
    assert b"".join(behind(parts, count)) == b"".join(parts)[count:]
    assert all(behind(parts, count))


def test_a_device_that_does_not_give_a_page(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = tier_at(path)
    store(tier, KEYS[0])
    with monkeypatch.context() as broken:

        def refuse(*_: object) -> int:
            raise OSError(errno.EIO, "broken")

        broken.setattr(os, "preadv", refuse)
        assert load(tier, KEYS[0]) == [Loaded.UNREACHABLE]
        assert tier.stats().unreachable_pages == 1
    assert load(tier, KEYS[0]) == [Loaded.OK]
    tier.close()


@pytest.mark.parametrize("bad", range(4))
def test_a_device_that_does_not_give_one_of_neighbours(path: Path, monkeypatch: pytest.MonkeyPatch, bad: int) -> None:
    """The others are there; a device that gives a little at a time gives all."""
    tier = tier_at(path)
    store(tier, *KEYS[:4])
    place = FIRST_SLOT + 2 * ALIGNMENT * bad
    read = os.preadv

    def refuse(file: int, buffers: list[memoryview], offset: int) -> int:
        if offset <= place < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, "broken")
        return read(file, [buffers[0][:1000]], offset)

    with monkeypatch.context() as broken:
        broken.setattr(os, "preadv", refuse)
        results = load(tier, *KEYS[:4])
    assert results == [Loaded.UNREACHABLE if at == bad else Loaded.OK for at in range(4)]
    flip(path, place + 17)
    assert load(tier, *KEYS[:4]) == [Loaded.CORRUPT if at == bad else Loaded.OK for at in range(4)]
    tier.close()


def test_a_device_that_gives_nothing_and_then_fails_has_not_shown_corrupt_pages(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = tier_at(path)
    store(tier, *KEYS[:2])
    answers = [0]

    def fail(*_: object) -> int:
        if answers and PAGE_BYTES == 2 * ALIGNMENT:  # of several at once
            return answers.pop()
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as broken:
        broken.setattr(os, "preadv", fail)
        assert load(tier, *KEYS[:2]) == [Loaded.UNREACHABLE] * 2
    assert load(tier, *KEYS[:2]) == [Loaded.OK] * 2
    tier.close()


@pytest.mark.parametrize("bad", range(4))
def test_a_device_that_does_not_take_one_of_neighbours(path: Path, monkeypatch: pytest.MonkeyPatch, bad: int) -> None:
    tier = tier_at(path)
    place = FIRST_SLOT + 2 * ALIGNMENT * bad
    write = os.pwritev

    def refuse(file: int, buffers: list[bytes], offset: int) -> int:
        if offset <= place < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, "broken")
        return write(file, buffers, offset)

    with monkeypatch.context() as broken:
        broken.setattr(os, "pwritev", refuse)
        assert store(tier, *KEYS[:4]) == [Stored.FAILED if at == bad else Stored.OK for at in range(4)]
    assert load(tier, *KEYS[:4]) == [Loaded.MISSING if at == bad else Loaded.OK for at in range(4)]
    leave(tier)
    tier = tier_at(path)
    assert sorted(tier.keys()) == sorted(key for at, key in enumerate(KEYS[:4]) if at != bad)
    tier.close()


def test_a_full_disk_at_the_start(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(DiskFullError, match="no room for 73728 bytes") as caught:
        tier_at(path)
    assert caught.value.errno == errno.ENOSPC
    assert not path.exists()


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_file_that_was_there_is_never_deleted(path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool) -> None:
    """Even an empty one, and with all that is in it."""
    fallocate = os.posix_fallocate

    def refuse(file: int, offset: int, length: int) -> None:
        fallocate(file, offset, length // 2)  # as where it is done step by step
        raise OSError(errno.ENOSPC, "No space left on device")

    path.touch()
    with monkeypatch.context() as full:
        full.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(DiskFullError):
            tier_at(path, overwrite=overwrite)
    assert path.read_bytes() == b""
    tier = tier_at(path)
    store(tier, *KEYS[:3])
    tier.close()
    before = path.read_bytes()
    if overwrite:
        with monkeypatch.context() as full:
            full.setattr(os, "posix_fallocate", refuse)
            with pytest.raises(DiskFullError, match="no room for"):
                tier_at(path, 1000, overwrite=True)
    assert path.read_bytes() == before
    tier = tier_at(path)
    assert load(tier, *KEYS[:3]) == [Loaded.OK] * 3
    tier.close()


def test_a_file_made_in_vain_is_gone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link to it stays."""
    device = Device(monkeypatch)
    device.fails_after = 0
    link = path.with_name("link")
    link.symlink_to(path)
    with pytest.raises(OSError, match="No space"):
        tier_at(link)
    assert link.is_symlink()
    assert not path.exists()
    device.fails_after = None
    tier_at(link).close()
    assert path.exists()


def test_what_is_no_regular_file_is_not_even_opened(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(path)
    link = path.with_name("link")
    link.symlink_to("/dev/null")
    opened: list[Any] = []
    open_ = os.open

    def noted(*arguments: Any) -> int:
        file = open_(*arguments)
        opened.append(arguments)
        return file

    monkeypatch.setattr(os, "open", noted)
    for other in (path, Path("/dev/null"), link, path.parent):
        for overwrite in (False, True):
            with pytest.raises(DiskFileError, match=f"{other} is no regular file"):
                tier_at(other, overwrite=overwrite)
        assert other.exists()
    assert not opened


def test_a_file_larger_than_the_system_allows(path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    try:
        with pytest.raises(DiskFullError):
            tier_at(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not path.exists()


@pytest.mark.parametrize("seed", range(50 if LONG else 5))
def test_kill_9_in_the_middle(path: Path, seed: int) -> None:
    """Every page that is found has its bytes; the child has found no other either, and goes on with the same file."""
    rng = random.Random(seed)
    for round_ in range(2):
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.offload.storing_child", str(path), str(2 * seed + round_)],
            stdout=subprocess.PIPE,
            bufsize=0,
            cwd=ROOT,
        )
        assert child.stdout is not None
        dots = child.stdout.read(1)
        for _ in range(rng.randrange(20, 60)):
            dots += child.stdout.read(1)
        for _ in range(rng.randrange(3000)):
            pass  # into the middle of a call
        child.kill()
        child.wait()
        child.stdout.close()
        assert set(dots) == set(b".")
        page_bytes, num_pages = storing_child.PAGE_BYTES, storing_child.NUM_PAGES
        tier = DiskTier(path, num_pages * page_bytes, page_bytes)
        assert tier.reopened.num_dropped == 0
        found = [key for key in storing_child.KEYS if tier.lookup([key])[0]]
        assert len(found) > num_pages // 2
        contents = [page_of(key, page_bytes) for key in found]
        pages = [memoryview(bytearray(len(content))) for content in contents]
        assert tier.load(found, pages) == [Loaded.OK] * len(found)
        assert pages == contents
        assert not tier.audit()
        leave(tier)
