"""Runners, which multiply with a build's tensors.

A product may have parts that own disjoint rows of C (``rsh``). Everything after a row's sum (alpha,
mean, beta, bias, ReLU, the exact recomputation) belongs to the part that owns the row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparsetile.launch.bound import BoundExtremum, BoundLinear
from sparsetile.launch.interface import PLAIN, Bound, Epilogue, Tensors

__all__ = ["ExactRunner", "Runner"]


class Runner(ABC):
    """Multiplies with the tensors of one recipe. Never synchronises.

    ``values`` are A's values in canonical order, None for a pattern. A system whose kernels read
    them in another order or shape lists those copies in ``packed_names`` and makes them in
    :meth:`pack`; a plan keeps the copies, so that only a change of values costs a packing. A runner
    with ``any_strides`` gets B and ``out`` as the caller has them; others get row-major ones,
    copied if necessary. One with ``fuses_linear`` takes B and ``out`` as transposes of row-major
    matrices without copies, and ``Epilogue.row_bias``.
    """

    packed_names: tuple[str, ...] = ()
    pack_only: tuple[str, ...] = ()  # tensors that only :meth:`pack` reads
    reads_values: bool = True  # whether :meth:`spmm` reads ``values`` if it has ``packed``
    any_strides: bool = False
    fuses_linear: bool = False

    def __init__(self, meta: Mapping[str, Any]) -> None:
        self.meta = meta
        self.rows = int(meta["rows"])
        self.cols = int(meta["cols"])
        self.nnz = int(meta["nnz"])
        self.tensor_names = tuple(meta["tensors"])

    @property
    def needs_packed_values(self) -> bool:
        """Whether :meth:`pack` must be called when values change."""
        return bool(self.packed_names)

    @abstractmethod
    def spmm(
        self,
        tensors: Tensors,
        values: Tensor | None,
        packed: Tensors | None,
        B: Tensor,
        out: Tensor,
        epilogue: Epilogue = PLAIN,
    ) -> None:
        """Write C into ``out``. B is [K, N] or [batch, K, N].

        Columns of both have unit stride unless the runner has ``any_strides``. ``packed`` is the
        result of :meth:`pack` for ``values``, or None if they were not packed.
        """

    def new_output(self, B: Tensor, dtype: torch.dtype) -> Tensor:
        """Return uninitialised memory for C."""
        return B.new_empty((*B.shape[:-2], self.rows, B.shape[-1]), dtype=dtype)

    def bind(self, tensors: Tensors, values: Tensor | None, packed: Tensors | None) -> Bound | None:
        """Return the product with the least host time, or None to use ``spmm``.

        It is called only with checked tensors, and only while ``tensors``, ``values`` and
        ``packed`` stay the same.
        """
        return None

    def bind_linear(self, tensors: Tensors, packed: Tensors | None) -> BoundLinear | None:
        """Return X·Aᵀ with the least host time, of runners that fuse it; None if there is none."""
        return None

    def pack(self, tensors: Tensors, values: Tensor | None, dtype: torch.dtype) -> Tensors:
        """Return the copies of A's values that :meth:`spmm` takes as ``packed``, by name."""
        return {}

    def prepare(self, n: int, dtype: torch.dtype, weighted: bool, device: torch.device) -> None:
        """Compile the kernels of a product of width ``n`` (nothing by default)."""
        return


class ExactRunner(Runner):
    """A runner that computes only from A's entries (``csr``, ``cpu``).

    It also computes max, min and the gradient of the values, and repairs products of systems that
    multiply zeros outside of A's entries.
    """

    @abstractmethod
    def extremum(
        self,
        tensors: Tensors,
        values: Tensor | None,
        B: Tensor,
        out: Tensor,
        args: Tensor | None,
        maximum: bool,
    ) -> None:
        """Write the max or min over each row's entries and, if asked for, in ``args`` the place of
        the winner in its row: of type ``place_dtype``, -1 in empty rows."""

    def bind_extremum(self, tensors: Tensors, values: Tensor | None) -> BoundExtremum | None:
        """Return :meth:`extremum` with the least host time; None if there is none."""
        return None

    @property
    @abstractmethod
    def place_dtype(self) -> torch.dtype:
        """Type of the place of an entry in its row."""

    @abstractmethod
    def won(
        self,
        tensors: Tensors,
        values: Tensor | None,
        grad: Tensor,
        args: Tensor,
        order: Tensor,
        indptr: Tensor,
        out: Tensor,
    ) -> None:
        """Write the gradient of the transpose's extremum for its operand.

        ``tensors`` and ``values`` are this matrix's. The transpose has row pointers ``indptr`` and
        the extremum ``args``, and its entry ``order[t]`` (int64) is entry t here. ``grad`` and
        ``args`` are contiguous, and so is ``out``.
        """

    @abstractmethod
    def sddmm(self, tensors: Tensors, G: Tensor, B: Tensor) -> Tensor:
        """Return dot(G[row], B[column]) for each entry, summed over batches.

        The result has the type of the sums: float32, or float64 for such operands.
        """

    @abstractmethod
    def repair(
        self,
        tensors: Tensors,
        values: Tensor | None,
        B: Tensor,
        out: Tensor,
        epilogue: Epilogue = PLAIN,
        only_if: Tensor | None = None,
    ) -> None:
        """Recompute, only from A's entries, the elements of ``out`` that are not finite.

        An explicit zero of a tile or of a dense A times an Inf or NaN of B is NaN and stays NaN
        through an epilogue, which is therefore recomputed as well. ``beta`` must be 0, because the
        old ``out`` is gone. If ``only_if`` [1] (int64) is 0, ``out`` is not even read.
        """

    def prepare_repair(
        self, n: int, dtype: torch.dtype, weighted: bool, device: torch.device
    ) -> None:
        """Compile the kernels of :meth:`repair` for a product of width ``n``."""
        return
