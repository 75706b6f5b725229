"""Products by torch's libraries hold float32 sums and the caller's types."""

from __future__ import annotations

import pytest
import torch

from sparsetile.engines.library import float32_product, without_autocast


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shapes", [((3, 5), (5, 4)), ((3, 5), (2, 5, 4)), ((3, 0), (0, 4))])
def test_16_bit_operands_give_the_float32_product(dtype, shapes):
    A, B = (torch.randn(shape).to(dtype) for shape in shapes)
    found = float32_product(A, B)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, (A.double() @ B.double()).float())


def test_autocast_is_off_inside_and_on_again_behind():
    A = torch.randn(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with without_autocast(A.device):
            assert (A @ A).dtype is torch.float32
        assert (A @ A).dtype is torch.bfloat16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shapes", [((64, 8192), (8192, 32)), ((64, 8192), (3, 8192, 32))], ids=str)
@pytest.mark.parametrize("reduced", [False, True])
def test_sums_on_a_gpu_are_float32_whatever_torch_allows(dtype, shapes, reduced):
    settings = torch.backends.cuda.matmul
    names = (
        "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    )  # fmt: skip
    before = [getattr(settings, name) for name in names]
    try:
        for name in names:
            setattr(settings, name, reduced)
        A, B = (torch.randn(shape, device="cuda").to(dtype) for shape in shapes)
        found, exact = float32_product(A, B), A.double() @ B.double()
        magnitude = A.double().abs() @ B.double().abs()
        assert bool(((found - exact).abs() <= 2**-20 * magnitude).all())
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(settings, name, value)
