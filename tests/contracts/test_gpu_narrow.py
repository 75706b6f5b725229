"""Products with few columns by ``csr``, whose entries are read side by side."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.kernels.csr import choose_narrow_tile, narrow_tiles, vector_width

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def matrix(lengths: list[int], cols: int, dtype: torch.dtype) -> tuple[st.CSR, Tensor]:
    """A matrix with small whole numbers, whose sums are exact, and itself in float64."""
    indptr = torch.tensor([0, *lengths]).cumsum(0)
    indices = torch.cat([torch.randperm(cols)[:length].sort().values for length in lengths])
    values = torch.randint(1, 4, (len(indices),)).to(dtype)
    dense = torch.zeros(len(lengths), cols, dtype=torch.float64)
    rows = torch.repeat_interleave(torch.arange(len(lengths)), indptr.diff())
    dense[rows, indices] = values.double()
    csr = st.CSR(indptr.cuda(), indices.int().cuda(), values.cuda(), dense.shape)
    return csr, dense.cuda()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 7, 8, 12, 16])
def test_every_tile_gives_exact_sums(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, n: int
) -> None:
    lengths = [*range(40), 64, 65, 130, 300, 513, 900, 0, 2000, 1]
    csr, dense = matrix(lengths, 2500, dtype)
    B = torch.randint(-1, 2, (2500, n), device="cuda").to(dtype)
    exact = dense @ B.double()
    want, after = exact.to(dtype), (exact + B[0].double()).relu().to(dtype)
    vector = vector_width(dtype, n)
    fitting = [t for t in narrow_tiles(dtype) if t.vector == vector and t.slab >= n]
    slab = min((t.slab for t in fitting), default=0)  # 12 columns of float64 take another kernel
    for tile in [t for t in fitting if t.slab == slab]:
        monkeypatch.setattr("sparsetile.kernels.csr.choose_narrow_tile", lambda *_, t=tile: t)
        plan = st.plan(csr, n, system="csr", reorder="identity")
        out = torch.full_like(want, torch.nan)
        assert torch.equal(plan.run(B, out=out), want)
        assert torch.equal(plan.run(B, bias=B[0], relu=True), after)
        two = torch.stack([B, -B])
        assert torch.equal(plan.run(two), torch.stack([want, -want]))


@pytest.mark.parametrize("rows, mean", [(200_000, 3), (60_000, 20), (300, 200)])
def test_usual_matrices_agree_with_float64(rows: int, mean: int) -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, 2 * mean + 1, (rows,), generator=generator)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).cuda()
    entries, cols = int(indptr[-1]), 50_000
    indices = torch.randint(0, cols, (entries,), device="cuda")
    values = torch.rand(entries, device="cuda")
    A = torch.sparse_csr_tensor(indptr, indices, values, size=(rows, cols))
    row = torch.repeat_interleave(torch.arange(rows, device="cuda"), indptr.diff())
    plan = {n: st.plan(A, n, system="csr", reorder="identity") for n in (1, 8, 16)}
    for n, made in plan.items():
        assert choose_narrow_tile(torch.float32, n, min(n, 4), rows, mean) is not None
        B = torch.rand(cols, n, device="cuda")
        each = values.double()[:, None] * B.double()[indices]
        want = torch.zeros(rows, n, dtype=torch.float64, device="cuda").index_add(0, row, each)
        assert ((made @ B).double() - want).abs().max() < 1e-4
        assert torch.equal(made @ B, made @ B)


def test_absent_entries_do_not_meet_what_is_not_finite() -> None:
    csr, dense = matrix([3, 0, 40, 200], 300, torch.float32)
    B = torch.ones(300, 1, device="cuda")
    B[0] = torch.nan
    touched = dense[:, 0] != 0
    for plan in (st.plan(csr, 1, system="csr"), st.plan(csr, 4, system="csr")):
        C = plan @ (B if plan.n == 1 else B.expand(300, 4).contiguous())
        assert torch.equal(C.isnan().any(1), touched)
