"""Threads that help the caller of a CPU kernel.

The kernels release the interpreter lock and share their work through a counter in memory, so the
caller can always finish alone and a helper may come late or not at all. The pool is therefore small
and robust: no work is assigned to a particular thread, a call that finds every helper busy (several
Python threads at once) runs alone, a forked child (DataLoader worker) starts with an empty pool,
and a process that may not start threads runs on one.

numba's own threading layers are not used: the portable one aborts when two Python threads enter it,
and the OpenMP one does not survive a fork.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

__all__ = ["run_shared"]


class _Job:
    """One kernel call; helpers take a ticket before they enter it."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        owners: tuple[Any, ...],
        helpers: int,
    ) -> None:
        self.function = function
        self.arguments = arguments
        # If the caller is interrupted while it waits, the memory must outlast a helper that is
        # still inside the kernel.
        self.owners = owners
        self.tickets = [None] * helpers
        self.finished: SimpleQueue[BaseException | None] = SimpleQueue()

    def take_ticket(self) -> bool:
        try:
            self.tickets.pop()  # atomic, so only one thread gets each
        except IndexError:
            return False
        return True


class _Pool:
    def __init__(self) -> None:
        self.jobs: SimpleQueue[_Job] = SimpleQueue()
        self.grow = threading.Lock()
        self.size = 0

    def ensure(self, size: int) -> None:
        with self.grow:
            while self.size < size:
                name = f"sparsetile-cpu-{self.size}"
                thread = threading.Thread(target=_serve, args=(self.jobs,), name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # thread limit, or the interpreter is shutting down
                    return
                self.size += 1


def _serve(jobs: SimpleQueue[_Job]) -> None:
    while True:
        job: _Job | None = jobs.get()
        if job is not None and job.take_ticket():
            try:
                job.function(*job.arguments)
            except BaseException as error:  # the caller raises it
                job.finished.put(error)
            else:
                job.finished.put(None)
        job = None  # an idle helper must not keep the last call's memory alive


_pool = _Pool()


def _reset_after_fork() -> None:
    # Threads do not cross a fork, and a thread that is gone may own the old locks.
    global _pool
    _pool = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


def run_shared(
    function: Callable[..., Any], arguments: tuple[Any, ...], owners: tuple[Any, ...], threads: int
) -> None:
    """Run ``function(*arguments)`` in this thread and in up to ``threads - 1`` helpers at once.

    The function does its share of a job that all callers with these arguments divide among
    themselves, and returns when nothing is left to claim. ``owners`` of the memory behind addresses
    are kept until the last helper has left. An exception in a helper is raised here.
    """
    helpers = threads - 1
    if helpers < 1:
        function(*arguments)
        return
    pool = _pool
    pool.ensure(helpers)
    job = _Job(function, arguments, owners, helpers)
    for _ in range(helpers):
        pool.jobs.put(job)
    try:
        function(*arguments)
    finally:
        # Nothing is left to claim. Cancel the helpers that have not begun, wait for the others.
        entered = helpers
        while job.take_ticket():
            entered -= 1
        errors = [job.finished.get() for _ in range(entered)]
        job.owners = ()  # an unserved job may stay in the queue for a while
    for error in errors:
        if error is not None:
            raise error
