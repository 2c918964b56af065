"""`make bench`: every figure of docs/performance.md, on this machine, now.

With BLOCKPOOL_PEER_PYTHON (the Python of an environment in which vLLM 0.33's scheduler side imports) each row is a
ratio to vLLM's own code: two processes, their rounds interleaved, medians. Without it the rows are absolute.
Options: --rounds N (default 5), --json FILE, --only TEXT (rows that contain it), --trace FILE (Mooncake conversation
trace; by default the one in ../shared/traces, when it is there).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TRACE = HERE.parent.parent / "shared" / "traces" / "mooncake" / "conversation_trace.jsonl"
PEER_ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
#: What the project promises: at least so many times as fast as vLLM 0.33.
PROMISED = {
    "allocate + free, no hash": 15,
    "allocate, evicting": 12,
    "touch, random cached": 15,
    "free, cached": 20,
    "cache_full_blocks": 20,
    "longest prefix, 1,000 cold": 10,
    "events on: cache + evict": 5,
    "one block: allocate + free": 6,
    "sha256_cbor chain, list of ints": 12,
    "sha256_cbor chain, int32 array": 18,
    "portable sha256_cbor chain, list of ints": 4,
}


class Timer:
    """A process that times rows on request."""

    def __init__(self, python: str, script: str, *options: str) -> None:
        self.process = subprocess.Popen(
            [python, str(HERE / script), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **PEER_ENVIRONMENT},
        )

    def ask(self, line: str) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"the benchmark process ended: {self.process.args}")
        median: float = json.loads(answer)["median"]
        return median

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def compare(script: str, rows: list[str], rounds: int, peer: str | None, numbered: bool) -> list[dict[str, Any]]:
    ours = Timer(sys.executable, script)
    rival = Timer(peer, script, "--rival") if peer else None
    results = []
    for row in rows:
        mine, theirs = [], []
        for number in range(rounds):
            line = f"{row} {number}" if numbered else row
            mine.append(ours.ask(line))
            if rival:
                theirs.append(rival.ask(line))
        result: dict[str, Any] = {"row": row, "ns": round(1e9 * statistics.median(mine), 1)}
        if rival:
            result["rival_ns"] = round(1e9 * statistics.median(theirs), 1)
            result["ratio"] = round(statistics.median([t / m for t, m in zip(theirs, mine, strict=True)]), 1)
            result["promised"] = PROMISED.get(row)
        results.append(result)
        print(
            f"{row:44s} {result['ns']:9.1f} ns"
            + (
                f"   vLLM {result['rival_ns']:9.1f} ns   {result['ratio']:6.1f}x"
                + (f"   (promised {result['promised']}x)" if result["promised"] else "")
                if rival
                else ""
            ),
            flush=True,
        )
    ours.close()
    if rival:
        rival.close()
    return results


def whole_process(trace: Path, options: list[str], rounds: int) -> dict[str, Any]:
    """Seconds and memory of the command as a user runs it, standard output thrown away."""
    times, peaks = [], []
    command = [sys.executable, "-m", "blockpool.cli", "replay", str(trace), *options]
    for _ in range(rounds):
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        times.append(time.perf_counter() - start)
        peaks.append(usage.ru_maxrss / 1024)
        if status:
            raise SystemExit(f"{command} failed")
    median, best = statistics.median(times), min(times)
    return {"seconds": round(median, 2), "best": round(best, 2), "peak_mib": round(max(peaks))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--trace", type=Path, default=TRACE)
    options = parser.parse_args()
    from blockpool import build_info

    info = build_info()
    print(f"blockpool {info.version}, compiled: {info.is_compiled}, hash kernel: {info.hash_kernel}")
    peer = os.environ.get("BLOCKPOOL_PEER_PYTHON")
    if not peer:
        print("BLOCKPOOL_PEER_PYTHON is not set: absolute figures only")
    sys.path.insert(0, str(HERE))
    import cache_ops
    import hash_ops
    import pool_ops

    wanted = options.only
    report: dict[str, Any] = {
        "pool": compare(
            "pool_ops.py", [row for row in pool_ops.ROWS if wanted in row], options.rounds, peer, numbered=True
        ),
        "hash": compare(
            "hash_ops.py", [row for row in hash_ops.ROWS if wanted in row], options.rounds, peer, numbered=False
        ),
        "cache": compare(
            "cache_ops.py", [row for row in cache_ops.ROWS if wanted in row], options.rounds, None, numbered=False
        ),
    }
    if not wanted or wanted in "replay":
        if options.trace.exists():
            replays = {
                "replay, 512-token blocks, 10,000 blocks": ["--num-blocks", "10000"],
                "replay, 16-token blocks, 1,000,000 blocks": ["--num-blocks", "1000000", "--block-size", "16"],
            }
            for name, arguments in replays.items():
                report[name] = whole_process(options.trace, arguments, options.rounds)
                print(f"{name:44s} {report[name]}", flush=True)
        else:
            print(f"{options.trace} is absent: no replay timed")
    if not wanted or wanted in "pauses":
        answer = subprocess.run([sys.executable, str(HERE / "pauses.py")], check=True, capture_output=True, text=True)
        report["pauses"] = json.loads(answer.stdout)
        print(f"{'pauses at 1,000,000 blocks':44s} {report['pauses']}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
