"""What sparsetile is measured against, each behind the same small door.

A baseline says where it runs, which operations it knows, why it cannot when it cannot, and
prepares a product: everything that does not depend on B's numbers happens there and is timed
as planning.
"""

from __future__ import annotations

import functools
import importlib.util
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsetile.intake.csr import CSR

__all__ = ["BASELINES", "Baseline", "Operands", "Prepared", "torch_bsr"]

_GIB = 2**30
# A dense copy of A, Blocked-ELL's padding or PyG's messages may take this much, no more: beyond
# it the baseline is far from competitive and would only cost time and memory.
_LIMIT_BYTES = 8 * _GIB


@dataclass(frozen=True, eq=False)
class Operands:
    """One product: A (already transposed where asked), B, and G for SDDMM."""

    csr: CSR
    B: Tensor
    G: Tensor | None
    op: str
    reduce: str

    @property
    def dtype(self) -> torch.dtype:
        return self.B.dtype

    @property
    def device(self) -> torch.device:
        return self.B.device

    def values(self) -> Tensor:
        """A's values in B's dtype; ones for a pattern."""
        if self.csr.values is None:
            return torch.ones(self.csr.nnz, dtype=self.dtype, device=self.device)
        return self.csr.values.to(self.dtype)


@dataclass(eq=False)
class Prepared:
    """A product ready to run, and what making it cost."""

    run: Callable[[], Any]
    planning: dict[str, float] = field(default_factory=dict)
    format_bytes: int = 0
    reorder: str = "identity"
    chosen: str = ""
    choices: Mapping[str, str] = field(default_factory=dict)
    # The plan in words; asked for after planning was timed, since it counts pairs again.
    explain: Callable[[], str] | None = None
    uses_tf32: bool = False


def _csr_bytes(operands: Operands) -> int:
    csr = operands.csr
    return 4 * (csr.shape[0] + 1) + (4 + operands.dtype.itemsize) * csr.nnz


