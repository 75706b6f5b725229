"""Worker processes seen from the driver: start, ask with a time limit, notice a death, restart."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any

__all__ = ["Pool", "WorkerAbsent", "WorkerDied", "WorkerTimeout"]

# Importing torch and opening a CUDA context on a cold machine takes tens of seconds.
_START_SECONDS = 180.0


class WorkerDied(RuntimeError):
    """The process ended without an answer."""


class WorkerAbsent(RuntimeError):
    """The family's worker does not start on this machine."""


class WorkerTimeout(RuntimeError):
    """The process did not answer in time and was killed."""


class _Process:
    """One worker process."""

    def __init__(self, command: list[str]) -> None:
        # Open as long as the process lives, hence no context manager.
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.environment: dict[str, Any] | None = None

    def _read(self) -> None:
        if self._process.stdout is None:
            return
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _receive(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            self.kill()
            raise WorkerTimeout(f"no answer within {seconds:g} s") from None
        if line is None:
            raise WorkerDied(self._obituary())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _obituary(self) -> str:
        code = self._process.wait()
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"ended by {signal.Signals(-code).name}{self._last_words()}"
        return f"ended with code {code}{self._last_words()}"

    def _last_words(self) -> str:
        self._errors.seek(0, 2)
        self._errors.seek(max(0, self._errors.tell() - 2000))
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return f": {lines[-1][:300]}" if lines else ""

    def wait_ready(self) -> None:
        """Wait for the first line; raises when the worker cannot work here."""
        if self.environment is not None:
            return
        answer = self._receive(_START_SECONDS)
        if "ready" not in answer:
            raise WorkerDied(str(answer.get("failed", "did not start")))
        self.environment = answer["ready"]

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request and return the answer."""
        self.send(request)
        return self._receive(seconds)

    def answer(self, seconds: float) -> dict[str, Any]:
        """Return the answer to a request that was sent before."""
        return self._receive(seconds)

    def send(self, request: Mapping[str, Any]) -> None:
        """Send a request without waiting."""
        stdin = self._process.stdin
        if stdin is None:
            raise WorkerDied("has no input")
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
        except (BrokenPipeError, OSError):
            raise WorkerDied(self._obituary()) from None

    def kill(self) -> None:
        """End the process and release what it held."""
        self._process.kill()
        self._process.wait()

    def hang_up(self) -> None:
        """Tell the process that nothing more comes, so that it ends by itself."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()

    def close(self) -> None:
        """Let the process end by itself; kill it when it does not."""
        self.hang_up()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.kill()
        self._errors.close()


class Pool:
    """Workers by family. A family whose worker cannot start twice running is given up."""

    def __init__(self, command: Callable[[str], list[str]]) -> None:
        self._command = command
        self._workers: dict[str, _Process] = {}
        self.given_up: dict[str, str] = {}

    @staticmethod
    def for_device(device: str) -> Pool:
        """Return the pool that starts ``sparsetile.bench.worker`` processes."""
        return Pool(lambda family: [sys.executable, "-m", "sparsetile.bench.worker", device])

    def start(self, family: str) -> None:
        """Start a family's worker without waiting for it."""
        if family not in self._workers and family not in self.given_up:
            self._workers[family] = _Process(self._command(family))

    def environment(self, family: str) -> dict[str, Any]:
        """Return the environment that the family's worker reported, or an empty one."""
        worker = self._workers.get(family)
        return dict(worker.environment or {}) if worker is not None else {}

    def ask(self, family: str, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request and return the answer.

        Raises
        ------
        WorkerDied, WorkerTimeout
            The worker is gone; the next request starts a new one.
        WorkerAbsent
            It cannot be started here; it is not tried again.
        """
        worker = self._ready(family)
        try:
            answer = worker.ask(request, seconds)
        except (WorkerDied, WorkerTimeout):
            self.forget(family)
            raise
        if answer.pop("fatal", False):
            self.forget(family)
        return answer

    def ask_all(self, families: Iterable[str], request: Mapping[str, Any], seconds: float) -> None:
        """Send one request to several workers at once and wait until all have answered.

        For requests whose answers do not matter: a worker that dies over it or does not answer
        is started again when it is next asked.
        """
        asked = []
        for family in families:
            try:
                worker = self._ready(family)
                worker.send(request)
                asked.append((family, worker))
            except WorkerAbsent:
                continue
            except WorkerDied:
                self.forget(family)
        limit = time.monotonic() + seconds
        for family, worker in asked:
            try:
                worker.answer(max(0.1, limit - time.monotonic()))
            except (WorkerDied, WorkerTimeout):
                self.forget(family)

    def _ready(self, family: str) -> _Process:
        """Return the family's worker once it says that it can work."""
        for attempt in (1, 2):
            self.start(family)
            if family in self.given_up:
                break
            try:
                self._workers[family].wait_ready()
                break
            except (WorkerDied, WorkerTimeout) as error:
                self.forget(family)
                if attempt == 2:
                    self.given_up[family] = str(error)
        if family in self.given_up:
            raise WorkerAbsent(self.given_up[family])
        return self._workers[family]

    def forget(self, family: str) -> None:
        """Drop a worker that is of no more use."""
        worker = self._workers.pop(family, None)
        if worker is not None:
            worker.kill()

    def close(self) -> None:
        """End every worker."""
        for worker in self._workers.values():  # all first: they take a second each to end
            worker.hang_up()
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
