"""Threads that ask for the same at once, and calls that must wait for a lock.

A machine that is busy can hide a missing lock from these tests. It cannot make them fail.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest

__all__ = ["Slow", "at_once", "slowed", "waits_for"]

SECONDS = 0.2  # far longer than what is called takes


class Slow:
    """A function that takes long enough for other threads to call it meanwhile.

    ``calls`` counts its calls, ``most`` is how many ran at the same time.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.calls = self._running = self.most = 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        self._running += 1
        self.most = max(self.most, self._running)
        time.sleep(SECONDS)
        try:
            return self._function(*arguments, **named)
        finally:
            self._running -= 1


def slowed(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> Slow:
    """Make the owner's function slow."""
    slow = Slow(getattr(owner, name))
    monkeypatch.setattr(owner, name, lambda *given, **named: slow(*given, **named))
    return slow


def at_once(call: Callable[[], Any], threads: int = 2) -> list[Any]:
    """Return what ``call`` returns in each of several threads that start together."""
    together = threading.Barrier(threads, timeout=60)

    def run(number: int) -> Any:
        together.wait()
        return call()

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(run, range(threads)))


def waits_for(lock: AbstractContextManager[Any], call: Callable[[], Any]) -> bool:
    """Whether ``call`` has not ended while this thread holds the lock, and ends afterwards."""
    ended = threading.Event()

    def run() -> None:
        call()
        ended.set()

    thread = threading.Thread(target=run, daemon=True)
    with lock:
        thread.start()
        early = ended.wait(SECONDS)
    thread.join(60)
    return not early and ended.is_set()
