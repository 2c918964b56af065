"""Break one rule at a time, in a copy of the source, and see that a test notices: `make mutations`.

A rule that can be broken unnoticed is not tested. Each mutation replaces a piece of source, which must be there
exactly once, and names tests, one of which must fail. Exit code 0: all were noticed; 1: one was not, or the tests
failed before anything was broken.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHADOW = "tests/engine/test_shadow.py"
OFFLOADER = "tests/offload/test_offloader.py"
TIERED = "tests/offload/test_tiered.py"


@dataclass(frozen=True)
class Mutation:
    """In a file of the package each first piece becomes the second; then one of `tests` has to fail."""

    rule: str
    file: str
    changes: tuple[tuple[str, str], ...]
    tests: tuple[str, ...] = (SHADOW,)


MUTATIONS = (
    Mutation(
        "queue order by hash: what can be hit again goes to the back, the rest to the front",
        "pool/block_pool.py",
        (("            self.queue.prepend_vec(front)\n", "            self.queue.append_vec(front)\n"),),
        ("tests/cache/test_machine.py",),
    ),
    Mutation(
        "touch before allocate: the hits of all groups are taken before any group gets new blocks",
        "cache/manager.py",
        (
            (
                "                manager.adopt(request_id, NOTHING_FOUND if hit is None else hit.groups[at])\n",
                "                pass\n",
            ),
            (
                "            if not admitted:\n                self._move_tail",
                "            if admitted:\n"
                "                manager.adopt(request_id, NOTHING_FOUND if hit is None else hit.groups[at])\n"
                "            if not admitted:\n                self._move_tail",
            ),
        ),
    ),
    Mutation(
        "copy before forward: a step's copies are made before it computes",
        "engine/worker.py",
        (
            ("        for order in output.copies:\n            self.store.copy(order)\n", ""),
            (
                "        sampled = self.model.forward(steps, self.store)\n",
                "        sampled = self.model.forward(steps, self.store)\n"
                "        for order in output.copies:\n            self.store.copy(order)\n",
            ),
        ),
    ),
    Mutation(
        "release on the settled count: what a step in flight reads stays",
        "cache/manager.py",
        (
            (
                "settled = max(0, request.num_computed_tokens - request.num_in_flight_tokens)",
                "settled = request.num_computed_tokens",
            ),
        ),
    ),
    Mutation(
        "fence before reuse: blocks of a request in flight come back when its step is acknowledged",
        "engine/scheduler.py",
        (("fence = request.last_step if request.last_step > self._acknowledged else None", "fence = None"),),
    ),
    Mutation(
        "findable after acknowledgement: a state is found only when the step that writes it has run",
        "managers/base.py",
        (
            (
                "self.findable_at_acknowledgement: bool = spec.is_state",
                "self.findable_at_acknowledgement: bool = False",
            ),
        ),
    ),
    Mutation(
        "null is never cached: a position that holds nothing is not registered",
        "pool/block_pool.py",
        (
            (
                "                if b != 0:\n"
                "                    if i64(meta[base + i64(b) * FIELDS + FLAGS]) & HASHED:\n"
                "                        self.forget(i64(b))\n"
                "                    prefix_index.add",
                "                if b >= 0:\n"
                "                    if i64(meta[base + i64(b) * FIELDS + FLAGS]) & HASHED:\n"
                "                        self.forget(i64(b))\n"
                "                    prefix_index.add",
            ),
        ),
    ),
    Mutation(
        "the last token is computed again: a hit never covers the whole request",
        "cache/manager.py",
        (("        most = request.num_tokens - 1\n", "        most = request.num_tokens\n"),),
    ),
    Mutation(
        "computed before it goes down: lower tiers get blocks of acknowledged steps alone",
        "cache/storing.py",
        (
            (
                "            step.registered.setdefault(request_id, []).append(span)\n",
                "            step.registered.setdefault(request_id, []).append(span)\n"
                "            if self.stored is not None:\n                self.stored.spans.append(span)\n",
            ),
        ),
        (OFFLOADER,),
    ),
    Mutation(
        "read before reuse: the copy of a block that was handed out meanwhile goes nowhere",
        "offload/transfers.py",
        (("if not job.is_lost(at):  # it was", "if True:  # it was"),),
        (OFFLOADER,),
    ),
    Mutation(
        "watched while it waits: a block is not read after it was handed out",
        "offload/storing.py",
        (("pool.watch_blocks(blocks, lost[number].add)", "pool.watch_blocks(blocks, lambda block: None)"),),
        (OFFLOADER,),
    ),
    Mutation(
        "nothing is written behind an abort: a load that comes too late finds its job cancelled",
        "offload/transfers.py",
        (
            (
                "            if self.is_cancelled:\n                return False\n            memory",
                "            memory",
            ),
        ),
        (OFFLOADER,),
    ),
    Mutation(
        "loaded before it is found: nobody hits a block that is on its way up",
        "engine/scheduler.py",
        (("            delay_cache_blocks=True,\n", "            delay_cache_blocks=False,\n"),),
        (TIERED, "tests/engine/test_remote.py"),
    ),
    Mutation(
        "what failed is no prefix: a load that came to a part is registered as far as all is there",
        "offload/transfers.py",
        (("if outcome is not Loaded.OK and start < reached[group_id]:", "if False:"),),
        (OFFLOADER,),
    ),
    Mutation(
        "checked when it is read: bytes that are not those that were stored are not served",
        "offload/disk_slots.py",
        (('if is_whole and b"".join(checksums) == stored:', "if is_whole:"),),
        ("tests/offload/test_disk.py",),
    ),
    Mutation(
        "nothing old names new bytes: a slot's entry is wiped before its page is written again",
        "offload/disk_slots.py",
        (("if self._may_have_entry.find(1, first, end) >= 0:", "if False:"),),
        ("tests/offload/test_disk.py",),
    ),
)


def mutate(package: Path, mutation: Mutation) -> None:
    path = package / mutation.file
    text = path.read_text()
    for old, new in mutation.changes:
        if text.count(old) != 1:
            sys.exit(f"{mutation.rule}: {mutation.file} has {old!r} {text.count(old)} times, not once")
        text = text.replace(old, new)
    path.write_text(text)


def failure(root: Path, tests: tuple[str, ...]) -> str | None:
    """The first test that fails, and why; None when all pass."""
    environment = os.environ | {"PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "400"}
    environment.pop("BLOCKPOOL_EXPECT", None)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:randomly", "--tb=line", *tests]
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if run.returncode == 0:
        return None
    if run.returncode != 1:
        sys.exit(f"pytest ended with {run.returncode}:\n{run.stdout}{run.stderr}")
    failed = re.search(r"^FAILED (.*)$", run.stdout, re.MULTILINE)
    return failed[1] if failed else run.stdout


def main(names: list[str]) -> int:
    """Those mutations whose rule starts with one of the names; all without any."""
    chosen = [m for m in MUTATIONS if not names or any(m.rule.startswith(name) for name in names)]
    unnoticed = []
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        ignored = shutil.ignore_patterns("*.so", "__pycache__")  # the pure build: what is changed is what runs
        shutil.copytree(ROOT / "src", root / "src", ignore=ignored)
        shutil.copytree(ROOT / "tests", root / "tests", ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", root)
        failed = failure(root, tuple(sorted({test for mutation in chosen for test in mutation.tests})))
        if failed is not None:
            print(f"nothing is broken yet, and a test fails: {failed}")
            return 1
        for mutation in chosen:
            path = root / "src/blockpool" / mutation.file
            sound = path.read_text()
            mutate(root / "src/blockpool", mutation)
            failed = failure(root, mutation.tests)
            path.write_text(sound)
            print(f"{mutation.rule}\n    {'NOT NOTICED' if failed is None else failed}", flush=True)
            if failed is None:
                unnoticed.append(mutation.rule)
    print(f"{len(chosen) - len(unnoticed)} of {len(chosen)} broken rules were noticed")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
