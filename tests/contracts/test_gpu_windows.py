"""The window system where the contract's small matrices do not lead it: widths, cuts, long runs."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.core.device import capability
from sparsetile.engines.tiles import tile_runner
from sparsetile.kernels.wcsr import choose_window_tile, redo_windows_pays
from sparsetile.systems.wcsr import system as wcsr
from tests.contracts.cases import (
    assert_close,
    csr_of,
    error_bound,
    random_matrix,
    reference,
    tf32,
)
from tests.contracts.subjects import Subject


def _hopper() -> bool:
    return torch.cuda.is_available() and capability(0) == (9, 0)


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _hopper(), reason="no Hopper GPU here"),
]

TALL = Subject("wcsr", "tall")
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
TYPES = [(F32, F32), (F16, F16), (F16, F32), (BF16, BF16), (BF16, F32)]
WIDTHS = (7, 36, 64, 128, 200, 256, 264, 512)


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


def dense(rows: int, n: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(rows, n, device="cuda").to(dtype)


def pieces(plan: st.Plan) -> int:
    """Pieces of all windows that were cut."""
    schedule = plan.info["choices"]["schedule"]
    return int(re.search(r"windows in (\d+) pieces", schedule).group(1))


def cut(csr: st.CSR, n: int, **options) -> st.Plan:
    """A plan that has cut windows."""
    plan = TALL.plan(csr, n, **options)
    assert pieces(plan) > 1
    return plan


@pytest.mark.parametrize("dtype, out_dtype", TYPES, ids=str)
@pytest.mark.parametrize("pattern", [False, True], ids=["weighted", "pattern"])
def test_every_type_and_width_agrees_with_float64_within_rounding(dtype, out_dtype, pattern):
    csr = csr_of(random_matrix(200, 160, 0.1), pattern=pattern, dtype=dtype).to("cuda")
    for n in WIDTHS:
        B = dense(160, n, dtype)
        C = TALL.plan(csr, n, dtype=dtype).run(B, out_dtype=out_dtype)
        assert C.dtype is out_dtype
        assert_close(C, csr, B)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_small_whole_numbers_match_bit_for_bit_and_nothing_beside_c_is_written(dtype):
    """C is NaN before, and lies in a larger matrix of sevens."""
    csr = whole_numbers(random_matrix(200, 300, 0.1), dtype)
    for n in WIDTHS:
        B = zeros_and_ones(csr, n, dtype=dtype)
        plan, expected = TALL.plan(csr, n), reference(csr, B)
        assert torch.equal(plan.run(B, out_dtype=F32).cpu().double(), expected)
        around = torch.full((202, 520), 7.0, device="cuda", dtype=dtype)
        around[1:-1, :n] = float("nan")
        plan.run(B, out=around[1:-1, :n])
        assert torch.equal(around[1:-1, :n].cpu().double(), expected)
        around[1:-1, :n] = 7
        assert bool((around == 7).all())


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_orders_of_the_rows_change_nothing(dtype):
    csr = whole_numbers(random_matrix(333, 200, 0.1), dtype)
    for n in (64, 264):
        B = zeros_and_ones(csr, n, dtype=dtype)
        expected = reference(csr, B)
        for order in (torch.randperm(333, device="cuda"), "rcm"):
            C = TALL.plan(csr, n, reorder=order) @ B
            assert torch.equal(C.cpu().double(), expected)


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("n", [36, 128, 512])
def test_cut_windows_give_the_same_bits_a_hundred_times(dtype, n):
    csr = csr_of(random_matrix(100, 9000, 0.1), dtype=dtype).to("cuda")
    plan, B = cut(csr, n), dense(9000, n, dtype)
    first = plan @ B
    assert_close(first, csr, B)
    assert all(torch.equal(plan @ B, first) for _ in range(100))


def with_long_window(rows: int, columns: int, row: int) -> sp.csr_array:
    """Short windows, and one that has every column."""
    matrix = random_matrix(rows, columns, 0.0001, seed=3).tolil()
    matrix[row, :] = 1.0
    return sp.csr_array(matrix)


def pieces_of_the_longest(plan: st.Plan) -> int:
    return int(plan._variant.built.tensors["cuts"][:, 2].max())


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_one_very_long_window_beside_short_ones_is_in_more_than_a_hundred_pieces(dtype):
    csr = whole_numbers(with_long_window(300, 60_000, 70), dtype)
    for n in (64, 256, 7):
        plan, B = cut(csr, n), zeros_and_ones(csr, n, dtype=dtype)
        assert pieces_of_the_longest(plan) > 100
        first = plan.run(B, out_dtype=F32)
        assert torch.equal(first.cpu().double(), reference(csr, B))
        assert all(torch.equal(plan.run(B, out_dtype=F32), first) for _ in range(10))


def test_a_matrix_of_one_window_in_more_than_a_hundred_pieces():
    csr = whole_numbers(random_matrix(50, 40_000, 0.02))
    for n in (128, 200):
        plan, B = cut(csr, n), zeros_and_ones(csr, n)
        assert pieces_of_the_longest(plan) == pieces(plan) > 100
        bias = torch.arange(n, device="cuda") / 4 - 9
        C = plan.run(B, alpha=0.5, bias=bias, relu=True)
        expected = torch.relu(reference(csr, B) / 2 + bias.cpu().double())
        assert torch.equal(C.cpu().double(), expected)


@pytest.mark.parametrize("most", [0.5, 1, 2.5, 100])
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_batches_whose_partial_sums_exceed_the_scratch_go_in_pieces(monkeypatch, dtype, most):
    """``most`` matrices fit the scratch; those that do not go one after the other."""
    csr = whole_numbers(random_matrix(40, 9000, 0.02), dtype)
    for n in (64, 264, 7):
        plan, B = cut(csr, n), zeros_and_ones(csr, 5, n, dtype=dtype)
        slabs = choose_window_tile(64, n).slabs(n)
        of_a_matrix = slabs * pieces(plan) * 64 * choose_window_tile(64, n).columns * 4
        monkeypatch.setattr(tile_runner, "MAX_SCRATCH", int(most * of_a_matrix))
        before = torch.randint(-3, 4, (5, 40, n), device="cuda").to(dtype)
        C = plan.run(B, out=before.clone(), beta=2.0)
        for one, mine, old in zip(C, B, before, strict=True):
            expected = reference(csr, mine) + 2 * old.cpu().double()
            assert torch.equal(one.cpu(), expected.to(dtype))


def test_products_with_cut_windows_do_not_overwrite_each_others_partial_sums():
    """They share the stream's scratch, and launches overlap."""
    plans = []
    for seed, columns in enumerate((9000, 4000, 20_000)):
        csr = whole_numbers(random_matrix(90, columns, 0.05, seed=seed))
        plans.append((cut(csr, 256), csr, [zeros_and_ones(csr, 256) for _ in range(6)]))
    results = [[plan @ B for plan, _, operands in plans for B in operands] for _ in range(3)]
    for found, again, third in zip(*results, strict=True):
        assert torch.equal(found, again) and torch.equal(found, third)
    expected = [reference(csr, B) for _, csr, operands in plans for B in operands]
    for C, wanted in zip(results[0], expected, strict=True):
        assert torch.equal(C.cpu().double(), wanted)


