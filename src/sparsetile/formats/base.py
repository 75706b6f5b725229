"""The interface of all formats, and the registry that the contract suites walk.

A new format is one file in this package with one class. Subclasses of ``Format`` register
themselves by their ``name``; ``formats/__init__.py`` imports every module.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from sparsetile.core.errors import value_error
from sparsetile.formats.cells import gather_values
from sparsetile.formats.units import Units
from sparsetile.intake.csr import CSR

__all__ = ["FORMATS", "Format", "Variants"]

# Named option sets.
Variants = Mapping[str, Mapping[str, Any]]

FORMATS: dict[str, type[Format]] = {}


class Format(ABC):
    """A sparse matrix packed for a kernel; subclasses are frozen dataclasses of tensors.

    Attributes
    ----------
    name : str
        Key in ``FORMATS``. A class that does not set one is not registered.
    variants : mapping
        Named option sets of :meth:`pack`, with which the contract suites run the format.
    index_arrays : tuple of str
        Tensors that :attr:`bytes` counts.
    value_maps : tuple of str
        Tensors that only :meth:`pack_values` reads: the place of each value. :meth:`decode` must
        not need them.
    shape : tuple of int
        (M, K) of A.
    """

    name: ClassVar[str]
    variants: ClassVar[Variants] = {"default": {}}
    index_arrays: ClassVar[tuple[str, ...]]
    value_maps: ClassVar[tuple[str, ...]] = ()

    shape: tuple[int, int]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls):
            return
        if cls.name in FORMATS:
            raise value_error(
                "Format", "name", "new", repr(cls.name), f"{FORMATS[cls.name].__name__} has it"
            )
        FORMATS[cls.name] = cls

    @classmethod
    @abstractmethod
    def pack(cls, csr: CSR, order: Tensor | None = None, *args: Any, **options: Any) -> Self:
        """CSR -> format.

        Parameters
        ----------
        csr : CSR
        order : Tensor of int64 [M], optional
            Row of A at each position; the given order when None.
        **options
            The format's own options.
        """

    @abstractmethod
    def pack_values(self, values: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """Canonical values [nnz] -> the array that the kernel reads.

        Parameters
        ----------
        values : Tensor [nnz] or None
            None: ones, for a pattern.
        dtype : torch.dtype, optional
            Type of the packed values, rounded to nearest. That of ``values`` (float32 for a
            pattern) when None. float8 does not saturate: scale first.
        """

    @abstractmethod
    def decode(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (row, column, place) of every entry, int64, in the format's own order.

        Decoded only from index arrays and bits. ``place`` is that of the entry's value in the
        flattened result of :meth:`pack_values`.
        """

    @abstractmethod
    def units(self) -> Units:
        """Return the units that a schedule distributes."""

    def tensors(self) -> dict[str, Tensor]:
        """Return every array by name, without those that this matrix does not need."""
        fields = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))  # type: ignore[arg-type]
        return {name: value for name, value in fields if isinstance(value, Tensor)}

    @property
    def bytes(self) -> int:
        """Bytes of the index arrays, without values."""
        arrays = self.tensors()
        return sum(arrays[name].nbytes for name in self.index_arrays if name in arrays)

    def unpack(self, packed: Tensor | None = None) -> CSR:
        """Return the matrix in canonical form: the round trip.

        Parameters
        ----------
        packed : Tensor, optional
            From :meth:`pack_values`. The pattern alone when None.
        """
        row, column, place = self.decode()
        rows, cols = self.shape
        by_place = torch.argsort(row * max(cols, 1) + column)
        indptr = torch.zeros(rows + 1, dtype=torch.int64, device=row.device)
        torch.cumsum(torch.bincount(row, minlength=rows), 0, out=indptr[1:])
        values = None if packed is None else gather_values(packed.reshape(-1), place[by_place])
        return CSR(indptr, column[by_place].to(torch.int32), values, self.shape)
