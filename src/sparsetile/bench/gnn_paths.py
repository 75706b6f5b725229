"""Ways to multiply with a graph's matrix while a network trains: PyG's, and sparsetile's.

Every path is given the same normalised matrix. Only the product differs between them, so that a
difference in time is one of the product, and losses must agree epoch by epoch. One path leaves the
products out: the rest of a step, which in eager mode is mostly the host's.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsetile.bench.baselines import pyg_layer
from sparsetile.formats.values import round_tf32
from sparsetile.intake import CSR
from sparsetile.plan.planner import plan

__all__ = ["PATHS", "Path", "Prepared", "sparse_tensor"]

# A layer's end: product of x, plus a bias, through ReLU or not.
Product = Callable[[Tensor, Tensor, bool], Tensor]
# Messages may take this share of a device's memory; a network holds several at once.
_MESSAGE_SHARE = 0.25


@dataclass(frozen=True)
class Prepared:
    """A product ready to train with, and what was chosen for it."""

    product: Product
    choices: Mapping[str, Any] = field(default_factory=dict)


class Path(ABC):
    """One way to multiply."""

    name: ClassVar[str]
    kind: ClassVar[str] = "baseline"
    # Whether the whole training step is captured into one CUDA graph.
    captured: ClassVar[bool] = False

    def missing(self, matrix: CSR, width: int) -> str | None:
        """Return why this path cannot run here, or None."""
        return None

    def load(self) -> None:  # noqa: B027  (nothing to import is a right answer)
        """Import what the path needs, so that its import is not timed as planning."""

    @abstractmethod
    def prepare(self, matrix: CSR, width: int, reorder: str) -> Prepared:
        """Do all that is done once a graph. ``matrix`` is A[target, source] in the type of x."""


def _apart(multiply: Callable[[Tensor], Tensor]) -> Product:
    """Bias and ReLU as torch operations of their own."""

    def product(x: Tensor, bias: Tensor, relu: bool) -> Tensor:
        out = multiply(x) + bias.to(x.dtype)
        return out.relu() if relu else out

    return product


def _needs(module: str, package: str) -> str | None:
    return None if importlib.util.find_spec(module) else f"{package} is not installed"


def sparse_tensor(matrix: CSR, dtype: torch.dtype | None = None) -> Tensor:
    """Return the matrix as a torch CSR tensor, in another dtype if one is given."""
    assert matrix.values is not None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(
            matrix.indptr, matrix.indices.long(), matrix.values.to(dtype or matrix.values.dtype),
            matrix.shape, check_invariants=False,
        )  # fmt: skip


class WithoutProduct(Path):
    """The network without its products: what no product can take less than."""

    name, kind = "no-product", "bound"

    def prepare(self, matrix: CSR, width: int, reorder: str) -> Prepared:
        return Prepared(_apart(lambda x: x))


class PygSparse(Path):
    """PyG's ``spmm`` of a torch sparse tensor ``adj_t``: cuSPARSE on a GPU."""

    name = "pyg-sparse"

    def missing(self, matrix: CSR, width: int) -> str | None:
        return _needs("torch_geometric", "torch-geometric")

    def load(self) -> None:
        importlib.import_module("torch_geometric.utils")

    def prepare(self, matrix: CSR, width: int, reorder: str) -> Prepared:
        from torch_geometric.utils import spmm

        adj_t = sparse_tensor(matrix)
        return Prepared(_apart(lambda x: spmm(adj_t, x)))


class PygRounded(PygSparse):
    """The same of operands rounded to TF32, forward and backward.

    Nobody's product but PyG's, at the precision that TF32 products have: how far its losses are
    from ``pyg-sparse``'s is what rounding does to this network, whoever multiplies.
    """

    name, kind = "pyg-rounded", "control"

    def missing(self, matrix: CSR, width: int) -> str | None:
        if matrix.values is None or matrix.values.dtype is not torch.float32:
            return "TF32 is a precision of float32"
        return super().missing(matrix, width)

    def prepare(self, matrix: CSR, width: int, reorder: str) -> Prepared:
        from torch_geometric.utils import spmm

        assert matrix.values is not None
        adj_t = sparse_tensor(matrix.with_values(round_tf32(matrix.values)))
        return Prepared(_apart(lambda x: _RoundedBack.apply(spmm(adj_t, _Rounded.apply(x)))))


