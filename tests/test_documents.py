"""The documents tell the truth: their code runs, their output is what comes out, their links and names exist.

A page is run from top to bottom in an empty folder. A ```python block is executed (as a doctest where it has `>>>`),
and a ```text block right behind it is what it printed. In a ```console block `blockpool` commands are run wherever
their output is shown, and only parsed where it is not; an exit code other than 0 must be shown by `$ echo $?`.
`...` stands for anything.
"""

from __future__ import annotations

import builtins
import contextlib
import doctest
import importlib
import io
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from blockpool.cli import app
from blockpool.pool import BlockPoolError

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("compat/**/*.md")])
MAKEFILES = [ROOT / "Makefile", *ROOT.glob("compat/**/*.mk")]
REFERENCE = ROOT / "docs/reference.md"
#: Figures that another machine has measured: the commands shown there must exist, and are not run again here.
MEASURED = {ROOT / "docs/performance.md"}

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
TARGETS = {name for path in MAKEFILES for name in re.findall(r"^([a-z-]+):", path.read_text(), re.MULTILINE)}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL_SYNTAX = re.compile(r"[|<>&;]")
Same = doctest.OutputChecker()


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@dataclass
class Block:
    """A fenced block; `line` is that of its first line of content."""

    language: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [Block(found[1], found[2], text.count("\n", 0, found.start(2)) + 1) for found in FENCE.finditer(text)]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub("", page.read_text())