@pytest.mark.parametrize("density", [0.0, 0.0001])
def test_many_empty_windows_give_zeros_between_the_others(density):
    csr = whole_numbers(random_matrix(20_000, 300, density), F16)
    for n in (128, 264):
        B = zeros_and_ones(csr, n, dtype=F16)
        out = torch.full((20_000, n), float("nan"), device="cuda", dtype=F16)
        TALL.plan(csr, n).run(B, out=out)
        assert torch.equal(out.cpu().double(), reference(csr, B))


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_windows_are_dealt_out_where_B_exceeds_the_cache(monkeypatch, dtype):
    monkeypatch.setattr(wcsr, "l2_bytes", lambda device: 0)
    csr = whole_numbers(random_matrix(20_000, 500, 0.004), dtype)
    for n in (64, 264):
        plan, B = TALL.plan(csr, n), zeros_and_ones(csr, n, dtype=dtype)
        C = plan @ B
        assert torch.equal(C.cpu().double(), reference(csr, B))
        assert all(torch.equal(plan @ B, C) for _ in range(10))


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_very_many_short_windows_are_right_every_time(dtype):
    """Stages of A are used again at once: what is read there must not be written too early."""
    rows = 129_000
    place = np.arange(rows).repeat(3)
    column = np.random.default_rng(7).integers(-90, 91, place.size) + place
    inside = (column >= 0) & (column < rows)
    matrix = sp.csr_array((np.ones(inside.sum()), (place[inside], column[inside])), (rows, rows))
    csr = whole_numbers(matrix, dtype)
    B = zeros_and_ones(csr, 512, dtype=dtype)
    expected = st.plan(csr, 512, system="csr") @ B
    plan, out = TALL.plan(csr, 512), torch.empty_like(expected)
    for _ in range(60):
        out.fill_(float("nan"))
        plan.run(B, out=out)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype, out_dtype", [(F32, F32), (F16, F16), (BF16, F32)], ids=str)
