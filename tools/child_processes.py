"""Commands with a time limit, ended with all that they started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

from tools.record import one_thread_each

__all__ = ["run_within", "stop_all"]

# Processes that run now, with all that they started: each is the first of a session of its own.
_running: set[subprocess.Popen[bytes]] = set()


def _stop(started: subprocess.Popen[bytes]) -> None:
    if started.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def stop_all() -> None:
    """End every process that runs now, with all that it started."""
    for started in list(_running):
        _stop(started)


def run_within(command: list[str], root: Path, limit: float) -> int | None:
    """Run a command and all it starts; its exit status, None where it was stopped at the limit."""
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
