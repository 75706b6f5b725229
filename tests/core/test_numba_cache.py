"""Compiled code on disk: a second process takes it from there, and damage costs a compilation.

Processes are real ones: numba does not promise to load into a process what that process compiled.
They import numba alone, which takes half a second.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest

from sparsetile.core import numba_cache
from sparsetile.core.numba_cache import entry_point

# What a process does: define the function, call it, and say whether it came from the cache.
SCRIPT = """
import resource, signal, sys
room = int(sys.argv.pop())
if room:  # bytes that a file may have: the write that exceeds them fails as on a full disk
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
*folders, digest = sys.argv[1:]
sys.path[:0] = folders
import numba_cache, source
kernel = numba_cache.entry_point(source.double, digest)
assert kernel(21) == 42
print(sum(kernel.stats.cache_hits.values()))
"""


def function_in(folder: Path) -> Path:
    """A file with one function; what is compiled of it is kept in a folder beside it."""
    path = folder / "source.py"
    path.write_text("def double(x):\n    return 2 * x\n")
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return function_in(tmp_path)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, which a process has compiled: tests leave it whole."""
    path = function_in(tmp_path_factory.mktemp("compiled"))
    assert not from_cache(path)
    return path


def from_cache(source: Path, digest: str = "", room: int = 0) -> bool:
    """Whether a process of its own takes the compiled function from the disk."""
    folders = [str(Path(numba_cache.__file__).parent), str(source.parent)]
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, *folders, digest, str(room)],
        capture_output=True, text=True, timeout=120,
        env={**os.environ, "NUMBA_CACHE_DIR": str(source.parent / "compiled")},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip() == "1"


def test_a_second_process_takes_what_the_first_compiled(compiled):
    assert from_cache(compiled)


@pytest.mark.parametrize("kind", ["*.nbc", "*.nbi"], ids=["code", "index"])
def test_a_damaged_file_costs_a_compilation_and_is_replaced(compiled, kind):
    (damaged,) = compiled.parent.rglob(kind)
    damaged.write_bytes(damaged.read_bytes()[:100])
    assert [from_cache(compiled) for _ in range(2)] == [False, True]


def files(folder: Path, stamp: str = "today") -> numba_cache._CheckedFiles:
    return numba_cache._CheckedFiles(str(folder), "double", stamp)


def test_a_file_is_taken_only_if_every_byte_is_as_written(tmp_path):
    """Machine code with one other bit would run, and give other results."""
    files(tmp_path).save("int64", b"machine code" * 9)
    (code,) = tmp_path.glob("*.nbc")
    body = code.read_bytes()
    changed = [body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :] for at in range(len(body))]
    for damaged in (*changed, *(body[:length] for length in range(len(body))), body + b"x"):
        code.write_bytes(damaged)
        with pytest.raises(ValueError, match="must be as it was written"):
            files(tmp_path).load("int64")
    code.write_bytes(body)
    assert files(tmp_path).load("int64") == b"machine code" * 9


def test_code_of_other_types_or_of_an_older_source_is_not_taken(tmp_path):
    """What two processes that compile at once, or one that was killed, can leave behind."""
    files(tmp_path).save("int64", "of int64")
    (code,) = tmp_path.glob("*.nbc")
    of_int64 = code.read_bytes()
    (tmp_path / "double.nbi").unlink()
    files(tmp_path).save("float32", "of float32")  # the index has float32 alone
    code.write_bytes(of_int64)
    assert files(tmp_path).load("float32") is None
    files(tmp_path, "tomorrow").save("int64", "of tomorrow")
    assert files(tmp_path, "tomorrow").load("int64") == "of tomorrow"
    code.write_bytes(of_int64)  # as if killed after the index was written
    assert files(tmp_path, "tomorrow").load("int64") is None


def test_a_full_disk_costs_the_cache_and_not_the_call(source):
    assert not from_cache(source, room=50)
    compiled = source.parent / "compiled"
    assert not [path for path in compiled.rglob("*") if path.is_file()]


def test_recompiles_when_the_digest_of_callees_changes(source):
    assert [from_cache(source, digest) for digest in ("a", "b", "a")] == [False, False, True]


def test_compiles_without_a_writable_cache_folder(monkeypatch):
    monkeypatch.setattr(numba.core.caching.CacheImpl, "_locator_classes", [])
    assert entry_point(lambda x: 2 * x)(21) == 42
