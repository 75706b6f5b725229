"""The predicted time of a product of ``half``: the copy of B, then ``csr`` in 16 bits."""

from __future__ import annotations

from sparsetile.engines.request import Request
from sparsetile.engines.rows.cost import predict_rows
from sparsetile.kernels.half import COPY_DTYPE

__all__ = ["predict_half"]

# Bytes that the copy moves per element of B, and extra bytes of C over 16 bits.
_COPY_BYTES, _C_BYTES = 6, 2
# Seconds of the copy's launch, beside the product's own.
_COPY_SECONDS = 1.5e-6
# Time relative to ``csr``'s in 16 bits, from this many columns of B on. Scales of rows are loaded
# beside their elements, and few columns lack csr's sharing of short rows.
_OVER_CSR = ((256, 1.05), (128, 1.12), (0, 1.5))
# If rows of the copy are not a multiple of this, they are gathered element by element, which takes
# about this much longer.
_VECTOR, _UNALIGNED = 8, 3.0


def predict_half(request: Request) -> float:
    """Return the seconds of one product."""
    rows, cols = request.csr.shape
    moved = request.n * (_COPY_BYTES * cols + _C_BYTES * rows) / request.machine.dram
    product = predict_rows(request.changed(dtype=COPY_DTYPE))
    over = next(share for least, share in _OVER_CSR if request.n >= least)
    return _COPY_SECONDS + moved + product * (_UNALIGNED if request.n % _VECTOR else over)
