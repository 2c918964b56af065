"""`blockpool vllm check`: what is said of a good environment and of bad ones, and that nothing stays behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from blockpool.cli import app
from blockpool.cli.vllm import print_text
from blockpool.integrations.vllm import selftest, speed
from blockpool.integrations.vllm.swap import (
    ORIGINALS,
    TESTED_VERSIONS,
    Replacement,
    install,
    is_installed,
    originals,
)
from tests.integrations.stand_in import StandIn, names

PAGE = Path(__file__).parents[2] / "docs/integrations/vllm.md"
POOL, UTILS = "vllm/v1/core/block_pool.py", "vllm/v1/core/kv_cache_utils.py"
NO_VLLM = "import sys\nsys.modules['vllm'] = None\nfrom blockpool.cli import main\nmain()\n"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few calls and one round: enough to see whether something is said."""
    monkeypatch.setattr(selftest, "NUM_CALLS", 900)
    monkeypatch.setattr(speed, "ROUNDS", 1)


def check(*options: str, code: int) -> str:
    result = CliRunner().invoke(app, ["vllm", "check", *options])
    assert result.exit_code == code, result.output
    return str(result.stdout)


def test_a_good_environment(vllm: StandIn, short: None) -> None:
    text = check(code=0)
    assert text.startswith("vLLM 0.33.0+cpu (tested)\nblockpool ")
    for original in ORIGINALS:
        assert f"  {original.module}.{original.name}\n" in text
    assert "calls to both pools" in text
    for name in ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"):
        assert f"block hashes, {name}\n" in text
    for work in ("allocate and free", "cache and look up", "hash 8,192 tokens, sha256_cbor"):
        assert work in text
    assert "DIFFERENT" not in text
    assert "left out: one prompt of 8,192 tokens through KVCacheManager" in text, "the stand-in has no manager"


def test_json(vllm: StandIn, short: None) -> None:
    document = json.loads(check("--json", code=0))
    assert document["format"] == "blockpool.vllm-check/1"
    assert (document["well"], document["vllm_version"], document["vllm_tested"]) == (True, "0.33.0+cpu", True)
    assert [one["name"] for one in document["replacements"]] == [original.name for original in ORIGINALS]
    assert all(one["difference"] is None and one["count"] > 0 for one in document["comparisons"])
    assert all(one["vllm_us"] > 0 and one["blockpool_us"] > 0 for one in document["speeds"])


@pytest.mark.parametrize("installed", [False, True])
def test_nothing_is_left_behind(vllm: StandIn, short: None, installed: bool) -> None:
    if installed:
        install()
    selftest.check()
    after = names()
    assert is_installed() is installed
    assert ("vllm.v1.core.kv_cache_utils", "NONE_HASH") not in after
    selftest.check()
    assert {name: value for name, value in names().items() if value is not after.get(name)} == {}


#: A rule that this vLLM has otherwise, the call that shows it, and what is different then.
DIFFERENT = [
    (POOL, "(front if block.block_hash is None else back)", "back", "free_blocks", "free order["),
    (POOL, "block.ref_cnt == 1 and block.block_hash is None", "block.ref_cnt == 1", "is_block_writable", "answer"),
    (POOL, "self.free_block_queue.remove(block)", "pass", "touch", "free order"),
    (POOL, "key, dst_block, num_tokens)", "key, dst_block, None)", "move_block_hashes", "hash of block["),
    (POOL, "iter(self.found.get(key, {}).values())", "reversed(self.found.get(key, {}).values())", "", "answer"),
    (POOL, "self.watchers.pop(block.block_id)(block)", "self.watchers[block.block_id](block)", "", "callbacks"),
    (POOL, 'raise ValueError("too many")', "return []", "get_new_blocks", "answer"),
    (POOL, "[num_tokens], unit, kv", "[num_tokens], block_size, kv", "cache_partial_block", "event"),
    (UTILS, "(request, start, end + lookahead, 0)", "(request, start, end, 0)", "lookahead 2", "digest["),
]


@pytest.mark.parametrize(("file", "old", "new", "call", "what"), DIFFERENT)
def test_a_difference_is_found_and_named(
    vllm: StandIn, short: None, file: str, old: str, new: str, call: str, what: str
) -> None:
    vllm.edit(file, old, new)
    text = check(code=1)
    _, _, told = text.partition("\nDIFFERENT: ")
    place, _, rest = told.splitlines()[1].partition(": ")
    assert call in place
    assert rest.startswith(what)
    assert "vLLM " in rest
    assert "blockpool " in rest
    assert text.splitlines()[-1].startswith("blockpool is not the same as vLLM's own here")


