"""``finish_dense``: sums of a dense product become C on the host, epilogue and repair included."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.engines.request import prefixed
from sparsetile.launch.interface import Epilogue
from sparsetile.systems.dense import bound
from sparsetile.systems.dense.bound import BoundDense
from tests.contracts.cases import csr_of
from tests.emulator.build import HostKernel, host_compiler
from tests.emulator.products import expected, load_on_host, whole_numbers
from tests.host import h200

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")

ROWS, COLS = 21, 13
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class _Rows:
    rows = ROWS


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[HostKernel]:
    return load_on_host(monkeypatch, folder, bound, machine=h200)


def bound_to(csr: st.CSR, dtype: torch.dtype, weighted: bool = True) -> BoundDense:
    values = csr.values.to(dtype) if weighted else None
    dense = torch.zeros(ROWS, COLS, dtype=torch.float64)
    dense[csr.row_ids(), csr.indices.long()] = csr.values.double() if weighted else 1.0
    exact = prefixed("exact", {"indptr": csr.indptr.long(), "columns": csr.indices.int()})
    return BoundDense(_Rows(), exact, values, {"A": dense.to(dtype)}, 0)


def finished(product: BoundDense, B: Tensor, epilogue: Epilogue, sums: Tensor) -> Tensor:
    """C, with guards behind it that must stay."""
    C = sums
    if B.dtype.itemsize == 2 or not epilogue.plain:
        room = torch.full((sums.numel() + 64,), 7.0, dtype=B.dtype)
        C = room[: sums.numel()].view(sums.shape)
        if B.dtype.itemsize != 2:
            C.copy_(sums)
            sums = C
    launch = product._prepare_finish(B, epilogue)
    more = () if epilogue.plain else (
        0 if epilogue.bias is None else epilogue.bias.data_ptr(), epilogue.alpha
    )  # fmt: skip
    launch(0, B.data_ptr(), C.data_ptr(), *more, sums.data_ptr())
    if C is not sums:
        assert (room[sums.numel() :] == 7.0).all()
    return C


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("n", [1, 4, 6, 36])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_that_met_no_entry_are_recomputed(
    loaded: list[HostKernel], dtype: torch.dtype, n: int, weighted: bool
):
    csr = csr_of(whole_numbers(ROWS, COLS, 0.3))
    B = torch.randint(-3, 4, (COLS, n)).to(dtype)
    B[2, 0], B[5, n - 1] = torch.inf, torch.nan
    product = bound_to(csr, dtype, weighted)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    sums = product._A.to(wide) @ B.to(wide)
    assert sums[:, 0].isnan().any() and not sums[:, n - 1].isfinite().any()
    want = expected(csr if weighted else csr.with_values(None), B).to(dtype)
    C = finished(product, B, Epilogue(), sums)
    torch.testing.assert_close(C, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_epilogue_is_applied_once(loaded: list[HostKernel], dtype: torch.dtype):
    csr = csr_of(whole_numbers(ROWS, COLS, 0.3))
    product, B = bound_to(csr, dtype), torch.randint(-3, 4, (COLS, 12)).to(dtype)
    B[3, 4] = -torch.inf
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    bias = torch.arange(12, dtype=wide) - 6
    sums = product._A.to(wide) @ B.to(wide)
    for mean in (False, True):
        epilogue = Epilogue(alpha=0.5, mean=mean, bias=bias, relu=True)
        want = expected(csr, B).to(torch.float64)
        if mean:
            want /= csr.indptr.diff().clamp(min=1).unsqueeze(1)
        want = torch.relu(0.5 * want + bias.double()).to(dtype)
        torch.testing.assert_close(
            finished(product, B, epilogue, sums.clone()), want, equal_nan=True
        )


def test_a_block_whose_first_row_is_finite_writes_nothing(
    loaded: list[HostKernel], monkeypatch: pytest.MonkeyPatch
):
    """A spoilt sum below a finite row can only come from A itself, and stays."""
    monkeypatch.setattr(bound, "machine", lambda device: SimpleNamespace(processors=3))
    csr = csr_of(whole_numbers(ROWS, COLS, 0.3))
    product, B = bound_to(csr, torch.float32), torch.ones(COLS, 8)
    sums = torch.ones(ROWS, 8)
    sums[1:7], sums[7, 3], sums[15] = torch.nan, torch.inf, torch.nan  # blocks have 7 rows each
    C = finished(product, B, Epilogue(), sums.clone())
    want = expected(csr, B).float()
    assert C[1:7].isnan().all() and C[15].isnan().all()
    assert torch.equal(C[7], torch.where(sums[7].isinf(), want[7], 1.0))
    sums[7, 3], sums[8:14] = torch.nan, torch.nan
    assert torch.equal(finished(product, B, Epilogue(), sums)[8:14], want[8:14])


def test_more_elements_than_threads(loaded: list[HostKernel], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bound, "machine", lambda device: SimpleNamespace(processors=1))
    monkeypatch.setattr(bound, "FINISH_BLOCKS", 1)
    csr = csr_of(whole_numbers(ROWS, COLS, 0.3))
    B = torch.randint(-3, 4, (COLS, 300)).half()
    product = bound_to(csr, torch.float16)
    sums = product._A.float() @ B.float()
    assert torch.equal(finished(product, B, Epilogue(), sums), expected(csr, B).half())
