"""The cuSPARSE binding: its formats and call sequence here, its results on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparsetile.bench import cusparse
from sparsetile.bench.baselines import BASELINES, Operands
from sparsetile.bench.worker import judge
from sparsetile.core.errors import UnsupportedError
from sparsetile.data.generators import generate
from sparsetile.intake import CSR

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]


class _FakeLibrary:
    """Answers every call with success and remembers the arguments."""

    def __init__(self, failing: str = "") -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.failing = failing

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name not in ("cusparseCreate", "cusparseSetStream"):
                self.calls.append((name, arguments))
            return 10 if name == self.failing else 0

        return call

    def cusparseGetErrorString(self, status: int) -> bytes:
        return b"operation not supported"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, torch_cuda) -> Iterator[_FakeLibrary]:
    library = _FakeLibrary()
    monkeypatch.setattr(cusparse, "_library", lambda: library)
    stream = SimpleNamespace(cuda_stream=0)
    torch_cuda(current_device=0, device=contextlib.nullcontext(), current_stream=stream)
    cusparse._handle.cache_clear()
    yield library
    cusparse._handle.cache_clear()


@pytest.mark.parametrize(("algorithm", "code"), [(1, 4), (2, 6), (3, 12)])
def test_spmm_asks_for_its_workspace_preprocesses_then_runs(
    fake: _FakeLibrary, algorithm: int, code: int
) -> None:
    csr = generate("power_law", rows=50, nnz=200, seed=1)
    B, C = torch.zeros(50, 8), torch.zeros(50, 8)
    product = cusparse.CsrSpmm(csr, torch.ones(200), B, C, algorithm)
    assert product.run() is C
    names = [name for name, _ in fake.calls]
    assert names == [
        "cusparseCreateCsr", "cusparseCreateDnMat", "cusparseCreateDnMat",
        "cusparseSpMM_bufferSize", "cusparseSpMM_preprocess", "cusparseSpMM",
    ]  # fmt: skip
    for name, arguments in fake.calls[3:]:
        assert len(arguments) == len(cusparse._SIGNATURES[name])
        assert arguments[9] == code and arguments[8] == 0
    created = fake.calls[1][1]
    assert created[1:4] == (50, 8, 8) and created[6] == 2  # row-major


@pytest.mark.parametrize(("algorithm", "code"), [(1, 2), (2, 3)])
def test_spmv_multiplies_vectors_by_its_own_algorithms(
    fake: _FakeLibrary, algorithm: int, code: int
) -> None:
    csr = generate("power_law", rows=50, nnz=200, seed=1)
    B, C = torch.zeros(50, 1), torch.zeros(50, 1)
    assert cusparse.CsrSpmv(csr, torch.ones(200), B, C, algorithm).run() is C
    names = [name for name, _ in fake.calls]
    assert names == [
        "cusparseCreateCsr", "cusparseCreateDnVec", "cusparseCreateDnVec",
        "cusparseSpMV_bufferSize", "cusparseSpMV_preprocess", "cusparseSpMV",
    ]  # fmt: skip
    for name, arguments in fake.calls[3:]:
        assert len(arguments) == len(cusparse._SIGNATURES[name])
        assert arguments[8] == code and arguments[7] == 0
    assert fake.calls[1][1][1] == 50


@pytest.mark.parametrize("B", [torch.zeros(50, 2), torch.zeros(50, 2)[:, :1]])
def test_spmv_refuses_anything_but_a_contiguous_column(fake: _FakeLibrary, B: torch.Tensor) -> None:
    csr = generate("power_law", rows=50, nnz=200, seed=1)
    with pytest.raises(ValueError, match="vector must be a contiguous column, got shape"):
        cusparse.CsrSpmv(csr, torch.ones(200), B, torch.zeros(50, 1), 1)


def test_the_baseline_of_vectors_says_that_it_takes_one_column() -> None:
    csr = generate("power_law", rows=50, nnz=200, seed=1)
    reasons = [
        BASELINES["cusparse-spmv1"].reason(Operands(csr, torch.zeros(50, n), None, "spmm", "sum"))
        for n in (1, 8)
    ]
    assert reasons == [None, "takes one column, not 8"]


def test_sddmm_transposes_its_second_operand(fake: _FakeLibrary) -> None:
    csr = generate("power_law", rows=50, nnz=200, seed=1)
    cusparse.CsrSddmm(csr, torch.zeros(50, 8), torch.zeros(50, 8)).run()
    name, arguments = fake.calls[-1]
    assert name == "cusparseSDDMM" and arguments[1:3] == (0, 1)


def test_a_bad_status_is_raised_in_the_librarys_words(fake: _FakeLibrary) -> None:
    fake.failing = "cusparseSpMM_preprocess"
    csr = generate("power_law", rows=50, nnz=200, seed=1)
    with pytest.raises(RuntimeError, match="cusparseSpMM_preprocess: operation not supported"):
        cusparse.CsrSpmm(csr, torch.ones(200), torch.zeros(50, 8), torch.zeros(50, 8), 1)


def test_a_column_major_operand_is_refused(fake: _FakeLibrary) -> None:
    csr = generate("power_law", rows=50, nnz=200, seed=1)
    with pytest.raises(ValueError, match="matrix must be row-major"):
        cusparse.CsrSpmm(csr, torch.ones(200), torch.zeros(8, 50).t(), torch.zeros(50, 8), 1)


class _Huge(CSR):
    """A matrix that says it has 2^31 entries."""

    @property
    def nnz(self) -> int:
        return 2**31


def test_offsets_have_64_bits_only_if_32_do_not_suffice(fake: _FakeLibrary) -> None:
    csr = generate("power_law", rows=50, nnz=200, seed=1)
    huge = _Huge(csr.indptr, csr.indices, None, csr.shape)
    cusparse._sparse(csr, torch.ones(200))
    cusparse._sparse(huge, torch.ones(200))
    usual, wide = (arguments for name, arguments in fake.calls if name == "cusparseCreateCsr")
    assert usual[7:9] == (2, 2)
    assert wide[3] == 2**31 and wide[4] == csr.indptr.data_ptr() and wide[7:9] == (3, 2)


@pytest.mark.parametrize("name", ["cusparse-sddmm", "torch-sddmm"])
def test_sddmm_needs_its_left_operand(name: str) -> None:
    csr = generate("power_law", rows=50, nnz=200, seed=1)
    operands = Operands(csr, torch.zeros(50, 8), None, "sddmm", "sum")
    with pytest.raises(ValueError, match=f"{name}: G must be given, got None"):
        BASELINES[name].prepare(operands)


def test_a_missing_library_is_unsupported_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(cusparse.ctypes, "CDLL", missing)
    cusparse._library.cache_clear()
    with pytest.raises(UnsupportedError, match="libcusparse must be loadable"):
        cusparse._library()


def _on_gpu(dtype: torch.dtype, op: str = "spmm", n: int = 40) -> Operands:
    csr = generate("power_law", rows=1001, nnz=20000, weighted=True, seed=2).to("cuda")
    B = torch.randn(1001, n, device="cuda").to(dtype)
    G = torch.randn(1001, n, device="cuda").to(dtype) if op == "sddmm" else None
    return Operands(csr, B, G, op, "sum")


class TestOnGpu:
    pytestmark = needs_gpu

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize(
        "name", ["cusparse-csr1", "cusparse-csr2", "cusparse-csr3", "torch-csr"]
    )
    def test_every_algorithm_is_right(self, name: str, dtype: torch.dtype) -> None:
        if dtype is not torch.float32 and name in ("cusparse-csr1", "cusparse-csr2", "torch-csr"):
            pytest.skip("cuSPARSE rounds these sums to 16 bits; the record shows the error")
        operands = _on_gpu(dtype)
        assert BASELINES[name].reason(operands) is None
        ready = BASELINES[name].prepare(operands)
        for _ in range(2):
            verdict = judge(operands, ready.run(), tf32=ready.uses_tf32)
            assert verdict.ok, verdict

    @pytest.mark.parametrize("name", ["cusparse-spmv1", "cusparse-spmv2"])
    def test_every_algorithm_of_one_column_is_right(self, name: str) -> None:
        operands = _on_gpu(torch.float32, n=1)
        ready = BASELINES[name].prepare(operands)
        for _ in range(2):
            verdict = judge(operands, ready.run())
            assert verdict.ok, verdict

    def test_sddmm_is_right(self) -> None:
        operands = _on_gpu(torch.float32, "sddmm")
        result = BASELINES["cusparse-sddmm"].prepare(operands).run()
        assert judge(operands, result).ok

    @pytest.mark.parametrize("name", ["cusparse-csr1", "cusparse-csr2", "cusparse-csr3"])
    def test_a_captured_product_replays_with_new_numbers(self, name: str) -> None:
        operands = _on_gpu(torch.float32)
        ready = BASELINES[name].prepare(operands)
        ready.run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            C = ready.run()
        operands.B.mul_(3.0)
        graph.replay()
        torch.cuda.synchronize()
        assert judge(operands, C).ok

    def test_the_version_reads_like_one(self) -> None:
        major, minor, _ = cusparse.library_version().split(".")
        assert int(major) >= 12 and int(minor) >= 0
