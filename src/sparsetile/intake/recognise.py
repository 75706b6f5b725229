"""Recognises the kind of a matrix without importing the library it comes from.

A class is known by the module that defines it or one of its bases. So a library that is not
installed costs nothing, and subclasses are recognised.
"""

from __future__ import annotations

import functools
import os
from enum import Enum
from typing import Any

from torch import Tensor

from sparsetile.intake.csr import CSR

__all__ = ["Kind", "is_scipy", "kind_of"]


class Kind(Enum):
    """The result of :func:`kind_of`."""

    CSR = "CSR"
    PATH = "path"
    TENSOR = "tensor"
    EDGE_INDEX = "EdgeIndex"
    EDGE_TUPLE = "(edge_index, weight, shape) or (edge_index, weight)"
    CSR_TUPLE = "(indptr, indices, values, shape)"
    SCIPY = "scipy.sparse"
    CUPYX = "cupyx.scipy.sparse"
    TORCH_SPARSE = "torch_sparse.SparseTensor"
    GRAPH = "torch_geometric.data.Data"


def kind_of(A: Any) -> Kind | None:
    """Return the kind of input ``A`` is, or None if intake does not support it."""
    if type(A) is Tensor:  # the input of layers at every step: skip the bases
        return Kind.TENSOR
    if isinstance(A, CSR):
        return Kind.CSR
    if isinstance(A, (str, os.PathLike)):
        return Kind.PATH
    if _comes_from(type(A), "torch_geometric", "EdgeIndex"):
        return Kind.EDGE_INDEX
    if isinstance(A, Tensor):
        return Kind.TENSOR
    if isinstance(A, (tuple, list)):
        if len(A) == 2:  # a list of two lists is not one
            return Kind.EDGE_TUPLE if hasattr(A[0], "shape") else None
        return {3: Kind.EDGE_TUPLE, 4: Kind.CSR_TUPLE}.get(len(A))
    # A scipy matrix has a format and derives from a class of scipy.sparse.
    if is_scipy(A):
        return Kind.SCIPY
    if hasattr(A, "format") and _comes_from(type(A), "cupyx.scipy.sparse"):
        return Kind.CUPYX
    if _comes_from(type(A), "torch_sparse", "SparseTensor"):
        return Kind.TORCH_SPARSE
    if _comes_from(type(A), "torch_geometric", "BaseData"):
        return Kind.GRAPH
    return None


def is_scipy(A: Any) -> bool:
    """Whether A is a matrix or an array of scipy.sparse."""
    return hasattr(A, "format") and _comes_from(type(A), "scipy.sparse")


_cached: Any = functools.lru_cache(maxsize=256)  # mypy does not take a type as hashable


@_cached
def _comes_from(kind: type, package: str, name: str | None = None) -> bool:
    for base in kind.__mro__:
        module = getattr(base, "__module__", "") or ""
        if (module == package or module.startswith(package + ".")) and name in (
            None,
            base.__name__,
        ):
            return True
    return False
