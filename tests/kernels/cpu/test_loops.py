"""What the CPU kernels compute, element by element, against float64 and against small integers."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsetile.intake.csr import CSR
from sparsetile.kernels.cpu import api as cpu_api
from sparsetile.kernels.cpu import loops
from tests.kernels.cpu.chunks import row_chunks

# One vector register holds 16 float32; blocks are 1, 2, 4 and 8 of them: every path has a width.
WIDTHS = (1, 7, 16, 31, 32, 64, 100, 128, 129, 1000)
FLOATS = (torch.float32, torch.float64)
SCALARS = {torch.float32: np.float32, torch.float64: np.float64}


@pytest.fixture(autouse=True)
def many_threads(constants) -> Iterator[None]:
    """Small matrices must take the threaded path too."""
    constants(cpu_api, WORK_PER_THREAD=1)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def csr(dense: Tensor, pattern: bool = False) -> CSR:
    rows, columns = dense.nonzero(as_tuple=True)
    indptr = torch.searchsorted(rows, torch.arange(dense.shape[0] + 1))
    values = None if pattern else dense[rows, columns]
    return CSR(indptr, columns.to(torch.int32), values, (dense.shape[0], dense.shape[1]))


def csr_dense(A: CSR) -> Tensor:
    values = torch.ones(A.nnz) if A.values is None else A.values
    dense = torch.zeros(A.shape, dtype=torch.float64)
    dense[A.row_ids(), A.indices.long()] = values.double()
    return dense


def spmm(
    A: CSR,
    B: Tensor,
    alpha: float = 1.0,
    beta: float = 0.0,
    out: Tensor | None = None,
    mean: bool = False,
    chunks: int = 5,
) -> Tensor:
    if out is None:
        out = torch.full((A.shape[0], B.shape[1]), float("nan"), dtype=B.dtype)
    bounds = row_chunks(A.indptr, chunks)
    cpu_api.spmm_sum(A.indptr, A.indices, A.values, B, out, alpha, beta, bounds, mean)
    return out


def extremum(A: CSR, B: Tensor, maximum: bool) -> tuple[Tensor, Tensor]:
    out = torch.full((A.shape[0], B.shape[1]), float("nan"), dtype=B.dtype)
    arg = torch.full(out.shape, -7, dtype=torch.int32)
    bounds = row_chunks(A.indptr, 5)
    cpu_api.spmm_extremum(A.indptr, A.indices, A.values, B, out, arg, maximum, bounds)
    return out, arg


def sampled(A: CSR, G: Tensor, B: Tensor, chunks: int = 5) -> Tensor:
    out = torch.full((A.nnz,), float("nan"), dtype=B.dtype)
    cpu_api.sddmm(A.indptr, A.indices, G, B, out, row_chunks(A.indptr, chunks))
    return out


def random_dense(rows: int, columns: int, density: float, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return dense * (torch.rand(rows, columns, generator=generator) < density)


def one_dense_row() -> Tensor:
    dense = random_dense(60, 400, 0.005)
    dense[37] = random_dense(1, 400, 1.0, seed=1)
    return dense


def one_dense_column() -> Tensor:
    dense = random_dense(60, 400, 0.005)
    dense[:, 3] = 2.5
    return dense


PATTERNS: dict[str, Callable[[], Tensor]] = {
    "random": lambda: random_dense(61, 53, 0.15),
    "half_empty": lambda: random_dense(61, 53, 0.15) * (torch.arange(61) % 2)[:, None],
    "no_entries": lambda: torch.zeros(9, 4, dtype=torch.float64),
    "one_dense_row": one_dense_row,
    "one_dense_column": one_dense_column,
    "all_rows_equal": lambda: random_dense(1, 53, 0.3).expand(61, 53).contiguous(),
    "one_element": lambda: torch.full((1, 1), 3.0, dtype=torch.float64),
}


def reference_extremum(A: CSR, B: Tensor, maximum: bool) -> tuple[Tensor, Tensor]:
    """Entry by entry, in float64: max/min that keeps the first of equals and the first NaN."""
    out = torch.zeros(A.shape[0], B.shape[1], dtype=B.dtype)
    arg = torch.full(out.shape, -1, dtype=torch.int32)
    for i in range(A.shape[0]):
        start, end = int(A.indptr[i]), int(A.indptr[i + 1])
        if start == end:
            continue
        products = B[A.indices[start:end].long()]
        if A.values is not None:
            products = products * A.values[start:end, None]
        for j in range(B.shape[1]):
            column = products[:, j].tolist()
            best = 0
            for e, x in enumerate(column):
                y = column[best]
                if y == y and (x != x or (x > y if maximum else x < y)):
                    best = e
            out[i, j], arg[i, j] = column[best], best
    return out, arg


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_each_element_is_within_the_rounding_of_its_own_sum(name: str, dtype: torch.dtype) -> None:
    dense = PATTERNS[name]().to(dtype).double()
    A = csr(dense.to(dtype))
    # A sum of n products rounded one by one is off by at most n units in the last place of the
    # sum of their sizes (u is half an eps); the scaling by alpha adds one.
    allowed = (A.row_lengths().double() + 2) * torch.finfo(dtype).eps / 2
    for n in WIDTHS:
        B = torch.randn(A.shape[1], n, dtype=dtype, generator=torch.Generator().manual_seed(n))
        error = (spmm(A, B).double() - dense @ B.double()).abs()
        assert (error <= allowed[:, None] * (dense.abs() @ B.double().abs())).all()


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("pattern", [False, True])
def test_small_integers_come_out_exact(name: str, dtype: torch.dtype, pattern: bool) -> None:
    dense = (PATTERNS[name]() * 3).round().to(dtype)
    A = csr(dense, pattern)
    exact = (dense != 0).to(dtype) if pattern else dense
    for n in WIDTHS:
        B = torch.randint(-4, 5, (A.shape[1], n), generator=torch.Generator().manual_seed(n))
        expected = exact.double() @ B.double()
        assert torch.equal(spmm(A, B.to(dtype)).double(), expected)


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.integers(0, 40), inner=st.integers(1, 40), n=st.integers(0, 150),
    density=st.sampled_from([0.0, 0.05, 0.5, 1.0]), chunks=st.integers(1, 60),
    threads=st.integers(1, 5), pattern=st.booleans(), seed=st.integers(0, 1000),
)  # fmt: skip
def test_any_shape_chunking_and_thread_count_is_exact_on_integers(
    rows: int,
    inner: int,
    n: int,
    density: float,
    chunks: int,
    threads: int,
    pattern: bool,
    seed: int,
) -> None:
    torch.set_num_threads(threads)
    dense = (random_dense(rows, inner, density, seed) * 3).round().float()
    A = csr(dense, pattern)
    exact = (dense != 0).float() if pattern else dense
    B = torch.randint(-4, 5, (inner, n), generator=torch.Generator().manual_seed(seed)).float()
    C = spmm(A, B, chunks=chunks)
    assert torch.equal(C, exact @ B)
    products = C @ B.T
    assert torch.equal(sampled(A, C, B, chunks), products[A.row_ids(), A.indices.long()])


@pytest.mark.parametrize("shape", [(0, 5, 3), (5, 0, 3), (5, 5, 0), (0, 0, 0), (1, 1, 1)])
def test_empty_and_single_sizes_work(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    A = csr(torch.ones(m, k))
    B = torch.ones(k, n)
    assert torch.equal(spmm(A, B), torch.full((m, n), float(k)))
    out, arg = extremum(A, B, maximum=True)
    assert torch.equal(out, torch.full((m, n), float(k > 0)))
    assert out.shape == arg.shape
    assert torch.equal(sampled(A, torch.ones(m, n), B), torch.full((m * k,), float(n)))


@pytest.mark.parametrize("n", [7, 33])
def test_alpha_and_beta_scale_the_product_and_the_old_content(n: int) -> None:
    dense = (random_dense(30, 20, 0.3) * 3).round().float()
    B = torch.randint(-4, 5, (20, n)).float()
    old = torch.randint(-4, 5, (30, n)).float()
    C = spmm(csr(dense), B, alpha=0.5, beta=-2.0, out=old.clone())
    assert torch.equal(C, 0.5 * (dense @ B) - 2.0 * old)


def test_beta_zero_does_not_read_out() -> None:
    dense = (random_dense(30, 20, 0.3) * 3).round().float()
    B = torch.randint(-4, 5, (20, 33)).float()
    out = torch.full((30, 33), float("nan"))
    assert torch.equal(spmm(csr(dense), B, alpha=2.0, beta=0.0, out=out), 2 * (dense @ B))


def test_beta_one_keeps_a_nan_of_out() -> None:
    out = torch.zeros(2, 3)
    out[1, 2] = float("nan")
    C = spmm(csr(torch.eye(2)), torch.ones(2, 3), beta=1.0, out=out)
    assert C.isnan().nonzero().tolist() == [[1, 2]]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", [1, 7, 40])
def test_mean_divides_by_the_number_of_entries_and_empty_rows_give_zero(
    dtype: torch.dtype, n: int
) -> None:
    dense = torch.tensor([[1, 2, 4, 0], [0, 0, 0, 0], [0, 5, 0, 0]], dtype=dtype)
    B = torch.randint(-4, 5, (4, n)).to(dtype)
    counts = torch.tensor([[3], [1], [1]], dtype=dtype)
    assert torch.equal(spmm(csr(dense), B, mean=True), (dense @ B) / counts)
    scaled = spmm(csr(dense), B, alpha=2.0, beta=1.0, out=torch.ones(3, n, dtype=dtype), mean=True)
    torch.testing.assert_close(scaled, 2 * ((dense @ B) / counts) + 1)


@pytest.mark.parametrize("n", [1, 7, 16, 130])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_element_of_B_reaches_only_the_rows_that_refer_to_it(
    n: int, bad: float
) -> None:
    dense = (random_dense(40, 30, 0.2) * 3).round().float()
    dense[:, 11] = 0
    dense[5, 11] = dense[17, 11] = 2
    B = torch.randint(-4, 5, (30, n)).float()
    expected = dense @ B
    B[11, n - 1] = bad
    expected[[5, 17], n - 1] = bad
    assert torch.equal(spmm(csr(dense), B).nan_to_num(7e7), expected.nan_to_num(7e7))


def test_a_stored_zero_times_infinity_is_nan_and_an_absent_one_is_nothing() -> None:
    A = CSR(
        torch.tensor([0, 1, 2]),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([0.0, 1.0]),
        (2, 2),
    )
    B = torch.tensor([[float("inf")] * 3, [1.0] * 3])
    C = spmm(A, B)
    assert C[0].isnan().all()
    assert torch.equal(C[1], torch.ones(3))


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("maximum", [True, False])
@pytest.mark.parametrize("pattern", [False, True])
def test_extremum_finds_the_first_best_entry(
    name: str, dtype: torch.dtype, maximum: bool, pattern: bool
) -> None:
    # Integers from a small range, so that ties abound.
    A = csr((PATTERNS[name]() * 2).round().to(dtype), pattern)
    for n in (1, 7, 83):
        B = torch.randint(-2, 3, (A.shape[1], n), generator=torch.Generator().manual_seed(n))
        out, arg = extremum(A, B.to(dtype), maximum)
        expected, winners = reference_extremum(A, B.to(dtype), maximum)
        assert torch.equal(out, expected)
        assert torch.equal(arg, winners)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("pattern", [False, True])
def test_the_gradient_of_an_extremum_goes_to_the_row_that_won(
    name: str, dtype: torch.dtype, pattern: bool
) -> None:
    A = csr((PATTERNS[name]() * 2).round().to(dtype), pattern)
    order = A.transpose_order()
    T = A.transposed(order)
    values = None if A.values is None else A.values[order]
    for n in (1, 7, 83):
        generator = torch.Generator().manual_seed(n)
        B = torch.randint(-2, 3, (A.shape[1], n), generator=generator).to(dtype)
        grad = torch.randint(-9, 9, (A.shape[0], n), generator=generator).to(dtype)
        _, arg = extremum(A, B, True)
        empty = arg < 0
        entry = (A.indptr[:-1, None] + arg).masked_fill(empty, 0)
        expected = torch.zeros_like(B)
        if A.nnz:
            weight = 1 if A.values is None else A.values[entry]
            won = (grad * weight).masked_fill(empty, 0)
            expected.scatter_add_(0, A.indices.long()[entry], won)
        grad[empty] = float("nan")  # what no entry won goes nowhere
        out = torch.full_like(B, float("nan"))
        cpu_api.spmm_won(
            T.indptr, T.indices, values, grad, arg, order.long(), A.indptr, out,
            row_chunks(T.indptr, 5),
        )  # fmt: skip
        assert torch.equal(out, expected)


@pytest.mark.parametrize("maximum", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
def test_extremum_lets_the_first_nan_win_and_orders_infinities(
    maximum: bool, dtype: torch.dtype
) -> None:
    A = csr(torch.ones(3, 6, dtype=dtype))
    nan, inf = float("nan"), float("inf")
    columns = [[1, nan, 5, nan, -5, 0], [nan, 1, 2, 3, 4, 5], [1, inf, -inf, inf, -inf, 0]]
    B = torch.tensor(columns, dtype=dtype).T.repeat(1, 11)
    out, arg = extremum(A, B, maximum)
    winners = [1, 0, 1 if maximum else 2]
    best = [nan, nan, inf if maximum else -inf]
    assert torch.equal(arg, torch.tensor(winners * 11, dtype=torch.int32).expand(3, 33))
    expected = torch.tensor(best * 11, dtype=dtype).expand(3, 33)
    assert torch.equal(out.nan_to_num(7e7), expected.nan_to_num(7e7))
    torch.testing.assert_close(out[0], B.amax(0) if maximum else B.amin(0), equal_nan=True)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_sampled_products_are_within_the_rounding_of_their_sums(
    name: str, dtype: torch.dtype
) -> None:
    A = csr(PATTERNS[name]().to(dtype))
    rows, columns = A.row_ids(), A.indices.long()
    for n in WIDTHS:
        generator = torch.Generator().manual_seed(n)
        G = torch.randn(A.shape[0], n, dtype=dtype, generator=generator)
        B = torch.randn(A.shape[1], n, dtype=dtype, generator=generator)
        products = G.double()[rows] * B.double()[columns]
        allowed = n * torch.finfo(dtype).eps / 2 * products.abs().sum(1)
        error = (sampled(A, G, B).double() - products.sum(1)).abs()
        assert (error <= allowed).all()


def test_sampled_product_of_a_nan_row_is_nan_only_in_that_row() -> None:
    A = csr(torch.ones(4, 5))
    G = torch.ones(4, 19)
    G[2, 18] = float("nan")
    out = sampled(A, G, torch.ones(5, 19)).view(4, 5)
    assert out[2].isnan().all()
    assert torch.equal(out[[0, 1, 3]], torch.full((3, 5), 19.0))


@pytest.mark.parametrize("name", ["random", "one_dense_row"])
def test_results_are_bit_identical_for_any_threads_chunks_and_column_split(name: str) -> None:
    dense = PATTERNS[name]().float()
    A = csr(dense)
    B = torch.randn(A.shape[1], 133)
    G = torch.randn(A.shape[0], 133)
    torch.set_num_threads(1)
    product, grad = spmm(A, B, chunks=1), sampled(A, G, B, chunks=1)
    best, winners = extremum(A, B, maximum=True)
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        for chunks in (1, 3, 64):
            assert torch.equal(spmm(A, B, chunks=chunks), product)
            assert torch.equal(sampled(A, G, B, chunks=chunks), grad)
        again, winners_again = extremum(A, B, maximum=True)
        assert torch.equal(again, best)
        assert torch.equal(winners_again, winners)
    for first, last in ((0, 1), (3, 20), (64, 133)):
        assert torch.equal(spmm(A, B[:, first:last]), product[:, first:last])


def test_a_hundred_runs_give_the_same_bits() -> None:
    A = csr(random_dense(200, 150, 0.1).float())
    B = torch.randn(150, 37)
    first = spmm(A, B)
    assert all(torch.equal(spmm(A, B), first) for _ in range(100))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pattern", [False, True])
def test_cache_sizes_do_not_change_the_bits_of_c(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, pattern: bool
) -> None:
    """Small caches: rows are fetched ahead, and wide panels are read in strips."""
    A = csr(random_dense(40, 60, 0.5).to(dtype), pattern)
    for n in (1, 15, 16, 33, 64, 127, 128, 131, 300):
        B = torch.randn(60, n, dtype=dtype, generator=torch.Generator().manual_seed(n))
        read = {}
        for size in (0, 1 << 40):
            monkeypatch.setattr(cpu_api, "cache_bytes", lambda level, size=size: size)
            read[size] = spmm(A, B)
        assert torch.equal(read[0], read[1 << 40])
        alone = torch.cat([spmm(A, B[:, j : j + 1].contiguous()) for j in range(n)], 1)
        assert torch.equal(read[0], alone), "an element must not depend on its neighbours"


def test_cache_sizes_come_from_linux_or_a_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"index2": "512K\n", "index3": "no number"}
    ask = cpu_api.cache_bytes.__wrapped__
    monkeypatch.setattr(
        cpu_api.Path, "read_text", lambda path, *_: told[path.parent.name], raising=True
    )
    assert ask(2) == 512 * 1024
    assert ask(3) == 1 << 25


_COMPILE = """
import llvmlite.binding as llvm
llvm.get_host_cpu_features = lambda: {}  # no AVX, as the processor named generic
from numba import types
from sparsetile.kernels.cpu import loops
i, flag, real = types.int64, types.boolean, types.float32
A = types.Tuple((i, i, i, i, i, types.int32))
tuples = [types.UniTuple(i, 4), A, types.UniTuple(i, 2), types.UniTuple(i, 2)]
loops.spmm_sum.compile((i, *tuples, i, real, real, flag, flag, flag, i))
loops.spmm_extremum.compile((i, *tuples, i, tuples[-1], flag, real))
loops.sddmm.compile((i, *tuples, i, i, real))
for kernel in (loops.spmm_sum, loops.spmm_extremum, loops.sddmm):
    for text in kernel.inspect_llvm().values():
        print("\\n".join(x for x in text.splitlines() if x.startswith(("define", "declare"))))
