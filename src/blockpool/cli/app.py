"""The command and its table of contents."""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn

import typer
from typer.core import TyperGroup

from .audit import audit
from .events import events
from .exits import fail
from .plan import plan
from .replay import replay
from .serve_demo import serve_demo
from .version import version
from .vllm import vllm

# What typer and click raise when the command line itself is wrong. Where it lives depends on the version of typer.
UsageError: Final[Any] = typer.BadParameter.__mro__[1]


@contextmanager
def usage_errors() -> Iterator[None]:
    """Say in one line what is wrong with the command line, as with any other input."""
    try:
        yield
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # nothing was asked for: the help is the answer
            raise
        context = getattr(error, "ctx", None)
        more = f"; see `{context.command_path} -h`" if context is not None else ""
        fail(" ".join(error.format_message().split()).removesuffix(".") + more)


class OneLineErrors(TyperGroup):
    """A group of commands whose usage errors are one line."""

    def make_context(self, *args: Any, **extra: Any) -> Any:
        with usage_errors():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        with usage_errors():
            return super().invoke(ctx)


app = typer.Typer(
    cls=OneLineErrors,
    help="The KV-cache block ledger of LLM inference engines: replay traffic through it, check it, explain it.",
    add_completion=False,
    no_args_is_help=True,
    # Plain help is quick help: the other kind imports rich.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(short_help="Replay traffic through a block pool: what would be hit, what evicted?")(replay)
app.command(short_help="Does a model's cache fit? Blocks, requests at once, what would help.")(plan)
app.command(name="serve-demo", short_help="Serve a few prompts with a toy model and watch the blocks.")(serve_demo)
app.command(short_help="Check a pool's dump: which invariants are broken, who holds what?")(audit)
app.add_typer(events, name="events", short_help="Streams of KV-cache events: watch, record, play, check.")
app.command(short_help="Say what is installed: version, compiled parts, hash kernel.")(version)
app.add_typer(vllm, name="vllm", short_help="The drop-in for vLLM: try it in this environment.")


def main() -> None:
    """Entry of the console script. Exit codes: 0 well, 1 faults found, 2 bad input or usage, 130 interrupted."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A character that the terminal cannot show is no reason to stop.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="blockpool")
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        raise
    except OSError as error:
        end(f"cannot write the output: {error.strerror or error}")
    except RuntimeError as error:
        # By name, since importing hashing is what failed: BLOCKPOOL_HASH_KERNEL asks for a kernel that is not there.
        if type(error).__name__ != "KernelUnavailable":
            raise
        end(str(error))


def end(message: str) -> NoReturn:
    """One line on stderr, exit 2, and nothing more on a standard output that may be broken."""
    print("blockpool: error:", message, file=sys.stderr)
    sys.stdout = io.StringIO()
    sys.exit(2)
