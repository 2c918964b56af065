"""`make bench-vllm`: what vLLM 0.33 gains by our pool and hasher in the place of its own, on this machine, now.

Run by the Python of an environment in which vLLM's scheduler side and its tests import. Both variants run in this
process, in turns, run by run. A row is the median over the rounds, its ratio the median of the rounds' ratios. Times
are processor time; only the longest step is by the wall clock.

Options: --manager (our KVCacheManager too), --quick (a small size, to see that it works), --rounds N,
--only PART ..., --json FILE, --markdown FILE.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from bench_collector import measure_full_collections, measure_pauses
from bench_engine import SchedulerFactory
from bench_figures import Figures, as_markdown, as_text
from bench_groups import measure_groups
from bench_memory import measure_memory
from bench_pool import measure_pool
from bench_report import Part, long_prompt_parts, many_requests_parts
from bench_serving import Size
from bench_variant import OURS, VLLM, Options

from blockpool import build_info

FULL = Size(num_requests=256, num_tokens=8_192, num_families=8, num_decode_steps=128, num_blocks=75_000)
QUICK = Size(num_requests=32, num_tokens=2_048, num_families=4, num_decode_steps=32, num_blocks=5_000)
FULL_LONG = Size(num_requests=1, num_tokens=1_000_000, num_families=1, num_decode_steps=128, num_blocks=70_000)
QUICK_LONG = Size(num_requests=1, num_tokens=100_000, num_families=1, num_decode_steps=32, num_blocks=7_000)

#: Who is first changes from round to round.
ORDERS = ((VLLM, OURS), (OURS, VLLM))
#: Rounds in the full size; what does not depend on the machine's mood needs fewer.
ROUNDS = {"memory": 1, "pool": 7, "groups": 7, "serving": 7, "long": 7, "collector": 5, "pauses": 5}


def parts_of(figures: Figures, quick: bool) -> dict[str, list[Part]]:
    """What is measured, by name."""
    num_requests = 20 if quick else 200
    large_pool = 50_000 if quick else 500_000
    size = QUICK if quick else FULL
    factory = SchedulerFactory()
    paused = replace(size, num_blocks=large_pool)
    return {
        "memory": [lambda variant: measure_memory(figures, variant, num_requests * 5)],
        "pool": [lambda variant: measure_pool(figures, variant, num_requests)],
        "groups": [lambda variant: measure_groups(figures, variant, num_requests)],
        "serving": many_requests_parts(figures, factory, size),
        "long": long_prompt_parts(figures, factory, QUICK_LONG if quick else FULL_LONG),
        "collector": [lambda variant: measure_full_collections(figures, variant, large_pool)],
        "pauses": [lambda variant: measure_pauses(figures, factory, variant, paused)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--manager", action="store_true", help="our KVCacheManager too, not our pool alone")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--only", nargs="+", metavar="PART")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    Options.manager = options.manager
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    os.environ["PYTHONHASHSEED"] = "0"  # both variants start their hash chains from the same root

    info = build_info()
    print(f"blockpool {info.version}, compiled: {info.is_compiled}, hash kernel: {info.hash_kernel}")
    if not info.is_compiled:
        raise SystemExit("this blockpool is not compiled: there is nothing to measure")
    figures = Figures()
    parts = parts_of(figures, options.quick)
    unknown = set(options.only or ()) - parts.keys()
    if unknown:
        raise SystemExit(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    for name in options.only or parts:
        rounds = options.rounds or (1 if options.quick else ROUNDS[name])
        for number in range(rounds):
            progress(f"{name}: round {number + 1} of {rounds}")
            for part in parts[name]:
                for variant in ORDERS[number % 2]:
                    part(variant)
    progress("")
    print(as_text(figures))
    if options.json:
        options.json.write_text(json.dumps(figures.as_json(), indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(as_markdown(figures))


def progress(line: str) -> None:
    """One line that is written over, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
