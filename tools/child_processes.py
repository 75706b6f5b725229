"""Runs commands with a time limit, and ends them with their child processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

from tools.record import one_thread_each

# Running processes. Each leads its own session, which contains its child processes.
_running: set[subprocess.Popen[bytes]] = set()


def _stop(started: subprocess.Popen[bytes]) -> None:
    if started.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def stop_all() -> None:
    """End every running process with its child processes."""
    for started in list(_running):
        _stop(started)


def run_within(command: list[str], root: Path, limit: float) -> int | None:
    """Run a command and return its exit status, None if it was stopped at the limit."""
    started = subprocess.Popen(
        command, cwd=root, stdout=2, start_new_session=True, env=one_thread_each()
    )
    _running.add(started)
    try:
        return started.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _stop(started)  # at the limit, or interrupted: the tool's own child too
        _running.discard(started)
