"""`blockpool serve-demo`: it tells all that can happen to a block, and its answers do not depend on the cache."""

import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import blockpool.cli.serve_demo as command
from blockpool.cli import app
from blockpool.engine.demo import NUM_BLOCKS, PROMPTS, Demo, Line, grown, names, small_num_blocks

runner = CliRunner()


def demo(*options: str, code: int = 0, text: str | None = None) -> str:
    result = runner.invoke(app, ["serve-demo", *options], input=text)
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


def test_the_built_in_prompts_show_everything_on_a_screen_or_two() -> None:
    output = demo()
    for what in ("prefill", "hit", "partial hit", "copy", "evicted", "preempted", "decode", "finished"):
        assert re.search(rf"^ *\d* +[a-f ]* {what}\b", output, re.MULTILINE), what
    lines = output.splitlines()
    assert len(lines) < 50
    assert max(map(len, lines)) <= 110
    assert "\x1b" not in output
    assert re.search(r"tokens computed: (\d+) with the cache, (\d+) without: 50% of the work saved", output)
    assert lines[-1] == "same tokens as without cache: yes"


def test_without_the_cache_nothing_is_hit_and_the_answers_are_the_same() -> None:
    output = demo("--no-cache")
    assert "prefix caching off" in output
    assert not re.search(r"\bhit\b|copy|evicted", output)
    assert output.splitlines()[-1] == "same tokens as with cache: yes"
    said = set(re.findall(r'says ".*"', output))
    assert said == set(re.findall(r'says ".*"', demo()))
    assert said == set(re.findall(r'says ".*"', demo("--num-blocks", "100")))


def test_prompts_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one two three\n\n  one   two three four \n")
    output = demo("--prompts", str(path))
    assert output.startswith("2 prompts, up to 5 words of answer each; 4 blocks of 8 words; prefix caching on\n")
    assert "  b: one two three four\n" in output
    assert demo("--prompts", "-", text=path.read_text()) == output


def test_a_prompt_that_can_never_fit_is_told_and_the_others_go_on() -> None:
    output = demo("--num-blocks", "3")
    assert re.search(r"c +error +request c: never_fits", output)
    assert re.search(r"a +finished", output)
    assert output.splitlines()[-1] == "same tokens as without cache: yes"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-blocks", "1"], "--num-blocks: 1 is not between 2 (one is the null block) and 10,000"),
        (["--num-blocks", "10001"], "--num-blocks: 10001 is not between 2 (one is the null block) and 10,000"),
        (["--prompts", "no/such/file"], "--prompts: no/such/file cannot be read: No such file or directory"),
        (["--prompts", "-"], "--prompts: stdin holds no prompt"),
    ],
)
def test_bad_input_is_one_line(options: list[str], message: str) -> None:
    assert demo(*options, code=2) == f"blockpool: error: {message}\n"


def test_bad_files_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_bytes(b"\xff\xfe\x00")
    assert demo("--prompts", str(path), code=2).endswith("is not text in UTF-8\n")
    path.write_text("word " * 2001)
    assert demo("--prompts", str(path), code=2).endswith("has 2,001 words, the toy model takes 2,000 at most\n")


def test_other_answers_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Demo.run

    def run(self: Demo):  # type: ignore[no-untyped-def]
        yield from sound(self)
        if not self.manager.enable_caching:
            self.answers["a"] = "something else"

    monkeypatch.setattr(Demo, "run", run)
    result = runner.invoke(app, ["serve-demo"])
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "same tokens as without cache: no"


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    styled: list[str] = []
    monkeypatch.setattr(command.sys, "stdout", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setattr(typer, "echo", styled.append)
    monkeypatch.delenv("NO_COLOR", raising=False)
    command._print_lines([Line(0, "a", "hit", "text")], 3)
    assert "\x1b[32mhit" in styled[1]
    monkeypatch.setenv("NO_COLOR", "1")
    command._print_lines([Line(0, "a", "hit", "text")], 3)
    assert "\x1b" not in styled[3]


def test_answers_do_not_depend_on_the_pool() -> None:
    answers = []
    for num_blocks in (6, NUM_BLOCKS, 9, 40):
        for caching in (True, False):
            one = Demo(PROMPTS, num_blocks, caching)
            list(one.run())
            assert one.manager.pool.audit() == []
            assert one.manager.pool.get_num_free_blocks() == num_blocks - 1
            answers.append(one.answers)
    assert all(answer == answers[0] for answer in answers)
    assert all(answers[0].values())


def test_small_parts() -> None:
    assert small_num_blocks(["a b c"]) == 4
    assert small_num_blocks(["a " * 100]) == 1 + 14 + 7
    letters = names()
    assert [next(letters) for _ in range(28)][-3:] == ["z", "a2", "b2"]
    assert list(grown([])) == []
    assert list(grown([(3, "a"), (4, "a")])) == [Line(3, "a", "decode", "one token each in steps 3 to 4")]