"""


@pytest.fixture(scope="module")
def functions_without_avx(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> str:
    """Every function of the kernels for a machine that has 128-bit vectors and no masks.

    Compiling them takes longest of all tests here: they are kept for the same sources and compiler.
    """
    cache = getattr(request.config, "cache", None)
    if cache is None:
        return functions_compiled(tmp_path_factory)
    parts = (_COMPILE, numba.__version__, llvmlite.__version__, sys.version, _sources())
    path = cache.mkdir("without_avx") / hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
    if not path.is_file():
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_text(functions_compiled(tmp_path_factory))
        partial.replace(path)  # whole, whoever else writes it
    return path.read_text()


def _sources() -> list[bytes]:
    """Everything that the compiled functions could depend on."""
    folder = Path(loops.__file__).parent
    return [file.read_bytes() for file in sorted(folder.glob("*.py"))]


def functions_compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    # Unoptimised, which is quicker: what must be inlined is, and calls are what is looked for.
    wanted = {"NUMBA_CPU_NAME": "generic", "NUMBA_OPT": "0"}
    folder = str(tmp_path_factory.mktemp("numba"))
    return subprocess.run(
        [sys.executable, "-c", _COMPILE],
        env={**os.environ, "NUMBA_CACHE_DIR": folder, **wanted},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_no_sum_goes_through_memory_between_the_entries_of_a_row(
    functions_without_avx: str,
) -> None:
    # A step that is a call returns the sums through memory: a third of the speed at N = 32.
    assert "spmm_sum" in functions_without_avx
    assert "add_entry" not in functions_without_avx
    assert "_fetch_row" not in functions_without_avx


def test_a_machine_without_masks_is_given_none(functions_without_avx: str) -> None:
    # Each lane of a masked vector would have its own branch: at N = 8 the plain loop is faster.
    assert "sddmm" in functions_without_avx and "spmm_extremum" in functions_without_avx
    assert "llvm.masked" not in functions_without_avx


class Guarded:
    """A matrix with numbers around it that must be neither written nor added."""

    def __init__(self, matrix: Tensor) -> None:
        self.memory = torch.full((matrix.numel() + 128,), 1000, dtype=matrix.dtype)
        self.matrix = self.memory[64:-64].view(matrix.shape)
        self.matrix.copy_(matrix)

    def intact(self) -> bool:
        return bool((self.memory[:64] == 1000).all() and (self.memory[-64:] == 1000).all())

    def address(self) -> tuple[int, int]:
        return self.matrix.data_ptr(), self.matrix.stride(0)


def addresses(A: CSR) -> tuple[Any, ...]:
    values = 0 if A.values is None else A.values.data_ptr()
    zeros = np.int64(0), np.int32(0)  # of the types of row pointers and columns
    return A.indptr.data_ptr(), A.indices.data_ptr(), values, A.nnz, *zeros


@functools.cache
def sum_rest() -> Any:
    """What sums the columns left over: compiled once for a type, whatever else it is given."""
    return loops._sum_rest()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("pattern", [False, True])
@pytest.mark.parametrize("mean", [False, True])
def test_columns_left_over_are_summed_without_masks(
    dtype: torch.dtype, pattern: bool, mean: bool
) -> None:
    A = csr((random_dense(20, 30, 0.3) * 3).round().to(dtype), pattern)
    exact = csr_dense(A).to(dtype)
    counts = A.row_lengths().clamp(min=1).to(dtype)[:, None] if mean else 1
    block, scalar = sum_rest(), SCALARS[dtype]
    for n in range(1, 64 // dtype.itemsize):
        B = Guarded(torch.randint(-4, 5, (30, n)).to(dtype))
        for beta in (0, -2):
            C = Guarded(torch.randint(-4, 5, (20, n)).to(dtype))
            expected = 2 * ((exact @ B.matrix) / counts) + beta * C.matrix
            tensors = (addresses(A), B.address(), C.address())
            block(0, 20, 0, n, 1, (*tensors, scalar(2), scalar(beta), mean))
            torch.testing.assert_close(C.matrix, expected)
            assert mean or torch.equal(C.matrix, expected)
            assert C.intact()


@pytest.mark.parametrize("dtype, maximum", [(torch.float32, True), (torch.float64, False)])
def test_columns_left_over_are_compared_without_masks(dtype: torch.dtype, maximum: bool) -> None:
    A = csr((random_dense(20, 30, 0.3) * 2).round().to(dtype))
    block, scalar = loops._extremum_rest(maximum), SCALARS[dtype]
    for n in range(1, 64 // dtype.itemsize):
        B = Guarded(torch.randint(-2, 3, (30, n)).to(dtype))
        C, arg = Guarded(torch.zeros(20, n, dtype=dtype)), Guarded(torch.zeros(20, n).int())
        tensors = (addresses(A), B.address(), C.address(), arg.address())
        block(0, 20, 0, n, (*tensors, scalar(0)))
        expected, winners = reference_extremum(A, B.matrix, maximum)
        assert torch.equal(C.matrix, expected) and torch.equal(arg.matrix, winners)
        assert C.intact() and arg.intact()


@pytest.mark.parametrize("dtype", FLOATS)
def test_columns_left_over_are_multiplied_without_masks(dtype: torch.dtype) -> None:
    rest = numba.njit(lambda g, b, j, n, before: loops._dot_rest(g, b, j, n, before))
    for n in range(1, 64 // dtype.itemsize):
        g = Guarded(torch.randint(-4, 5, (1, n + 3)).to(dtype))
        b = Guarded(torch.randint(-4, 5, (1, n + 3)).to(dtype))
        scalar = SCALARS[dtype]
        found = rest(g.address()[0], b.address()[0], 3, n + 3, scalar(7))
        assert found == 7 + float((g.matrix * b.matrix)[0, 3:].sum())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("pattern", [False, True], ids=["weighted", "pattern"])
@pytest.mark.parametrize("lengths", [[1, 2, 0, 4, 3, 0, 6], [1, 22, 0, 34, 13, 0, 39]])
def test_one_column_takes_nothing_from_entries_of_other_rows(dtype, pattern, lengths) -> None:
    """A range's first entry, which is computed for rows without an odd one, may be anything."""
    dense = torch.zeros(len(lengths), 40, dtype=dtype)
    for row, length in enumerate(lengths):
        dense[row, 40 - length :] = torch.arange(1, length + 1)
    dense[0] = torch.eye(40, dtype=dtype)[0]  # the only entry of column 0
    B = torch.ones(40, 1, dtype=dtype)
    B[0] = torch.nan
    found = spmm(csr(dense, pattern), B)
    wanted = torch.tensor(lengths) if pattern else dense.sum(1)
    assert found[0].isnan() and torch.equal(found[1:, 0], wanted[1:].to(dtype))
    assert not spmm(csr(torch.zeros(5, 40, dtype=dtype)), B).any()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("pattern", [False, True], ids=["weighted", "pattern"])
