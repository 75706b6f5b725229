"""Cores kept at work beside a run, to see what a product takes on a machine that others use too.

A share of work that is fixed before the product starts waits for the slow core; one that is claimed
piece by piece does not. On idle cores the two look the same.

This file is also the program of the child process, hence the standard library alone.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

__all__ = ["busy_cores", "core_count"]

_LOOK_SECONDS = 0.05


def _cores() -> list[int]:
    """Numbers of the cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def core_count() -> int:
    """Return how many cores this process may use."""
    return len(_cores())


@contextlib.contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Keep the last ``count`` cores at work, one process each, for as long as the context lasts.

    Where the system binds processes to cores each child stays on its own. A child ends by itself
    soon after the process that started it is gone.

    Raises
    ------
    ValueError
        Fewer than one core would be left to measure on.
    """
    cores = _cores()
    if not 0 <= count < len(cores):
        raise ValueError(
            f"bench: busy_cores must be from 0 to {len(cores) - 1} on {len(cores)} cores, "
            f"got {count}. Run the suite on a machine with more cores."
        )
    children: list[subprocess.Popen[bytes]] = []
    try:
        for core in cores[len(cores) - count :]:
            command = [sys.executable, "-I", os.path.abspath(__file__), str(core), str(os.getpid())]
            children.append(subprocess.Popen(command))
        yield
    finally:
        for child in children:
            child.kill()
        for child in children:
            child.wait()


def _spin(core: int, parent: int) -> None:
    """Use a core until ``parent`` is gone."""
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # not allowed here: the scheduler chooses the core
            os.sched_setaffinity(0, {core})
    while os.getppid() == parent:
        until = time.perf_counter() + _LOOK_SECONDS
        while time.perf_counter() < until:
            pass


if __name__ == "__main__":
    _spin(int(sys.argv[1]), int(sys.argv[2]))
