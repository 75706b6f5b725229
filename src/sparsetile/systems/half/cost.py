"""What a product of ``half`` is predicted to take: the copy of B, then ``csr`` in 16 bits."""

from __future__ import annotations

from sparsetile.kernels.half import COPY_DTYPE
from sparsetile.systems.base import Request
from sparsetile.systems.csr.cost import predict_csr

__all__ = ["predict_half"]

# Bytes that the copy moves of an element of B, and C more than in 16 bits.
_COPY_BYTES, _C_BYTES = 6, 2
# Seconds of the copy's launch, beside the product's own.
_COPY_SECONDS = 1.5e-6
# What a product takes of ``csr``'s time in 16 bits, by the columns that B has at least. Scales of
# rows are loaded beside their elements, and few columns lack csr's way of sharing short rows.
_OVER_CSR = ((256, 1.05), (128, 1.12), (0, 1.5))
# Rows of the copy that are no multiple of this are gathered an element at a time, which takes
# about this much longer.
_VECTOR, _UNALIGNED = 8, 3.0


def predict_half(request: Request) -> float:
    """Return the seconds of one product."""
    rows, cols = request.csr.shape
    moved = request.n * (_COPY_BYTES * cols + _C_BYTES * rows) / request.machine.dram
    product = predict_csr(request.changed(dtype=COPY_DTYPE))
    over = next(share for least, share in _OVER_CSR if request.n >= least)
    return _COPY_SECONDS + moved + product * (_UNALIGNED if request.n % _VECTOR else over)
