"""The random engine over memory, disk and a server, while the disk is damaged and full and the server is killed."""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blockpool import build_info
from blockpool.engine import Scheduler
from blockpool.offload import DiskTier, HostTier, Tier, ValkeyTier
from tests.engine.shadow_engine import random_workload
from tests.offload.servers import PROGRAM, Server
from tests.offload.tiered_engine import NAMESPACE, TieredEngine, Tiers
from tests.sizes import LONG

WORKLOADS = 600 if LONG else 24 if build_info().is_compiled else 6
PAGE = 256  # at least 16 bytes for each of the tokens of a block


class Saboteur:
    """What may befall a disk's file and a server; `happened` counts it."""

    def __init__(self, c: random.Random, path: Path, server: Server | None) -> None:
        self.c = c
        self.path = path
        self.server = server
        self.is_full = False
        self.happened: Counter[str] = Counter()

    def strike(self) -> None:
        what = self.c.choice(["flip", "flip", "flip", "cut", "full", "server"])
        size = self.path.stat().st_size
        if what == "flip" and size > 8192:
            with self.path.open("r+b") as file:
                for _ in range(100):
                    file.seek(self.c.randrange(4096, size))
                    file.write(bytes([self.c.randrange(256)]))
        elif what == "cut" and self.c.random() < 0.2:
            os.truncate(self.path, self.c.randrange(4096, size + 1))
        elif what == "full":
            self.is_full = not self.is_full
        elif what == "server" and self.server is not None:
            if self.server.process is None:
                self.server.start()
            else:
                self.server.kill()
        else:
            return
        self.happened[what] += 1


class SabotagedTiers(Tiers):
    saboteur: Saboteur

    def carry_out(self, scheduler: Scheduler) -> None:
        if self.c.random() < 0.3:
            self.saboteur.strike()
        super().carry_out(scheduler)


class SabotagedEngine(TieredEngine):
    def __init__(self, *arguments: Any, saboteur: Saboteur) -> None:
        self.saboteur = saboteur
        super().__init__(*arguments)

    def connect(self) -> Tiers:
        connection = SabotagedTiers(self.c, self.manager, self.store, self.tiers, self.num_threads)
        connection.saboteur = self.saboteur
        self.connection = connection
        return connection


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server | None]:
    """None where there is no such program: memory and disk are tested all the same."""
    if PROGRAM is None:
        yield None
        return
    pytest.importorskip("redis", reason="redis-py is not installed")
    one = Server(tmp_path_factory.mktemp("server"))
    yield one
    one.kill()


def test_no_read_sees_a_foreign_fingerprint(
    tmp_path: Path, server: Server | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: Counter[str] = Counter()
    losses: Counter[str] = Counter()
    loaded = 0
    pwritev = os.pwritev
    saboteur: Saboteur | None = None

    def write(file: int, buffers: Any, offset: int) -> int:
        if saboteur is not None and saboteur.is_full:
            raise OSError(errno.ENOSPC, "no space left on device")
        return pwritev(file, buffers, offset)

    monkeypatch.setattr(os, "pwritev", write)
    for seed in range(WORKLOADS):
        c = random.Random(f"real {seed}")
        case, wanted = random_workload(c, 30)
        while not case.enable_caching:
            case, wanted = random_workload(c, 30)
        case = replace(case, abort_rate=c.choice([0.0, 0.02]))
        path = tmp_path / f"{seed}.tier"
        saboteur = None
        tiers: list[Tier] = [
            HostTier(c.choice([1, 2, 8]) * PAGE, PAGE, policy=c.choice(["lru", "arc"])),
            DiskTier(path, 60 * PAGE, PAGE),
        ]
        if server is not None and seed % 2:
            if server.process is None:
                server.start()
            tiers.append(ValkeyTier(server.url, PAGE, namespace=NAMESPACE, retry_after_s=0.0, timeout_s=5.0))
        saboteur = Saboteur(c, path, server if len(tiers) == 3 else None)
        engine = SabotagedEngine(case, c, tiers, c.choice([0, 0, 2]), saboteur=saboteur)
        try:
            engine.run(wanted)
            engine.check()
        except BaseException as error:
            error.add_note(f"workload {seed}")
            raise
        finally:
            saboteur.is_full = False
            engine.connection.offloader.close()
            for tier in tiers:
                tier.close()
        for tier in tiers[:2]:
            assert tier.audit() == []  # type: ignore[attr-defined]
        happened += saboteur.happened
        losses += engine.connection.offloader.losses
        loaded += engine.connection.offloader.num_loaded_tokens
    assert loaded > 0
    if build_info().is_compiled:
        assert {"flip", "full"} <= set(happened)
        assert losses["load: corrupt"] > 0
        assert losses["store: failed"] > 0
        assert server is None or losses["store: unreachable"] > 0
