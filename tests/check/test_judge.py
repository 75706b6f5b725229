"""The judge of products: what it lets pass, what it catches, what it looks at of large ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsetile.check import judge, reference
from sparsetile.check.bound import error_bound
from sparsetile.check.judge import INFINITE, check_product, check_sddmm
from sparsetile.data.generators import generate, one_dense_row, random
from sparsetile.intake.csr import CSR, FP8
from tests.check.products import entries, exact, row_by_row

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
REDUCES = ("sum", "mean", "max", "min")


def case(dtype: torch.dtype = torch.float32, n: int = 24, weighted: bool = True):
    csr = random(90, 70, nnz=900, weighted=weighted, seed=3)
    if csr.values is not None:
        csr = csr.with_values(csr.values.to(dtype))
    generator = torch.Generator().manual_seed(5)
    return csr, torch.randn(70, n, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("worst_case", [False, True])
@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_rounded_exact_product_passes(dtype: torch.dtype, reduce: str, worst_case: bool):
    csr, B = case(dtype)
    C = exact(csr, B, reduce).to(dtype)
    verdict = check_product(csr, B, C, reduce=reduce, worst_case=worst_case)
    assert verdict.ok and verdict.full and verdict.coverage == "all rows"


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_element_beyond_its_bound_is_caught(dtype: torch.dtype, reduce: str):
    csr, B = case(dtype)
    result, magnitude = reference.reference(csr, B, reduce)
    terms = 1 if reduce in ("max", "min") else csr.row_lengths().unsqueeze(1)
    bound = error_bound(result, magnitude, terms, dtype=dtype)
    C = result.clone()
    C[7, 3] += 1.5 * float(bound[7, 3])
    verdict = check_product(csr, B, C, reduce=reduce, out_dtype=dtype)
    assert not verdict.ok and verdict.worst == pytest.approx(1.5, rel=0.1)
    assert verdict.max_abs == pytest.approx(1.5 * float(bound[7, 3]), rel=0.1)


def test_a_missing_entry_of_a_very_long_row_is_caught():
    csr = one_dense_row(50, 40_000, background=2.0)
    B = torch.randn(40_000, 64, generator=torch.Generator().manual_seed(1))
    C = torch.zeros(50, 64, dtype=torch.float64)
    C.index_add_(0, csr.row_ids(), B.double()[csr.indices.long()])
    assert check_product(csr, B, C.float()).ok
    longest = int(csr.row_lengths().argmax())
    column = int(csr.indices[csr.indptr[longest] + 17_000])
    C[longest] -= B[column].double()
    assert not check_product(csr, B, C.float()).ok


def test_a_pattern_counts_each_entry_as_one():
    csr, B = case(weighted=False)
    assert check_product(csr, B, exact(csr, B).float()).ok
    assert not check_product(csr, B, 2 * exact(csr, B).float()).ok


def test_tf32_rounding_passes_only_where_tf32_is_used():
    csr, B = case()
    rounded = (B.view(torch.int32) & ~0x1FFF).view(torch.float32)
    C = exact(csr, rounded).float()
    assert check_product(csr, B, C, tf32=True).ok
    assert not check_product(csr, B, C).ok


def test_a_wrong_shape_is_named():
    csr, B = case()
    verdict = check_product(csr, B, torch.zeros(89, 24))
    assert verdict.worst == INFINITE and not verdict.ok and not verdict.full
    assert verdict.why == "shape (89, 24) instead of (90, 24)"
    assert verdict.as_record() == {
        "worst": 1e30, "max_abs": 1e30, "rows_checked": 0, "full": False, "why": verdict.why,
    }  # fmt: skip


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_element_that_should_be_finite_is_wrong(bad: float):
    csr, B = case()
    C = exact(csr, B).float()
    C[0, 0] = bad
    verdict = check_product(csr, B, C)
    assert verdict.worst == INFINITE and verdict.why == "elements that are not finite"


@pytest.mark.parametrize("worst_case", [False, True])
def test_non_finite_elements_that_csr_arithmetic_gives_are_right_and_others_wrong(worst_case):
    csr, B = case()
    B[int(csr.indices[0]), 0] = float("inf")
    B[int(csr.indices[400]), 5] = float("nan")
    C = row_by_row(csr, B).float()
    assert bool(C.isinf().any()) and bool(C.isnan().any())
    assert check_product(csr, B, C, worst_case=worst_case).ok
    for wrong in (
        torch.where(C.isinf(), -C, C),
        torch.where(C.isinf(), torch.nan, C),
        torch.where(C.isnan(), 0.0, C),
        torch.where(C.isinf(), 0.0, C),
    ):
        assert not check_product(csr, B, wrong, worst_case=worst_case).ok


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_an_infinity_that_an_extremum_does_not_take_hides_no_error(reduce: str):
    csr, B = case()
    B[int(csr.indices[0])] = -float("inf") if reduce == "max" else float("inf")
    csr = csr.with_values(torch.ones(csr.nnz))
    terms = entries(csr).unsqueeze(2) * B.double().unsqueeze(0)
    never = -torch.inf if reduce == "max" else torch.inf
    terms = terms.masked_fill((entries(csr) == 0).unsqueeze(2), never)
    C = (terms.amax(1) if reduce == "max" else terms.amin(1)).float()
    C[csr.row_lengths() == 0] = 0
    assert check_product(csr, B, C, reduce=reduce).ok
    touched = int(csr.row_ids()[0])
    assert bool(C[touched].isfinite().all())
    C[touched, 2] += 0.01
    assert not check_product(csr, B, C, reduce=reduce).ok


def test_a_result_too_large_for_the_type_may_overflow_with_its_sign():
    csr, B = case(torch.float16)
    assert csr.values is not None
    csr = csr.with_values(csr.values * 20_000)
    C = exact(csr, B).to(torch.float16)
    assert bool(C.isinf().any())
    assert check_product(csr, B, C).ok
    assert not check_product(csr, B, -C).ok
    assert not check_product(csr, B, torch.where(C.isinf(), C.new_zeros(()), C)).ok


def test_values_that_overflow_the_type_of_B_make_their_rows_infinite():
    csr = random(40, 30, nnz=200, weighted=True, seed=3)
    assert csr.values is not None
    values = csr.values.clone()
    values[7] = 1e5  # Inf in float16
    csr = csr.with_values(values)
    B = torch.randn(30, 6, generator=torch.Generator().manual_seed(0)).half()
    C = row_by_row(csr.with_values(values.half().float()), B).half()
    assert bool(C.isinf().any()) and check_product(csr, B, C).ok
    finite = C.isfinite().nonzero()[3]
    C[finite[0], finite[1]] = float("inf")
    assert check_product(csr, B, C).worst == INFINITE


@pytest.mark.parametrize("n", [9, 6000])
def test_a_product_in_fp8_is_held_against_its_rounded_operands(n: int):
    csr = random(120, 150, nnz=6000, weighted=True, seed=3)
    assert csr.values is not None
    B = torch.randn(n, 150, generator=torch.Generator().manual_seed(1)).to(FP8).T
    rounded = csr.with_values(csr.values.to(FP8).float())
    assert check_product(csr, B, exact(rounded, B.float()).bfloat16()).ok
    assert not check_product(csr, B, exact(csr, B.float()).bfloat16()).ok


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (5, 5)])
@pytest.mark.parametrize("reduce", REDUCES)
def test_empty_matrices_are_checked_too(shape: tuple[int, int], reduce: str):
    csr = random(*shape, nnz=0)
    B, C = torch.randn(shape[1], 3), torch.zeros(shape[0], 3)
    assert check_product(csr, B, C, reduce=reduce).ok
    if shape[0]:
        assert not check_product(csr, B, C + 1, reduce=reduce).ok


def test_a_product_without_columns_is_right():
    csr, _ = case()
    verdict = check_product(csr, torch.zeros(70, 0), torch.zeros(90, 0))
    assert verdict.ok and verdict.worst == 0


# -- SDDMM


def test_sddmm_is_checked_entry_by_entry():
    csr, B = case()
    G = torch.randn(90, 24, generator=torch.Generator().manual_seed(6))
    found = (G.double() @ B.double().T)[csr.row_ids(), csr.indices.long()].float()
    verdict = check_sddmm(csr, G, B, found)
    assert verdict.ok and verdict.full
    for place in (0, 457, csr.nnz - 1):
        wrong = found.clone()
        wrong[place] += 0.01
        assert not check_sddmm(csr, G, B, wrong).ok
    assert check_sddmm(csr, G, B, found[:-1]).why == "shape (899,) instead of (900,)"


def test_an_entry_of_sddmm_that_is_not_finite_is_always_seen():
    csr, B, _ = large()
    G = torch.randn(300, 9, generator=torch.Generator().manual_seed(6))
    found = (G.double() @ B.double().T)[csr.row_ids(), csr.indices.long()].float()
    whole = check_sddmm(csr, G, B, found, limit=100)
    assert whole.ok and whole.rows_checked < 90
    for place in range(0, csr.nnz, 97):
        wrong = found.clone()
        wrong[place] = float("nan")
        assert check_sddmm(csr, G, B, wrong, limit=100).worst == INFINITE


# -- samples of large products


def large() -> tuple[CSR, Tensor, Tensor]:
    csr = generate("power_law", rows=300, nnz=3000, weighted=True, seed=3)
    B = torch.randn(300, 9, generator=torch.Generator().manual_seed(2))
    return csr, B, exact(csr, B).float()


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_a_large_product_is_sampled_and_says_so(reduce: str):
    csr, B, _ = large()
    verdict = check_product(csr, B, exact(csr, B, reduce).float(), reduce=reduce, limit=5000)
    assert verdict.ok and not verdict.full
    assert 64 < verdict.rows_checked < 90, "the last ones, the longest, and some of the others"
    assert verdict.coverage == f"{verdict.rows_checked} of 300 rows"
    assert set(verdict.as_record()) == {"worst", "max_abs", "rows_checked", "full"}


def test_everything_is_checked_without_a_limit():
    csr, B, C = large()
    C[137, 4] += 1
    verdict = check_product(csr, B, C, limit=None)
    assert verdict.rows_checked == 300 and not verdict.ok


@pytest.mark.parametrize("row", ["longest", "last"])
def test_a_sample_always_holds_the_longest_and_the_last_row(row: str):
    csr, B, C = large()
    C[299 if row == "last" else int(csr.row_lengths().argmax())] += 1
    for seed in range(5):
        assert not check_product(csr, B, C, limit=1, seed=seed).ok


def test_a_row_that_is_not_finite_is_always_looked_at():
    csr, B, C = large()
    assert check_product(csr, B, C, limit=200).rows_checked < 90
    for row in range(0, 300, 37):
        wrong = C.clone()
        wrong[row, 0] = float("nan")
        assert check_product(csr, B, wrong, limit=200).worst == INFINITE


def wide() -> tuple[CSR, Tensor, Tensor]:
    """A product of which neither all rows nor all columns are checked."""
    csr = random(200, 150, nnz=9000, weighted=True, seed=3)
    assert csr.values is not None
    csr = csr.with_values(csr.values.bfloat16())
    B = torch.randn(150, 5000, generator=torch.Generator().manual_seed(4)).bfloat16()
    return csr, B, exact(csr, B).bfloat16()


def test_a_wide_product_is_checked_on_columns_from_everywhere():
    csr, B, C = wide()
    verdict = check_product(csr, B, C)
    assert verdict.ok and not verdict.full
    assert verdict.columns_checked is not None and 256 <= verdict.columns_checked <= 264
    assert verdict.rows_checked > 100
    assert verdict.as_record()["columns_checked"] == verdict.columns_checked
    assert verdict.coverage.endswith(f"{verdict.columns_checked} columns")
    last = C.clone()
    last[:, -1] += 1
    assert not check_product(csr, B, last).ok
    for tile in range(0, 5000, 625):  # any tile of columns
        wrong = C.clone()
        wrong[:, tile : tile + 625] += 1
        assert not check_product(csr, B, wrong).ok


@pytest.mark.parametrize("transposed", [False, True])
def test_an_element_of_a_wide_product_that_is_not_finite_is_always_seen(transposed: bool):
    csr, B, C = wide()
    if transposed:
        C = C.T.contiguous().T
    C[17, 1234] = float("nan")
    assert "not finite" in check_product(csr, B, C).why


def test_where_many_elements_are_not_finite_each_row_is_looked_at_where_it_is_not():
    csr, _, C = wide()
    C[100:, :300] = float("inf")
    C[3, 4321] = float("nan")  # its row is looked at first, its column lies behind many others
    strange = judge._not_finite(C)
    suspects = judge._suspects(strange, strange.device)
    columns = judge._column_sample(csr, strange, suspects, 5000, judge.CHECKED_ELEMENTS, 0)
    assert columns is not None and suspects[0] == 3 and 4321 in columns.tolist()


def test_what_is_sampled_stays_on_the_product_s_device():
    """A sample joins these rows with rows chosen on the device."""
    none = judge._suspects(None, torch.device("meta"))
    assert none.device.type == "meta" and none.shape == (0,)
