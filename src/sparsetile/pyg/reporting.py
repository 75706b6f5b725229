"""Which calls sparsetile computed under the patch, which PyG computed, and why."""

from __future__ import annotations

import threading
from dataclasses import dataclass

__all__ = ["Report", "Row", "clear_counts", "count", "report"]

# Distinct rows. Texts of errors may differ at every call.
MAX_ROWS = 256
_REST = "other reasons"

_counts: dict[tuple[str, str], int] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class Row:
    """Calls of one function that had the same outcome."""

    name: str  # such as "GCNConv.propagate"
    ran: str  # "sparsetile" or "PyG"
    calls: int
    why: str  # PyG computed; empty if sparsetile did


@dataclass(frozen=True)
class Report:
    """What ran where since :func:`sparsetile.pyg.patch`; prints as a table."""

    rows: tuple[Row, ...]  # by name, those of sparsetile first

    def __str__(self) -> str:
        cells = [("call", "ran on", "calls", "why")]
        cells += [(row.name, row.ran, str(row.calls), row.why) for row in self.rows]
        name, ran, calls = (max(len(line[column]) for line in cells) for column in range(3))
        return "\n".join(
            f"{line[0]:{name}}  {line[1]:{ran}}  {line[2]:>{calls}}  {line[3]}".rstrip()
            for line in cells
        )


def report() -> Report:
    """Return which calls sparsetile has computed since :func:`patch`, which PyG, and why.

    A row counts the calls of one function with one outcome: ``forward`` of the layers that
    :func:`patch` lists, ``propagate`` of every layer, ``EdgeIndex.matmul`` and ``utils.spmm`` of
    matrices. If PyG runs a ``forward``, the ``propagate`` that it calls has a row of its own, and
    so has ``utils.spmm`` of a sparse matrix that a layer was given. The counts begin at
    :func:`patch` and can still be read after :func:`unpatch`. Nothing is counted of layers whose
    ``propagate`` is not PyG's, or that were explained or decomposed before :func:`patch`.

    Returns
    -------
    Report
        ``rows``, a tuple of :class:`Row`; ``print(report())`` shows a table.
    """
    with _lock:
        counts = dict(_counts)
    ordered = sorted(counts, key=lambda key: (key[0], bool(key[1]), -counts[key]))
    return Report(
        tuple(Row(name, "PyG" if why else "sparsetile", counts[name, why], why)
              for name, why in ordered)
    )  # fmt: skip


def count(name: str, why: str = "") -> None:
    """Count a call that sparsetile computed or, for the reason ``why``, PyG."""
    key = name, why
    with _lock:
        if key in _counts:
            _counts[key] += 1
            return
        if len(_counts) >= MAX_ROWS:
            key = name, why and _REST
        _counts[key] = _counts.get(key, 0) + 1


# torch.compile runs it at each trace and compiles nothing of it: what
# torch.compiler.assume_constant_result does, without the 1.5 s import of torch._dynamo.
count._dynamo_marked_constant = True  # type: ignore[attr-defined]


def clear_counts() -> None:
    """Begin to count anew."""
    with _lock:
        _counts.clear()
