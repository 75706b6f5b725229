"""Operators of arrays where they do not run as they are on the CPU: traced, and on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import sparsetile.functional as F

INDPTR = torch.tensor([0, 3, 3, 4, 7])
INDICES = torch.tensor([4, 0, 0, 2, 1, 4, 3])
VALUES = torch.tensor([1, -2, 3, 0.5, 2, -1, 4])
ROWS = torch.repeat_interleave(torch.arange(4), INDPTR.diff())
DENSE = torch.zeros(4, 5).index_put((ROWS, INDICES), VALUES, accumulate=True)
SHAPES = [(5,), (5, 1), (5, 3), (2, 5, 3), (2, 3, 5, 4)]


def operand(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_are_known_without_computing(shape):
    x, values = operand(*shape).requires_grad_(), VALUES.clone().requires_grad_()
    C = F.spmm(INDPTR, INDICES, values, x)
    grads = torch.autograd.grad(C.sum(), (x, values), create_graph=True)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x, values = (mode.from_tensor(each) for each in (x, values))
        found = F.spmm(INDPTR, INDICES, values, x)
        assert found.shape == C.shape and found.dtype is C.dtype
        for mine, real in zip(torch.autograd.grad(found.sum(), (x, values)), grads, strict=True):
            assert mine.shape == real.shape and mine.dtype is real.dtype
        if len(shape) > 1:
            assert F.sddmm(INDPTR, INDICES, found, x).shape == INDICES.shape


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_gpu_multiplies_arrays_of_any_batches(on_gpu, shape, reduce):
    x = operand(*shape)
    C = F.spmm(*map(on_gpu, (INDPTR, INDICES, VALUES, x)), reduce)
    counts = INDPTR.diff().clamp(min=1)
    expected = DENSE @ x
    if reduce == "mean":
        expected = expected / (counts if x.dim() == 1 else counts[:, None])
    torch.testing.assert_close(C, expected)


def test_operands_of_any_strides_reach_a_gpu_in_order(on_gpu):
    x = operand(2, 5, 6)
    for each in (x.mT.contiguous().mT, x[..., ::2], x[:, :, :1], torch.imag(x.to(torch.complex64))):
        values = torch.stack([VALUES, VALUES], 1)[:, 0]
        C = F.spmm(*map(on_gpu, (INDPTR, INDICES, values, each)))
        torch.testing.assert_close(C, DENSE @ each)


def test_what_a_gpu_found_wrong_is_raised_by_the_next_product(on_gpu, wrong_column):
    given = [on_gpu(each) for each in (INDPTR, INDICES, VALUES, operand(5, 3))]
    F.spmm(*given)
    wrong_column()
    with pytest.raises(ValueError, match=r"indices must be from 0 to 4 .*, got 9 at entry 3"):
        F.spmm(*given)
    torch.testing.assert_close(F.spmm(*given), DENSE @ operand(5, 3))


def test_a_gpu_multiplies_a_matrix_without_columns(on_gpu):
    given = torch.zeros(5, dtype=torch.int64), INDICES[:0], VALUES[:0], torch.zeros(0, 3)
    assert torch.equal(F.spmm(*map(on_gpu, given)), torch.zeros(4, 3))
