"""The error bound: what right arithmetic costs stays inside, what a wrong entry costs does not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sparsetile.check.bound import error_bound

F32, F64 = torch.float32, torch.float64


def truncated(exact: Tensor) -> Tensor:
    """float64 cut to float32 towards zero, as Tensor Cores add."""
    near = exact.to(F32)
    over = near.double().abs() > exact.abs()
    return torch.where(over, torch.nextafter(near, torch.zeros_like(near)), near)


def chain(terms: Tensor, *, truncate: bool) -> Tensor:
    """Sums over the first dimension in float32, one term after the other."""
    total = torch.zeros(terms.shape[1:])
    for term in terms:
        exact = total.double() + term.double()
        total = truncated(exact) if truncate else exact.to(F32)
    return total


def ratio(terms: Tensor, found: Tensor, **options: bool) -> float:
    """Largest error of float32 sums, in units of the bound."""
    exact, magnitude = terms.double().sum(0), terms.double().abs().sum(0)
    bound = error_bound(exact, magnitude, terms.shape[0], dtype=F32, **options)
    return float(((found.double() - exact).abs() / bound).max())


@pytest.mark.parametrize("truncate", [False, True], ids=["to nearest", "truncated"])
@pytest.mark.parametrize("length", [1, 30, 3000])
def test_sums_of_random_signs_stay_inside_in_any_rounding(length: int, truncate: bool):
    terms = torch.randn(length, 2000)
    assert ratio(terms, chain(terms, truncate=truncate)) < 0.5


@pytest.mark.parametrize("length", [30, 3000])
def test_sums_of_one_sign_stay_inside_where_sums_round_to_nearest(length: int):
    terms = torch.rand(length, 2000)
    assert ratio(terms, chain(terms, truncate=False)) < 0.5


def test_truncated_sums_of_one_sign_need_the_worst_case():
    terms = torch.full((3000, 4), 0.7)
    found = chain(terms, truncate=True)
    assert ratio(terms, found) > 1
    assert ratio(terms, found, worst_case=True) <= 1


@pytest.mark.parametrize("length", [2, 100, 20_000])
def test_a_dropped_or_doubled_entry_of_average_size_breaks_the_bound(length: int):
    terms = torch.rand(length, 50) + 0.5
    terms[length // 2] = terms.mean()
    for missing in (0.0, 2.0):
        wrong = terms.clone()
        wrong[length // 2] *= missing
        assert ratio(terms, wrong.double().sum(0).float()) > 1


def test_tf32_adds_the_rounding_of_both_operands_to_float32_alone():
    one = torch.ones(1, dtype=F64)

    def at(dtype: torch.dtype, tf32: bool) -> float:
        return float(error_bound(one, one, 1, dtype=dtype, tf32=tf32))

    assert at(F32, True) - at(F32, False) == pytest.approx(2.0**-10 + 2.0**-20, rel=1e-6)
    worst_operands = (1 + 2.0**-11) ** 2 - 1
    assert at(F32, True) > worst_operands > at(F32, False)
    for dtype in (torch.float16, torch.bfloat16, F64):
        assert at(dtype, True) == at(dtype, False)


def test_fp8_pays_for_the_bits_that_tensor_cores_keep_of_its_sums():
    one = torch.ones(1, dtype=F64)
    eight = error_bound(one, one, 1, dtype=torch.float8_e4m3fn, out_dtype=F32)
    assert float(eight - error_bound(one, one, 1, dtype=F32)) == pytest.approx(2.0**-10, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, F32, F64], ids=str)
def test_the_rounding_of_the_result_is_within_the_bound_down_to_subnormals(dtype: torch.dtype):
    info = torch.finfo(dtype)
    low = math.log2(info.tiny) - 8
    exact = torch.exp2(torch.linspace(low, 10, 5000, dtype=F64)) * 1.000123
    found = exact.to(dtype).double()
    bound = error_bound(exact, torch.zeros_like(exact), 0, dtype=dtype)
    assert bool(((found - exact).abs() <= bound).all())
    # And it is no wider than that: half a step, give or take nothing.
    step = info.eps * torch.exp2(torch.floor(torch.log2(exact.clamp(min=info.tiny))))
    assert bool((bound <= 1.01 * 1.5 * step).all())


def test_a_wider_result_is_not_given_the_rounding_of_the_operands():
    one = torch.ones(1, dtype=F64)
    narrow = error_bound(one, one, 9, dtype=torch.float16)
    wide = error_bound(one, one, 9, dtype=torch.float16, out_dtype=F32)
    assert float(narrow) > 2.0**-11 > 100 * float(wide)


def test_products_flushed_to_zero_are_allowed_one_smallest_number_each():
    tiny = torch.finfo(F32).tiny
    exact = torch.full((1,), 5 * 0.9 * tiny, dtype=F64)
    assert float(error_bound(exact, exact, 5, dtype=F32)) > 5 * 0.9 * tiny
