"""What the systems' cost models share: bytes of operands, and gathers one after the other."""

from __future__ import annotations

from dataclasses import dataclass

from sparsetile.intake.csr import CSR
from sparsetile.systems.base import Request

__all__ = ["SHORT_WINDOW", "GatherModel", "a_bytes", "rows_once"]

# Rows of the windows whose distinct columns csr and acc are predicted by.
SHORT_WINDOW = 8


def rows_once(csr: CSR) -> int:
    """Rows of B and C together, each once."""
    return min(csr.shape[1], csr.nnz) + csr.shape[0]


def a_bytes(request: Request) -> int:
    """Bytes of A's columns and values."""
    csr = request.csr
    return csr.nnz * (4 + (0 if csr.values is None else request.dtype.itemsize))


@dataclass(frozen=True)
class GatherModel:
    """Seconds to start, then bytes at shares of the machine's ceilings, term after term.

    Attributes
    ----------
    start : float
        Seconds before the first and after the last byte.
    entries : float
        Share of L2's gather rate for a row of B per entry; above 1, because most come from L1.
    pairs : float
        The same for a row of B per distinct (8-row window, column) pair.
    extra : int
        Bytes that a pair costs beside its row of B, which is decoding.
    a : float
        Share of DRAM's rate for A, read once.
    held, beyond : float
        The same for B and C once: what L2 can hold, and the rest, above 1 because a part of it is
        still in L2.
    """

    start: float
    entries: float
    pairs: float
    extra: int
    a: float
    held: float
    beyond: float

    def seconds(self, request: Request, pairs: int) -> float:
        """Return the seconds of one product."""
        ceilings, row = request.machine, request.row_bytes
        gathered = row * request.csr.nnz / self.entries + (row + self.extra) * pairs / self.pairs
        return self.least(request) + gathered / ceilings.l2_gather

    def least(self, request: Request) -> float:
        """Return the seconds without gathers: the start, then A, B and C, each once."""
        ceilings = request.machine
        once = request.row_bytes * rows_once(request.csr)
        beyond = max(once - ceilings.l2_bytes, 0)
        streamed = a_bytes(request) / self.a + (once - beyond) / self.held + beyond / self.beyond
        return self.start + streamed / ceilings.dram
