"""Four processes in one gloo group, and smaller groups within it, that run cases by name.

Processes are started once and serve every test: starting them costs more than all cases. A case
is a function ``case(group, **arguments)`` of a test module; it runs on the first ranks of the
group and raises where something is wrong. Nothing waits longer than ``SECONDS``.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

WORLD = 4
SECONDS = 60.0
# What a collective may wait for a rank that is gone.
TIMEOUT = timedelta(seconds=20)
IMPATIENT = timedelta(seconds=5)

# Groups that only some cases use, by name; a case may leave them broken.
spare: dict[str, Any] = {}


def _serve(rank: int, world: int, store: str, pipe: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["NUMBA_NUM_THREADS"] = "1"  # four processes share the cores
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=TIMEOUT
    )
    groups = {size: dist.new_group(list(range(size))) for size in range(1, world + 1)}
    spare["impatient"] = dist.new_group([0, 1, 2], timeout=IMPATIENT)
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
        context = multiprocessing.get_context("spawn")
        for rank in range(self._world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self._world, store, theirs), daemon=True
            )
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, case: Any, ranks: int, **arguments: Any) -> list[Any]:
        """Run a case on the first ``ranks`` ranks; return what each returned."""
        if not self._processes:  # at first, and after a case that had to be ended
            self._start()
        order = (case.__module__, case.__name__, ranks, arguments)
        for pipe in self._pipes:
            pipe.send(order)
        end = time.monotonic() + SECONDS
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, end - time.monotonic())):
                self.close()
                raise AssertionError(f"rank {rank} gave no answer within {SECONDS} s")
            answers.append(pipe.recv())
        for rank, (right, answer) in enumerate(answers):
            assert right, f"rank {rank} of {ranks}:\n{answer}"
        return [answer for _, answer in answers[:ranks]]

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
