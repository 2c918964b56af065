"""Random operations on vLLM's own pool and on ours, compared after each.

    PYTHONPATH=build/peer DIR/bin/python compat/vllm/fuzz.py [--long] [--self-check]

`make test-vllm PEER=DIR` runs it. Seeds are fixed; a difference is shown with its seed, its number and the operations
that lead to it, as few as were found. Exit codes: 0 no difference, 1 a difference (or, with --self-check, a fault
that was not found), 2 it cannot run here.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from deliberate import NAMES, Deliberate
from faults import faults
from hash_fuzz import fuzz_hashing
from lockstep import Parting
from manager_fuzz import fuzz_manager
from parts_fuzz import fuzz_parts
from pool_fuzz import fuzz_pool
from scheduler_fuzz import fuzz_scheduler
from sides import Side, our_side, vllm_side

Fuzz = Callable[[Side, Side, int], tuple[int, Parting | None]]

# how many seeds of each part; the long size has twenty times as many
SEEDS = {
    "pool": 80,
    "parts": 25,
    "manager": 40,
    "scheduler": 20,
    "hashing": 60,
    "managed": 2000,
    "managed scheduler": 60,
}
#: Parts that compare our KVCacheManager too, not our pool under vLLM's.
MANAGED = frozenset({"managed", "managed scheduler"})
LONG_FACTOR = 20
SEEDS_FOR_A_FAULT = 150


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="vLLM's own pool and ours under the same random operations.")
    parser.add_argument("--part", choices=tuple(SEEDS), action="append", help="only this part (may be repeated)")
    parser.add_argument("--seed", type=int, help="only this seed")
    parser.add_argument("--long", action="store_true", default=os.environ.get("BLOCKPOOL_LONG") == "1")
    parser.add_argument("--keep-going", action="store_true", help="show the differences of all seeds, not the first")
    parser.add_argument("--self-check", action="store_true", help="does the fuzz find faults? (blockpool not needed)")
    parser.add_argument("--verbose", action="store_true", help="with --self-check: say how each fault was found")
    parser.add_argument("--json", type=Path, help="write the outcome here")
    return parser.parse_args(argv)


def parts(deliberate: Deliberate) -> dict[str, Fuzz]:
    return {
        "pool": partial(fuzz_pool, deliberate=deliberate),
        "parts": fuzz_parts,
        "manager": partial(fuzz_manager, deliberate=deliberate),
        "scheduler": fuzz_scheduler,
        "hashing": fuzz_hashing,
        "managed": partial(fuzz_manager, deliberate=deliberate),
        "managed scheduler": fuzz_scheduler,
    }


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:60}", end="", file=sys.stderr, flush=True)


def run(args: argparse.Namespace) -> int:
    vllm, ours, managed = vllm_side(), our_side(), our_side(manager=True)
    deliberate = Deliberate()
    outcome: dict[str, object] = {}
    num_partings = 0
    for name, fuzz in parts(deliberate).items():
        if args.part and name not in args.part:
            continue
        number = SEEDS[name] * (LONG_FACTOR if args.long else 1)
        seeds = range(number) if args.seed is None else (args.seed,)
        began, done = time.monotonic(), 0
        for seed in seeds:
            progress(f"{name}: seed {seed} of {number}")
            count, parting = fuzz(vllm, managed if name in MANAGED else ours, seed)
            done += count
            if parting is not None:
                num_partings += 1
                progress("")
                print(parting)
                if not args.keep_going:
                    break
        progress("")
        print(f"{name}: {done:,} operations compared, {time.monotonic() - began:.0f} s")
        outcome[name] = done
    unneeded = [name for name in NAMES if not deliberate.counts[name]] if not args.part and args.seed is None else []
    for name, count in deliberate.counts.items():
        print(f"deliberate difference: {name}, {count:,} times")
    for name in unneeded:
        print(f"FAULT deliberate difference that does not occur any more: {name}")
    print("no difference" if not num_partings else f"{num_partings} differences")
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        outcome |= {"differences": num_partings, "deliberate": dict(deliberate.counts)}
        args.json.write_text(json.dumps(outcome, indent=2) + "\n", encoding="utf-8")
    return 1 if num_partings or unneeded else 0


def self_check(*, verbose: bool) -> int:
    """Each fault must be found, and vLLM's own must equal itself."""
    vllm = vllm_side()
    unequal = undetected = tried = 0
    for name, fuzz in parts(Deliberate()).items():
        if name in MANAGED:
            continue
        for seed in range(5):
            _, parting = fuzz(vllm, vllm, seed)
            if parting is not None:
                unequal += 1
                print(f"vLLM's own differs from itself: {parting}")
    for fault in faults(vllm):
        progress(fault.name)
        tried += 1
        fuzz = parts(Deliberate())[fault.part]
        partings = (fuzz(vllm, fault.side, seed)[1] for seed in range(SEEDS_FOR_A_FAULT))
        found = next((parting for parting in partings if parting is not None), None)
        progress("")
        if found is None:
            undetected += 1
            print(f"NOT FOUND: {fault.name}")
        elif verbose:
            print(f"found: {fault.name} ({fault.part}, seed {found.seed}, {len(found.history)} operations)")
    print(f"of {tried} faults put into vLLM's own classes, {tried - undetected} were found")
    return 1 if unequal or undetected else 0


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of bytes are iterated, and xxhash takes its root from it
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"PYTHONHASHSEED": "0"})
    logging.disable(logging.CRITICAL)
    try:
        return self_check(verbose=args.verbose) if args.self_check else run(args)
    except ImportError as error:
        print(f"fuzz: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
