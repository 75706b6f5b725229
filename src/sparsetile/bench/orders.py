"""Row orders that a run has found: each once per matrix, shared by all workers, with its time.

Orders are found on the host, which takes a minute for a graph of a hundred million entries. A run
keeps them in a folder of its own; every record carries the time that finding its order took.
"""

from __future__ import annotations

import functools
import hashlib
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sparsetile.intake.csr import CSR
from sparsetile.reorder import REORDERERS

__all__ = ["Order", "find_order", "load_order", "matrix_hash", "save_order"]


@dataclass(frozen=True, eq=False)
class Order:
    """A row order: its algorithm, ``perm[i]`` the row at position i, and seconds to find it."""

    name: str
    perm: Tensor
    seconds: float


def matrix_hash(csr: CSR) -> str:
    """Return 16 hex digits over shape, pattern and values of a matrix on the host."""
    digest = hashlib.sha256(repr(csr.shape).encode())
    for tensor in (csr.indptr, csr.indices, csr.values):
        if tensor is not None and tensor.numel():  # torch refuses to view some empty ones
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


@functools.cache
def _warm(name: str) -> None:
    """Let an algorithm load, and compile on a new machine, before it is timed."""
    indptr = torch.tensor([0, 1, 3], dtype=torch.int64)
    indices = torch.tensor([0, 0, 1], dtype=torch.int32)
    REORDERERS[name](CSR(indptr, indices, None, (2, 2)))


def find_order(csr: CSR, name: str) -> Order | None:
    """Find a row order by its name and time it; None for the given order."""
    _warm(name)
    begun = time.perf_counter()
    perm = REORDERERS[name](csr).perm
    seconds = time.perf_counter() - begun
    return None if perm is None else Order(name, perm, seconds)


def _file(folder: str | Path, hash_of_matrix: str, name: str) -> Path:
    return Path(folder) / f"{hash_of_matrix}-{name}.pt"


def save_order(folder: str | Path, hash_of_matrix: str, order: Order) -> None:
    """Leave an order for the other processes of the run; it appears whole or not at all."""
    file = _file(folder, hash_of_matrix, order.name)
    partial = file.with_suffix(f".{time.monotonic_ns()}")
    torch.save({"perm": order.perm.cpu(), "seconds": order.seconds}, partial)
    partial.replace(file)


def load_order(folder: str | Path, hash_of_matrix: str, name: str) -> Order | None:
    """Return an order that a process of the run has left, or None."""
    file = _file(folder, hash_of_matrix, name)
    if not file.exists():
        return None
    held = torch.load(file, weights_only=True)
    return Order(name, held["perm"], held["seconds"])
