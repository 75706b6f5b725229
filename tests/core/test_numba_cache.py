"""Compiled code on disk: a second process takes it from there, and damage costs a compilation.

A function whose file is read anew stands for that of a second process: numba keeps nothing of the
first in memory for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numba
import pytest

from sparsetile.core.numba_cache import entry_point

# Of numba, when it reads its files.
pytestmark = pytest.mark.filterwarnings("ignore:numpy.core is deprecated")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with one function; what is compiled of it is kept in a folder beside it."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "compiled"))
    path = tmp_path / "source.py"
    path.write_text("def double(x):\n    return 2 * x\n")
    return path


def fresh(source: Path, digest: str = "") -> Any:
    """The function as a process that has just started defines it."""
    names: dict[str, Any] = {}
    exec(compile(source.read_text(), str(source), "exec"), names)
    return entry_point(names["double"], digest)


def from_cache(source: Path, digest: str = "") -> bool:
    kernel = fresh(source, digest)
    assert kernel(21) == 42
    return sum(kernel.stats.cache_hits.values()) == 1


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
