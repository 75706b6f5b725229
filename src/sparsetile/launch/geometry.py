"""What a kernel has to know of B and C: sizes, strides, alignment; the same for every runner."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparsetile.core.errors import value_error
from sparsetile.kernels.csr import vector_width

__all__ = [
    "ACCESS_BYTES", "MAX_BLOCKS", "MAX_ROW_BYTES", "MAX_SCRATCH", "MAX_SLABS", "Geometry",
    "aligned", "batch_count", "batch_pieces", "padded_like", "reachable", "stride_params",
    "within_reach",
]  # fmt: skip

# gridDim.z, the batch, ends here; larger batches are launched in pieces.
MAX_BATCHES = 65535
# gridDim.x ends here.
MAX_BLOCKS = 2**31 - 1
# gridDim.y, slabs of columns, ends here.
MAX_SLABS = 65535
# Bytes of partial sums that a launch may have; batches that need more go in pieces.
MAX_SCRATCH = 2**28
# Kernels keep the distance of two rows in 32 bits.
MAX_ROW_BYTES = 2**32 - 1
# The widest access.
ACCESS_BYTES = 16


def batch_count(B: Tensor) -> int:
    """Matrices in B [K, N] or [batch, K, N]."""
    return B.shape[0] if B.dim() == 3 else 1


def batch_pieces(batches: int, most: int = MAX_BATCHES) -> list[slice]:
    """Cut a batch into what one grid can hold, at least one matrix of at most ``most``: one piece
    as a rule."""
    step = max(1, min(most, MAX_BATCHES))
    return [slice(at, at + step) for at in range(0, batches, step)]


def within_reach(matrix: Tensor) -> bool:
    """Whether kernels can address every row, as the CPU's always can."""
    near = matrix.stride(-2) * matrix.element_size() <= MAX_ROW_BYTES
    return near or matrix.shape[-2] <= 1 or matrix.device.type == "cpu"


def reachable(matrix: Tensor) -> Tensor:
    """Return a matrix whose rows kernels can address: a slice of a very wide one is copied."""
    if within_reach(matrix):
        return matrix
    copied = matrix.contiguous()
    if not within_reach(copied):
        raise value_error(
            "run", "a dense operand", "of rows below 4 GiB",
            f"{matrix.shape[-1]} columns of {matrix.dtype}", "Multiply parts of its columns",
        )  # fmt: skip
    return copied


def aligned(matrix: Tensor) -> bool:
    """Whether every row begins at a multiple of 16 bytes."""
    size = matrix.element_size()
    strides = (stride * size for stride in matrix.stride()[:-1])
    return not any(at % ACCESS_BYTES for at in (matrix.data_ptr(), *strides))


def padded_like(matrix: Tensor, columns: int) -> Tensor:
    """Uninitialised memory of the same shape; rows have room for whole groups of ``columns``."""
    width = -(-matrix.shape[-1] // columns) * columns
    return matrix.new_empty((*matrix.shape[:-1], width))[..., : matrix.shape[-1]]


@dataclass(frozen=True)
class Geometry:
    """One launch's operands."""

    n: int  # columns of B
    batches: int
    # Bytes from a row of B to the next; elements from a row of C, a matrix of B, a matrix of C.
    strides: tuple[int, int, int, int]
    vector: int  # elements that one access may move: it divides every address and stride
    b: int  # addresses
    c: int
    device: int

    @classmethod
    def of(cls, B: Tensor, out: Tensor) -> Geometry:
        """Read both tensors; their columns have unit stride."""
        n, batched = B.shape[-1], B.dim() == 3
        b_batch, c_batch = (B.stride(0), out.stride(0)) if batched else (0, 0)
        b_row, c_row, size = B.stride(-2), out.stride(-2), B.element_size()
        b, c = B.data_ptr(), out.data_ptr()
        vector = vector_width(
            B.dtype, n, b_row, c_row, b_batch, c_batch, b // size, c // out.element_size()
        )
        strides = (b_row * size, c_row, b_batch, c_batch)
        return cls(n, batch_count(B), strides, vector, b, c, B.device.index)

    @property
    def params(self) -> dict[str, int]:
        """Fields of a kernel's parameters: addresses, strides and width."""
        return {"b": self.b, "c": self.c, "n": self.n, **stride_params(self.strides)}


def stride_params(strides: tuple[int, int, int, int]) -> dict[str, int]:
    """Name the strides of :class:`Geometry`."""
    names = ("b_row_bytes", "c_row_stride", "b_batch_stride", "c_batch_stride")
    return dict(zip(names, strides, strict=True))
