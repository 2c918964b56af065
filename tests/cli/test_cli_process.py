"""The command as a process of its own: exit codes, streams, signals, and what it does not import."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

REPLAY = ("replay", "--num-blocks", "2500")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "blockpool.cli", *arguments]


def run(*arguments: str, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    result = subprocess.run(
        command(*arguments), input=stdin, capture_output=True, env=os.environ | environment, check=False
    )
    assert b"Traceback" not in result.stderr
    return result


def run_python(program: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", program, *arguments]


def test_help_reads_like_a_table_of_contents():
    result = run("--help")
    assert result.returncode == 0
    text = result.stdout.decode()
    for name in ("replay", "plan", "audit", "version", "vllm"):
        assert f"\n  {name} " in text


@pytest.mark.parametrize("name", ["replay", "plan", "audit", "version"])
def test_the_help_of_a_command_has_an_example(name: str):
    result = run(name, "-h")
    assert result.returncode == 0
    assert f"Example: blockpool {name}" in result.stdout.decode()


def test_help_imports_nothing_heavy():
    program = (
        "import sys\n"
        "from blockpool.cli import main\n"
        "sys.argv = ['blockpool', '--help']\n"
        "try:\n    main()\n"
        "except SystemExit:\n    pass\n"
        "print(sorted({'numpy', 'blockpool.replay', 'blockpool.pool', 'blockpool.models'} & set(sys.modules)))"
    )
    result = subprocess.run(run_python(program), capture_output=True, check=True)
    assert result.stdout.decode().splitlines()[-1] == "[]"


def test_no_command_and_unknown_ones():
    assert b"Commands:" in run().stdout + run().stderr
    for arguments in (
        ("nonsense",),
        ("--nonsense",),
        ("replay", "--nonsense"),
        ("replay", "--block-size", "0"),
        ("replay", "--block-size"),
        ("plan", "--concurrency", "many"),
        ("audit",),
        ("vllm", "nonsense"),
        ("vllm", "check", "--nonsense"),
    ):
        result = run(*arguments)
        assert (result.returncode, result.stdout) == (2, b"")
        assert result.stderr.startswith(b"blockpool: error: ")
        assert result.stderr.count(b"\n") == 1


def test_bad_input_is_one_line_on_stderr(tmp_path: Path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"tokens": [1]}\n{"tokens": [-1]}\n')
    result = run("replay", str(path))
    assert (result.returncode, result.stdout) == (2, b"")
    assert result.stderr.decode() == f"blockpool: error: {path}:2: tokens[0]: expected int >= 0\n"


def test_a_name_that_is_no_text():
    result = subprocess.run([*command("replay"), b"/absent\xff\nname"], capture_output=True, check=False)
    assert result.returncode == 2
    assert result.stderr.count(b"\n") == 1
    assert b"Traceback" not in result.stderr


def test_piped_output_has_no_escape_codes():
    for arguments in ((), REPLAY, ("replay", "--help"), ("version",), ("replay", "/absent")):
        result = run(*arguments, TERM="xterm-256color")
        assert b"\x1b" not in result.stdout + result.stderr


def test_json_on_stdout_is_alone():
    result = run(*REPLAY, "--json", "-")
    assert result.returncode == 0
    assert json.loads(result.stdout)["runs"][0]["num_blocks"] == 2500
    assert result.stderr == b""


def test_stdin_and_an_encoding_that_cannot_show_everything(tmp_path: Path):
    path = tmp_path / "tr\u00e4ce.jsonl"
    path.write_text('{"tokens": [1, 2, 3]}\n')
    for stdin, argument in ((path.read_bytes(), "-"), (b"", str(path))):
        result = run("replay", argument, stdin=stdin, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
        assert result.returncode == 0


def test_version():
    text = run("version").stdout.decode()
    assert text.startswith("blockpool ")
    assert "hash kernel: " in text
    document = json.loads(run("version", "--json").stdout)
    assert set(document) == {"version", "python", "compiled", "hash_kernel"}
    assert document["python"] == ".".join(map(str, sys.version_info[:3]))
    assert all(isinstance(is_compiled, bool) for is_compiled in document["compiled"].values())


def test_a_closed_pipe_is_quiet():
    with subprocess.Popen(command(*REPLAY), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.returncode in (0, 1)


# Says when it is in the replay's loop, then waits there for the signal.
INTERRUPTED_REPLAY = """
import importlib, signal, sys
from blockpool.cli import main

class Waiting(importlib.import_module("blockpool.cli.progress").ProgressBar):
    def update(self, num_done):
        if num_done == 256:
            print("in the loop", file=sys.stderr, flush=True)
            while True:
                signal.pause()

importlib.import_module("blockpool.cli.replay").ProgressBar = Waiting
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv[1:1] = ["replay"]
main()
"""


@pytest.mark.skipif(os.name != "posix", reason="signals as on POSIX")
@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_prints_what_is_known(as_json: bool):
    arguments = ["--num-blocks", "2500,5000", *(["--json", "-"] if as_json else [])]
    program = run_python(INTERRUPTED_REPLAY, *arguments)
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "in the loop\n"
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate()
    assert process.returncode == 130
    assert stderr == "interrupted\n"
    if as_json:
        document = json.loads(stdout)
        assert document["interrupted"] is True
        (known,) = document["runs"]
        assert (known["requests"], known["interrupted"]) == (256, True)
        assert known["prompt_tokens"] > known["hit_tokens"] > 0
    else:
        assert "The run with 2,500 blocks was interrupted after 256 of " in stdout


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_an_output_that_cannot_be_written_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "blockpool.cli", "version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.startswith("blockpool: error: cannot write the output")
    assert done.stderr.count("\n") == 1


def test_a_hash_kernel_that_is_not_there_is_one_line():
    done = subprocess.run(
        [sys.executable, "-m", "blockpool.cli", "version"],
        env={**os.environ, "BLOCKPOOL_HASH_KERNEL": "bogus"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("blockpool: error: hash kernel 'bogus'")
    assert done.stderr.count("\n") == 1
