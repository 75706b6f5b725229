"""Helpers share a call, never break it: several callers at once, forks, errors, no threads."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch

from sparsetile.kernels.cpu import pool as cpu_pool
from sparsetile.kernels.cpu.pool import run_shared


def test_all_threads_enter_the_function_and_the_call_waits_for_them() -> None:
    together = threading.Barrier(3, timeout=30)
    left = []

    def work(number: int) -> None:
        together.wait()
        time.sleep(0.02)
        left.append(number)

    run_shared(work, (4,), (), threads=3)
    assert left == [4, 4, 4]


def test_one_thread_runs_in_the_caller_alone() -> None:
    seen = []
    run_shared(lambda: seen.append(threading.current_thread()), (), (), threads=1)
    assert seen == [threading.current_thread()]


def test_a_helper_that_comes_late_is_not_waited_for() -> None:
    release = threading.Event()
    blocker = threading.Thread(
        target=run_shared, args=(lambda: release.wait(30), (), (), cpu_pool._pool.size + 2)
    )
    blocker.start()
    try:
        while not cpu_pool._pool.jobs.empty():  # until every helper is held up
            time.sleep(0.001)
        calls = []
        run_shared(lambda: calls.append(1), (), (), threads=2)
        assert calls == [1]
    finally:
        release.set()
        blocker.join()


def test_an_error_in_the_caller_is_raised_after_the_helpers_have_left() -> None:
    inside = threading.Barrier(2, timeout=30)
    caller = threading.current_thread()
    left = []

    def work() -> None:
        inside.wait()
        if threading.current_thread() is caller:
            raise ValueError("of the caller")
        time.sleep(0.02)
        left.append(1)

    with pytest.raises(ValueError, match="of the caller"):
        run_shared(work, (), (), threads=2)
    assert left == [1]


def test_an_error_in_a_helper_reaches_the_caller_and_the_pool_lives_on() -> None:
    inside = threading.Barrier(2, timeout=30)
    caller = threading.current_thread()

    def work() -> None:
        inside.wait()
        if threading.current_thread() is not caller:
            raise ValueError("of the helper")

    with pytest.raises(ValueError, match="of the helper"):
        run_shared(work, (), (), threads=2)
    inside.reset()
    run_shared(inside.wait, (), (), threads=2)


def test_a_process_that_may_not_start_threads_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(cpu_pool, "_pool", cpu_pool._Pool())
    monkeypatch.setattr(threading.Thread, "start", refuse)
    calls = []
    run_shared(lambda: calls.append(1), (), (), threads=4)
    assert calls == [1]


def test_memory_of_a_finished_call_is_not_kept() -> None:
    class Owner:
        alive = 0

        def __init__(self) -> None:
            Owner.alive += 1

        def __del__(self) -> None:
            Owner.alive -= 1

    for _ in range(20):
        run_shared(lambda: None, (), (Owner(),), threads=3)
    deadline = time.monotonic() + 10
    while Owner.alive and time.monotonic() < deadline:
        time.sleep(0.01)
    assert Owner.alive == 0


SETUP = """
import os
import torch
from sparsetile.balance import RowChunks, Units
from sparsetile.kernels.cpu import api as cpu_api
cpu_api.WORK_PER_THREAD = 1
torch.set_num_threads(2)
generator = torch.Generator().manual_seed(0)
dense = torch.randint(-2, 3, (300, 200), generator=generator).float()
rows, columns = dense.nonzero(as_tuple=True)
indptr = torch.searchsorted(rows, torch.arange(301))
indices, values = columns.int(), dense[rows, columns]
bounds = RowChunks.make(Units.from_offsets(indptr), chunks=16).bounds
exact = dense.int().numpy()

def check(seed):
    B = torch.randint(-4, 5, (200, 70), generator=torch.Generator().manual_seed(seed)).float()
    out = torch.empty(300, 70)
    cpu_api.spmm_sum(indptr, indices, values, B, out, 1.0, 0.0, bounds)
    # NumPy's integer product has no threads: torch's own would hang in a forked child.
    return (out.numpy() == exact @ B.numpy().astype("int32")).all()
"""


SCRIPT = """
import atexit, multiprocessing, threading
from concurrent.futures import ThreadPoolExecutor

class Products(torch.utils.data.Dataset):
    def __len__(self): return 12
    def __getitem__(self, i):
        torch.set_num_threads(1 + i % 2)
        return torch.tensor(bool(check(i)))

def helped(seed):
    right = check(seed)
    return right and any(t.name.startswith("sparsetile-cpu") for t in threading.enumerate())

with ThreadPoolExecutor(4) as callers:  # the first calls also race for the compiler
    print("threads", all(callers.map(check, range(200))))
if hasattr(os, "fork"):
    with multiprocessing.get_context("fork").Pool(2) as children:
        print("children", all(children.map(helped, range(20))))
    loader = torch.utils.data.DataLoader(
        Products(), num_workers=2, batch_size=3, multiprocessing_context="fork")
    print("loader", all(bool(batch.all()) for batch in loader))
print("parent", helped(0))
atexit.register(lambda: print("shutdown", check(1)))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What one process, started for this file alone, says of each kind of caller."""
    done = subprocess.run(
        [sys.executable, "-c", SETUP + SCRIPT],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split() for line in done.stdout.splitlines())


def test_four_python_threads_get_right_results_at_once(said: dict[str, str]) -> None:
    assert said["threads"] == "True"


@pytest.mark.skipif(sys.platform == "win32", reason="fork exists on Unix only")
def test_a_forked_child_has_its_own_helpers_and_its_parent_keeps_its_own(
    said: dict[str, str],
) -> None:
    assert said["children"] == said["parent"] == "True"


@pytest.mark.skipif(sys.platform == "win32", reason="fork exists on Unix only")
def test_dataloader_workers_multiply_with_one_thread_and_with_two(said: dict[str, str]) -> None:
    assert said["loader"] == "True"


def test_a_product_during_interpreter_shutdown_is_right(said: dict[str, str]) -> None:
    assert said["shutdown"] == "True"


def test_the_number_of_threads_is_the_one_torch_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sparsetile.kernels.cpu import api as cpu_api
    from tests.kernels.cpu.chunks import row_chunks

    asked: list[int] = []
    monkeypatch.setattr(cpu_api, "run_shared", lambda *arguments: asked.append(arguments[3]))
    indptr = torch.arange(40_001)
    matrix = (indptr, torch.zeros(40_000, dtype=torch.int32), None)
    before = torch.get_num_threads()
    try:
        for threads, columns in ((1, 64), (2, 64), (5, 64), (5, 1)):
            torch.set_num_threads(threads)
            B, out = torch.ones(1, columns), torch.zeros(40_000, columns)
            cpu_api.spmm_sum(*matrix, B, out, 1.0, 0.0, row_chunks(indptr, 4))
            assert bool(out.all()) == (threads == 1), "one thread needs no helpers"
        small, out = torch.arange(11), torch.zeros(10, 1)
        cpu_api.spmm_sum(small, matrix[1][:10], None, B, out, 1.0, 0.0, row_chunks(small, 4))
        assert bool(out.all())
    finally:
        torch.set_num_threads(before)
    # 200,000 steps of a column, or of a register at least; a helper for every 2^20 of them.
    assert asked == [2, 5, 4]
