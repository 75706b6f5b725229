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

from sparsetile.core.packages import register
from sparsetile.formats.cells import checked_values, gather_values
from sparsetile.formats.units import Units
from sparsetile.intake.csr import CSR, offsets

__all__ = ["FORMATS", "Format", "TiledWindows", "Variants"]

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
        register(cls, FORMATS, "Format")

    @classmethod
    @abstractmethod
    def pack(cls, csr: CSR, order: Tensor | None = None, *args: Any, **options: Any) -> Self:
        """CSR -> format; the row of A at each position is ``order``, the given one when None."""

    @abstractmethod
    def pack_values(self, values: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """Canonical values [nnz], or None for ones -> the array that the kernel reads.

        They are rounded to ``dtype``, that of ``values`` (float32 for a pattern) when None. float8
        does not saturate: scale first.
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
        """Return the matrix in canonical form, with values from :meth:`pack_values` if they are
        given.
        """
        row, column, place = self.decode()
        rows, cols = self.shape
        by_place = torch.argsort(row * max(cols, 1) + column)
        indptr = offsets(torch.bincount(row, minlength=rows))
        values = None if packed is None else gather_values(packed.reshape(-1), place[by_place])
        return CSR(indptr, column[by_place].to(torch.int32), values, self.shape)


class TiledWindows(Format):
    """Windows of condensed tiles, values in tile and bit order.

    The first of ``index_arrays`` has the first tile of each window, and the end.
    """

    entries: Tensor

    @property
    def _first_tiles(self) -> Tensor:
        first: Tensor = getattr(self, self.index_arrays[0])
        return first

    @property
    def window_count(self) -> int:
        return self._first_tiles.numel() - 1

    def tiles_per_window(self) -> Tensor:
        """Tiles of each window, int32 [windows]."""
        return self._first_tiles.diff()

    def units(self) -> Units:
        """Windows; a unit's list is its tiles."""
        return Units.from_offsets(self._first_tiles)

    def pack_values(self, values: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """Canonical values [nnz] -> packed values [nnz], in tile and bit order."""
        values = checked_values(values, self.entries.numel(), dtype, self.entries.device)
        return gather_values(values, self.entries)