@pytest.mark.parametrize("shape", [(450, 300), (40, 9000)], ids=["whole", "cut"])
def test_the_epilogue_reaches_every_element(dtype, out_dtype, shape):
    csr = whole_numbers(random_matrix(*shape, 0.05), dtype)
    order = torch.randperm(shape[0], device="cuda")
    for n in (256, 36, 7):
        plan = TALL.plan(csr, n, reorder=order)
        B = zeros_and_ones(csr, n, dtype=dtype)
        bias, plain = torch.arange(n, device="cuda") / 4 - 9, reference(csr, B)
        C = plan.run(B, alpha=0.5, bias=bias, relu=True, out_dtype=out_dtype)
        expected = torch.relu(plain / 2 + bias.cpu().double())
        assert torch.equal(C.cpu(), expected.to(out_dtype))
        before = torch.randint(-3, 4, (shape[0], n), device="cuda").to(dtype)
        C = plan.run(B, out=before.clone(), alpha=0.5, beta=2.0)
        expected = plain / 2 + 2 * before.cpu().double()
        assert torch.equal(C.cpu(), expected.to(dtype))
        mean = plan.run(B, reduce="mean", out_dtype=out_dtype).cpu().double()
        lengths = csr.row_lengths().cpu().clamp(min=1).unsqueeze(1)
        assert torch.allclose(mean, plain / lengths, rtol=torch.finfo(out_dtype).eps, atol=1e-7)


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("shape", [(200, 300), (40, 9000)], ids=["whole", "cut"])
def test_a_batch_is_multiplied_matrix_by_matrix(dtype, shape):
    csr = whole_numbers(random_matrix(*shape, 0.02), dtype)
    for n in (64, 264, 7):
        B = zeros_and_ones(csr, 3, n, dtype=dtype)
        C = TALL.plan(csr, n) @ B
        for one, mine in zip(C, B, strict=True):
            assert torch.equal(one.cpu().double(), reference(csr, mine))


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("shape", [(301, 90), (40, 9000)], ids=["whole", "cut"])
def test_non_finite_values_of_B_reach_only_rows_that_reference_them(dtype, shape):
    csr = csr_of(random_matrix(*shape, 0.08), dtype=dtype).to("cuda")
    for n in (64, 264):
        B = dense(shape[1], n, dtype)
        B[0], B[17, 5], B[80, 39] = float("nan"), float("inf"), -float("inf")
        expected = reference(csr, B)
        C = (TALL.plan(csr, n) @ B).cpu().double()
        assert torch.equal(C.isnan(), expected.isnan())
        assert torch.equal(C.isinf(), expected.isinf())
        assert torch.equal(C[C.isinf()], expected[expected.isinf()])
        finite = expected.isfinite()
        bound = error_bound(csr, B.nan_to_num(nan=0, posinf=0, neginf=0), expected)
        assert bool(((C - expected).abs() <= bound)[finite].all())


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_whole_windows_are_computed_again_the_same_way_every_time(dtype):
    """As many windows as SMs, of equal length: a thread block takes each of them as a whole."""
    csr, n = whole_numbers(random_matrix(9000, 800, 0.05), dtype), 520
    plan, sms = cut(csr, n), torch.cuda.get_device_properties(0).multi_processor_count
    share = 141 * 100 * 3 / sms
    assert redo_windows_pays(dtype, choose_window_tile(64, n), share, 100)
    B = zeros_and_ones(csr, n, dtype=dtype)
    B[5], B[300:306], B[700, 519], B[701, 40] = float("inf"), float("nan"), float("nan"), -torch.inf
    expected = reference(csr, B)
    first = plan @ B
    assert torch.equal(first.cpu().double().nan_to_num(nan=7), expected.nan_to_num(nan=7))
    assert torch.equal(first.cpu().isnan(), expected.isnan())
    for _ in range(20):
        assert torch.equal((plan @ B).nan_to_num(nan=7), first.nan_to_num(nan=7))


def test_rows_of_any_alignment_and_stride_are_taken():
    csr = whole_numbers(random_matrix(200, 300, 0.1))
    B = zeros_and_ones(csr, 64)
    wide = torch.full((300, 69), float("nan"), device="cuda")
    wide[:, 2:66] = B
    flat = torch.full((300 * 64 + 1,), float("nan"), device="cuda")
    flat[1:] = B.flatten()
    plan, expected = TALL.plan(csr, 64), reference(csr, B)
    for operand in (wide[:, 2:66], flat[1:].view(300, 64), B.t().contiguous().t()):
        assert torch.equal((plan @ operand).cpu().double(), expected)
    one_row = torch.ones(1, 64, device="cuda").expand(300, 64)
    assert torch.equal((plan @ one_row).cpu().double(), reference(csr, one_row))


def test_a_captured_graph_replays_with_new_input_and_new_values():
    csr = csr_of(random_matrix(640, 512, 0.1)).to("cuda")
    plan, B = TALL.plan(csr, 128), dense(512, 128)
    plan @ B
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        C = plan @ B
    for _ in range(3):
        B.copy_(dense(512, 128))
        fresh = torch.randn(csr.nnz, device="cuda")
        plan.update_values(fresh)
        graph.replay()
        assert_close(C, csr.with_values(fresh), B)


def test_products_one_after_the_other_do_not_disturb_each_other():
    """Launches overlap: the next begins while the last blocks of this one still store."""
    csr = whole_numbers(random_matrix(3000, 700, 0.02))
    plan = TALL.plan(csr, 256)
    operands = [zeros_and_ones(csr, 256) for _ in range(20)]
    results = [plan @ B for B in operands]
    for B, C in zip(operands[::6], results[::6], strict=True):
        assert torch.equal(C.cpu().double(), reference(csr, B))
    assert all(torch.equal(plan @ B, C) for B, C in zip(operands, results, strict=True))
