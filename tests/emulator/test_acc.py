"""Whole products of ``acc``, run on the host thread by thread: numbers that are not finite above
all, in B and in A, in whole windows and in pieces of cut ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.core.device import H200
from sparsetile.engines.request import Request
from sparsetile.engines.tiles import short, tile_runner
from sparsetile.engines.tiles import short_runner as acc_runner
from sparsetile.kernels.bittcf import Slab
from sparsetile.launch.interface import PLAIN, Epilogue
from sparsetile.reorder import Permutation
from sparsetile.systems import SYSTEMS, runner
from tests.contracts.cases import csr_of, random_matrix
from tests.emulator.build import host_compiler
from tests.emulator.products import (
    assert_same,
    expected,
    load_on_host,
    operand,
    whole_numbers,
)
from tests.host import h200, unread_scratch

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
NAN, INF = torch.nan, torch.inf
# Type, the slab that a warp takes, ablation (stacked: windows of sixteen rows).
KERNELS = [
    (F32, Slab(4, 1), None),
    (F32, Slab(4, 2, 2), "stacked"),
    (F16, Slab(8, 1), None),
    (F16, Slab(4, 1, 2), "stacked"),
    (BF16, Slab(8, 1), None),
    (F32, Slab(4, 1), "cache"),
    (F16, Slab(8, 1), "dtc-pipeline"),
]
IDS = ["f32", "f32 stacked", "f16", "f16 stacked", "bf16", "f32 one stage", "f16 A ahead"]


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch, folder: Path, fresh_runners: None) -> None:
    load_on_host(monkeypatch, folder, tile_runner, acc_runner, scratch=unread_scratch, machine=h200)


@pytest.fixture
def product(monkeypatch: pytest.MonkeyPatch):
    """Return a function that multiplies; a slab that is given is taken in place of the best."""

    def multiply(
        csr: st.CSR,
        B: Tensor,
        ablation: str | None = None,
        slab: Slab | None = None,
        epilogue: Epilogue = PLAIN,
        *,
        out_dtype: torch.dtype | None = None,
        order: Tensor | None = None,
        cut: bool = False,
    ) -> Tensor:
        if slab is not None:
            monkeypatch.setattr(acc_runner, "choose_slab", lambda *_, **__: slab)
        permutation = Permutation("identity" if order is None else "given", order)
        request = Request(csr, B.shape[-1], B.dtype, permutation, ablation=ablation, ceilings=H200)
        built = SYSTEMS["acc"].build(request)
        assert (built.tensors["parent_of_slot"].numel() > 0) == cut
        shape = (*B.shape[:-2], csr.shape[0], B.shape[-1])
        out = torch.full(shape, 7.0 if epilogue.beta else NAN, dtype=out_dtype or B.dtype)
        runner(built.recipe).spmm(built.tensors, csr.values, None, B, out, epilogue)
        return out

    return multiply


def spoiled(B: Tensor, *numbers: float) -> Tensor:
    """B with one such number in each of some rows, in different columns."""
    B = B.clone()
    for i, number in enumerate(numbers):
        B[..., (3 + 5 * i) % B.shape[-2], (i * 11) % B.shape[-1]] = number
    return B


@pytest.mark.parametrize("dtype, slab, ablation", KERNELS, ids=IDS)
def test_finite_numbers(product, dtype, slab, ablation):
    csr = csr_of(whole_numbers(50, 44, 0.4), dtype=dtype)
    for n in (slab.columns, slab.columns + 8):
        B = operand(csr, n, dtype)
        assert_same(product(csr, B, ablation, slab), expected(csr, B))


@pytest.mark.parametrize(
    "numbers", [(NAN,), (INF,), (-INF,), (INF, -INF), (NAN, INF, -INF) * 6], ids=str
)
@pytest.mark.parametrize("dtype, slab, ablation", KERNELS, ids=IDS)
def test_only_rows_with_an_entry_there_meet_what_is_not_finite(
    product, dtype, slab, ablation, numbers
):
    csr = csr_of(whole_numbers(50, 44, 0.2), dtype=dtype)
    B = spoiled(operand(csr, slab.columns + 8, dtype), *numbers)
    C = product(csr, B, ablation, slab)
    assert not C.isfinite().all() and C.isfinite().any()
    assert_same(C, expected(csr, B))


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("number", [NAN, INF, -INF])
def test_a_whole_row_of_b(product, dtype, number):
    csr = csr_of(whole_numbers(50, 44, 0.2), dtype=dtype)
    B = operand(csr, 64, dtype)
    B[7] = number
    assert_same(product(csr, B), expected(csr, B))


@pytest.mark.parametrize("dtype, slab, ablation", KERNELS[:4], ids=IDS[:4])
def test_numbers_of_a_that_are_not_finite(product, dtype, slab, ablation):
    csr = csr_of(whole_numbers(50, 44, 0.3), dtype=dtype)
    csr.values[5], csr.values[60], csr.values[61] = NAN, INF, -INF
    B = operand(csr, slab.columns, dtype)  # has zeros, and Inf times zero is NaN
    assert_same(product(csr, B, ablation, slab), expected(csr, B))
    B = spoiled(B, NAN, INF, -INF, INF)
    B[csr.indices[60].long()] = INF  # Inf times Inf is Inf
    C = product(csr, B, ablation, slab)
    assert C.isinf().any()
    assert_same(C, expected(csr, B))


def test_stored_zeros_are_entries(product):
    csr = csr_of(whole_numbers(40, 44, 0.3))
    csr.values[::3] = 0.0
    B = spoiled(operand(csr, 32, F32), *(NAN, INF, -INF) * 6)
    assert_same(product(csr, B), expected(csr, B))


def test_numbers_that_only_tf32_makes_infinite(product):
    csr = csr_of(whole_numbers(20, 30, 0.2))
    csr.values[:] = csr.values.sign()
    B = operand(csr, 32, F32)
    B[3, 5] = torch.finfo(F32).max
    wanted = B.clone()
    wanted[3, 5] = INF
    assert_same(product(csr, B), expected(csr, wanted))


@pytest.mark.parametrize(
    "dtype, n, ablation",
    [(F32, 31, "stacked"), (F32, 34, None), (F16, 33, None), (F16, 36, "stacked"),
     (BF16, 33, "stacked")],
)  # fmt: skip
def test_odd_widths(product, dtype, n, ablation):
    csr = csr_of(whole_numbers(30, 44, 0.2), dtype=dtype)
    B = operand(csr, n, dtype)
    assert_same(product(csr, B, ablation), expected(csr, B))
    B = spoiled(B, NAN, INF, -INF, INF)
    assert_same(product(csr, B, ablation), expected(csr, B))


def long_windows(dtype: torch.dtype, pattern: bool = False) -> st.CSR:
    """A window of many tiles, which is cut, and short ones beside it."""
    dense = np.zeros((40, 700))
    dense[9, ::2], dense[14, 5::3] = 1.0, 2.0
    short = whole_numbers(40, 700, 0.01).toarray()
    return csr_of(sp.csr_array(np.where(dense != 0, dense, short)), dtype=dtype, pattern=pattern)


@pytest.fixture
def _many_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short, "_workers", lambda request: 1e4)


@pytest.mark.usefixtures("_many_workers")
@pytest.mark.parametrize("dtype, slab, ablation", KERNELS[:4], ids=IDS[:4])
def test_pieces_of_cut_windows_are_made_exact_before_they_are_joined(
    product, dtype, slab, ablation
):
    csr = long_windows(dtype)
    clean = operand(csr, slab.columns, dtype, 2)
    assert_same(product(csr, clean, ablation, slab, cut=True), expected(csr, clean))
    B = spoiled(clean, *(NAN, INF, -INF) * 7)
    B[1] = clean[1]  # a batch without
    assert_same(product(csr, B, ablation, slab, cut=True), expected(csr, B))
    B[0] = clean[0]
    B[0, 700 - 50, 3], B[0, 100, 3] = INF, -INF  # opposite ones in different pieces
    assert_same(product(csr, B, ablation, slab, cut=True), expected(csr, B))


@pytest.mark.usefixtures("_many_workers")
@pytest.mark.parametrize("dtype", [F32, F16])
def test_rows_that_meet_finite_numbers_only_have_the_bits_of_a_clean_product(product, dtype):
    short = csr_of(random_matrix(50, 60, 0.1), dtype=dtype)
    long = long_windows(dtype)
    long.values[:] = torch.randn(long.nnz, generator=torch.Generator().manual_seed(2)).to(dtype)
    for csr, cut in ((short, False), (long, True)):
        generator = torch.Generator().manual_seed(5)
        clean = torch.randn(csr.shape[1], 40, generator=generator).to(dtype)
        B = clean.clone()
        B[11, :20], B[20], B[32, 3] = NAN, INF, -INF
        meets = ~expected(csr, B).isfinite()
        assert meets.any() and not meets.all()
        before, after = (product(csr, x, cut=cut, out_dtype=F32) for x in (clean, B))
        assert torch.equal(~after.isfinite(), meets)
        assert torch.equal(after[~meets].view(torch.int32), before[~meets].view(torch.int32))
        again = product(csr, B, cut=cut, out_dtype=F32)
        assert torch.equal(again.view(torch.int32), after.view(torch.int32))


def test_epilogues_patterns_orders_and_means(product):
    csr = csr_of(whole_numbers(50, 60, 0.2))
    B = spoiled(operand(csr, 40, F32), NAN, INF, -INF, INF)
    sums, bias = expected(csr, B), torch.arange(40.0)
    terms = Epilogue(alpha=-2.0, beta=3.0, bias=bias)
    assert_same(product(csr, B, epilogue=terms), -2 * sums + 21 + bias)
    terms = Epilogue(alpha=2.0, bias=bias, relu=True)
    assert_same(product(csr, B, epilogue=terms), torch.relu(2 * sums + bias))
    order = torch.randperm(50, generator=torch.Generator().manual_seed(3))
    assert_same(product(csr, B, order=order), sums)
    pattern = csr_of(whole_numbers(50, 60, 0.2), pattern=True)
    for right in (B, spoiled(operand(pattern, 64, F16), NAN, INF, -INF)):
        wanted = expected(pattern, right)
        assert_same(product(pattern, right, out_dtype=F32), wanted)
        mean = product(pattern, right, epilogue=Epilogue(mean=True), out_dtype=F32)
        lengths = pattern.indptr.diff().clamp(min=1).unsqueeze(-1)
        finite = wanted.isfinite()
        assert torch.equal(mean.isfinite(), finite)
        close = (wanted / lengths)[finite]
        torch.testing.assert_close(mean[finite].double(), close, rtol=1e-6, atol=1e-6)