class Baseline(ABC):
    """One way to compute the product without sparsetile."""

    name: ClassVar[str]
    devices: ClassVar[tuple[str, ...]]
    ops: ClassVar[tuple[str, ...]] = ("spmm", "transpose")
    reduces: ClassVar[tuple[str, ...]] = ("sum",)
    # Baselines of one family share a worker process, hence one copy of A.
    family: ClassVar[str]

    def missing(self) -> str | None:
        """Return what has to be installed before this baseline runs here, or None."""
        return None

    def reason(self, operands: Operands) -> str | None:
        """Return why this product cannot be served, or None."""
        if operands.reduce not in self.reduces:
            return f"knows {', '.join(self.reduces)}, not {operands.reduce}"
        return self.missing() or self.further_reason(operands)

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
    """Blocked-ELL with 16×16 blocks, the smallest that its Tensor-Core kernels like."""

    name, devices, family = "cusparse-bell", ("cuda",), "cusparse-bell"
    block = 16

    def further_reason(self, operands: Operands) -> str | None:
        csr, block = operands.csr, self.block
        if csr.nnz == 0:
            return "A has no entry"
        keys = _blocks(csr, block)[0]
        width = int(torch.bincount(keys // -(-csr.shape[1] // block)).max())
        needed = -(-csr.shape[0] // block) * width * block * block * operands.dtype.itemsize
        if needed > _LIMIT_BYTES:
            return f"padding would take more than {_LIMIT_BYTES // _GIB} GiB"
        return None

    def prepare(self, operands: Operands) -> Prepared:
        from sparsetile.bench.cusparse import BlockedEllSpmm

        product = BlockedEllSpmm(operands.csr, operands.values(), operands.B, self.block)
        single = operands.dtype is torch.float32
        return Prepared(product.run, format_bytes=product.format_bytes, uses_tf32=single)


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


def _blocks(csr: CSR, block: int) -> tuple[Tensor, Tensor]:
    """Distinct (block row, block column) keys, sorted, and the place of each entry's own."""
    width = -(-csr.shape[1] // block)
    keys = (csr.row_ids() // block) * width + csr.indices // block
    return torch.unique(keys, return_inverse=True)


def torch_bsr(csr: CSR, values: Tensor, block: int) -> Tensor:
    """Return A as a torch BSR tensor; its shape must be divisible by ``block``."""
    keys, place = _blocks(csr, block)
    width = csr.shape[1] // block
    blocks = torch.zeros((keys.numel(), block, block), dtype=values.dtype, device=values.device)
    blocks[place, csr.row_ids() % block, csr.indices.long() % block] = values
    crow = torch.zeros(csr.shape[0] // block + 1, dtype=torch.int32, device=values.device)
    counts = torch.bincount(keys // width, minlength=csr.shape[0] // block)
    crow[1:] = torch.cumsum(counts, 0)
    columns = (keys % width).to(torch.int32)
    return torch.sparse_bsr_tensor(crow, columns, blocks, csr.shape, check_invariants=False)


class TorchBsr(Baseline):
    """torch.sparse BSR with 16×16 blocks."""

    name, devices, family = "torch-bsr", ("cuda",), "torch-bsr"
    block = 16

    def further_reason(self, operands: Operands) -> str | None:
        csr, block = operands.csr, self.block
        if csr.nnz == 0:
            return "A has no entry"
        if csr.shape[0] % block or csr.shape[1] % block:
            return f"needs a shape divisible by {block}"
        needed = _blocks(csr, block)[0].numel() * block * block * operands.dtype.itemsize
        if needed > _LIMIT_BYTES:
            return f"blocks would take more than {_LIMIT_BYTES // _GIB} GiB"
        return None

    def prepare(self, operands: Operands) -> Prepared:
        A = torch_bsr(operands.csr, operands.values(), self.block)
        indices = A.crow_indices().numel() + A.col_indices().numel()
        size = 4 * indices + operands.dtype.itemsize * A.values().numel()
        # torch may multiply blocks in TF32 whatever its setting for dense products says.
        return Prepared(
            lambda: A @ operands.B,
            format_bytes=size,
            uses_tf32=operands.dtype is torch.float32,
        )


class TorchDense(Baseline):
    """A written out, torch.mm (cuBLAS on a GPU)."""

    name, devices, family = "torch-dense", ("cuda", "cpu"), "torch-dense"

    def further_reason(self, operands: Operands) -> str | None:
        needed = operands.csr.shape[0] * operands.csr.shape[1] * operands.dtype.itemsize
        if needed > _LIMIT_BYTES:
            return f"A written out takes more than {_LIMIT_BYTES // _GIB} GiB"
        return None

    def prepare(self, operands: Operands) -> Prepared:
        csr = operands.csr
        A = torch.zeros(csr.shape, dtype=operands.dtype, device=operands.device)
        A[csr.row_ids(), csr.indices.to(torch.int64)] = operands.values()
        C = torch.empty(
            (csr.shape[0], operands.B.shape[1]), dtype=operands.dtype, device=operands.device
        )
        single = operands.dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32
        return Prepared(
            lambda: torch.mm(A, operands.B, out=C),
            format_bytes=A.numel() * A.element_size(),
            uses_tf32=single and operands.device.type == "cuda",
        )


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


class Nvmath(Baseline):
    """nvmath-python's sparse product: cuSPARSE chosen and driven by NVIDIA's own library."""

    name, devices, family = "nvmath", ("cuda",), "nvmath"

    def missing(self) -> str | None:
        absent = _needs("nvmath", "nvmath-python")
        if absent is not None:
            return absent
        try:
            import nvmath.sparse
        except Exception as error:  # an installation that does not load is no reason to stop
            return f"nvmath-python does not load ({type(error).__name__}: {error})"
        if not hasattr(nvmath.sparse, "Matmul"):
            return "nvmath-python is too old: it has no nvmath.sparse.Matmul"
        return None

    def prepare(self, operands: Operands) -> Prepared:
        import nvmath.sparse

        A = _torch_csr(operands)
        shape = (operands.csr.shape[0], operands.B.shape[1])
        C = torch.zeros(shape, dtype=operands.dtype, device=operands.device)
        product = nvmath.sparse.Matmul(A, operands.B, C, alpha=1.0, beta=0.0)
        product.plan()

        def run() -> Tensor:
            product.execute()  # into C, on torch's current stream, without waiting
            return C

        weakref.finalize(run, product.free)  # its library objects do not free themselves
        return Prepared(run, format_bytes=_csr_bytes(operands))


@functools.cache
def _pyg_layer(reduce: str) -> Any:
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
        layer = _pyg_layer(operands.reduce)
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
        Nvmath(),
        Scipy(),
    )
}
