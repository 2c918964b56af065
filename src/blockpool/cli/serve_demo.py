"""`blockpool serve-demo`."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .exits import fail, unless_interrupted

if TYPE_CHECKING:
    from blockpool.engine.demo import Demo, Line

FAULTS_FOUND = 1
STDIN = "-"
MAX_NUM_BLOCKS = 10_000
MAX_WORDS = 2_000
COLOURS = {
    "hit": typer.colors.GREEN,
    "partial hit": typer.colors.GREEN,
    "copy": typer.colors.GREEN,
    "evicted": typer.colors.YELLOW,
    "preempted": typer.colors.RED,
    "error": typer.colors.RED,
    "finished": typer.colors.CYAN,
}


def serve_demo(
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="A prompt per line, words are tokens; - is stdin. Default: built-in prompts that show everything.",
            show_default=False,
        ),
    ] = None,
    num_blocks: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Pool size in blocks, the null block included. Default: so few that room is short.",
            show_default=False,
        ),
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Tell the run without prefix caching.")] = False,
) -> None:
    """Serve a few prompts with a toy model and watch the blocks: prefill, hit, copy, preemption, eviction.

    The same prompts run once more without the cache (with it, for --no-cache): the answers must be the same.

    Exit code: 0 the same answers, 1 different ones, or none, 2 bad input.

    Example: blockpool serve-demo --num-blocks 12
    """
    texts = _read_prompts(prompts)
    if num_blocks is not None and not 2 <= num_blocks <= MAX_NUM_BLOCKS:
        fail(f"--num-blocks: {num_blocks} is not between 2 (one is the null block) and {MAX_NUM_BLOCKS:,}")

    from blockpool.engine.demo import (
        ANSWER,
        BLOCK_SIZE,
        NUM_BLOCKS,
        PROMPTS,
        Demo,
        blocks_needed,
        small_num_blocks,
    )

    if texts is None:
        texts = list(PROMPTS)
        num_blocks = num_blocks or NUM_BLOCKS
    num_blocks = num_blocks or small_num_blocks(texts)
    least = 1 + min(map(blocks_needed, texts))
    if num_blocks < least:
        fail(
            f"--num-blocks: no prompt fits with its answer in {_count(num_blocks - 1, 'block')} of {BLOCK_SIZE}"
            f" words: take {least} or more"
        )
    with unless_interrupted():
        told = Demo(texts, num_blocks, caching=not no_cache)
        other = Demo(texts, num_blocks, caching=no_cache)
        pool = f"{_count(num_blocks - 1, 'block')} of {BLOCK_SIZE} words"
        caching = f"prefix caching {'off' if no_cache else 'on'}"
        typer.echo(f"{_count(len(texts), 'prompt')}, up to {ANSWER} words of answer each; {pool}; {caching}")
        for name, text in zip(told.requests, texts, strict=True):
            typer.echo(f"  {name}: {' '.join(text.split())}")
        typer.echo()
        _print_lines(told.run(), max(3, *map(len, told.requests)))
        for _ in other.run():
            pass
    typer.echo()
    _print_verdict(told, other, no_cache)


def _read_prompts(path: str | None) -> list[str] | None:
    """The lines that hold anything; None without a file."""
    if path is None:
        return None
    if not path:
        fail("--prompts: the name of the file is empty")
    name = "stdin" if path == STDIN else path
    try:
        data = sys.stdin.buffer.read() if path == STDIN else Path(path).read_bytes()
        text = data.decode("utf-8-sig")
    except OSError as error:
        fail(f"--prompts: {name} cannot be read: {error.strerror}")
    except UnicodeDecodeError:
        fail(f"--prompts: {name} is not text in UTF-8")
    prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        fail(f"--prompts: {name} holds no prompt")
    num_words = sum(len(prompt.split()) for prompt in prompts)
    if num_words > MAX_WORDS:
        fail(f"--prompts: {name} has {num_words:,} words, the toy model takes {MAX_WORDS:,} at most")
    return prompts


def _print_lines(lines: Iterable["Line"], width: int) -> None:
    has_colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    typer.echo(f"step  {'who':<{2 * width}}  what")
    last = -2
    for line in lines:
        step = "" if line.step in (last, -1) else str(line.step)
        last = line.step
        what = f"{line.what:<11}"
        if has_colours and line.what in COLOURS:
            what = typer.style(what, fg=COLOURS[line.what])
        typer.echo(f"{step:>4}  {line.who:<{2 * width}}  {what}  {line.text}")


def _print_verdict(told: "Demo", other: "Demo", no_cache: bool) -> None:
    with_cache, without = (other, told) if no_cache else (told, other)
    typer.echo(
        f"tokens computed: {with_cache.num_computed} with the cache, {without.num_computed} without:"
        f" {_work_text(with_cache.num_computed, without.num_computed)}"
    )
    unanswered = told.unanswered
    if unanswered:
        prompts = _count(len(told.requests), "prompt")
        typer.echo(
            f"{len(unanswered)} of {prompts} could not run to the end, take more blocks: {' '.join(unanswered)}"
        )
    if len(unanswered) == len(told.requests):
        typer.echo("no prompt could run: there are no tokens to compare")
        raise typer.Exit(FAULTS_FOUND)
    is_same = told.answers == other.answers
    typer.echo(f"same tokens as {'with' if no_cache else 'without'} cache: {'yes' if is_same else 'no'}")
    if not is_same:
        raise typer.Exit(FAULTS_FOUND)


def _work_text(with_cache: int, without: int) -> str:
    """What the cache spares, or costs: who is preempted earlier or more often computes more again."""
    if with_cache > without:
        return f"{(with_cache - without) / without:.0%} more work: preemptions cost more than the cache spares"
    share = (without - with_cache) / without if without else 0.0
    return f"{share:.0%} of the work saved"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