def commands(block: Block) -> Iterator[tuple[str, str]]:
    """The commands of a console block, each with the output that is shown for it."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        while command.endswith("\\"):
            more, _, output = output.partition("\n")
            command = command[:-1] + more.strip()
        yield command, output


def expect(shown: str, got: str, where: str) -> None:
    if not Same.check_output(shown, got, doctest.ELLIPSIS):
        pytest.fail(f"{where}: the page shows\n{shown}\nbut this came out\n{got}", pytrace=False)


class Run:
    """One page being run."""

    def __init__(self, page: Path) -> None:
        self.page = page
        self.names: dict[str, Any] = {"__name__": "page"}
        self.printed: str | None = None
        self.exit_code = 0

    def block(self, block: Block) -> None:
        where = f"{name(self.page)}:{block.line}"
        if block.language == "python":
            self.python(block, where)
            return
        if block.language == "text" and self.printed is not None:
            expect(block.text, self.printed, where)
        elif block.language == "console":
            self.exit_code = 0
            for command, shown in commands(block):
                if self.exit_code and command != "echo $?":
                    pytest.fail(f"{where}: exit code {self.exit_code} before `{command}`", pytrace=False)
                self.console(command, shown, where)
            if self.exit_code:
                pytest.fail(f"{where}: the last command's exit code is {self.exit_code}", pytrace=False)
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "jsonl":
            for line in block.text.splitlines():
                json.loads(line)
        self.printed = None

    def python(self, block: Block, where: str) -> None:
        if ">>> " in block.text:
            test = doctest.DocTestParser().get_doctest(block.text, self.names, where, where, block.line - 1)
            told: list[str] = []
            runner = doctest.DocTestRunner(Same, verbose=False, optionflags=doctest.ELLIPSIS)
            if runner.run(test, out=told.append, clear_globs=False).failed:
                pytest.fail("".join(told), pytrace=False)
            self.names = test.globs
            self.printed = None
            return
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            # the empty lines in front make tracebacks name the page's line
            exec(compile("\n" * (block.line - 1) + block.text, name(self.page), "exec"), self.names)
        self.printed = printed.getvalue()

    def console(self, command: str, shown: str, where: str) -> None:
        if command == "echo $?":
            expect(shown, f"{self.exit_code}\n", where)
            self.exit_code = 0
            return
        arguments = replay_arguments(command) if command.startswith("make replay") else blockpool_arguments(command)
        if arguments is None or not shown:
            return
        result = CliRunner().invoke(app, arguments)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        self.exit_code = result.exit_code
        expect(shown, result.output, f"{where}: {command}")


def blockpool_arguments(command: str) -> list[str] | None:
    """What a line passes to `blockpool`; None for another program, or for a line that needs a shell."""
    if not command.startswith("blockpool ") or SHELL_SYNTAX.search(command):
        return None
    return shlex.split(command, comments=True)[1:]


def replay_arguments(command: str) -> list[str]:
    """What `make replay` runs."""
    variables = dict(word.split("=", 1) for word in shlex.split(command, comments=True)[2:])
    return ["replay", *shlex.split(variables.get("ARGS", "")), *shlex.split(variables.get("TRACE", ""))]


def parse(arguments: list[str], where: str) -> None:
    """Fail unless there is such a subcommand with such options."""
    assert arguments, where
    if arguments[0].startswith("-"):
        return
    assert arguments[0] in COMMANDS, f"{where}: there is no blockpool {arguments[0]}"
    command, rest = COMMANDS[arguments[0]], arguments[1:]
    while hasattr(command, "commands"):
        assert rest, f"{where}: {command.name} needs a subcommand"
        assert rest[0] in command.commands, f"{where}: there is no {rest[0]} in {command.name}"
        command, rest = command.commands[rest[0]], rest[1:]
    if not {"-h", "--help"} & set(rest):
        command.make_context(command.name, rest)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in MEASURED], ids=name)
def test_what_a_page_shows_is_what_happens(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))  # models by name are those of the catalogue
    run = Run(page)
    for block in blocks(page):
        run.block(block)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_fence_is_closed_and_of_a_kind_that_is_checked(page: Path) -> None:
    marks = re.findall(r"^ *```", page.read_text(), re.MULTILINE)
    assert len(marks) == 2 * len(blocks(page))
    assert {block.language for block in blocks(page)} <= {"python", "text", "console", "json", "jsonl"}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_exist(page: Path) -> None:
    for block in blocks(page):
        if block.language == "console":
            for command, _ in commands(block):
                where = f"{name(page)}:{block.line}: {command}"
                if command.startswith("make "):
                    targets = [word for word in shlex.split(command, comments=True)[1:] if "=" not in word]
                    assert set(targets) <= TARGETS, where
                if command.startswith("make replay"):
                    parse(replay_arguments(command), where)
                arguments = blockpool_arguments(command)
                if arguments is not None:
                    parse(arguments, where)
                for word in re.findall(r"(?:^|[|&;] *)blockpool (\w[\w-]*)", command):
                    assert word in COMMANDS, where
    for subcommand in re.findall(r"`blockpool ([a-z][\w-]*)", prose(page)):
        assert subcommand in COMMANDS, f"{name(page)}: `blockpool {subcommand}`"
    for target in re.findall(r"`make ([a-z-]+)", prose(page)):
        assert target in TARGETS, f"{name(page)}: `make {target}`"


def anchors(page: Path) -> set[str]:
    """The headings of a page as links name them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_point_to_something(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{name(page)}: {target}"
        if anchor:
            assert anchor in anchors(linked), f"{name(page)}: {target}"


def reference_names() -> dict[str, list[str]]:
    """Module -> the names in the first column of the tables under its heading."""
    names: dict[str, list[str]] = {}
    for part in re.split(r"^## ", REFERENCE.read_text(), flags=re.MULTILINE)[1:]:
        heading = re.match(r"`(blockpool[\w.]*)`", part)
        if heading:
            rows = re.findall(r"^\| (`.*?) \|", part, re.MULTILINE)
            names[heading[1]] = [word for row in rows for word in re.findall(r"`(\w+)`", row)]
    return names


def test_the_reference_has_every_public_room() -> None:
    package = ROOT / "src/blockpool"
    rooms = {"blockpool"} | {
        ".".join(["blockpool", *path.parent.relative_to(package).parts])
        for path in [*package.glob("*/__init__.py"), *package.glob("integrations/*/__init__.py")]
        if path.parent.name not in ("cli", "integrations")
    }
    assert set(reference_names()) == rooms


@pytest.mark.parametrize("module", sorted(reference_names()))
def test_the_reference_has_every_public_name_once(module: str) -> None:
    assert sorted(reference_names()[module]) == sorted(importlib.import_module(module).__all__)


def error_rows() -> list[tuple[str, str, str]]:
    """(name, module, builtin base) of each row of the table of errors."""
    table = REFERENCE.read_text().partition("## Errors")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \| `([\w.]+)` \| `(\w+)` \|", table, re.MULTILINE)


def test_the_reference_names_every_error() -> None:
    found = [
        (public, module)
        for module in sorted(reference_names())
        for public in importlib.import_module(module).__all__
        if isinstance(value := getattr(importlib.import_module(module), public), type)
        and issubclass(value, BaseException)
    ]
    assert sorted(row[:2] for row in error_rows()) == sorted(found)


@pytest.mark.parametrize(("public", "module", "base"), error_rows())
def test_the_reference_is_right_about_an_error(public: str, module: str, base: str) -> None:
    error = getattr(importlib.import_module(module), public)
    assert issubclass(error, getattr(builtins, base))
    assert issubclass(error, BlockPoolError) == (module == "blockpool.pool" and public != "DumpError")


def test_the_audit_guide_lists_every_invariant() -> None:
    source = (ROOT / "src/blockpool/pool/audit.py").read_text()
    table = (ROOT / "docs/guides/audit.md").read_text().partition("## What is checked")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    assert sorted(re.findall(r"`([^`]+)`", " ".join(cells))) == sorted(
        set(re.findall(r'fault\(\s*"([^"]+)"', source))
    )


def test_the_audit_guide_lists_every_field() -> None:
    from blockpool.pool.audit import BlockRow, Dump

    table = (ROOT / "docs/guides/audit.md").read_text().partition("## The format")[2]
    cells = " ".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE))
    fields = {field.name for field in msgspec.structs.fields(Dump)}
    fields |= {f"blocks[].{field.name}" for field in msgspec.structs.fields(BlockRow)}
    assert set(re.findall(r"`([^`]+)`", cells)) == fields
