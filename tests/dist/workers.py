"""Four processes in one gloo group, and smaller groups within it, that run cases by name.

Processes are started once and serve every test: starting them costs more than most cases. They are
forked from one server that has imported what they need. A case is a function
``case(group, **arguments)`` of a test module; it runs on the first ranks of the group and raises if
something is wrong. Nothing waits longer than ``SECONDS``. After a case that fails the processes are
started again: their groups may be out of step.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

WORLD = 4
SECONDS = 60.0
# What a collective may wait for a rank that is gone.
TIMEOUT = timedelta(seconds=20)

# What takes long to import.
PRELOAD = [
    "pytest",
    "scipy.sparse",
    "sparsetile.check",
    "sparsetile.dist",
    "sparsetile.kernels.cpu.api",
    "sparsetile.nn",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
]
# One thread in each process: they share the cores.
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NUMBA_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}

# Groups that only some cases use, by name; a case may leave them broken.
spare: dict[str, Any] = {}


def started(target: Any, *arguments: Any) -> tuple[Any, Any]:
    """Start ``target(*arguments, pipe)`` in a process; return it and the other end of the pipe."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with pytest.MonkeyPatch.context() as patch:  # the server reads them when it starts
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        multiprocessing.forkserver.ensure_running()
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()  # so that the process's end is noticed
    return process, ours


def _serve(rank: int, world: int, store: str, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=TIMEOUT
    )
    groups = {size: dist.new_group(list(range(size))) for size in range(1, world + 1)}
    spare["to break"] = dist.new_group([0, 1, 2])
    while True:
        order = pipe.recv()
        if order is None:
            break
        module, name, size, arguments = order
        if rank >= size:
            pipe.send((True, None))
            continue
        try:
            torch.manual_seed(20240611)
            case = getattr(importlib.import_module(module), name)
            pipe.send((True, case(groups[size], **arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    os._exit(0)  # leaving in order would wait for groups that a case broke


class Workers:
    """The processes, seen from the test."""

    def __init__(self, world: int = WORLD) -> None:
        self._world = world
        self._pipes: list[Any] = []
        self._processes: list[Any] = []

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        for rank in range(self._world):
            process, pipe = started(_serve, rank, self._world, store)
            self._pipes.append(pipe)
            self._processes.append(process)

    def run(self, case: Any, ranks: int, **arguments: Any) -> list[Any]:
        """Run a case on the first ``ranks`` ranks; return what each returned."""
        if not self._processes:  # at first, and after a case that failed
            self._start()
        order = (case.__module__, case.__name__, ranks, arguments)
        for pipe in self._pipes:
            pipe.send(order)
        end = time.monotonic() + SECONDS
        answers = [self._answer(pipe, end) for pipe in self._pipes]
        if not all(right for right, _ in answers):
            self.close()
        for rank, (right, answer) in enumerate(answers):
            assert right, f"rank {rank} of {ranks}:\n{answer}"
        return [answer for _, answer in answers[:ranks]]

    def _answer(self, pipe: Any, end: float) -> tuple[bool, Any]:
        """Whether the case passed on a rank, and what it returned or raised."""
        if not pipe.poll(max(0.0, end - time.monotonic())):
            return False, f"no answer within {SECONDS} s"
        try:
            return pipe.recv()
        except EOFError:
            return False, "the process ended"

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive():
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    pipe.send(None)
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join(5)
        if self._processes:
            self._folder.cleanup()
        self._pipes, self._processes = [], []
