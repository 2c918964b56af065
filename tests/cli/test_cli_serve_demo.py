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
    assert re.search(r"c +error +cannot run: 21 tokens need 3 blocks, the pool has 2\n", output)
    assert re.search(r"b +error +cannot go on: 17 tokens need 3 blocks, the pool has 2\n", output)
    assert re.search(r"a +finished", output)
    assert "never_fits" not in output
    assert output.splitlines()[-2:] == [
        "4 of 6 prompts could not run to the end, take more blocks: b c e f",
        "same tokens as without cache: yes",
    ]
    assert "could not run" not in demo("--num-blocks", "5")


@pytest.mark.parametrize("num_words", [1, 4, 5, 12, 13, 40])
def test_a_pool_that_no_prompt_fits_is_bad_input(num_words: int) -> None:
    """At the least that is named, a prompt runs to its end; below it none would."""
    text = "word " * num_words
    least = 1 + -(-(num_words + 4) // 8)
    output = demo("--prompts", "-", "--num-blocks", str(least), text=text)
    assert output.splitlines()[-1] == "same tokens as without cache: yes"
    assert "could not run" not in output
    if least > 2:
        message = demo("--prompts", "-", "--num-blocks", str(least - 1), text=text, code=2)
        assert message.startswith("blockpool: error: --num-blocks: no prompt fits with its answer in ")
        assert message.endswith(f" of 8 words: take {least} or more\n")
        alone = Demo([text], least - 1)
        list(alone.run())
        assert alone.unanswered == ["a"]


def test_nothing_ran_is_no_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockpool.engine.demo.blocks_needed", lambda prompt: 1)
    result = runner.invoke(app, ["serve-demo", "--num-blocks", "2"])
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-2:] == [
        "6 of 6 prompts could not run to the end, take more blocks: a b c d e f",
        "no prompt could run: there are no tokens to compare",
    ]


@pytest.mark.parametrize(
    ("with_cache", "without", "text"),
    [
        (83, 167, "50% of the work saved"),
        (100, 100, "0% of the work saved"),
        (0, 0, "0% of the work saved"),
        (109, 100, "9% more work: preemptions cost more than the cache spares"),
    ],
)
def test_work_is_saved_or_added(with_cache: int, without: int, text: str) -> None:
    assert command._work_text(with_cache, without) == text


def test_a_mark_of_byte_order_is_no_part_of_the_first_word(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_bytes(b"\xef\xbb\xbfone two\none two three\n")
    output = demo("--prompts", str(path))
    path.write_bytes(b"one two\none two three\n")
    assert output == demo("--prompts", str(path))
    path.write_bytes(b"\xef\xbb\xbf")
    assert demo("--prompts", str(path), code=2).endswith("holds no prompt\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-blocks", "1"], "--num-blocks: 1 is not between 2 (one is the null block) and 10,000"),
        (["--num-blocks", "10001"], "--num-blocks: 10001 is not between 2 (one is the null block) and 10,000"),
        (["--prompts", "no/such/file"], "--prompts: no/such/file cannot be read: No such file or directory"),
        (["--prompts", ""], "--prompts: the name of the file is empty"),
        (
            ["--num-blocks", "2"],
            "--num-blocks: no prompt fits with its answer in 1 block of 8 words: take 3 or more",
        ),
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
