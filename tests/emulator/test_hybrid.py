"""Whole products of the hybrid kernels, run on the host thread by thread."""

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
from sparsetile.engines.tiles import hybrid_runner
from sparsetile.launch.interface import PLAIN, Epilogue
from sparsetile.reorder import Permutation
from sparsetile.systems import SYSTEMS, runner
from tests.contracts.cases import csr_of
from tests.emulator.build import host_compiler
from tests.emulator.products import (
    assert_same,
    expected,
    load_on_host,
    operand,
    whole_numbers,
)
from tests.host import unread_scratch

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch, folder: Path, fresh_runners: None) -> None:
    load_on_host(monkeypatch, folder, hybrid_runner, scratch=unread_scratch)


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


SUBJECTS = [
    ("rsh", "tiles", F32), ("rsh", "tiles", F16),
    ("brp", "1x4", F32), ("brp", "2x2", F16), ("brp", "8x2", F32), ("brp", "4x2", BF16),
    ("brp", "atomic", F32), ("brp", "atomic", F16), ("brp", "atomic", BF16),
    ("brp", "direct", F32), ("brp", "direct", F16),
]  # fmt: skip


WHOLE = [("rsh", "tiles"), ("brp", "2x2"), ("brp", "direct"), ("brp", "atomic")]


@pytest.mark.parametrize("system, ablation, dtype", SUBJECTS)
def test_products_with_and_without_numbers_that_are_not_finite(system, ablation, dtype):
    csr = csr_of(whole_numbers(50, 44, 0.7), dtype=dtype)
    for n, special in ((32, False), (32, True), (24, True), (72, False)):
        B = operand(csr, n, dtype, special=special)
        assert_same(product(system, ablation, csr, B), expected(csr, B))


@pytest.mark.parametrize("system, ablation", WHOLE)
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


@pytest.mark.parametrize("system, ablation", WHOLE)
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


def with_rows_in_no_window(dtype: torch.dtype, *, pattern: bool = False) -> st.CSR:
    """Windows of one group to six, one of fewer rows, and one without a group."""
    matrix = sp.vstack([
        whole_numbers(16, 44, 0.3), whole_numbers(16, 44, 0.08),
        whole_numbers(16, 44, 0.02), whole_numbers(9, 44, 0.5),
    ])  # fmt: skip
    return csr_of(sp.csr_array(matrix), dtype=dtype, pattern=pattern)


EPILOGUES = {
    "alpha": {"alpha": -0.5},
    "mean": {"mean": True, "alpha": 2.0},
    "bias": {"bias": True},
    "relu": {"relu": True},
    "beta": {"beta": 2.0},
    "all": {"alpha": 0.5, "beta": -1.0, "mean": True, "bias": True, "relu": True},
}


@pytest.mark.parametrize("dtype, out_dtype, n", [
    (F32, F32, 32), (F32, F32, 68), (F32, F32, 30), (F16, F16, 40), (F16, F32, 64), (BF16, BF16, 9),
])  # fmt: skip
@pytest.mark.parametrize("name", EPILOGUES)
def test_every_epilogue_of_what_is_added_by_atomics(name, dtype, out_dtype, n):
    terms = dict(EPILOGUES[name])
    bias = torch.arange(n) / 4.0 - 3 if terms.pop("bias", False) else None
    epilogue = Epilogue(bias=bias, **terms)
    csr = with_rows_in_no_window(dtype)
    B = operand(csr, n, dtype, special=True)
    wanted = expected(csr, B) * epilogue.alpha
    if epilogue.mean:
        wanted /= torch.diff(csr.indptr).clamp(min=1).unsqueeze(1)
    wanted += 7 * epilogue.beta + (0 if bias is None else bias.double())
    wanted = torch.relu(wanted) if epilogue.relu else wanted
    found = product("brp", "atomic", csr, B, out_dtype, epilogue)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.isinf(), wanted.to(out_dtype).isinf())
    assert torch.equal(found[found.isinf()], wanted.to(out_dtype)[found.isinf()])
    finite = wanted.isfinite() & found.isfinite()
    bits = {F32: 24, F16: 11, BF16: 8}[out_dtype]
    # Sums are whole numbers; scales of a mean and C itself are rounded, a few times each.
    assert bool(((found - wanted).abs() <= 2.0 ** (2 - bits) * (wanted.abs() + 64))[finite].all())


@pytest.mark.parametrize("dtype", [F32, F16])
def test_atomics_meet_batches_orders_patterns_and_strides(dtype):
    csr = with_rows_in_no_window(dtype, pattern=True)
    order = torch.randperm(csr.shape[0], generator=torch.Generator().manual_seed(4))
    B = operand(csr, 48, dtype, 3, special=True)
    assert_same(product("brp", "atomic", csr, B, F32, order=order), expected(csr, B))
    # C is a part of a larger tensor, which keeps the rest: Inf of A is NaN where B has no column.
    csr = with_rows_in_no_window(dtype)
    csr.values[5] = csr.values[-5] = torch.inf
    request = Request(csr, 48, dtype, Permutation("given", order), ablation="atomic", ceilings=H200)
    built = SYSTEMS["brp"].build(request)
    whole = torch.full((csr.shape[0], 112), 5.0, dtype=dtype)
    epilogue = Epilogue(beta=1.0)
    runner(built.recipe).spmm(built.tensors, csr.values, None, B[0], whole[:, 32:80], epilogue)
    assert_same(whole[:, 32:80], expected(csr, B[0]) + 5)
    assert bool((whole[:, :32] == 5).all()) and bool((whole[:, 80:] == 5).all())


def test_windows_without_a_group_are_rows_and_others_a_piece_a_group():
    csr = with_rows_in_no_window(F32)
    permutation = Permutation("identity", None)
    request = Request(csr, 32, F32, permutation, ablation="atomic", ceilings=H200)
    tensors = SYSTEMS["brp"].build(request).tensors
    offsets, items = tensors["row_window_offset"], tensors["window_items"]
    assert tensors["order"].tolist() == [*range(32), *range(48, 57)]
    found = sorted((int(w), int(begin), int(end)) for w, begin, end, _ in items)
    wanted = [
        (window, tile, tile + 4)
        for window in range(offsets.numel() - 1)
        for tile in range(int(offsets[window]), int(offsets[window + 1]), 4)
    ]
    assert found == wanted and len(wanted) == 6 + 1 + 6