class _Rounded(torch.autograd.Function):
    """x in TF32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return round_tf32(x.contiguous())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class _RoundedBack(torch.autograd.Function):
    """x, whose gradient is in TF32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return round_tf32(grad.contiguous())


class PygEdges(Path):
    """PyG's default: a message per edge, gathered and scattered."""

    name = "pyg-edges"

    def missing(self, matrix: CSR, width: int) -> str | None:
        absent = _needs("torch_geometric", "torch-geometric")
        if absent is not None:
            return absent
        size = 4 * matrix.nnz * width
        limit = 8 * 2**30
        if matrix.device.type == "cuda":
            memory = torch.cuda.get_device_properties(matrix.device).total_memory
            limit = int(_MESSAGE_SHARE * memory)
        if size > limit:
            return f"messages of a layer take {size / 2**30:.0f} GiB, over {limit / 2**30:.0f}"
        return None

    def load(self) -> None:
        pyg_layer("sum")  # generates the code of its class

    def prepare(self, matrix: CSR, width: int, reorder: str) -> Prepared:
        layer = pyg_layer("sum")
        edges = torch.stack([matrix.indices.long(), matrix.row_ids()])
        size = (matrix.shape[1], matrix.shape[0])
        return Prepared(_apart(lambda x: layer(x, edges, matrix.values, size)))


class TorchSparse(Path):
    """torch_sparse's ``matmul`` of a ``SparseTensor``."""

    name = "torch_sparse"

    def missing(self, matrix: CSR, width: int) -> str | None:
        return _needs("torch_sparse", "torch_sparse")

    def load(self) -> None:
        importlib.import_module("torch_sparse")

    def prepare(self, matrix: CSR, width: int, reorder: str) -> Prepared:
        import torch_sparse

        adj_t = torch_sparse.SparseTensor(
            rowptr=matrix.indptr, col=matrix.indices.long(), value=matrix.values,
            sparse_sizes=matrix.shape, is_sorted=True,
        )  # fmt: skip
        return Prepared(_apart(lambda x: torch_sparse.matmul(adj_t, x)))


class Sparsetile(Path):
    """A plan instead of ``adj_t``; nothing else differs from ``pyg-sparse``."""

    name, kind = "sparsetile", "system"

    def prepare(self, matrix: CSR, width: int, reorder: str) -> Prepared:
        assert matrix.values is not None
        made = plan(matrix, width, dtype=matrix.values.dtype, reorder=reorder)
        info = made.info
        choices = {"system": made.system, "seconds": info["seconds"], "bytes": info["format_bytes"]}
        return Prepared(self.product(made.run), choices)

    def product(self, run: Callable[..., Tensor]) -> Product:
        return _apart(run)


class SparsetileFused(Sparsetile):
    """The same with bias and ReLU in the product's kernel, as ``sparsetile.nn.GCNConv`` has it."""

    name = "sparsetile-fused"

    def product(self, run: Callable[..., Tensor]) -> Product:
        return lambda x, bias, relu: run(x, bias=bias, relu=relu)


class SparsetileGraph(SparsetileFused):
    """The same with the whole training step in one CUDA graph."""

    name, captured = "sparsetile-cudagraph", True

    def missing(self, matrix: CSR, width: int) -> str | None:
        return None if matrix.device.type == "cuda" else "CUDA graphs need a GPU"


# PyG's first: the others' losses are held against theirs.
PATHS: dict[str, Path] = {
    path.name: path
    for path in (
        PygSparse(),
        PygRounded(),
        PygEdges(),
        TorchSparse(),
        Sparsetile(),
        SparsetileFused(),
        SparsetileGraph(),
        WithoutProduct(),
    )
}
