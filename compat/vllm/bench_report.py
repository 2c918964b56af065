"""What the runs of a workload say, as figures: steps, KV-cache management in them, the pool in that, hashing."""

from __future__ import annotations

from collections.abc import Callable

from bench_engine import SchedulerFactory
from bench_figures import LEAST, Figures
from bench_serving import Run, Size, many_requests, one_prompt
from bench_watch import HASHER, ONE_TOKEN, ManagerWatch, PoolWatch, Unwatched, Watch

Part = Callable[[str], None]
"""Runs a variant once and adds what it says."""


class Decided:
    """All runs of a workload must decide alike, whichever pool they run on."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}

    def check(self, algorithm: str, run: Run) -> Run:
        if self._digests.setdefault(algorithm, run.decisions) != run.decisions:
            raise SystemExit(f"two runs of the same requests ({algorithm}) differ in blocks, hits or hashes")
        return run


def many_requests_parts(figures: Figures, factory: SchedulerFactory, size: Size) -> list[Part]:
    """256 requests in the full size: steps, management, pool, and hashing with both of vLLM's hash functions."""
    what = f"{size.num_requests} requests of {size.num_tokens:,} tokens"
    phases = ("prefill, fresh pool", "prefill", "decode", "finish")
    decided = Decided()

    def run(variant: str, algorithm: str, watch: Watch) -> Run:
        return decided.check(algorithm, many_requests(factory, variant, algorithm, size, watch))

    def steps(variant: str) -> None:
        add_steps(figures, variant, what, run(variant, "sha256", Unwatched()), phases)

    def management(variant: str) -> None:
        done = run(variant, "sha256", ManagerWatch())
        add_management(figures, variant, what, done, phases)
        for phase in ("prefill", "decode"):
            add_methods(figures, variant, f"{what}, {phase} by method", done, phase)
        add_hashing(figures, variant, "sha256", done, size)

    def pool(variant: str) -> None:
        add_pool(figures, variant, what, run(variant, "sha256", PoolWatch()), phases)

    def hashing(variant: str) -> None:
        add_hashing(figures, variant, "sha256_cbor", run(variant, "sha256_cbor", ManagerWatch()), size)

    return [steps, management, pool, hashing]


def long_prompt_parts(figures: Figures, factory: SchedulerFactory, size: Size) -> list[Part]:
    """One prompt of a million tokens in the full size, and the same once more."""
    what = f"One prompt of {size.num_tokens:,} tokens"
    phases = ("prefill", "decode", "finish", "the same again")
    decided = Decided()

    def run(variant: str, watch: Watch) -> Run:
        return decided.check("sha256", one_prompt(factory, variant, "sha256", size, watch))

    def steps(variant: str) -> None:
        add_steps(figures, variant, what, run(variant, Unwatched()), phases)

    def management(variant: str) -> None:
        done = run(variant, ManagerWatch())
        add_management(figures, variant, what, done, phases)
        for phase in ("prefill", "the same again"):
            add_methods(figures, variant, f"{what}, {phase} by method", done, phase)

    def pool(variant: str) -> None:
        add_pool(figures, variant, what, run(variant, PoolWatch()), phases)

    return [steps, management, pool]


def add_steps(figures: Figures, variant: str, what: str, run: Run, phases: tuple[str, ...]) -> None:
    """What an engine's process spends in schedule() and update_from_output(), nothing else being measured."""
    for name in phases:
        figures.add(f"{what}: scheduler", name, "ms", variant, 1e3 * run.phases[name].cpu_s)
    for name in phases:
        figures.add(f"{what}: longest step", name, LEAST, variant, 1e3 * run.phases[name].longest_step_s)


def add_management(figures: Figures, variant: str, what: str, run: Run, phases: tuple[str, ...]) -> None:
    section = f"{what}: KV-cache management"
    for name in phases:
        seconds, _, added_s = run.spent[name]
        one_token_s = sum(value for method, value in seconds.items() if method.endswith(ONE_TOKEN))
        rest_s = sum(seconds.values()) - one_token_s - seconds[HASHER]
        if name.startswith("prefill"):
            figures.add(section, f"{name}: for prompts", "ms", variant, 1e3 * rest_s)
            figures.add(section, f"{name}: for decodes beside them", "ms", variant, 1e3 * one_token_s)
        figures.add(section, name, "ms", variant, 1e3 * (rest_s + one_token_s))
        share = (rest_s + one_token_s) / (run.phases[name].cpu_s - added_s)
        figures.add(section, f"{name}: share of the scheduler's time", "%", variant, 100 * share)


def add_pool(figures: Figures, variant: str, what: str, run: Run, phases: tuple[str, ...]) -> None:
    section = f"{what}: the pool's methods"
    for name in phases:
        seconds, _, added_s = run.spent[name]
        spent_s = sum(seconds.values())
        share = spent_s / (run.phases[name].cpu_s - added_s)
        figures.add(section, name, "ms", variant, 1e3 * spent_s)
        figures.add(section, f"{name}: share of the scheduler's time", "%", variant, 100 * share)
    for name in phases:
        add_methods(figures, variant, f"{what}: the pool by method, {name}", run, name)


def add_methods(figures: Figures, variant: str, section: str, run: Run, phase: str) -> None:
    seconds, calls, _ = run.spent[phase]
    for method, spent_s in seconds.items():
        if calls[method]:
            figures.add(section, f"{method} ({calls[method]:,})", "ms", variant, 1e3 * spent_s)


def add_hashing(figures: Figures, variant: str, algorithm: str, run: Run, size: Size) -> None:
    section = f"Hashing, {algorithm}"
    num_tokens = size.num_requests * size.num_tokens
    making, unhashed = f"making {size.num_requests} requests", "of it not hashing"
    figures.add(section, making, "ms", variant, 1e3 * run.make_requests_s)
    figures.add(section, unhashed, "ms", variant, 1e3 * run.make_unhashed_s)
    figures.add(section, "their hasher alone", "ms", variant, 1e3 * run.hasher_s)
    figures.add(section, "their hasher alone", "M tokens/s", variant, num_tokens / run.hasher_s / 1e6)
    decode = run.spent["decode"]
    num_steps = run.phases["decode"].num_steps
    figures.add(section, "per decode step", "µs", variant, 1e6 * decode[0][HASHER] / num_steps)
