"""Cores kept busy beside a run: the children work, stay on their cores, and never outlive it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sparsetile.bench import busy

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists() or busy.core_count() < 2,
    reason="needs two cores and /proc",
)


def _spinning(parent: int) -> list[Path]:
    """The processes kept busy for `parent`, by their command lines."""
    return [
        path for path in Path("/proc").iterdir() if path.name.isdigit() and _works_for(path, parent)
    ]


def _works_for(path: Path, parent: int) -> bool:
    try:
        words = (path / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return str(Path(busy.__file__).resolve()).encode() in words and str(parent).encode() in words


def _one_spinning(parent: int) -> Path:
    """The one process kept busy for `parent`.

    A process that was just started has no command line for a moment: the file descriptor
    that closes once it runs is closed before the arguments are written.
    """
    assert _within(20, lambda: len(_spinning(parent)) == 1)
    return _spinning(parent)[0]


def _within(seconds: float, holds: Callable[[], bool]) -> bool:
    """Whether `holds` came true before `seconds` had passed."""
    limit = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > limit:
            return False
        time.sleep(0.02)
    return True


def _ticks(process: int) -> int:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11])  # in user mode


def test_a_core_is_kept_busy_for_as_long_as_the_run_lasts() -> None:
    with busy.busy_cores(1):
        child = int(_one_spinning(os.getpid()).name)
        assert _within(20, lambda: _ticks(child) >= 5)
        assert os.sched_getaffinity(child) == {max(os.sched_getaffinity(0))}
    assert _spinning(os.getpid()) == []


def test_an_error_inside_ends_the_children_too() -> None:
    with pytest.raises(RuntimeError, match="stop"), busy.busy_cores(1):
        raise RuntimeError("stop")
    assert _spinning(os.getpid()) == []


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
        child = _one_spinning(parent)
        process.kill()
    assert _within(20, lambda: not _works_for(child, parent))
