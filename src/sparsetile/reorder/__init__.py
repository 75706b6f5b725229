"""Row orders: CSR -> Permutation. Pure functions, one file an algorithm."""

from __future__ import annotations

from sparsetile.reorder.affinity import affinity
from sparsetile.reorder.identity import identity
from sparsetile.reorder.louvain import louvain
from sparsetile.reorder.lsh import lsh
from sparsetile.reorder.permutation import Permutation, Reorderer
from sparsetile.reorder.rcm import rcm

__all__ = ["REORDERERS", "Permutation", "Reorderer"]

REORDERERS: dict[str, Reorderer] = {
    "identity": identity,
    "rcm": rcm,
    "louvain": louvain,
    "lsh": lsh,
    "affinity": affinity,
}
