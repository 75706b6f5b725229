"""Shared by the systems' cost models: bytes of operands, and sequential gathers."""

from __future__ import annotations

from dataclasses import dataclass

from sparsetile.engines.request import Request
from sparsetile.intake.csr import CSR

__all__ = ["SHORT_WINDOW", "GatherModel", "a_bytes", "rows_once"]

# Rows of the windows whose distinct columns predict csr and acc.
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
    """Start-up seconds plus bytes at shares of the machine's ceilings, term by term.

    Attributes
    ----------
    start : float
        Seconds before the first and after the last byte.
    entries : float
        Share of L2's gather rate for a row of B per entry; above 1, because most come from L1.
    pairs : float
        The same for a row of B per distinct (8-row window, column) pair.
    extra : int
        Bytes that a pair costs beside its row of B, for decoding.
    a : float
        Share of DRAM's rate for A, read once.
    in_l2, beyond : float
        The same for B and C once: the part that fits L2, and the rest, above 1 because some of it
        is still in L2.
    """

    start: float
    entries: float
    pairs: float
    extra: int
    a: float
    in_l2: float
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
        streamed = a_bytes(request) / self.a + (once - beyond) / self.in_l2 + beyond / self.beyond
        return self.start + streamed / ceilings.dram
