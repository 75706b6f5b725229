"""What sparsetile is measured against, each behind the same small door.

A baseline says where it runs, which operations it knows, why it cannot when it cannot, and
prepares a product: everything that does not depend on B's numbers happens there and is timed
as planning.
"""

from __future__ import annotations

import functools
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsetile.bench.blocks import BLOCKS, distinct_blocks, own_block, torch_bsr
from sparsetile.bench.operands import Operands, Prepared
from sparsetile.intake.csr import FP8

__all__ = ["BASELINES", "Baseline", "pyg_layer"]

_GIB = 2**30
# A dense copy of A, Blocked-ELL's padding or PyG's messages may take this much, no more: beyond
# it the baseline is far from competitive and would only cost time and memory.
_LIMIT_BYTES = 8 * _GIB
_FP8_NAME = str(FP8).removeprefix("torch.")


def _csr_bytes(operands: Operands) -> int:
    csr = operands.csr
    return 4 * (csr.shape[0] + 1) + (4 + operands.dtype.itemsize) * csr.nnz


class Baseline(ABC):
    """One way to compute the product without sparsetile."""

    name: ClassVar[str]
    devices: ClassVar[tuple[str, ...]]
    ops: ClassVar[tuple[str, ...]] = ("spmm", "transpose")
    reduces: ClassVar[tuple[str, ...]] = ("sum",)
    layouts: ClassVar[tuple[str, ...]] = ("rows",)
    takes_fp8: ClassVar[bool] = False
    # Baselines of one family share a worker process, hence one copy of A.
    family: ClassVar[str]

    def missing(self) -> str | None:
        """Return what has to be installed before this baseline runs here, or None."""
        return None

    def reason(self, operands: Operands) -> str | None:
        """Return why this product cannot be served, or None."""
        if operands.reduce not in self.reduces:
            return f"knows {', '.join(self.reduces)}, not {operands.reduce}"
        dtype = str(operands.dtype).removeprefix("torch.")
        refused = self.refuses(dtype, operands.layout)
        if refused is not None:
            return refused
        return self.missing() or self.further_reason(operands)

    def refuses(self, dtype: str, layout: str) -> str | None:
        """Return why no product of this type or layout can be served, or None."""
        if dtype == _FP8_NAME and not self.takes_fp8:
            return f"does not take {dtype}"
        if layout not in self.layouts:
            return f"takes row-major operands, not layout {layout}"
        return None

    def further_reason(self, operands: Operands) -> str | None:
        return None

    @abstractmethod
    def prepare(self, operands: Operands) -> Prepared:
        """Do all that does not depend on B's numbers."""


def _needs(module: str, package: str = "") -> str | None:
    found = importlib.util.find_spec(module) is not None
    return None if found else f"{package or module} is not installed"


def _torch_csr(operands: Operands) -> Tensor:
    csr = operands.csr
    indptr = csr.indptr.to(torch.int32)
    return torch.sparse_csr_tensor(
        indptr, csr.indices, operands.values(), csr.shape, check_invariants=False
    )


class _CuSparseCsr(Baseline):
    devices = ("cuda",)
    family = "cusparse"
    algorithm: ClassVar[int]

    def prepare(self, operands: Operands) -> Prepared:
        from sparsetile.bench.cusparse import CsrSpmm

        shape = (operands.csr.shape[0], operands.B.shape[1])
        C = torch.empty(shape, dtype=operands.dtype, device=operands.device)
        product = CsrSpmm(operands.csr, operands.values(), operands.B, C, self.algorithm)
        size = _csr_bytes(operands) + product.workspace_bytes
        return Prepared(product.run, format_bytes=size)


class CuSparseCsr1(_CuSparseCsr):
    name, algorithm = "cusparse-csr1", 1


class CuSparseCsr2(_CuSparseCsr):
    name, algorithm = "cusparse-csr2", 2


