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
import sys
*folders, digest = sys.argv[1:]
sys.path[:0] = folders
import numba_cache, source
kernel = numba_cache.entry_point(source.double, digest)
assert kernel(21) == 42
print(sum(kernel.stats.cache_hits.values()))
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file with one function; what is compiled of it is kept in a folder beside it."""
    path = tmp_path / "source.py"
    path.write_text("def double(x):\n    return 2 * x\n")
    return path


def from_cache(source: Path, digest: str = "") -> bool:
    """Whether a process of its own takes the compiled function from the disk."""
    folders = [str(Path(numba_cache.__file__).parent), str(source.parent)]
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, *folders, digest],
        capture_output=True, text=True, timeout=120,
        env={**os.environ, "NUMBA_CACHE_DIR": str(source.parent / "compiled")},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip() == "1"


def test_a_second_process_takes_what_the_first_compiled(source):
    assert [from_cache(source) for _ in range(2)] == [False, True]


@pytest.mark.parametrize("kind", ["*.nbc", "*.nbi"], ids=["code", "index"])
def test_a_damaged_file_costs_a_compilation_and_is_replaced(source, kind):
    from_cache(source)
    (damaged,) = source.parent.rglob(kind)
    damaged.write_bytes(damaged.read_bytes()[:100])
    assert [from_cache(source) for _ in range(2)] == [False, True]


def test_another_digest_of_the_callees_is_compiled_anew(source):
    assert [from_cache(source, digest) for digest in ("a", "b", "a")] == [False, False, True]


def test_a_machine_without_a_folder_to_cache_in_compiles_all_the_same(monkeypatch):
    monkeypatch.setattr(numba.core.caching.CacheImpl, "_locator_classes", [])
    assert entry_point(lambda x: 2 * x)(21) == 42
