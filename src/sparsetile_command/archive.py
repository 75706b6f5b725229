"""The arrays of ``.npz`` files, whose headers are checked before any array is read.

Packed zeros take a thousandth of their size, so a small file may hold gigabytes. Headers must fit
the archive before memory is reserved.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import numpy as np

__all__ = ["DEFLATE_LIMIT", "ArrayHeader", "NpzArrays"]

# Deflate cannot expand more than this, so a .gz of n bytes holds no more than n times as much.
DEFLATE_LIMIT = 1032
_HEAD = 2**14  # most bytes of an array's header; numpy's own limit is 10,000


@dataclass(frozen=True)
class ArrayHeader:
    """Shape and type of an array, and where its numbers begin."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    begin: int  # offset of the numbers

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def example(self) -> np.ndarray:
        """An array of this shape and type that takes the memory of one number."""
        one = np.zeros(1, self.dtype)
        return np.lib.stride_tricks.as_strided(one, self.shape, (0,) * len(self.shape))


class NpzArrays:
    """The arrays of an ``.npz`` by name. Raises zipfile's and numpy's errors, or ValueError."""

    def __init__(self, file: Path) -> None:
        self._bytes = file.stat().st_size
        self._archive = zipfile.ZipFile(file)
        members = self._archive.namelist()
        self.names = {name.removesuffix(".npy") for name in members if name.endswith(".npy")}
        self._headers: dict[str, ArrayHeader] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()

    def header(self, name: str) -> ArrayHeader:
        """Return shape and type of an array that the archive can hold."""
        if name not in self._headers:
            self._headers[name] = self._read_header(name)
        return self._headers[name]

    def _read_header(self, name: str) -> ArrayHeader:
        info = self._archive.getinfo(f"{name}.npy")
        with self._archive.open(info) as stream:
            head = io.BytesIO(stream.read(_HEAD))
        version = np.lib.format.read_magic(head)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(head)
        else:
            shape, _, dtype = np.lib.format.read_array_header_2_0(head)
        if dtype.hasobject:
            raise ValueError("Object arrays cannot be loaded when allow_pickle=False")
        found = ArrayHeader(shape, dtype, head.tell())
        packed = 1 if info.compress_type == zipfile.ZIP_STORED else DEFLATE_LIMIT
        room = min(info.file_size, packed * min(info.compress_size, self._bytes))
        needed = found.begin + found.count * dtype.itemsize
        if min(shape, default=0) < 0 or needed > room:
            raise ValueError(f"{name} claims {needed} bytes, and there is room for {room}")
        return found

    def read(self, name: str) -> np.ndarray:
        """Return a whole array."""
        self.header(name)
        with self._archive.open(f"{name}.npy") as stream:
            return cast(np.ndarray, np.lib.format.read_array(stream, allow_pickle=False))

    def part(self, name: str, begin: int, end: int) -> np.ndarray:
        """Return some elements of a 1-D array; seeks if it is not packed."""
        header = self.header(name)
        with self._archive.open(f"{name}.npy") as stream:
            stream.seek(header.begin + begin * header.dtype.itemsize, os.SEEK_SET)
            body = stream.read((end - begin) * header.dtype.itemsize)
        return np.frombuffer(bytearray(body), dtype=header.dtype)
