"""Windows of the hybrid systems that warps share and that are cut, and groups that are added by
atomics: small matrices have none or few."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

import sparsetile as st
from tests.contracts.cases import assert_close, csr_of, error_bound, random_matrix, reference, tf32
from tests.contracts.subjects import Subject

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]

SUBJECTS = [
    Subject("rsh", "tiles"), Subject("brp", "2x2"), Subject("brp", "direct"),
    Subject("brp", "atomic"),
]  # fmt: skip
systems = pytest.mark.parametrize("system", SUBJECTS, ids=str)
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
# Sixteen rows have all columns: 90 tiles are shared, 1125 are cut whatever the type.
SHAPES = [(70, 720), (40, 9000)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=["shared", "cut"])


@pytest.fixture(autouse=True)
def _tf32() -> Iterator[None]:
    with tf32(True):
        yield


def matrix_of(shape: tuple[int, int]) -> sp.csr_array:
    """Long windows, and short ones behind them."""
    short = random_matrix(50, shape[1], 0.002, seed=2)
    return sp.csr_array(sp.vstack([random_matrix(*shape, 0.2), short]))


def whole_numbers(matrix: sp.csr_array, dtype: torch.dtype) -> st.CSR:
    """The matrix with entries from -3 to 3."""
    matrix.data = np.random.default_rng(6).integers(-3, 4, matrix.nnz).astype(float)
    return csr_of(matrix, dtype=dtype).to("cuda")


def zeros_and_ones(csr: st.CSR, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(0, 2, (*shape[:-1], csr.shape[1], shape[-1]), device="cuda").to(dtype)


def plan_of(system: Subject, csr: st.CSR, n: int, shape: tuple[int, int], **options) -> st.Plan:
    """A plan whose windows are shared, and cut where the shape says so; of atomics, in pieces."""
    plan = system.plan(csr, n, **options)
    schedule = plan.info["choices"]["schedule"]
    if not system.repeats:
        assert int(schedule.split()[0]) > 20 and "by atomics" in plan.info["choices"]["write-back"]
        return plan
    shared = int(re.search(r"(\d+) of them shared", schedule).group(1))
    partial = int(re.search(r"(\d+) partial sums", schedule).group(1))
    assert shared > 1
    if system != Subject("brp", "direct"):  # whose groups of one entry a column are more tiles
        assert (partial > 0) == (shape == SHAPES[1])
    return plan


@systems
@shapes
@pytest.mark.parametrize("dtype, out_dtype", [(F32, F32), (F16, F32), (F16, F16), (BF16, BF16)])
def test_small_whole_numbers_match_bit_for_bit(system, shape, dtype, out_dtype):
    csr = whole_numbers(matrix_of(shape), dtype)
    for n in (7, 32, 64, 128, 200, 512):
        B = zeros_and_ones(csr, n, dtype=dtype)
        C = plan_of(system, csr, n, shape).run(B, out_dtype=out_dtype)
        assert torch.equal(C.cpu(), reference(csr, B).to(out_dtype))


@systems
@shapes
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_the_same_bits_come_fifty_times(system, shape, dtype):
    if not system.repeats:
        pytest.skip(f"{system} does not promise reproducible bits")
    csr = csr_of(matrix_of(shape), dtype=dtype).to("cuda")
    B = torch.randn(shape[1], 128, device="cuda").to(dtype)
    plan = plan_of(system, csr, 128, shape)
    first = plan @ B
    assert_close(first, csr, B)
    assert all(torch.equal(plan @ B, first) for _ in range(50))


@systems
@shapes
@pytest.mark.parametrize("dtype, out_dtype", [(F32, F32), (F16, F16), (F16, F32)])
def test_the_epilogue_reaches_every_element(system, shape, dtype, out_dtype):
    csr = whole_numbers(matrix_of(shape), dtype)
    order = torch.randperm(csr.shape[0], device="cuda")
    for n in (7, 64, 256):
        plan, B = system.plan(csr, n, reorder=order), zeros_and_ones(csr, n, dtype=dtype)
        bias, plain = torch.arange(n, device="cuda") / 4 - 9, reference(csr, B)
        C = plan.run(B, alpha=0.5, bias=bias, relu=True, out_dtype=out_dtype)
        assert torch.equal(C.cpu(), torch.relu(plain / 2 + bias.cpu().double()).to(out_dtype))


@systems
@shapes
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_a_batch_is_multiplied_matrix_by_matrix(system, shape, dtype):
    csr = whole_numbers(matrix_of(shape), dtype)
    for n in (64, 264):
        B = zeros_and_ones(csr, 3, n, dtype=dtype)
        for one, mine in zip(plan_of(system, csr, n, shape) @ B, B, strict=True):
            assert torch.equal(one.cpu(), reference(csr, mine).to(dtype))


@systems
@shapes
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_non_finite_values_of_B_reach_only_rows_that_reference_them(system, shape, dtype):
    csr = csr_of(matrix_of(shape), dtype=dtype).to("cuda")
    for n in (64, 256):
        B = torch.randn(shape[1], n, device="cuda").to(dtype)
        B[0], B[17, 5], B[80, 39] = float("nan"), float("inf"), -float("inf")
        expected = reference(csr, B)
        C = (plan_of(system, csr, n, shape) @ B).cpu().double()
        assert torch.equal(C.isnan(), expected.isnan())
        assert torch.equal(C.isinf(), expected.isinf())
        finite = expected.isfinite()
        bound = error_bound(csr, B.nan_to_num(nan=0, posinf=0, neginf=0), expected)
        assert bool(((C - expected).abs() <= bound)[finite].all())


@systems
@shapes
@pytest.mark.parametrize("dtype, out_dtype", [(F32, F32), (F16, F32), (BF16, BF16)])
def test_a_captured_graph_adds_to_what_c_holds_each_time(system, shape, dtype, out_dtype):
    csr = whole_numbers(matrix_of(shape), dtype)
    plan, B = plan_of(system, csr, 64, shape), zeros_and_ones(csr, 64, dtype=dtype)
    out = torch.zeros((csr.shape[0], 64), dtype=dtype, device="cuda")
    plan.run(B, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(B, out=out, alpha=0.5, beta=-1.0)
        C = plan.run(B, relu=True, out_dtype=out_dtype)
    for start in (3.0, -2.0):
        out.fill_(start)
        C.fill_(float("nan"))
        graph.replay()
        plain = reference(csr, B)
        assert torch.equal(out.cpu(), (plain / 2 - start).to(dtype))
        assert torch.equal(C.cpu(), torch.relu(plain).to(out_dtype))