def test_an_untested_version_is_compared_but_not_well(vllm: StandIn, short: None) -> None:
    vllm.version("0.34.0")
    text = check(code=1)
    assert text.startswith("vLLM 0.34.0 (NOT TESTED, only 0.33.0)\n")
    assert "calls to both pools" in text
    assert text.splitlines()[-1].endswith("vLLM 0.34.0 was not tested: BLOCKPOOL_VLLM=force uses it.")


def test_a_changed_signature_is_refused_and_compared(vllm: StandIn, short: None) -> None:
    vllm.edit(POOL, "def touch(self, blocks)", "def touch(self, blocks, now=0)")
    text = check(code=1)
    assert "REFUSED vLLM 0.33.0+cpu does not fit this blockpool: BlockPool.touch(blocks, now=0) where" in text
    assert "calls to both pools" in text
    assert "but blockpool refuses this vLLM" in text.splitlines()[-1]


def test_a_missing_name_leaves_nothing_to_compare(vllm: StandIn, short: None) -> None:
    vllm.edit(UTILS, "class FreeKVCacheBlockQueue:", "class Queue:")
    vllm.edit(POOL, "import FreeKVCacheBlockQueue, ", "import Queue as FreeKVCacheBlockQueue_, ")
    vllm.edit(POOL, "= FreeKVCacheBlockQueue(", "= FreeKVCacheBlockQueue_(")
    text = check(code=1)
    assert "vLLM has no vllm.v1.core.kv_cache_utils.FreeKVCacheBlockQueue" in text
    assert "the same" not in text
    assert text.splitlines()[-1] == "blockpool cannot take the place of vLLM's own here."


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_without_vllm(stand_in: StandIn, options: tuple[str, ...]) -> None:
    result = stand_in.run("-c", NO_VLLM, "vllm", "check", *options)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("blockpool: error: vLLM is not installed for ")


def test_a_vllm_that_cannot_be_imported_is_one_line(stand_in: StandIn) -> None:
    stand_in.edit("vllm/__init__.py", "__version__", 'raise OSError("libcuda.so: not\\nthere")\n__version__')
    result = stand_in.run("-m", "blockpool.cli", "vllm", "check")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "blockpool: error: vLLM cannot be imported: OSError: libcuda.so: not there\n"


def test_what_vllm_prints_is_not_part_of_the_answer(vllm: StandIn, short: None) -> None:
    vllm.edit("vllm/__init__.py", "__version__", 'print("Hello from vLLM")\n\n__version__')
    json.loads(check("--json", code=0))


@pytest.mark.parametrize("arguments", [("vllm", "nonsense"), ("vllm", "check", "--nonsense"), ("vllm", "check", "x")])
def test_bad_usage(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "error: " in result.stderr


def test_help_has_an_example_and_needs_no_integration(stand_in: StandIn) -> None:
    program = NO_VLLM.replace("main()\n", "") + (
        "try:\n    main()\nexcept SystemExit as end:\n    print(end.code)\n"
        "print([name for name in sys.modules if name.startswith('blockpool.integrations')])"
    )
    for arguments in ((), ("vllm",), ("vllm", "check")):
        result = stand_in.run("-c", program, *arguments, "--help")
        assert result.stdout.splitlines()[-2:] == ["0", "[]"]
    assert "Example: blockpool vllm check" in result.stdout


def test_the_page_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    modules = (4, 1, 6, 2, 2, 2, 2)
    compared = [("calls to both pools", 6105)]
    compared += [(f"block hashes, {name}", 744) for name in ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")]
    compared += [(f"prompts through {name}", 42) for name in ("KVCacheManager", "blockpool's KVCacheManager")]
    report = selftest.CheckReport(
        vllm_version="0.33.0",
        vllm_tested=True,
        tested_versions=TESTED_VERSIONS,
        blockpool_version="0.1.0",
        python="3.11.7",
        compiled=True,
        hash_kernel="sha-ni",
        refused=None,
        replacements=tuple(
            Replacement(*original, num_modules=number)
            for original, number in zip(originals(manager=True), modules, strict=True)
        ),
        comparisons=tuple(selftest.Comparison(what, count, None) for what, count in compared),
        speeds=(
            speed.Speed("allocate and free 1,000 blocks", 679.0, 29.0, 23.9),
            speed.Speed("cache and look up a 512-block prompt", 1265.0, 162.0, 7.8),
            speed.Speed("hash 8,192 tokens, sha256", 1863.0, 165.0, 11.3),
            speed.Speed("hash 8,192 tokens, sha256_cbor", 3709.0, 159.0, 23.4),
            speed.Speed("one prompt of 8,192 tokens through KVCacheManager", 1738.0, 546.0, 3.2),
            speed.Speed("one prompt of 8,192 tokens through blockpool's KVCacheManager", 1643.0, 299.0, 5.5),
        ),
        left_out=(),
    )
    print_text(report)
    assert f"```text\n{capsys.readouterr().out}```\n" in PAGE.read_text()