class CuSparseCsr3(_CuSparseCsr):
    name, algorithm = "cusparse-csr3", 3


class CuSparseBell(Baseline):
    """Blocked-ELL, in blocks of 64 or 32 where A consists of such, else of 16."""

    name, devices, family = "cusparse-bell", ("cuda",), "cusparse-bell"

    def further_reason(self, operands: Operands) -> str | None:
        csr = operands.csr
        if csr.nnz == 0:
            return "A has no entry"
        block = own_block(csr)
        keys = distinct_blocks(csr, block)[0]
        width = int(torch.bincount(keys // -(-csr.shape[1] // block)).max())
        needed = -(-csr.shape[0] // block) * width * block * block * operands.dtype.itemsize
        if needed > _LIMIT_BYTES:
            return f"padding would take more than {_LIMIT_BYTES // _GIB} GiB"
        return None

    def prepare(self, operands: Operands) -> Prepared:
        from sparsetile.bench.cusparse import BlockedEllSpmm

        block = own_block(operands.csr)
        product = BlockedEllSpmm(operands.csr, operands.values(), operands.B, block)
        single = operands.dtype is torch.float32
        return Prepared(
            product.run, format_bytes=product.format_bytes, choices={"block": str(block)},
            uses_tf32=single,
        )  # fmt: skip


class CuSparseSddmm(Baseline):
    name, devices, family, ops = "cusparse-sddmm", ("cuda",), "cusparse", ("sddmm",)

    def prepare(self, operands: Operands) -> Prepared:
        from sparsetile.bench.cusparse import CsrSddmm

        if operands.G is None:
            raise ValueError("cusparse-sddmm: G must be given, got None.")
        product = CsrSddmm(operands.csr, operands.G, operands.B)
        size = _csr_bytes(operands) + product.workspace_bytes
        return Prepared(product.run, format_bytes=size)


class TorchCsr(Baseline):
    """torch.sparse CSR: what a torch user gets without thinking."""

    name, devices, family = "torch-csr", ("cuda", "cpu"), "torch"

    def prepare(self, operands: Operands) -> Prepared:
        A = _torch_csr(operands)
        return Prepared(lambda: A @ operands.B, format_bytes=_csr_bytes(operands))


class TorchBsr(Baseline):
    """torch.sparse BSR, in blocks of 64 or 32 where A consists of such, else of 16."""

    name, devices, family = "torch-bsr", ("cuda",), "torch-bsr"

    def further_reason(self, operands: Operands) -> str | None:
        csr, least = operands.csr, BLOCKS[-1]
        if csr.nnz == 0:
            return "A has no entry"
        if csr.shape[0] % least or csr.shape[1] % least:
            return f"needs a shape divisible by {least}"
        block = own_block(csr)
        needed = distinct_blocks(csr, block)[0].numel() * block * block * operands.dtype.itemsize
        if needed > _LIMIT_BYTES:
            return f"blocks would take more than {_LIMIT_BYTES // _GIB} GiB"
        return None

    def prepare(self, operands: Operands) -> Prepared:
        block = own_block(operands.csr)
        A = torch_bsr(operands.csr, operands.values(), block)
        indices = A.crow_indices().numel() + A.col_indices().numel()
        size = 4 * indices + operands.dtype.itemsize * A.values().numel()
        # torch may multiply blocks in TF32 whatever its setting for dense products says.
        return Prepared(
            lambda: A @ operands.B,
            format_bytes=size,
            choices={"block": str(block)},
            uses_tf32=operands.dtype is torch.float32,
        )


class TorchDense(Baseline):
    """A written out: torch.mm (cuBLAS on a GPU), F.linear(X, A) in the layout of a linear layer.

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
        # Through the type of C: not every device indexes FP8, which it holds exactly.
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


@functools.cache
def pyg_layer(reduce: str) -> Any:
    """A layer of message passing; its class is made once, as PyG generates code for each."""
    from torch_geometric.nn import MessagePassing

    class Aggregate(MessagePassing):  # type: ignore[misc]
        def forward(
            self, x: Tensor, edges: Tensor, weight: Tensor | None, size: tuple[int, int]
        ) -> Tensor:
            return self.propagate(edges, x=(x, None), weight=weight, size=size)

        def message(self, x_j: Tensor, weight: Tensor | None) -> Tensor:
            return x_j if weight is None else x_j * weight.unsqueeze(-1)

    return Aggregate(aggr=reduce)


class Pyg(Baseline):
    """PyTorch Geometric's message passing: gather a row of B per entry, scatter into C."""

    name, devices, family = "pyg", ("cuda", "cpu"), "pyg"
    reduces = ("sum", "mean", "max", "min")

    def missing(self) -> str | None:
        return _needs("torch_geometric", "torch-geometric")

    def further_reason(self, operands: Operands) -> str | None:
        needed = operands.csr.nnz * operands.B.shape[1] * operands.dtype.itemsize
        if needed > _LIMIT_BYTES:
            return f"messages take more than {_LIMIT_BYTES // _GIB} GiB"
        return None

    def prepare(self, operands: Operands) -> Prepared:
        csr = operands.csr
        size = (csr.shape[1], csr.shape[0])
        edges = torch.stack([csr.indices.to(torch.int64), csr.row_ids()])
        weight = None if csr.values is None else operands.values()
        layer = pyg_layer(operands.reduce)
        bytes_held = 16 * csr.nnz + (0 if weight is None else weight.numel() * weight.itemsize)
        return Prepared(lambda: layer(operands.B, edges, weight, size), format_bytes=bytes_held)


class Scipy(Baseline):
    """scipy's CSR product on one core, in float32 or float64."""

    name, devices, family = "scipy", ("cpu",), "scipy"

    def missing(self) -> str | None:
        return _needs("scipy")

    def further_reason(self, operands: Operands) -> str | None:
        if operands.dtype not in (torch.float32, torch.float64):
            return "knows float32 and float64 only"
        return None

    def prepare(self, operands: Operands) -> Prepared:
        from scipy.sparse import csr_array

        csr = operands.csr
        A = csr_array(
            (operands.values().numpy(), csr.indices.numpy(), csr.indptr.to(torch.int32).numpy()),
            shape=csr.shape,
        )
        B = operands.B.numpy()
        return Prepared(lambda: A @ B, format_bytes=_csr_bytes(operands))


class NumbaLoop(Baseline):
    """A parallel numba loop over the rows, then their entries, then the columns."""

    name, devices, family = "numba-loop", ("cpu",), "numba-loop"

    def missing(self) -> str | None:
        return _needs("numba")

    def further_reason(self, operands: Operands) -> str | None:
        if operands.dtype not in (torch.float32, torch.float64):
            return "knows float32 and float64 only"
        return None

    def prepare(self, operands: Operands) -> Prepared:
        from sparsetile.bench.numba_loop import multiply, use_threads

        use_threads(torch.get_num_threads())
        csr = operands.csr
        indptr, indices = csr.indptr.to(torch.int32).numpy(), csr.indices.numpy()
        values, B = operands.values().numpy(), operands.B.numpy()
        # Compiled by the first product, which is checked and not timed: planning is not charged.
        return Prepared(
            lambda: multiply(indptr, indices, values, B),
            format_bytes=_csr_bytes(operands),
        )


BASELINES: dict[str, Baseline] = {
    baseline.name: baseline
    for baseline in (
        CuSparseCsr1(),
        CuSparseCsr2(),
        CuSparseCsr3(),
        CuSparseBell(),
        CuSparseSddmm(),
        TorchCsr(),
        TorchBsr(),
        TorchDense(),
        TorchSddmm(),
        Pyg(),
        Scipy(),
        NumbaLoop(),
    )
}
