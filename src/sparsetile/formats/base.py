"""What formats have in common: the bytes of their index arrays, and windows of condensed tiles.

A format is one file in this package with one class, a frozen dataclass of tensors: ``pack`` makes
it of a CSR matrix and a row order (the given one when None), ``units`` names what a schedule
distributes. Runners pack A's values by its maps. ``tests/formats/decoding.py`` reads every entry
back.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from sparsetile.formats.units import Units

__all__ = ["Format", "TiledWindows"]


class Format:
    """A sparse matrix packed for a kernel.

    Attributes
    ----------
    index_arrays : tuple of str
        Tensors that :attr:`bytes` counts; one that this matrix does not need is None.
    shape : tuple of int
        (M, K) of A.
    """

    index_arrays: ClassVar[tuple[str, ...]]

    shape: tuple[int, int]

    @property
    def bytes(self) -> int:
        """Bytes of the index arrays, without values."""
        arrays = (getattr(self, name) for name in self.index_arrays)
        return sum(array.nbytes for array in arrays if array is not None)


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
