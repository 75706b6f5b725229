"""Whole products of the hybrid kernels, run on the host thread by thread."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.core.device import H200
from sparsetile.kernels import KernelSpec
from sparsetile.reorder import Permutation
from sparsetile.systems import SYSTEMS, runner
from sparsetile.systems.base import PLAIN, Epilogue, Request
from sparsetile.systems.shared import hybrid_runner
from tests.contracts.cases import csr_of, random_matrix
from tests.emulator.build import HostKernel, host_compiler

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch, folder: Path, fresh_runners: None) -> None:
    """Kernels are loaded for the host; scratch memory holds what nobody should read."""

    def scratch(device: Any, stream: int, size: int, counters: int) -> tuple[Tensor, Tensor]:
        return torch.full((size,), 255, dtype=torch.uint8), torch.zeros(counters, dtype=torch.int32)

    def load(spec: KernelSpec, config: Any, *rest: Any) -> HostKernel:
        return HostKernel(spec, config, folder)

    monkeypatch.setattr(KernelSpec, "load", load)
    monkeypatch.setattr(hybrid_runner, "on_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(hybrid_runner, "ensure_cuda_context", lambda device: None)
    monkeypatch.setattr(hybrid_runner, "current_stream_handle", lambda device: 0)
    monkeypatch.setattr(hybrid_runner, "scratch", scratch)


def whole_numbers(rows: int, cols: int, density: float) -> sp.csr_array:
    """Entries from -7 to 7, none of them 0: sums are exact in every type."""
    matrix = sp.csr_array(random_matrix(rows, cols, density))
    matrix.data = (np.arange(matrix.nnz) % 7 + 1.0) * (-1.0) ** np.arange(matrix.nnz)
    return matrix


def product(
    system: str,
    ablation: str,
    csr: st.CSR,
    B: Tensor,
    out_dtype: torch.dtype | None = None,
    epilogue: Epilogue = PLAIN,
    order: Tensor | None = None,
) -> Tensor:
    permutation = Permutation("identity" if order is None else "given", order)
    request = Request(csr, B.shape[-1], B.dtype, permutation, ablation=ablation, ceilings=H200)
    built = SYSTEMS[system].build(request)
    assert "rows_alone" not in built.recipe
    shape = (*B.shape[:-2], csr.shape[0], B.shape[-1])
    out = torch.full(shape, 7.0 if epilogue.beta else torch.nan, dtype=out_dtype or B.dtype)
    runner(built.recipe).spmm(built.tensors, csr.values, None, B, out, epilogue)
    return out


def expected(csr: st.CSR, B: Tensor) -> Tensor:
    """Entry by entry in float64: nothing that is not stored takes part."""
    values = torch.ones(csr.nnz) if csr.values is None else csr.values
    terms = values.double().unsqueeze(-1) * B.double()[..., csr.indices.long(), :]
    zeros = torch.zeros((*B.shape[:-2], csr.shape[0], B.shape[-1]), dtype=torch.float64)
    return zeros.index_add(-2, csr.row_ids(), terms)


def operand(csr: st.CSR, n: int, dtype: torch.dtype, *lead: int, special: bool = False) -> Tensor:
    B = torch.randint(-4, 5, (*lead, csr.shape[1], n)).to(dtype)
    if special:
        B[..., 3, 0], B[..., 7, n - 1], B[..., -1, n // 2] = torch.nan, torch.inf, -torch.inf
    return B


def assert_same(C: Tensor, wanted: Tensor) -> None:
    assert torch.equal(C.nan_to_num(nan=12345.0), wanted.to(C.dtype).nan_to_num(nan=12345.0))


SUBJECTS = [
    ("rsh", "tiles", F32), ("rsh", "tiles", F16),
    ("brp", "1x4", F32), ("brp", "2x2", F16), ("brp", "8x2", F32), ("brp", "4x2", BF16),
]  # fmt: skip


@pytest.mark.parametrize("system, ablation, dtype", SUBJECTS)
def test_products_with_and_without_numbers_that_are_not_finite(system, ablation, dtype):
    csr = csr_of(whole_numbers(50, 44, 0.7), dtype=dtype)
    for n, special in ((32, False), (32, True), (24, True)):
        B = operand(csr, n, dtype, special=special)
        assert_same(product(system, ablation, csr, B), expected(csr, B))


@pytest.mark.parametrize("system, ablation", [("rsh", "tiles"), ("brp", "2x2")])
def test_long_windows_are_shared_and_cut(system, ablation):
    csr = csr_of(whole_numbers(20, 2600, 0.5))
    B = operand(csr, 32, F32, special=True)
    assert_same(product(system, ablation, csr, B), expected(csr, B))


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_entries_outside_groups_may_all_be_of_few_rows(dtype, rows):
    # Two entries in each of 32 columns make groups; 260 columns have one entry, in the last rows:
    # groups of lanes share them evenly, wherever a row ends.
    dense = np.zeros((16, 300))
    dense[:2, :32] = 3.0
    columns = np.arange(40, 300)
    dense[16 - rows + columns % rows, columns] = columns % 5 + 1.0
    csr = csr_of(sp.csr_array(dense), dtype=dtype)
    B = operand(csr, 40, dtype, special=True)
    assert_same(product("brp", "2x2", csr, B), expected(csr, B))


@pytest.mark.parametrize("system, ablation", [("rsh", "tiles"), ("brp", "2x2")])
def test_row_orders_batches_patterns_odd_widths_and_epilogues(system, ablation):
    csr = csr_of(whole_numbers(50, 60, 0.4))
    B = operand(csr, 32, F32, 2, special=True)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(3))
    assert_same(product(system, ablation, csr, B, order=order), expected(csr, B))
    terms = Epilogue(alpha=2.0, beta=3.0, bias=torch.arange(33.0), relu=True)
    B = operand(csr, 33, F32)  # rows that are not 16-byte multiples
    wanted = torch.relu(2 * expected(csr, B) + 21 + torch.arange(33.0))
    assert_same(product(system, ablation, csr, B, epilogue=terms), wanted)
    pattern = csr_of(whole_numbers(50, 60, 0.4), pattern=True)
    B = operand(pattern, 32, F16)
    assert_same(product(system, ablation, pattern, B, F32), expected(pattern, B))
