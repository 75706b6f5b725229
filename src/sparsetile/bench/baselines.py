"""The baselines that sparsetile is compared with.

A baseline has its devices and operations, says why it cannot run a product, and prepares one: all
work that does not depend on B's values happens there and is timed as planning.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from sparsetile.bench.operands import Operands, Prepared
from sparsetile.intake.csr import CSR, FP8

__all__ = ["BASELINES", "Baseline"]

_GIB = 2**30
# Largest dense copy of A: beyond it the baseline is far from competitive.
_LIMIT_BYTES = 8 * _GIB
_FP8_NAME = str(FP8).removeprefix("torch.")
_WIDE = (torch.float32, torch.float64)
# torch BSR takes the largest of these whose blocks have no empty cell, else the smallest.
_BLOCKS = (64, 32, 16)


class Baseline(ABC):
    """A method to compute the product without sparsetile."""

    name: ClassVar[str]
    devices: ClassVar[tuple[str, ...]]
    # Baselines of one family share a worker process, hence one copy of A.
    family: ClassVar[str]
    ops: ClassVar[tuple[str, ...]] = ("spmm", "transpose")
    layouts: ClassVar[tuple[str, ...]] = ("rows",)
    takes_fp8: ClassVar[bool] = False
    package: ClassVar[str] = "torch"

    def missing(self) -> str | None:
        """Return what must be installed for this baseline to run, or None."""
        found = importlib.util.find_spec(self.package) is not None
        return None if found else f"{self.package} is not installed"

    def reason(self, operands: Operands) -> str | None:
        """Return why this product cannot run, or None."""
        if operands.reduce != "sum":
            return f"knows sum, not {operands.reduce}"
        dtype = str(operands.dtype).removeprefix("torch.")
        refused = self.refuses(dtype, operands.layout)
        return refused or self.missing() or self.further_reason(operands)

    def refuses(self, dtype: str, layout: str) -> str | None:
        """Return why no product of this type or layout can run, or None."""
        if dtype == _FP8_NAME and not self.takes_fp8:
            return f"does not take {dtype}"
        if layout not in self.layouts:
            return f"takes row-major operands, not layout {layout}"
        return None

    def further_reason(self, operands: Operands) -> str | None:
        return None

    @abstractmethod
    def prepare(self, operands: Operands) -> Prepared:
        """Do all work that does not depend on B's values."""


def _csr_bytes(operands: Operands) -> int:
    csr = operands.csr
    return 4 * (csr.shape[0] + 1) + (4 + operands.dtype.itemsize) * csr.nnz


def _torch_csr(operands: Operands) -> Tensor:
    csr = operands.csr
    indptr = csr.indptr.to(torch.int32)
    return torch.sparse_csr_tensor(
        indptr, csr.indices, operands.values(), csr.shape, check_invariants=False
    )


class _CuSparse(Baseline):
    """An algorithm of SpMM (``csr``) or, for one column, of SpMV (``spmv``)."""

    devices, family = ("cuda",), "cusparse"

    def __init__(self, product: str, algorithm: int) -> None:
        self._vector, self._algorithm = product == "spmv", algorithm
        self.name = f"cusparse-{product}{algorithm}"  # type: ignore[misc]

    def further_reason(self, operands: Operands) -> str | None:
        columns = operands.B.shape[1]
        return f"takes one column, not {columns}" if self._vector and columns != 1 else None

    def prepare(self, operands: Operands) -> Prepared:
        from sparsetile.bench.cusparse import CsrSpmm, CsrSpmv

        shape = (operands.csr.shape[0], operands.B.shape[1])
        C = torch.empty(shape, dtype=operands.dtype, device=operands.device)
        kind = CsrSpmv if self._vector else CsrSpmm
        product = kind(operands.csr, operands.values(), operands.B, C, self._algorithm)
        return Prepared(product.run, format_bytes=_csr_bytes(operands) + product.workspace_bytes)


class CuSparseSddmm(Baseline):
    name, devices, family, ops = "cusparse-sddmm", ("cuda",), "cusparse", ("sddmm",)

    def prepare(self, operands: Operands) -> Prepared:
        from sparsetile.bench.cusparse import CsrSddmm

        if operands.G is None:
            raise ValueError("cusparse-sddmm: G must be given, got None.")
        product = CsrSddmm(operands.csr, operands.G, operands.B)
        return Prepared(product.run, format_bytes=_csr_bytes(operands) + product.workspace_bytes)


class TorchCsr(Baseline):
    """torch.sparse CSR, torch's default."""

    name, devices, family = "torch-csr", ("cuda", "cpu"), "torch"

    def prepare(self, operands: Operands) -> Prepared:
        A = _torch_csr(operands)
        return Prepared(lambda: A @ operands.B, format_bytes=_csr_bytes(operands))


