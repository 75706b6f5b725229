"""The driver's worker processes: start, request with a time limit, detect a crash, restart."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, ClassVar

__all__ = ["Pool", "Serve", "WorkerAbsent", "WorkerDied", "WorkerTimeout"]

# Importing torch and opening a CUDA context on a cold machine takes tens of seconds.
_START_SECONDS = 180.0

# Answers requests of a connection until None comes: first ``ready`` or ``failed``, then replies.
Serve = Callable[[Connection], None]


class WorkerDied(RuntimeError):
    """The process ended without an answer."""


class WorkerAbsent(RuntimeError):
    """The family's worker does not start on this machine."""


class WorkerTimeout(RuntimeError):
    """The process did not answer in time and was killed."""


def _child(serve: Serve, connection: Connection, log: str) -> None:
    """Serve requests; whatever libraries print goes to the log."""
    out = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    serve(connection)


class _Process:
    """One worker process."""

    def __init__(self, context: BaseContext, serve: Serve) -> None:
        self._log = tempfile.NamedTemporaryFile()  # noqa: SIM115 (open as long as the process)
        self._connection, theirs = context.Pipe()
        arguments = (serve, theirs, self._log.name)
        self._process = context.Process(target=_child, args=arguments, daemon=True)  # type: ignore[attr-defined]
        self._process.start()
        theirs.close()
        self.environment: dict[str, Any] | None = None

    def send(self, request: Mapping[str, Any]) -> None:
        """Send a request without waiting."""
        try:
            self._connection.send(dict(request))
        except OSError:
            raise WorkerDied(self._obituary()) from None

    def receive(self, seconds: float) -> dict[str, Any]:
        """Return the next answer."""
        try:
            if self._connection.poll(seconds):
                answer: dict[str, Any] = self._connection.recv()
                return answer
        except (EOFError, OSError):
            raise WorkerDied(self._obituary()) from None
        self.kill()
        raise WorkerTimeout(f"no answer within {seconds:g} s")

    def wait_ready(self) -> None:
        """Wait for the first answer; raises when the worker cannot work here."""
        if self.environment is None:
            answer = self.receive(_START_SECONDS)
            if "ready" not in answer:
                raise WorkerDied(str(answer.get("failed", "did not start")))
            self.environment = answer["ready"]

    def _obituary(self) -> str:
        self._process.join()
        code = self._process.exitcode or 0
        how = f"with code {code}"
        with contextlib.suppress(ValueError):
            how = f"by {signal.Signals(-code).name}" if code < 0 else how
        lines = Path(self._log.name).read_text(encoding="utf-8", errors="replace").splitlines()
        last = next((line for line in reversed(lines) if line.strip()), "")
        return f"ended {how}: {last[:300]}" if last else f"ended {how}"

    def kill(self) -> None:
        """End the process and release its resources."""
        self._process.kill()
        self._process.join()

    def hang_up(self) -> None:
        """Send the end of requests, so that the process exits by itself."""
        with contextlib.suppress(OSError):
            self._connection.send(None)

    def close(self) -> None:
        """Wait until the process has ended by itself; kill it when it does not."""
        self._process.join(10)
        self.kill()
        self._connection.close()
        self._log.close()


class Pool:
    """Workers by family. A family whose worker cannot start twice running is given up.

    ``serve_for`` returns the function that a family's process runs; it must be picklable.
    """

    context: ClassVar[BaseContext] = multiprocessing.get_context("spawn")  # a fork has no CUDA

    def __init__(self, serve_for: Callable[[str], Serve]) -> None:
        self._serve_for = serve_for
        self._workers: dict[str, _Process] = {}
        self.given_up: dict[str, str] = {}

    @staticmethod
    def for_device(device: str) -> Pool:
        """Return the pool that starts ``sparsetile.bench.worker`` processes."""
        from sparsetile.bench.worker import serve

        return Pool(lambda family: functools.partial(serve, device))

    def start(self, family: str) -> None:
        """Start a family's worker without waiting for it."""
        if family not in self._workers and family not in self.given_up:
            self._workers[family] = _Process(self.context, self._serve_for(family))

    def environment(self, family: str) -> dict[str, Any]:
        """Return the environment that the family's worker reported, or an empty one."""
        worker = self._workers.get(family)
        return dict(worker.environment or {}) if worker is not None else {}

    def ask(self, family: str, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request and return the answer.

        WorkerDied, WorkerTimeout: the worker is gone; the next request starts a new one.
        WorkerAbsent: it cannot be started here; it is not tried again.
        """
        worker = self._ready(family)
        try:
            worker.send(request)
            answer = worker.receive(seconds)
        except (WorkerDied, WorkerTimeout):
            self._forget(family)
            raise
        if answer.pop("fatal", False):
            self._forget(family)
        return answer

    def ask_all(self, families: Iterable[str], request: Mapping[str, Any], seconds: float) -> None:
        """Send one request to several workers at once and wait until all have answered.

        For requests whose answers do not matter: a worker that crashes or does not answer is
        restarted at its next request.
        """
        asked = []
        for family in families:
            with contextlib.suppress(WorkerAbsent, WorkerDied):
                worker = self._ready(family)
                worker.send(request)
                asked.append((family, worker))
        limit = time.monotonic() + seconds
        for family, worker in asked:
            try:
                worker.receive(max(0.1, limit - time.monotonic()))
            except (WorkerDied, WorkerTimeout):
                self._forget(family)

    def _ready(self, family: str) -> _Process:
        """Return the family's worker once it says that it can work."""
        for attempt in (1, 2):
            self.start(family)
            if family in self.given_up:
                break
            try:
                self._workers[family].wait_ready()
                return self._workers[family]
            except (WorkerDied, WorkerTimeout) as error:
                self._forget(family)
                if attempt == 2:
                    self.given_up[family] = str(error)
        raise WorkerAbsent(self.given_up[family])

    def _forget(self, family: str) -> None:
        self._workers.pop(family).kill()

    def close(self) -> None:
        """End every worker."""
        for worker in self._workers.values():  # all first: they take a second each to end
            worker.hang_up()
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
