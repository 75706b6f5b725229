"""Row orders: CSR -> Permutation. Pure functions, one file per algorithm."""

from __future__ import annotations

import dataclasses

import torch

from sparsetile.intake.csr import CSR
from sparsetile.reorder.affinity import affinity
from sparsetile.reorder.locality import locality
from sparsetile.reorder.louvain import louvain
from sparsetile.reorder.lsh import lsh
from sparsetile.reorder.merging import merging
from sparsetile.reorder.permutation import Permutation, Reorderer
from sparsetile.reorder.rabbit import rabbit
from sparsetile.reorder.rcm import rcm

__all__ = ["REORDERERS", "Permutation", "Reorderer", "order_of_transpose"]


def _locality_stage(name: str, *, two_opt: bool) -> Reorderer:
    """Return ``locality`` up to one of its stages, as a named order."""

    def find(csr: CSR) -> Permutation:
        return dataclasses.replace(locality(csr, two_opt=two_opt, isolation=False), name=name)

    return find


def _identity(csr: CSR) -> Permutation:
    """Keep the rows as they come; costs nothing."""
    return Permutation("identity", None)


REORDERERS: dict[str, Reorderer] = {
    "identity": _identity,
    "rcm": rcm,
    "louvain": louvain,
    "rabbit": rabbit,
    "lsh": lsh,
    "merging": merging,
    "affinity": affinity,
    "locality": locality,
    "locality-mst": _locality_stage("locality-mst", two_opt=False),
    "locality-2opt": _locality_stage("locality-2opt", two_opt=True),
}


def order_of_transpose(order: Permutation, csr: CSR, transpose: CSR) -> Permutation:
    """Order the rows of A's transpose as those of A were.

    If the pattern is symmetric the order of A is reused. An order given as a tensor does not apply
    otherwise: it numbers rows of A.
    """
    if order.perm is None:
        return order
    if torch.equal(transpose.indptr, csr.indptr) and torch.equal(transpose.indices, csr.indices):
        return order
    return REORDERERS.get(order.name, REORDERERS["identity"])(transpose)
