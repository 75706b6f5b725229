"""Cores kept busy beside a run: the children work, stay on their cores, and never outlive it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparsetile.bench import busy

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists() or busy.core_count() < 2,
    reason="needs two cores and /proc",
)


def _children() -> list[int]:
    return [
        int(path.name)
        for path in Path("/proc").iterdir()
        if path.name.isdigit() and _is_spinning(path)
    ]


def _is_spinning(path: Path, parent: int | None = None) -> bool:
    try:
        words = (path / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    wanted = str(os.getpid() if parent is None else parent).encode()
    return str(Path(busy.__file__).resolve()).encode() in words and wanted in words


def _ticks(process: int) -> int:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11])  # in user mode


def test_a_core_is_kept_busy_for_as_long_as_the_run_lasts() -> None:
    with busy.busy_cores(1):
        (child,) = _children()
        limit = time.monotonic() + 20
        while _ticks(child) < 5 and time.monotonic() < limit:
            time.sleep(0.02)
        assert _ticks(child) >= 5
        assert os.sched_getaffinity(child) == {max(os.sched_getaffinity(0))}
    assert _children() == []


def test_an_error_inside_ends_the_children_too() -> None:
    with pytest.raises(RuntimeError, match="stop"), busy.busy_cores(1):
        raise RuntimeError("stop")
    assert _children() == []


def test_a_core_must_be_left_to_measure_on() -> None:
    count = busy.core_count()
    with (
        pytest.raises(ValueError, match=f"busy_cores must be from 0 to {count - 1}"),
        busy.busy_cores(count),
    ):
        pass


def test_a_child_ends_when_the_process_that_started_it_is_gone() -> None:
    program = (
        "import os, time; from sparsetile.bench import busy; context = busy.busy_cores(1); "
        "context.__enter__(); print(os.getpid(), flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        parent = int(process.stdout.readline())
        spinning = [p for p in Path("/proc").iterdir() if p.name.isdigit() and
                    _is_spinning(p, parent)]  # fmt: skip
        process.kill()
    assert len(spinning) == 1
    limit = time.monotonic() + 20
    while _is_spinning(spinning[0], parent) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not _is_spinning(spinning[0], parent)