@pytest.mark.parametrize("longest", [3, 15, 17, 60])
@pytest.mark.parametrize("rows", [1, 127, 128, 300])
def test_one_column_has_the_bits_of_wider_products(dtype, pattern, longest, rows) -> None:
    """Rows of few entries are visited by their length, others in their order."""
    draw = torch.Generator().manual_seed(rows + longest)
    lengths = torch.randint(0, longest + 1, (rows,), generator=draw)
    places = torch.rand(rows, 70, generator=draw).argsort(1)
    dense = torch.randn(rows, 70, dtype=dtype, generator=draw) * (places < lengths[:, None])
    A, B = csr(dense, pattern), torch.randn(70, 20, dtype=dtype, generator=draw)
    for chunks in (1, 5):
        wide = spmm(A, B, alpha=0.75, chunks=chunks)
        for j in (0, 19):  # of a matrix with other columns beside, and alone
            assert torch.equal(spmm(A, B[:, j : j + 1], alpha=0.75)[:, 0], wide[:, j])
            assert torch.equal(spmm(A, B[:, j : j + 1].clone(), alpha=0.75)[:, 0], wide[:, j])
        last = spmm(A, B[:, :17], alpha=0.75, chunks=chunks)  # its last column is computed alone
        assert torch.equal(last, wide[:, :17])
