"""The check before timing: right results pass, every kind of wrong one is caught."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sparsetile.bench import checking
from sparsetile.bench.baselines import BASELINES
from sparsetile.bench.blocks import own_block, torch_bsr
from sparsetile.bench.operands import Operands
from sparsetile.data.registry import generate
from sparsetile.intake.csr import CSR


def _operands(
    dtype: torch.dtype = torch.float32,
    reduce: str = "sum",
    op: str = "spmm",
    weighted: bool = True,
    device: str = "cpu",
) -> Operands:
    csr = generate("power_law", rows=300, nnz=3000, weighted=weighted, seed=3).to(device)
    B = torch.randn(300, 9, device=device).to(dtype)
    G = torch.randn(300, 9, device=device).to(dtype) if op == "sddmm" else None
    return Operands(csr, B, G, op, reduce)


def _dense(csr: CSR) -> Tensor:
    A = torch.zeros(csr.shape, dtype=torch.float64)
    ones = torch.ones(csr.nnz) if csr.values is None else csr.values
    A[csr.row_ids(), csr.indices.long()] = ones.double()
    return A


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weighted", [True, False])
def test_a_right_product_passes_in_every_type(dtype: torch.dtype, weighted: bool) -> None:
    operands = _operands(dtype, weighted=weighted)
    A = _dense(operands.csr).to(dtype).double()
    found = checking.check_product(operands, (A @ operands.B.double()).to(dtype), uses_tf32=False)
    assert found["worst"] <= 1 and found["full"] and found["rows_checked"] == 300


def test_one_dropped_entry_fails() -> None:
    operands = _operands()
    A = _dense(operands.csr)
    row, column = int(operands.csr.row_ids()[17]), int(operands.csr.indices[17])
    A[row, column] = 0
    found = checking.check_product(operands, (A @ operands.B.double()).float(), uses_tf32=False)
    assert found["worst"] > 100


def test_tf32_rounding_passes_only_where_tf32_is_used() -> None:
    operands = _operands()
    rounded = (operands.B.view(torch.int32) & ~0x1FFF).view(torch.float32)
    C = (_dense(operands.csr) @ rounded.double()).float()
    assert checking.check_product(operands, C, uses_tf32=True)["worst"] <= 1
    assert checking.check_product(operands, C, uses_tf32=False)["worst"] > 1


def test_a_wrong_shape_and_a_nan_are_named() -> None:
    operands = _operands()
    found = checking.check_product(operands, torch.zeros(299, 9), uses_tf32=False)
    assert found["worst"] > 1 and found["why"] == "shape (299, 9) instead of (300, 9)"
    C = torch.full((300, 9), float("nan"))
    assert "not finite" in checking.check_product(operands, C, uses_tf32=False)["why"]


@pytest.mark.parametrize("row", ["longest", "last"])
def test_a_sample_always_holds_the_longest_and_the_last_row(
    row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "_CHECKED_ELEMENTS", 5000)
    monkeypatch.setattr(checking, "_CHUNK_ELEMENTS", 1000)
    operands = _operands()
    C = (_dense(operands.csr) @ operands.B.double()).float()
    found = checking.check_product(operands, C, uses_tf32=False)
    assert found["worst"] <= 1 and not found["full"]
    wrong = 299 if row == "last" else int(operands.csr.row_lengths().argmax())
    C[wrong] += 1
    assert checking.check_product(operands, C, uses_tf32=False)["worst"] > 1


@pytest.mark.parametrize("name", ["torch-csr", "torch-dense", "scipy", "pyg"])
@pytest.mark.parametrize("weighted", [True, False])
def test_the_baselines_of_the_host_are_right(name: str, weighted: bool) -> None:
    operands = _operands(weighted=weighted)
    baseline = BASELINES[name]
    assert baseline.reason(operands) is None
    result = torch.as_tensor(baseline.prepare(operands).run())
    assert checking.check_product(operands, result, uses_tf32=False)["worst"] <= 1


@pytest.mark.parametrize("reduce", ["mean", "max", "min"])
def test_reductions_are_checked_too(reduce: str) -> None:
    operands = _operands(reduce=reduce, weighted=False)
    result = BASELINES["pyg"].prepare(operands).run()
    assert checking.check_product(operands, result, uses_tf32=False)["worst"] <= 1
    assert checking.check_product(operands, result + 0.1, uses_tf32=False)["worst"] > 1
    assert BASELINES["scipy"].reason(operands) == f"knows sum, not {reduce}"


def test_sddmm_is_checked_entry_by_entry() -> None:
    operands = _operands(op="sddmm", weighted=False)
    result = BASELINES["torch-sddmm"].prepare(operands).run()
    assert checking.check_product(operands, result, uses_tf32=False)["worst"] <= 1
    wrong = result.clone()
    wrong[-1] += 1
    assert checking.check_product(operands, wrong, uses_tf32=False)["worst"] > 1


def test_a_dense_copy_that_would_not_fit_is_refused_with_its_size() -> None:
    csr = CSR(torch.zeros(10**6 + 1, dtype=torch.int64), torch.zeros(0, dtype=torch.int32), None,
              (10**6, 10**6))  # fmt: skip
    operands = Operands(csr, torch.zeros(1, 1), None, "spmm", "sum")
    assert BASELINES["torch-dense"].reason(operands) == "A written out takes more than 8 GiB"


def test_torch_bsr_holds_exactly_the_matrix() -> None:
    csr = generate("power_law", rows=96, nnz=700, weighted=True, seed=4)
    assert csr.values is not None
    found = torch_bsr(csr, csr.values, 16)
    torch.sparse_bsr_tensor(
        found.crow_indices(), found.col_indices(), found.values(), found.shape,
        check_invariants=True,
    )  # fmt: skip
    assert torch.equal(found.to_dense().double(), _dense(csr))


def test_torch_bsr_refuses_other_shapes() -> None:
    assert BASELINES["torch-bsr"].reason(_operands()) == "needs a shape divisible by 16"


def _overflowing() -> Operands:
    csr = generate("random", rows=40, cols=30, nnz=200, weighted=True, seed=3)
    assert csr.values is not None
    values = csr.values.clone()
    values[7] = 1e5  # Inf in float16
    values[100] = 6e4  # finite, but its products are not
    B = torch.randn(30, 6, generator=torch.Generator().manual_seed(0)).half()
    return Operands(csr.with_values(values), B, None, "spmm", "sum")


def test_an_infinity_is_right_where_the_type_overflows_and_wrong_elsewhere() -> None:
    operands = _overflowing()
    assert operands.csr.values is not None
    A = _dense(operands.csr.with_values(operands.csr.values.half().float()))
    exact = torch.zeros(40, 6, dtype=torch.float64)
    for row in range(40):  # entry by entry: a dense product would meet Inf with 0
        for column in range(30):
            if A[row, column] != 0:
                exact[row] += A[row, column] * operands.B[column].double()
    C = exact.half()
    assert not bool(torch.isfinite(C).all())
    assert checking.check_product(operands, C, uses_tf32=False)["worst"] <= 1
    for bad in (float("inf"), float("nan")):
        wrong = C.clone()
        finite = torch.isfinite(wrong).nonzero()[3]
        wrong[finite[0], finite[1]] = bad
        found = checking.check_product(operands, wrong, uses_tf32=False)
        assert found["worst"] == 1e30 and found["why"] == "elements that are not finite"
    wrong = torch.where(torch.isinf(C), -C, C)
    assert checking.check_product(operands, wrong, uses_tf32=False)["worst"] == 1e30


def test_a_row_that_is_not_finite_is_always_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "_CHECKED_ELEMENTS", 200)
    monkeypatch.setattr(checking, "_SAMPLE_ROWS", 4)
    monkeypatch.setattr(checking, "_FORCED_ROWS", 4)
    operands = _operands()
    C = (_dense(operands.csr) @ operands.B.double()).float()
    for row in range(0, C.shape[0], 37):
        wrong = C.clone()
        wrong[row, 0] = float("nan")
        assert checking.check_product(operands, wrong, uses_tf32=False)["worst"] == 1e30


def _wide() -> Operands:
    """A product of which neither all rows nor all columns are checked."""
    csr = generate("random", rows=200, cols=150, nnz=9000, weighted=True, seed=3)
    return Operands(csr, torch.randn(150, 5000).bfloat16(), None, "spmm", "sum")


def _exact(operands: Operands) -> Tensor:
    A = _dense(operands.csr).to(operands.dtype).double()
    return (A @ operands.B.double()).to(operands.result_dtype)


def test_a_wide_product_is_checked_on_columns_from_everywhere() -> None:
    operands = _wide()
    C = _exact(operands)
    found = checking.check_product(operands, C, uses_tf32=False)
    assert found["worst"] <= 1 and not found["full"]
    assert 256 <= found["columns_checked"] <= 264 and found["rows_checked"] > 100
    last = C.clone()
    last[:, -1] += 1
    assert checking.check_product(operands, last, uses_tf32=False)["worst"] > 1
    for tile in range(0, 5000, 625):  # any tile of columns
        wrong = C.clone()
        wrong[:, tile : tile + 625] += 1
        assert checking.check_product(operands, wrong, uses_tf32=False)["worst"] > 1


@pytest.mark.parametrize("transposed", [False, True])
def test_an_element_of_a_wide_product_that_is_not_finite_is_always_seen(transposed: bool) -> None:
    operands = _wide()
    C = _exact(operands)
    if transposed:
        C = C.T.contiguous().T
    C[17, 1234] = float("nan")
    assert "not finite" in checking.check_product(operands, C, uses_tf32=False)["why"]


def test_where_many_elements_are_not_finite_each_row_is_looked_at_where_it_is_not() -> None:
    operands = _wide()
    C = _exact(operands)
    C[100:, :300] = float("inf")
    C[3, 4321] = float("nan")  # its row is looked at first, its column lies behind many others
    strange = checking._strange(C)
    suspects = checking._suspects(operands, strange)
    columns = checking._column_sample(operands, strange, suspects)
    assert columns is not None and suspects[0] == 3 and 4321 in columns.tolist()


def test_narrow_products_are_checked_in_all_columns() -> None:
    operands = _operands()
    C = (_dense(operands.csr) @ operands.B.double()).float()
    found = checking.check_product(operands, C, uses_tf32=False)
    assert found["full"] and "columns_checked" not in found


def _in_fp8(n: int) -> Operands:
    csr = generate("random", rows=120, cols=150, nnz=6000, weighted=True, seed=3)
    X = torch.randn(n, 150, generator=torch.Generator().manual_seed(1))
    return Operands(csr, X.to(torch.float8_e4m3fn).T, None, "spmm", "sum")


@pytest.mark.parametrize("n", [9, 6000])
def test_a_product_in_fp8_is_held_against_its_rounded_operands(n: int) -> None:
    operands = _in_fp8(n)
    assert operands.csr.values is not None and operands.result_dtype is torch.bfloat16
    rounded = operands.csr.with_values(operands.csr.values.to(torch.float8_e4m3fn).float())
    C = (_dense(rounded) @ operands.B.float().double()).bfloat16()
    assert checking.check_product(operands, C, uses_tf32=False)["worst"] <= 1
    unrounded = (_dense(operands.csr) @ operands.B.float().double()).bfloat16()
    assert checking.check_product(operands, unrounded, uses_tf32=False)["worst"] > 1


def test_block_formats_take_the_blocks_in_which_weights_were_pruned() -> None:
    pruned = {"out_features": 256, "in_features": 192, "sparsity": 0.5}
    for block, expected in ((64, 64), (32, 32), (1, 16)):
        assert own_block(generate("pruned_weights", **pruned, block=block)) == expected


def test_a_linear_layer_is_refused_by_baselines_of_row_major_operands() -> None:
    operands = replace(_operands(), layout="linear")
    said = "takes row-major operands, not layout linear"
    assert BASELINES["torch-csr"].reason(operands) == said
    assert BASELINES["torch-dense"].reason(operands) is None
