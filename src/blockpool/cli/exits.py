"""How the command ends when its input is bad or when it is interrupted."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

BAD_INPUT = 2
INTERRUPTED = 130


def fail(message: object) -> NoReturn:
    """Say in one line on stderr what is wrong with the input, and exit with 2."""
    print("blockpool: error:", " ".join(str(message).splitlines()), file=sys.stderr)
    raise typer.Exit(BAD_INPUT)


@contextmanager
def input_errors(*named: type[Exception]) -> Iterator[None]:
    """Turn the named errors, which are about the input, into one line and exit code 2. Any other error is ours."""
    try:
        yield
    except named as error:
        fail(error)


@contextmanager
def unless_interrupted() -> Iterator[None]:
    """Ctrl-C before there is anything to show: say so and exit with 130."""
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
