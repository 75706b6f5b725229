"""The float64 judge: what it lets pass, what it catches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparsetile.cli.reference import check_product, error_bound
from sparsetile.data.generators import one_dense_row, random
from sparsetile.intake.csr import CSR

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def case(dtype: torch.dtype, n: int = 24, weighted: bool = True) -> tuple[CSR, torch.Tensor]:
    csr = random(90, 70, nnz=900, weighted=weighted, seed=3)
    if csr.values is not None:
        csr = csr.with_values(csr.values.to(dtype))
    generator = torch.Generator().manual_seed(5)
    return csr, torch.randn(70, n, generator=generator, dtype=torch.float64).to(dtype)


def entries(csr: CSR) -> torch.Tensor:
    """A written out in float64."""
    values = torch.ones(csr.nnz) if csr.values is None else csr.values
    full = torch.zeros(csr.shape, dtype=torch.float64)
    full[csr.row_ids(), csr.indices.long()] = values.double()
    return full


def exact(csr: CSR, B: torch.Tensor, reduce: str) -> torch.Tensor:
    """The product in float64 by a way that shares nothing with the judge's."""
    full, B = entries(csr), B.double()
    if reduce in ("sum", "mean"):
        lengths = csr.row_lengths().clamp(min=1).unsqueeze(1)
        return full @ B / (lengths if reduce == "mean" else 1)
    terms = full.unsqueeze(2) * B.unsqueeze(0)
    missing = (full == 0).unsqueeze(2)
    worst = -torch.inf if reduce == "max" else torch.inf
    terms = terms.masked_fill(missing, worst)
    best = terms.amax(1) if reduce == "max" else terms.amin(1)
    return torch.where(csr.row_lengths().unsqueeze(1) == 0, torch.zeros_like(best), best)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rounded_exact_product_passes(dtype: torch.dtype, reduce: str):
    csr, B = case(dtype)
    verdict = check_product(csr, B, exact(csr, B, reduce).to(dtype), reduce=reduce)
    assert verdict.ok and verdict.coverage == "all rows"
    assert 0 < verdict.worst <= 0.5 or dtype is torch.float64


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_element_beyond_rounding_is_caught(dtype: torch.dtype, reduce: str):
    csr, B = case(dtype)
    C = exact(csr, B, reduce).to(dtype)
    scale = float((entries(csr).abs() @ B.double().abs())[7, 3])
    C[7, 3] += 1.5 * error_bound(dtype) * scale + 4 * torch.finfo(dtype).eps
    verdict = check_product(csr, B, C, reduce=reduce)
    assert not verdict.ok and verdict.worst > 1


def test_a_missing_entry_of_a_very_long_row_is_caught():
    csr = one_dense_row(50, 40_000, background=2.0)
    B = torch.randn(40_000, 4, generator=torch.Generator().manual_seed(1))
    C = torch.zeros(50, 4, dtype=torch.float64)
    C.index_add_(0, csr.row_ids(), B.double()[csr.indices.long()])
    assert check_product(csr, B, C.float()).ok
    longest = int(csr.row_lengths().argmax())
    column = int(csr.indices[csr.indptr[longest] + 17_000])
    C[longest] -= B[column].double()
    assert not check_product(csr, B, C.float()).ok


def test_a_pattern_counts_each_entry_as_one():
    csr, B = case(torch.float32, weighted=False)
    assert check_product(csr, B, exact(csr, B, "sum").float()).ok
    assert not check_product(csr, B, 2 * exact(csr, B, "sum").float()).ok


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_element_that_should_be_finite_is_wrong(bad: float):
    csr, B = case(torch.float32)
    C = exact(csr, B, "sum").float()
    C[0, 0] = bad
    verdict = check_product(csr, B, C)
    assert not verdict.ok and verdict.worst == float("inf")


def test_non_finite_elements_that_csr_arithmetic_gives_are_right_and_others_wrong():
    csr, B = case(torch.float32)
    B[int(csr.indices[0]), 0] = float("inf")
    C = torch.from_numpy(np.nan_to_num(exact(csr, B, "sum").numpy())).float()
    full = entries(csr)
    for row in range(csr.shape[0]):
        used = full[row] != 0
        C[row, 0] = (full[row][used] * B[used, 0].double()).sum().float()
    assert torch.isinf(C).any()
    assert check_product(csr, B, C).ok
    C[torch.isinf(C)] *= -1
    assert not check_product(csr, B, C).ok


def test_a_result_too_large_for_the_type_may_overflow_with_its_sign():
    csr, B = case(torch.float16)
    assert csr.values is not None
    csr = csr.with_values(csr.values * 20_000)
    C = exact(csr, B, "sum").to(torch.float16)
    assert torch.isinf(C).any()
    assert check_product(csr, B, C).ok
    assert not check_product(csr, B, -C).ok


def test_tf32_widens_the_bound_of_float32_alone_as_much_as_cut_inputs_need():
    assert error_bound(torch.float32, tf32=True) > 2 * 2.0**-10 > error_bound(torch.float32)


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_a_large_problem_is_sampled_and_says_so(reduce: str):
    csr, B = case(torch.float32)
    C = exact(csr, B, reduce).float()
    verdict = check_product(csr, B, C, reduce=reduce, limit=csr.nnz * B.shape[1] // 3)
    assert verdict.ok
    assert 10 < verdict.rows_checked < 45
    assert verdict.coverage == f"{verdict.rows_checked} of 90 rows"


def test_a_sample_always_holds_the_longest_row():
    csr, B = case(torch.float32)
    C = exact(csr, B, "sum").float()
    C[int(csr.row_lengths().argmax())] += 1
    verdict = check_product(csr, B, C, limit=1)
    assert verdict.rows_checked == 1 and not verdict.ok


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (5, 5)])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_empty_matrices_are_checked_too(shape: tuple[int, int], reduce: str):
    csr = random(*shape, nnz=0)
    B, C = torch.randn(shape[1], 3), torch.zeros(shape[0], 3)
    assert check_product(csr, B, C, reduce=reduce).ok
    if shape[0]:
        assert not check_product(csr, B, C + 1, reduce=reduce).ok
