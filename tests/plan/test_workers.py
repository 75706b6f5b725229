"""Plans in other processes: forked DataLoader workers, and processes started from scratch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import sparsetile as st
from tests.contracts.cases import assert_close, csr_of, random_matrix

MATRIX = random_matrix(400, 300, 0.05)
WIDTH = 24


def operand(seed: int) -> torch.Tensor:
    return torch.randn(300, WIDTH, generator=torch.Generator().manual_seed(seed))


class Products(Dataset):
    """Item i is the product with operand i, made in the worker."""

    def __init__(self, plan: st.Plan | None) -> None:
        self.plan = plan
        self.csr = csr_of(MATRIX)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.plan is None:
            return st.spmm(self.csr, operand(index))
        return self.plan @ operand(index)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("how", ["plan", "spmm"])
def test_dataloader_workers_multiply_with_what_they_inherit(how, threads):
    csr = csr_of(MATRIX)
    plan = st.plan(csr, WIDTH, system="cpu")
    plan @ operand(0)  # the parent has worked already: its threads do not cross the fork

    def start(_: int) -> None:
        torch.set_num_threads(threads)

    loader = DataLoader(
        Products(plan if how == "plan" else None), batch_size=None, num_workers=2, timeout=60,
        multiprocessing_context="fork", worker_init_fn=start,
    )  # fmt: skip
    products = list(loader)
    assert len(products) == 8
    for index, C in enumerate(products):
        assert_close(C, csr, operand(index))
    C = plan @ operand(3)
    assert_close(C, csr, operand(3))


def _multiply_in_a_new_process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    loaded = st.load_plan(Path(folder) / "plan.safetensors")
    planned = st.plan(csr_of(MATRIX), WIDTH, system="cpu")
    B = operand(rank)
    assert torch.equal(loaded @ B, planned @ B)
    torch.save(loaded @ B, Path(folder) / f"{rank}.pt")


def test_a_spawned_process_loads_a_plan_and_gives_the_same_bits(tmp_path):
    csr = csr_of(MATRIX)
    plan = st.plan(csr, WIDTH, system="cpu")
    plan.save(tmp_path / "plan.safetensors")
    started = torch.multiprocessing.start_processes(
        _multiply_in_a_new_process, (str(tmp_path),), nprocs=1, join=False, start_method="spawn"
    )
    try:
        started.join(timeout=90)  # raises what the child raised
        assert [process.exitcode for process in started.processes] == [0]
    finally:
        for process in started.processes:
            process.kill()
    C = torch.load(tmp_path / "0.pt")
    assert torch.equal(C, plan @ operand(0))
    assert_close(C, csr, operand(0))
