"""The voltrix system where the contract's matrices do not lead it: widths, cuts, long runs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.core.device import capability
from sparsetile.systems.voltrix.system import LONG_WINDOW, TILE_ROWS
from tests.contracts.cases import assert_close, csr_of, random_matrix, reference, tf32
from tests.contracts.subjects import Subject


def _hopper() -> bool:
    return torch.cuda.is_available() and capability(0) == (9, 0)


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _hopper(), reason="no Hopper GPU here"),
]

VOLTRIX = Subject("voltrix", None)
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
TYPES = [(F32, F32), (F16, F16), (F16, F32), (BF16, BF16), (BF16, F32)]
# One of each kind of slabs, whole and not: 1 to 16 pieces of 128 bytes, several slabs.
WIDTHS = (7, 36, 64, 128, 200, 256, 520, 1032)
STEPS = (
    None, "sync", "tma", "bmat", "multitier", "bits", "contiguous", "greedy", "unbalanced",
    "windows of 32", "windows of 16",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _tf32() -> Iterator[None]:
    with tf32(True):
        yield


def whole_numbers(matrix: sp.csr_array, dtype: torch.dtype = F32) -> st.CSR:
    """The matrix with entries from -3 to 3."""
    matrix = sp.csr_array(matrix)
    matrix.data = np.random.default_rng(6).integers(-3, 4, matrix.nnz).astype(float)
    return csr_of(matrix, dtype=dtype).to("cuda")


def zeros_and_ones(csr: st.CSR, *shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randint(0, 2, (*shape[:-1], csr.shape[1], shape[-1]), device="cuda").to(dtype)


def slots(plan: st.Plan) -> int:
    """Partial sums of windows that were cut."""
    said = plan.info["choices"]["schedule"]
    return int(said.partition(" splits along N, ")[2].split()[0])


@pytest.mark.parametrize("dtype, out_dtype", TYPES, ids=str)
@pytest.mark.parametrize("pattern", [False, True], ids=["weighted", "pattern"])
def test_every_type_and_width_agrees_with_float64_within_rounding(dtype, out_dtype, pattern):
    csr = csr_of(random_matrix(200, 160, 0.1), pattern=pattern, dtype=dtype).to("cuda")
    for n in WIDTHS:
        B = torch.randn(160, n, device="cuda").to(dtype)
        C = VOLTRIX.plan(csr, n, dtype=dtype).run(B, out_dtype=out_dtype)
        assert C.dtype is out_dtype
        assert_close(C, csr, B)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_small_whole_numbers_match_bit_for_bit_and_nothing_beside_c_is_written(dtype, step):
    """C is NaN before, and lies in a larger matrix of sevens."""
    csr = whole_numbers(random_matrix(203, 300, 0.1), dtype)
    for n in WIDTHS:
        B = zeros_and_ones(csr, n, dtype=dtype)
        plan, expected = Subject("voltrix", step).plan(csr, n), reference(csr, B)
        assert torch.equal(plan.run(B, out_dtype=F32).cpu().double(), expected)
        around = torch.full((205, 1040), 7.0, device="cuda", dtype=dtype)
        around[1:-1, :n] = float("nan")
        plan.run(B, out=around[1:-1, :n])
        assert torch.equal(around[1:-1, :n].cpu().double(), expected)
        around[1:-1, :n] = 7
        assert bool((around == 7).all())


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("n", [32, 72, 512])
def test_cut_windows_give_the_same_bits_a_hundred_times(dtype, n):
    csr = csr_of(random_matrix(40, 20_000, 0.1), dtype=dtype).to("cuda")
    plan, B = VOLTRIX.plan(csr, n), torch.randn(20_000, n, device="cuda").to(dtype)
    assert slots(plan) > 1
    first = plan @ B
    assert_close(first, csr, B)
    assert all(torch.equal(plan @ B, first) for _ in range(100))


def test_batches_of_cut_windows_have_partial_sums_of_their_own():
    csr = whole_numbers(random_matrix(20, 20_000, 0.05))
    plan, B = VOLTRIX.plan(csr, 96), zeros_and_ones(csr, 3, 96)
    assert slots(plan) > 1
    expected = torch.stack([reference(csr, each) for each in B])
    assert torch.equal((plan @ B).cpu().double(), expected)


@pytest.mark.parametrize("planned", [64, 512])
def test_a_plan_serves_other_widths_than_its_own(planned):
    csr = whole_numbers(random_matrix(300, 200, 0.1))
    plan = VOLTRIX.plan(csr, planned)
    for n in WIDTHS:
        B = zeros_and_ones(csr, n)
        assert torch.equal((plan @ B).cpu().double(), reference(csr, B))


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("n", [128, 512])
def test_very_many_short_windows_are_right_every_time(dtype, n):
    """Each stage is filled and read thousands of times: a missing fence or wait shows here."""
    random = np.random.default_rng(3)
    rows, cols, count = 200_000, 30_000, 600_000
    matrix = sp.csr_array(
        (np.ones(count), (random.integers(0, rows, count), random.integers(0, cols, count))),
        (rows, cols),
    )
    csr = whole_numbers(matrix, dtype)
    B = zeros_and_ones(csr, n, dtype=dtype)
    expected = st.plan(csr, n, system="csr") @ B
    plan = VOLTRIX.plan(csr, n)
    assert all(torch.equal(plan @ B, expected) for _ in range(5))


@pytest.mark.parametrize("step", [None, "bits", "windows of 32"], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_nan_and_inf_reach_the_rows_that_refer_to_them_alone(dtype, step):
    csr = whole_numbers(random_matrix(500, 300, 0.02), dtype)
    B = zeros_and_ones(csr, 200, dtype=dtype)
    B[7, 3], B[100, 199], B[0] = float("nan"), float("inf"), float("-inf")
    C = Subject("voltrix", step).plan(csr, 200) @ B
    expected = st.plan(csr, 200, system="csr") @ B
    assert torch.equal(C.isnan(), expected.isnan())
    assert torch.equal(C.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


@pytest.mark.parametrize("step", [None, "bits"], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_long_windows_with_nan_and_inf_are_computed_by_a_second_launch(dtype, step):
    """Sums that are finite are in the units that are computed again, too."""
    matrix = random_matrix(40, 9000, 0.08)
    assert np.unique(matrix[:16].indices).size >= LONG_WINDOW * TILE_ROWS
    csr = whole_numbers(matrix, dtype)
    plan = Subject("voltrix", step).plan(csr, 200)
    for _ in range(2):
        B = zeros_and_ones(csr, 200, dtype=dtype)
        B[0], B[17, 5], B[80, 39] = float("nan"), float("inf"), float("-inf")
        C, expected = plan @ B, st.plan(csr, 200, system="csr") @ B
        assert bool(expected[:, 64:].isfinite().any()) and bool(expected.isnan().any())
        assert torch.equal(C.isnan(), expected.isnan())
        assert torch.equal(C.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


def test_a_second_launch_adds_to_c_only_in_the_pieces_that_it_computes_again():
    csr = whole_numbers(random_matrix(40, 9000, 0.08))
    plan, exact = VOLTRIX.plan(csr, 200), st.plan(csr, 200, system="csr")
    B = zeros_and_ones(csr, 200)
    B[17, 70], B[80, 71] = float("inf"), float("nan")  # one piece of 32 columns
    C = torch.randint(-3, 4, (40, 200), device="cuda").float()
    found, expected = C.clone(), C.clone()
    plan.run(B, out=found, beta=1)
    exact.run(B, out=expected, beta=1)
    assert torch.equal(found.isnan(), expected.isnan()) and bool(expected.isnan().any())
    assert torch.equal(found.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


def test_two_streams_do_not_share_partial_sums():
    csr = whole_numbers(random_matrix(20, 20_000, 0.05))
    plan = VOLTRIX.plan(csr, 64)
    assert slots(plan) > 1
    operands = [zeros_and_ones(csr, 64) for _ in range(2)]
    expected = [plan @ B for B in operands]
    streams = [torch.cuda.Stream() for _ in operands]
    torch.cuda.synchronize()
    found: list[Tensor] = []
    for _ in range(20):
        for stream, B in zip(streams, operands, strict=True):
            with torch.cuda.stream(stream):
                found.append(plan @ B)
    torch.cuda.synchronize()
    assert all(torch.equal(C, expected[i % 2]) for i, C in enumerate(found))


@pytest.mark.parametrize("step", ["windows of 32", "windows of 16", "bits", None], ids=str)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_a_plan_in_float32_takes_autocast_s_type_in_slabs_of_every_width(step, dtype):
    csr = whole_numbers(random_matrix(203, 300, 0.1))
    for n in (7, 128, 260, 512, 600):
        plan, B = Subject("voltrix", step).plan(csr, n), zeros_and_ones(csr, n)
        B[0, 0] = torch.inf
        with torch.autocast("cuda", dtype=dtype):
            C = plan @ B
        assert C.dtype is dtype
        assert_close(C, csr, B.to(dtype))
