"""Memory that runs out in the middle of planning: the error is told, and the next plan works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import sparsetile as st
from sparsetile.plan import planner
from sparsetile.systems import SYSTEMS
from tests.contracts.cases import assert_close, csr_of, random_matrix


class Failing(TorchFunctionMode):
    """Calls of torch up to one of them; that one gets no memory.

    No dispatch mode: planning switches those off.
    """

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last = last

    def __torch_function__(self, function: Any, types: Any, given: Any = (), options: Any = None):
        # Switches take no memory; one that failed would stay as it is for all later tests. What is
        # copied into a tensor of the same type takes none either, nor does the name of a device.
        name = getattr(function, "__name__", "")
        allocates = not name.startswith(("_set_", "copy_")) and function is not torch.device
        self.last -= allocates
        if allocates and self.last == 0:
            raise torch.OutOfMemoryError("out of memory: tried to allocate 20.00 MiB")
        return function(*given, **(options or {}))


def fails_at_each(work: Callable[[], object], after: Callable[[], None], most: int) -> int:
    """Let each operation of ``work`` fail in turn, about ``most`` of them; return how many did."""
    with Failing(10**9) as counted:
        work()
    total, failed = 10**9 - counted.last, 0
    for last in range(1, total + 1, max(1, total // most)):
        try:
            with Failing(last):
                work()
        except torch.OutOfMemoryError:
            failed += 1
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        after()
    return failed


@pytest.mark.parametrize("system", ["cpu", "dense"])
def test_the_next_plan_works_wherever_memory_ran_out(system):
    csr, B = csr_of(random_matrix(30, 20, 0.2)), torch.randn(20, 4)

    def make() -> st.Plan:
        # Entries out of order, so that reading A takes memory as well.
        edges = torch.stack([csr.row_ids().flip(0), csr.indices.long().flip(0)])
        given = (edges, csr.values.flip(0), csr.shape)
        return st.plan(given, 4, system=system, reorder=torch.arange(29, -1, -1))

    def after() -> None:
        assert_close(make() @ B, csr, B)

    assert fails_at_each(make, after, 40) >= 10


def test_a_plan_that_ran_out_of_memory_once_is_whole_afterwards():
    csr, B = csr_of(random_matrix(30, 20, 0.2)), torch.randn(20, 4)
    G = torch.randn(30, 4)
    plan = st.plan(csr, 4, system="cpu")

    def work() -> None:
        fresh = st.plan(csr, 4, system="cpu")
        fresh.update_values(csr.values * 2)
        fresh.T @ G
        fresh @ B

    def after() -> None:
        assert_close(plan @ B, csr, B)
        assert_close(plan.T @ G, csr.transposed(), G)

    assert fails_at_each(work, after, 30) >= 10


def test_an_update_that_ran_out_of_memory_changes_neither_the_plan_nor_its_transpose():
    csr, B = csr_of(random_matrix(30, 20, 0.2)), torch.randn(20, 4)
    doubled = csr.with_values(csr.values * 2)
    G, failed = torch.randn(30, 4), 0
    before = st.plan(csr, 4, system="cpu")
    old, turned = before @ B, before.T @ G
    for last in range(1, 30):
        plan = st.plan(csr, 4, system="cpu")
        plan.T  # noqa: B018 it must follow
        try:
            with Failing(last):
                plan.update_values(doubled.values)
        except torch.OutOfMemoryError:
            failed += 1
            assert torch.equal(plan @ B, old) and torch.equal(plan.T @ G, turned), last
        else:
            assert torch.equal(plan @ B, 2 * old) and torch.equal(plan.T @ G, 2 * turned)
    assert failed >= 3


def test_spmm_keeps_no_plan_that_ran_out_of_memory():
    csr, B = csr_of(random_matrix(30, 20, 0.2)), torch.randn(20, 4)

    def work() -> None:
        st.clear_plan_cache()
        st.spmm(csr, B)

    def after() -> None:
        assert_close(st.spmm(csr, B), csr, B)
        assert_close(st.spmm(csr, B), csr, B)

    assert fails_at_each(work, after, 30) >= 10
    st.clear_plan_cache()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("system", ["csr", "acc"])
def test_a_gpu_that_is_full_refuses_a_plan_and_takes_the_next(system):
    csr = csr_of(random_matrix(3000, 2000, 0.05), dtype=torch.float16).to(torch.device("cuda"))
    B = torch.randn(2000, 32, device="cuda", dtype=torch.float16)
    st.plan(csr, 32, system=system)  # compiles, so that what fails below is memory
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    kept = []
    try:
        with pytest.raises(torch.OutOfMemoryError):
            for _ in range(100):
                kept.append(st.plan(csr, 32, system=system))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        kept.clear()
    assert_close(st.plan(csr, 32, system=system) @ B, csr, B)


class _NoMemory:
    """Stands for a system's build that takes more memory than there is."""

    def __init__(self, name: str) -> None:
        self.name, self.times = name, 0

    def __call__(self, request: Any) -> Any:
        self.times += 1
        raise torch.OutOfMemoryError("out of memory: tried to allocate 20.00 GiB")


@pytest.fixture
def chosen_without_memory(monkeypatch: pytest.MonkeyPatch) -> _NoMemory:
    """``auto`` chooses ``dense``, for whose format there is no memory."""
    build = _NoMemory("dense")
    monkeypatch.setattr(type(SYSTEMS["dense"]), "build", lambda self, request: build(request))
    monkeypatch.setattr(type(SYSTEMS["dense"]), "predict", lambda self, request: 1e-9)
    return build


def test_auto_falls_back_to_the_exact_system_and_says_so(chosen_without_memory):
    csr, B = csr_of(random_matrix(30, 20, 0.2)), torch.randn(20, 4)
    plan = st.plan(csr, 4, expected_runs=10)
    assert chosen_without_memory.times == 1 and plan.system == "cpu"
    note = "memory ran out while dense was built: cpu in its place"
    assert plan.info["notes"] == [note] and f"note      {note}" in plan.explain()
    assert_close(plan @ B, csr, B)


def test_a_system_that_was_asked_for_is_not_replaced(chosen_without_memory):
    csr = csr_of(random_matrix(30, 20, 0.2))
    with pytest.raises(torch.OutOfMemoryError):
        st.plan(csr, 4, system="dense")


def test_memory_that_runs_out_in_a_comparison_leaves_the_exact_system(monkeypatch):
    def no_memory(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory: tried to allocate 20.00 GiB")

    csr, B = csr_of(random_matrix(30, 20, 0.2)), torch.randn(20, 4)
    monkeypatch.setattr(planner, "choose_system", no_memory)
    monkeypatch.setattr(planner, "order_that_pays", no_memory)
    monkeypatch.setattr(planner, "quickly", lambda *_: None)
    plan = st.plan(csr, 4)
    assert plan.system == "cpu" and plan.info["notes"] == [
        "memory ran out while row orders were compared: the given order",
        "memory ran out while systems were compared: cpu without a comparison",
    ]
    assert_close(plan @ B, csr, B)


def test_a_saved_plan_keeps_its_notes(chosen_without_memory, tmp_path):
    csr = csr_of(random_matrix(30, 20, 0.2))
    st.plan(csr, 4, expected_runs=10).save(tmp_path / "plan.safetensors")
    found = st.load_plan(tmp_path / "plan.safetensors")
    assert "memory ran out while dense was built" in found.explain()
