"""What products in FP8 take and give."""

from __future__ import annotations

import pytest
import torch

import sparsetile as st
from sparsetile.engines.request import Request
from sparsetile.plan.operands import check_epilogue, check_fp8, check_out, in_plan_dtype
from sparsetile.reorder import Permutation
from sparsetile.systems import SYSTEMS
from tests.contracts.cases import csr_of, random_matrix

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
FP8 = torch.float8_e4m3fn
B = torch.zeros(20, 4, dtype=FP8)


@pytest.mark.parametrize("dtype", [None, BF16, F16, F32], ids=str)
def test_fp8_products_may_be_stored_in_wider_types(dtype):
    check_epilogue(B, None, "sum", None, True, dtype)
    if dtype is not None:
        check_out(30, B, torch.zeros(30, 4, dtype=dtype), "sum", False)


@pytest.mark.parametrize("dtype", [FP8, torch.float64], ids=str)
def test_fp8_products_are_not_stored_in_other_types(dtype):
    with pytest.raises(TypeError) as caught:
        check_epilogue(B, None, "sum", None, False, dtype)
    assert str(caught.value) == (
        "run: out_dtype must be one of torch.bfloat16, torch.float16, torch.float32, "
        f"got {dtype}. Cast the result."
    )
    with pytest.raises(ValueError, match=r"out must be torch\.bfloat16 of shape \(30, 4\)"):
        check_out(30, B, torch.zeros(30, 4, dtype=dtype), "sum", False)


@pytest.mark.parametrize(
    "reduce, needs_grad, got", [("max", False, "reduce=max"), ("sum", True, "gradients")]
)
def test_fp8_products_are_sums_without_gradients(reduce, needs_grad, got):
    with pytest.raises(ValueError) as caught:
        check_fp8(reduce, needs_grad)
    assert str(caught.value) == (
        "run: a float8 product must be a sum or mean without gradients, "
        f"got {got}. Make a plan in torch.bfloat16."
    )
    check_fp8("mean", False)


def test_a_cpu_has_no_system_for_fp8_and_every_reason_is_given():
    csr = csr_of(random_matrix(30, 20, 0.2), dtype=F16)
    with pytest.raises(st.UnsupportedError, match=r"cpu: takes .*, not float8_e4m3fn"):
        st.plan(csr, 4, dtype=FP8)


def test_the_exact_system_beside_an_fp8_plan_is_built_from_the_pattern():
    csr = csr_of(random_matrix(30, 20, 0.2), dtype=F16)
    request = Request(csr, 4, FP8, Permutation("identity", None))
    assert SYSTEMS["csr"].build(request).system == "csr"


def test_a_plan_of_several_systems_takes_autocast_s_type():
    class Several:
        shape, dtype, device = (2, 2), torch.float32, torch.device("cpu")

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert in_plan_dtype(Several(), torch.ones(2, 2), "run", "B").dtype is torch.bfloat16


@pytest.mark.parametrize(
    "operand, expected",
    [
        (torch.ones(2, 2, dtype=torch.int64), "spmm: B must be of type torch.float16, "),
        (torch.ones(2, 2, dtype=torch.complex32), "torch.complex128, got torch.complex32. Cast it"),
        (torch.ones(2, 2, device="meta"), "spmm: the device of B must be cpu or cuda, got meta."),
    ],
)
def test_one_call_refuses_operands_that_no_plan_takes(operand, expected):
    with pytest.raises((TypeError, ValueError)) as caught:
        st.spmm(torch.eye(2).to_sparse_csr(), operand)
    assert expected in str(caught.value)