def _count_blocks(csr: CSR, block: int) -> int:
    across = -(-csr.shape[1] // block)
    keys = (csr.row_ids() // block) * across + csr.indices // block
    return int(torch.unique(keys).numel())


def _own_block(csr: CSR) -> int:
    """The largest block size for which A has only full blocks; the smallest if there is none."""
    for block in _BLOCKS[:-1]:
        divides = csr.shape[0] % block == csr.shape[1] % block == csr.nnz % block**2 == 0
        if divides and _count_blocks(csr, block) * block**2 == csr.nnz:
            return block
    return _BLOCKS[-1]


class TorchBsr(Baseline):
    """torch.sparse BSR, in blocks of 64 or 32 if A consists of such, else of 16."""

    name, devices, family = "torch-bsr", ("cuda",), "torch-bsr"

    def further_reason(self, operands: Operands) -> str | None:
        csr, least = operands.csr, _BLOCKS[-1]
        if csr.nnz == 0:
            return "A has no entry"
        if csr.shape[0] % least or csr.shape[1] % least:
            return f"needs a shape divisible by {least}"
        block = _own_block(csr)
        if _count_blocks(csr, block) * block * block * operands.dtype.itemsize > _LIMIT_BYTES:
            return f"blocks would take more than {_LIMIT_BYTES // _GIB} GiB"
        return None

    def prepare(self, operands: Operands) -> Prepared:
        block = _own_block(operands.csr)
        A = _torch_csr(operands).to_sparse_bsr((block, block))
        indices = A.crow_indices().numel() + A.col_indices().numel()
        # torch may multiply blocks in TF32, whatever its setting for dense products.
        return Prepared(
            lambda: A @ operands.B,
            format_bytes=4 * indices + operands.dtype.itemsize * A.values().numel(),
            choices={"block": str(block)},
            uses_tf32=operands.dtype is torch.float32,
        )


class TorchDense(Baseline):
    """A as a dense matrix: torch.mm (cuBLAS on a GPU), F.linear(X, A) in the linear layout.

    In FP8 it is torch._scaled_mm, the only dense product that torch has in that type.
    """

    name, devices, family = "torch-dense", ("cuda", "cpu"), "torch-dense"
    layouts = ("rows", "linear")
    takes_fp8 = True

    def further_reason(self, operands: Operands) -> str | None:
        needed = operands.csr.shape[0] * operands.csr.shape[1] * operands.dtype.itemsize
        if needed > _LIMIT_BYTES:
            return f"A written out takes more than {_LIMIT_BYTES // _GIB} GiB"
        return None

    def prepare(self, operands: Operands) -> Prepared:
        csr, B = operands.csr, operands.B
        # Through the type of C, which represents FP8 exactly: not every device indexes FP8.
        A = torch.zeros(csr.shape, dtype=operands.result_dtype, device=operands.device)
        A[csr.row_ids(), csr.indices.to(torch.int64)] = operands.values().to(A.dtype)
        A = A.to(operands.dtype)
        single = operands.dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32
        return Prepared(
            _dense_product(A, B, operands.layout, operands.result_dtype),
            format_bytes=A.numel() * A.element_size(),
            uses_tf32=single and operands.device.type == "cuda",
        )


def _dense_product(
    A: Tensor, B: Tensor, layout: str, out_dtype: torch.dtype
) -> Callable[[], Tensor]:
    """C = A·B in one of the layouts; A is row-major."""
    linear = layout == "linear"
    if A.dtype is FP8:
        one = torch.ones((), dtype=torch.float32, device=A.device)
        left, right = (B.T, A.T) if linear else (A, B)  # row-major times column-major, all it takes

        def scaled() -> Tensor:
            C = torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=out_dtype)
            return C.T if linear else C

        return scaled
    if linear:
        X = B.T
        return lambda: torch.nn.functional.linear(X, A).T
    C = torch.empty((A.shape[0], B.shape[1]), dtype=out_dtype, device=A.device)
    return lambda: torch.mm(A, B, out=C)


class TorchSddmm(Baseline):
    """torch.sparse.sampled_addmm on A's pattern."""

    name, devices, family, ops = "torch-sddmm", ("cuda", "cpu"), "torch", ("sddmm",)

    def prepare(self, operands: Operands) -> Prepared:
        if operands.G is None:
            raise ValueError("torch-sddmm: G must be given, got None.")
        G, transposed = operands.G, operands.B.t()
        A = _torch_csr(operands)

        def run() -> Tensor:
            return torch.sparse.sampled_addmm(A, G, transposed, beta=0.0).values()

        return Prepared(run, format_bytes=_csr_bytes(operands))


class Scipy(Baseline):
    """scipy's CSR product on one core, in float32 or float64."""

    name, devices, family, package = "scipy", ("cpu",), "scipy", "scipy"

    def further_reason(self, operands: Operands) -> str | None:
        return None if operands.dtype in _WIDE else "knows float32 and float64 only"

    def prepare(self, operands: Operands) -> Prepared:
        from scipy.sparse import csr_array

        csr = operands.csr
        indptr = csr.indptr.to(torch.int32).numpy()
        A = csr_array((operands.values().numpy(), csr.indices.numpy(), indptr), shape=csr.shape)
        B = operands.B.numpy()
        return Prepared(lambda: A @ B, format_bytes=_csr_bytes(operands))


class NumbaLoop(Scipy):
    """A parallel numba loop over the rows, then their entries, then the columns."""

    name, family, package = "numba-loop", "numba-loop", "numba"

    def prepare(self, operands: Operands) -> Prepared:
        from sparsetile.bench.numba_loop import multiply, use_threads

        use_threads(torch.get_num_threads())
        csr = operands.csr
        indptr, indices = csr.indptr.to(torch.int32).numpy(), csr.indices.numpy()
        values, B = operands.values().numpy(), operands.B.numpy()
        # Compiled by the first product, which is checked and not timed; not part of planning.
        return Prepared(
            lambda: multiply(indptr, indices, values, B), format_bytes=_csr_bytes(operands)
        )


BASELINES: dict[str, Baseline] = {
    baseline.name: baseline
    for baseline in (
        *(_CuSparse("csr", algorithm) for algorithm in (1, 2, 3)),
        *(_CuSparse("spmv", algorithm) for algorithm in (1, 2)),
        CuSparseSddmm(), TorchCsr(), TorchBsr(), TorchDense(), TorchSddmm(), Scipy(), NumbaLoop(),
    )
}  # fmt: skip
